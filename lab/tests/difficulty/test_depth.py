"""Prediction depth and its statistics against their definitions."""

import numpy as np
import pytest
import torch

from linattn_lab.difficulty import Measured, measure, prediction_depth
from linattn_lab.difficulty.depth import bands
from linattn_lab.difficulty.statistics import by_depth, partial_rank_correlation, rank_correlation
from linattn_lab.images import Part, ResNet18, generate, train
from linattn_lab.training.config import TrainConfig


@pytest.mark.parametrize(
    ("probes", "network", "depth"),
    [
        ([1, 1, 1, 1], 1, 0),  # the input already agrees
        ([0, 1, 1, 1], 1, 1),
        ([1, 0, 1, 1], 1, 2),  # an early agreement that does not last counts for nothing
        ([0, 0, 0, 1], 1, 3),
        ([1, 1, 1, 0], 1, 4),  # all but the last agree
        ([2, 2, 2, 2], 1, 4),  # the probes agree among themselves, not with the network
    ],
)
def test_depth_is_the_first_probe_from_which_all_agree_with_the_network(probes, network, depth):
    assert prediction_depth(torch.tensor(probes)[:, None], torch.tensor([network])).tolist() == [depth]


def test_depth_of_many_pictures_is_that_of_each():
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(0, 2, (11, 300), generator=generator)
    network = torch.randint(0, 2, (300,), generator=generator)
    naive = [min(d for d in range(12) if all(p == n for p in row[d:])) for row, n in zip(probes.T, network)]
    assert prediction_depth(probes, network).tolist() == naive
    with pytest.raises(ValueError, match=r"got \(11, 300\) and \(299,\)"):
        prediction_depth(probes, network[1:])


def test_accuracy_by_depth_counts_every_picture_once():
    generator = torch.Generator().manual_seed(1)
    probes = torch.randint(0, 2, (11, 300), generator=generator)
    network, labels = torch.randint(0, 2, (2, 300), generator=generator)
    measured = Measured(probes, network, torch.ones(300), torch.arange(300), labels)
    found = by_depth([measured, measured])
    assert sum(found.counts) == 600
    assert sum(count for _, count, _ in found.single) == 600
    for (first, last), count, accuracy in zip(found.bands, found.counts, found.accuracy):
        inside = [i for i in range(300) if first <= measured.depth[i] <= last]
        assert count == 2 * len(inside) > 0
        assert accuracy == pytest.approx(np.mean([network[i] == labels[i] for i in inside]))


@pytest.mark.parametrize(
    ("depths", "expected"), [(12, [(0, 2), (3, 5), (6, 8), (9, 11)]), (3, [(0, 0), (1, 1), (2, 2)])]
)
def test_bands_are_of_like_width_and_leave_no_depth_out(depths, expected):
    assert bands(depths) == expected


def test_what_two_things_have_from_a_third_is_taken_out():
    generator = np.random.default_rng(0)
    third, one, other = generator.standard_normal((3, 2000))
    rho, p = rank_correlation(one + 2 * third, other + 2 * third)
    assert rho > 0.7
    assert p < 1e-9
    rho, p = partial_rank_correlation(one + 2 * third, other + 2 * third, third)
    assert abs(rho) < 0.1
    assert partial_rank_correlation(one + third, -one + third, third)[0] < -0.8


@pytest.mark.slow
def test_small_and_noisy_pictures_are_deep_and_deep_ones_more_often_wrong():
    """Circles and triangles alone, which a tiny network tells apart within seconds."""
    drawn = generate(12000, 0, noise=(0.0, 0.6))
    two = torch.from_numpy(np.flatnonzero((drawn.labels == 0) | (drawn.labels == 3)))
    labels = (torch.from_numpy(drawn.labels) == 3).long()
    whole = Part(torch.from_numpy(drawn.images), labels, drawn.truth).take(two)
    learnt, test = whole.take(torch.arange(3000)), whole.take(torch.arange(3000, 4000))
    torch.manual_seed(0)
    model = ResNet18(2, width=8, stem="imagenet", channels=1)
    config = TrainConfig(steps=120, batch_size=64, lr=5e-3, warmup=10, weight_decay=0.05, validate_every=1000)
    train(model, learnt, config, validation=0, show=False)
    (found,) = measure(model, learnt.take(torch.arange(1500)), [test])
    depth = found.depth.numpy()
    for name, sign in (("noise", 1), ("size", -1)):
        rho, p = rank_correlation(depth, test.truth[name])
        assert sign * rho > 0
        assert p < 1e-3
    shallow = depth <= np.median(depth)
    right = found.right.numpy()
    assert right[shallow].mean() > right[~shallow].mean() + 0.02
