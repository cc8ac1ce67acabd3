"""Probes of a network and nearest neighbours against their definitions."""

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from linattn_lab.difficulty import activations, knn_probe, measure, points, prediction_depth, vote
from linattn_lab.images import ResNet18, load, scores
from linattn_lab.neighbours import smallest

PROBES = ("input", "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc")


def all_of(model, images, point, batch=500):
    return torch.cat(list(activations(model, images, point, batch)))


@pytest.fixture(scope="module")
def small():
    """A network with random weights, and its outputs step by step."""
    torch.manual_seed(0)
    model = ResNet18(4, width=4, stem="imagenet", channels=1).eval()
    images = torch.rand(7, 1, 16, 16)
    steps = {"input": images}
    with torch.no_grad():
        for (name, module), before in zip(model.named_children(), PROBES):
            x = steps[before]
            steps[name] = module(x.flatten(1) if name == "fc" else x)
    return model, images, steps


def test_a_resnet_is_probed_at_eleven_points(small):
    model, images, steps = small
    assert points(model) == PROBES
    for name in PROBES:
        torch.testing.assert_close(all_of(model, images, name, batch=3), steps[name].flatten(1))
    assert torch.equal(all_of(model, images, "fc"), scores(model, images))


def test_probes_reach_any_module_and_leave_no_hook(small):
    model, images, steps = small
    with torch.no_grad():
        inner = model.layer1[0].conv1(steps["maxpool"])
    assert torch.equal(all_of(model, images, "layer1.0.conv1"), inner.flatten(1))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_relu_in_place_does_not_reach_the_probe_before_it():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    found = all_of(model, torch.randn(5, 1, 4, 4), "2")
    assert (found < 0).any()


def test_a_module_that_writes_over_its_last_output_is_probed_right():
    class Reusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("room", torch.zeros(2, 9))

        def forward(self, x):
            return self.room.copy_(x.flatten(1))

    images = torch.rand(6, 1, 3, 3)
    assert torch.equal(all_of(nn.Sequential(Reusing()), images, "0", batch=2), images.flatten(1))


def test_points_that_cannot_be_probed_say_why(small):
    model, images, _ = small
    with pytest.raises(ValueError, match=r"no module 'layer9': a point is 'input' or a name"):
        all_of(model, images, "layer9")

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.pair = nn.Linear(2, 2), nn.LSTM(3, 2)

        def forward(self, x):
            return self.pair(x[:, 0])[0]

    with pytest.raises(ValueError, match="does not come through 'unused'"):
        all_of(Odd(), torch.rand(2, 1, 3, 3), "unused")
    model = Odd()
    with pytest.raises(TypeError, match="'pair' puts out a tuple"):
        all_of(model, torch.rand(2, 1, 3, 3), "pair")
    assert not model.pair._forward_hooks


@pytest.mark.parametrize(("k", "features"), [(30, 40), (4, 16), (1, 17)])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("chunk", [2000, 37])
def test_votes_are_those_of_scikit_learn(k, features, twice, chunk, monkeypatch):
    """Also where votes are equal (often, for k = 4), and where references occur twice, so that distances are."""
    monkeypatch.setattr(knn_probe, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(k)
    references = torch.randn(400, features, generator=generator)
    queries = torch.randn(150, features, generator=generator)
    labels = torch.randint(0, 5, (400,), generator=generator)
    if twice:
        references[200:], labels[200:] = references[:200], labels[:200]
    oracle = KNeighborsClassifier(k, algorithm="brute").fit(references.numpy(), labels.numpy())
    found = vote(queries, references.split(90), labels, k=k)
    assert found.tolist() == oracle.predict(queries.numpy()).tolist()


def test_of_equal_distances_the_first_counts_and_of_equal_votes_the_smaller_class():
    references = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    labels = torch.tensor([2, 0, 1, 1])
    query = torch.zeros(1, 1)
    assert vote(query, [references], labels, k=1).tolist() == [2]
    assert vote(query, [references], labels, k=2).tolist() == [0]
    assert vote(query, [references], labels, k=4).tolist() == [1]
    values = torch.tensor([[3.0, 1, 2, 1, 2, 1], [5.0, 5, 5, 5, 5, 5]])
    assert smallest(values, 4).tolist() == [[1, 2, 3, 5], [0, 1, 2, 3]]


def test_distances_far_from_the_origin_are_told_apart():
    """In float32 the squares of such numbers swallow their differences."""
    references = torch.tensor([[4096.0], [4097.0]])
    assert vote(torch.tensor([[4096.75]]), [references], torch.tensor([0, 1]), k=1).tolist() == [1]


def test_neighbours_that_cannot_vote_are_refused():
    x, labels = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="k must be 1 to the number of references, 3; got 4"):
        vote(x, [x], labels, k=4)
    with pytest.raises(ValueError, match="2 references and 3 labels"):
        vote(x, [x[:2]], labels, k=2)
    with pytest.raises(ValueError, match="must be finite"):
        vote(x, [x / 0], labels, k=2)


def test_a_measurement_is_scikit_learns_vote_at_every_point(small):
    model, _, _ = small
    drawn = load("shapes", train=80, test=40)
    references, queries = drawn.train, drawn.test
    (found,) = measure(model, references, [queries], k=30)
    assert torch.equal(found.network, scores(model, queries.images).argmax(1))
    for probe, name in zip(found.probes, PROBES):
        oracle = KNeighborsClassifier(30, algorithm="brute").fit(
            all_of(model, references.images, name).double(), references.labels
        )
        expected = oracle.predict(all_of(model, queries.images, name).double().numpy())
        assert probe.tolist() == expected.tolist(), name
    assert torch.equal(found.depth, prediction_depth(found.probes, found.network))


def test_any_module_can_be_measured():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))
    drawn = load("shapes", train=60, test=20)
    parts = drawn.test.take(torch.arange(12)), drawn.test.take(torch.arange(12, 20))
    one, other = measure(model, drawn.train, parts, at=["input", "1", "3"], k=5)
    assert one.probes.shape == (3, 12)
    assert other.probes.shape == (3, 8)
    (both,) = measure(model, drawn.train, [drawn.test], at=["input", "1", "3"], k=5)
    assert torch.equal(torch.cat([one.probes, other.probes], 1), both.probes)
