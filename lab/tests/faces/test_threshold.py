"""The threshold for a rate of false accepts, the cut of clusters, and cross-fitting with and without an old model."""

import json

import numpy as np
import pytest
import torch

from cli_support import refusal
from face_files import write_people
from linattn.cli import main
from linattn_lab.faces.embedder import Embedder
from linattn_lab.faces.reports.unseen import COLUMNS, Seen, figures_of
from linattn_lab.faces.training.fit import Choice, groups_of
from linattn_lab.faces.verification.clustering import agreement, cluster
from linattn_lab.faces.verification.cut import choose_cut
from linattn_lab.faces.verification.metrics import join, pairs_of, threshold_at
from linattn_lab.faces.verification.threshold import choose_threshold

pytestmark = pytest.mark.usefixtures("one_thread")


def faces(people, each=8, dim=12, noise=0.55, seed=0):
    """Unit vectors (N, dim) of made-up people, and whose they are."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(people), each)
    rows = rng.standard_normal((people, dim))[owner] + noise * rng.standard_normal((people * each, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), owner


def test_the_threshold_is_that_of_the_rate_over_all_groups_together():
    groups = [pairs_of(*faces(9, seed=seed)) for seed in range(3)]
    for far in (0.2, 0.05, 0.01):
        found = choose_threshold(groups, far)
        assert found.value == threshold_at(join(groups), far)
        assert found.low < found.value < found.high
        assert found.far_95[0] <= far <= found.far_95[1]
        assert (found.people, found.pairs) == (27, 3 * (72 * 71 - 9 * 8 * 7) // 2)
    assert "cannot show a rate" not in found.text()
    assert "pairs cannot show a rate of 1e-06" in choose_threshold(groups, 1e-6).text()
    with pytest.raises(ValueError, match="between 0 and 1"):
        choose_threshold(groups, 0.0)


def test_the_interval_covers_the_rate_of_other_people_and_narrows_with_more():
    """Of 40 draws of 20 people, the interval misses the threshold of 300 people about as often as it should."""
    truth = threshold_at(pairs_of(*faces(300, each=3, seed=99)), 0.01)
    inside = 0
    for seed in range(40):
        found = choose_threshold([pairs_of(*faces(20, each=3, seed=seed))], 0.01)
        inside += found.low <= truth <= found.high
    assert 32 <= inside <= 40
    few, many = (choose_threshold([pairs_of(*faces(n, each=3, seed=1))], 0.05) for n in (10, 80))
    assert many.high - many.low < 0.6 * (few.high - few.low)


def test_draws_count_people_not_pairs():
    """Images of a person that are all alike say no more than one of them: the interval stays as wide."""
    rows, owner = faces(12, each=2, noise=0.4)
    once = choose_threshold([pairs_of(rows, owner)], 0.05)
    often = choose_threshold([pairs_of(np.repeat(rows, 4, 0), np.repeat(owner, 4))], 0.05)
    assert often.high - often.low > 0.8 * (once.high - once.low)


def test_the_cut_parts_people_that_were_not_used_to_choose_it():
    groups = [faces(8, seed=seed, noise=0.7, dim=24) for seed in range(3)]
    cut = choose_cut(groups)
    assert all(0.9 < f1 <= best for f1, best in zip(cut.f1, cut.best))
    for (rows, owner), f1 in zip(groups, cut.f1):  # the same clusters as the command's
        assert agreement(cluster(rows, cut.value), owner.tolist()).f1 == pytest.approx(f1)
    rows, owner = faces(15, seed=7, noise=0.7, dim=24)
    labels = cluster(rows, cut.value)
    assert agreement(labels, owner.tolist()).f1 > 0.9
    assert agreement(cluster(rows, cut.value / 4), owner.tolist()).f1 < 0.5
    uneven = np.concatenate([np.flatnonzero(owner == k)[: 1 + k % 8] for k in range(15)])
    assert agreement(cluster(rows[uneven], cut.value), owner[uneven].tolist()).f1 > 0.9


def test_everyone_is_held_out_once():
    people = torch.arange(11) * 3
    groups = groups_of(people, Choice(folds=3), seed=1)
    assert sorted(torch.cat(groups).tolist()) == people.tolist()
    assert [len(group) for group in groups] == [4, 4, 3]
    assert [len(group) for group in groups_of(people[:5], Choice(folds=9), seed=1)] == [3, 2]
    (alone,) = groups_of(people, Choice(held_out=0.3), seed=1)
    assert len(alone) == 3
    with pytest.raises(ValueError, match="at least 4 people"):
        groups_of(people[:3], Choice(), seed=0)


TINY = ["--network", "tiny", "--size", "32", "24", "--dim", "16"]
SHORT = ["--people", "6", "--pictures", "3", "--steps", "25"]


def test_a_new_model_searches_the_index_of_the_old_one(tmp_path, capfd):
    """The path of the docs: train, embed, train --old on more people, search the old index with the new model."""
    write_people(tmp_path / "before", people=5)
    write_people(tmp_path / "photos", people=10)
    old, new, index = tmp_path / "old", tmp_path / "new", tmp_path / "index"

    def run(*words):
        return main(["lab", "faces", *map(str, words)])

    assert run("train", tmp_path / "before", "--model", old, "--folds", "2", *TINY, *SHORT) == 0
    assert run("embed", tmp_path / "photos", "--model", old, "--index", index) == 0
    assert run("train", tmp_path / "photos", "--old", old, "--model", new, "--folds", "2", "--far", "0.1", *SHORT) == 0
    said = capfd.readouterr().out
    assert "new images against old vectors: threshold" in said
    facts = Embedder.load(new).about
    assert facts["old"]["network"] == Embedder.load(old).digest()
    assert facts["held_out_people"] == 5  # those that the old model does not know
    assert facts["far"] == facts["old"]["far"] == 0.1
    assert len(facts["trained_on"]) == 10
    picture = tmp_path / "photos" / "p7" / "0.png"
    assert run("search", picture, "--index", index, "--model", new, "-k", "4", "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["threshold"] == facts["old"]["threshold"]
    assert [hit["person"] for hit in found["answers"][0]["found"]].count("p7") >= 3
    # Adding to the old index with the new model would mix their vectors unseen.
    line = refusal(
        ["lab", "faces", "embed", str(tmp_path / "photos"), "--model", str(new), "--index", str(index)], capfd
    )
    assert "was made with another network" in line
    words = ["lab", "faces", "train", str(tmp_path / "photos"), "--old", str(old)]
    assert "the new model is the same" in refusal([*words, "--model", str(tmp_path / "x"), "--dim", "8"], capfd)
    assert "needs a folder of its own" in refusal([*words, "--model", str(old)], capfd)
    knows = ["lab", "faces", "train", str(tmp_path / "before"), "--old", str(old), "--model", str(tmp_path / "x")]
    assert "people that it does not know" in refusal(knows, capfd)


def test_the_model_keeps_its_cut_and_older_models_have_none(tmp_path):
    from linattn_lab.faces.networks import NetworkSpec

    Embedder(NetworkSpec("tiny", (32, 24), 1, 8), threshold=0.7, cut=0.9).save(tmp_path)
    assert Embedder.load(tmp_path).cut == 0.9
    facts = json.loads((tmp_path / "embedder.json").read_text())
    del facts["cut"]
    (tmp_path / "embedder.json").write_text(json.dumps(facts))
    assert Embedder.load(tmp_path).cut == 0.7


def test_figures_of_unseen_people_have_intervals_over_people():
    seen = []
    for seed in (0, 1):
        for fold in range(4):
            rows, owner = faces(10, seed=10 * seed + fold)
            pairs = pairs_of(rows, owner)
            accepted = pairs.distance <= 0.5
            figures = {"FAR": accepted[~pairs.same].mean(), "VAL": accepted[pairs.same].mean(), "pairwise F1": 0.9}
            without = {"pairwise F1": [0.9] * 9 + [0.8], "clusters": [9.0 + seed] * 10}
            seen.append(Seen(fold, seed, (0.5, 0.4, 0.6), 0.6, figures | {"clusters": 10 + seed}, without, pairs))
    found = figures_of(seen)
    assert set(found) == {
        f"unseen|{row}|{column}"
        for row in ("people 1 to 10", "people 11 to 20", "people 21 to 30", "people 31 to 40", "all folds")
        for column in COLUMNS
    }
    whole = found["unseen|all folds|FAR"]
    assert whole.value == pytest.approx(np.mean([one.figures["FAR"] for one in seen]))
    one = found["unseen|people 1 to 10|FAR"]
    assert 0 < whole.high - whole.low < one.high - one.low
    assert found["unseen|people 1 to 10|clusters"].value == 10.5
    f1 = found["unseen|people 1 to 10|pairwise F1"]
    assert f1.value - f1.low == pytest.approx(2.262157 * (9 * np.var([0.9] * 9 + [0.8])) ** 0.5)


def test_ways_to_cluster_are_compared_on_people_they_were_not_set_by():
    from linattn_lab.faces.reports.clusterings import WAYS, compare

    folds = {seed: [faces(5, 6, seed=4 * seed + k, noise=0.6, dim=24) for k in range(3)] for seed in (0, 1)}
    found = compare(folds)
    assert len(found) == 2 * len(WAYS)
    assert found["clusterings|average linkage, the default|all images"].value > 0.9
    assert found["clusterings|average linkage, the default|3 images of each"].value > 0.9
    assert {one.seeds for one in found.values()} == {(0, 1)}
