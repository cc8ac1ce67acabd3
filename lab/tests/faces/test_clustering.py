"""Faces without a command: clusters, pairs around the threshold, and how sure a distance is."""

import json

import numpy as np
import pytest
from sklearn.cluster import AgglomerativeClustering

from linattn_lab.faces.index.search import squared_distances
from linattn_lab.faces.verification.clustering import agreement, cluster, typical_first
from linattn_lab.faces.verification.confidence import Sureness, calibrate
from linattn_lab.faces.verification.threshold_pairs import find_pairs

DIM = 32


def unit(count, dim=DIM, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def people(count, each, spread=0.5, seed=0):
    """Rows around `count` centres, and whose they are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count, DIM))
    x = np.repeat(centres, each, 0) + spread * rng.standard_normal((count * each, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), np.repeat(np.arange(count), each)


class TestCluster:
    @pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9, 1.3, 2.0])
    def test_groups_clustered_one_by_one_are_scikit_learns_clusters_of_the_whole(self, threshold):
        x, _ = people(30, 8)
        whole = AgglomerativeClustering(
            n_clusters=None, metric="precomputed", linkage="average", distance_threshold=threshold
        ).fit_predict(squared_distances(x.astype(np.float64), x.astype(np.float64)))
        labels = cluster(x, threshold)
        match = agreement(labels, list(whole))
        assert (match.precision, match.recall) == (1.0, 1.0)
        assert labels.max() == whole.max()
        sizes = np.bincount(labels)
        assert (np.diff(sizes) <= 0).all()

    def test_people_far_apart_are_found(self):
        x, who = people(12, 5, spread=0.2)
        assert agreement(cluster(x, 0.6), list(who)).f1 == 1.0

    def test_agreement_counts_pairs(self):
        match = agreement(np.array([0, 0, 0, 1, 1]), ["a", "a", "b", "b", "b"])
        assert (match.precision, match.recall) == (2 / 4, 2 / 4)
        assert agreement(np.array([0, 1]), ["a", "b"]).f1 == 1.0

    def test_what_may_not_belong_comes_last(self):
        x = np.array([[0.6, 0.8], [1, 0], [0.99, np.sqrt(1 - 0.99**2)], [-1, 0]], np.float32)
        assert typical_first(x, np.array([0, 0, 0, 1])) == [[2, 1, 0], [3]]

    def test_equal_pictures_and_one_picture(self):
        assert cluster(np.repeat(unit(1), 3, 0), 0.1).tolist() == [0, 0, 0]
        assert cluster(unit(1), 0.1).tolist() == [0]
        assert cluster(unit(0), 0.1).tolist() == []


class TestPairs:
    def test_counts_thresholds_and_the_pairs_shown_are_those_of_the_whole_matrix(self):
        x, who = people(20, 20, spread=0.9)
        names = [None if i % 50 == 0 else f"p{person}" for i, person in enumerate(who)]
        kept = [i for i, name in enumerate(names) if name is not None]
        found = find_pairs(x, names, 0.9, show=5)
        apart = squared_distances(x, x)
        same = {(i, j): apart[i, j] for i in kept for j in kept if i < j and who[i] == who[j]}
        different = {(i, j): apart[i, j] for i in kept for j in kept if i < j and who[i] != who[j]}
        assert len(found.same) == len(same)
        assert len(found.different) == len(different)
        assert found.accepted() == pytest.approx(np.mean([d <= 0.9 for d in same.values()]))
        assert found.mistaken() == pytest.approx(np.mean([d <= 0.9 for d in different.values()]))
        for kind, pairs, inside, farthest in [
            ("accepted", same, True, False),
            ("missed", same, False, False),
            ("rejected", different, False, False),
            ("mistaken", different, True, False),
            ("worst missed", same, False, True),
            ("worst mistaken", different, True, True),
        ]:
            these = {pair: d for pair, d in pairs.items() if (d <= 0.9) == inside}
            expected = sorted(these, key=lambda p: abs(these[p] - 0.9), reverse=farthest)[:5]
            shown = found.shown[kind]
            assert [p.distance for p in shown] == pytest.approx([these[p] for p in expected], abs=1e-6), kind
            assert found.count(kind) == len(these)
            assert all((p.first, p.second) in these for p in shown)

    def test_a_threshold_for_a_share_of_false_accepts_is_the_largest_that_keeps_it(self):
        x, who = people(15, 6)
        found = find_pairs(x, [str(p) for p in who], 1.0)
        for far in (0.1, 0.01, 0.001):
            threshold = found.threshold_for(far)
            assert found.mistaken(threshold) <= far
            assert found.mistaken(threshold + 1e-5) > far or found.mistaken(threshold) == far

    def test_no_pairs_no_page(self):
        for names in (["a", "a"], ["a", "b"], [None, None]):
            with pytest.raises(ValueError, match="no pairs to judge by"):
                find_pairs(unit(2), names, 1.0)


class TestSureness:
    def test_it_falls_with_distance_and_matches_the_pairs(self):
        rng = np.random.default_rng(0)
        same, different = rng.normal(0.6, 0.2, 4000).clip(0, 4), rng.normal(1.6, 0.3, 40000).clip(0, 4)
        calibration = json.loads(json.dumps(calibrate(same, different)))
        sure = [Sureness.of(d, calibration) for d in np.linspace(0, 3, 31)]
        assert (np.diff([at.probability for at in sure]) <= 0).all()
        assert sure[0].probability > 0.99
        assert sure[-1].probability < 0.01
        middle = Sureness.of(0.8, calibration)
        assert middle.missed == pytest.approx((same > 0.8).mean(), abs=0.01)
        assert middle.mistaken == pytest.approx((different <= 0.8).mean(), abs=0.001)
        # Among pairs near a distance, with both kinds equally likely, the probability is the share of one person.
        near = [(np.abs(kind - 1.05) < 0.05).mean() for kind in (same, different)]
        assert Sureness.of(1.05, calibration).probability == pytest.approx(near[0] / sum(near), abs=0.1)

    def test_it_needs_both_kinds(self):
        with pytest.raises(ValueError, match="got 0 and 3"):
            calibrate(np.array([]), np.ones(3))
