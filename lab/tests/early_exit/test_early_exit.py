"""Early exit: who leaves where, what it costs, and that nothing but the needed work is done."""

import math

import pytest
import torch
from torch import nn

from linattn.measure import cost
from linattn_lab.early_exit import Confidence, EarlyExit, Entropy, Patience, decide, weighted_loss
from linattn_lab.early_exit.backbones import conv_head, resnet_exits, transformer_exits
from linattn_lab.early_exit.latency import latencies
from linattn_lab.early_exit.macs import ExitCosts, course_costs, course_totals, exit_costs
from linattn_lab.early_exit.rules import RULES, confidence, entropy, make_rule
from linattn_lab.early_exit.study import spearman, timed_points
from linattn_lab.early_exit.sweep import choose, point, sweep
from linattn_lab.images.resnet import ResNet18


class Counting(nn.Module):
    """A stage that remembers how many examples it was given."""

    def __init__(self, module):
        super().__init__()
        self.module, self.seen = module, []

    def forward(self, x):
        self.seen.append(len(x))
        return self.module(x)


def small(classes=5, stages=4, seed=0):
    torch.manual_seed(seed)
    parts = [Counting(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(stages)]
    heads = [nn.Linear(8, classes) for _ in range(stages)]
    for head in heads:
        head.weight.data *= 6  # sure of some, unsure of others
    return EarlyExit(parts, heads).eval()


def all_rules():
    return [
        Entropy(0.9),
        Entropy(0.0),
        Entropy(9.0),
        Confidence(0.6),
        Confidence(1.0),
        Patience(1),
        Patience(2),
        Patience(9),
    ]


class TestCounts:
    def test_the_course_s_figures_exactly(self):
        costs = course_costs()
        assert costs.full == 556035584
        assert costs.stages == (153092096, 134381568, 134299648, 134262272)
        assert costs.heads == (393216, 196608, 98304)
        assert course_totals() == (3336213504000, 2305700339712)
        assert round(6000 * costs.full / costs.of_batches([0] * 47, [128] * 46 + [112]), 2) == 3.62

    def test_batches_must_add_up(self):
        with pytest.raises(ValueError, match="47 batches of 128, not 46"):
            course_totals(leave=(16, 3, 6, 21))

    def test_torch_s_counter_counts_convolutions_linear_layers_and_every_head_passed(self):
        net = ResNet18(6, width=8, channels=3)
        found = exit_costs(resnet_exits(net, 32, "linear"), torch.zeros(1, 3, 32, 32))
        stem = 3 * 9 * 8 * 32 * 32
        layer1 = 4 * 8 * 9 * 8 * 32 * 32
        assert found.exits[0] == stem + layer1 + 8 * 32 * 32 * 6
        layer2 = (8 + 3 * 16) * 9 * 16 * 16 * 16 + 8 * 16 * 16 * 16
        assert found.exits[1] - found.exits[0] == layer2 + 16 * 16 * 16 * 6
        heads = (8 * 1024 + 16 * 256 + 32 * 64) * 6
        assert found.exits[-1] == found.full + heads
        assert found.mean(torch.tensor([0, 0, 1])) == pytest.approx((2 * found.exits[0] + found.exits[1]) / 3)

    def test_linear_attention_is_counted_whichever_engine_serves_it(self):
        model = transformer_exits(6, dim=32, heads=4, layers=2)
        found = exit_costs(model, torch.zeros(1, 1, 32, 32))
        tokens, heads, dim = 64, 4, 8
        layer = tokens * (4 * 32 * 32 + 2 * 32 * 64 + 9 * 32) + heads * cost("elu", tokens, dim, dim).flops // 2
        assert found.exits[1] - found.exits[0] == layer + 32 * 6
        stem = 32 * 32 * 9 * 8 + 16 * 16 * 9 * 8 * 16 + 8 * 8 * 9 * 16 * 32  # three convolutions
        assert found.exits[0] == stem + layer + 32 * 6


class TestRules:
    def test_entropy_is_in_nats(self):
        logits = torch.stack([torch.zeros(6), torch.tensor([50.0, 0, 0, 0, 0, 0])])
        torch.testing.assert_close(entropy(logits), torch.tensor([math.log(6), 0.0]), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(confidence(logits), torch.tensor([1 / 6, 1.0]))

    def test_patience_counts_exits_in_a_row(self):
        named = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])  # (exits, examples)
        logits = nn.functional.one_hot(named, 2).float()
        assert decide(logits, Patience(1)).tolist() == [0, 0, 0]
        assert decide(logits, Patience(2)).tolist() == [1, 2, 1]
        assert decide(logits, Patience(3)).tolist() == [3, 3, 2]

    def test_a_rule_by_name(self):
        assert make_rule("entropy", 0.5) == Entropy(0.5)
        assert make_rule("patience", 2.0) == Patience(2)
        with pytest.raises(ValueError, match=r"number of exits from 1 up, got 0\.5"):
            make_rule("patience", 0.5)
        with pytest.raises(ValueError, match="unknown rule 'margin'"):
            make_rule("margin", 0.5)


class TestWrapper:
    @pytest.mark.parametrize("rule", all_rules(), ids=str)
    def test_leaving_early_gives_what_all_logits_say(self, rule):
        model, x = small(), torch.randn(200, 8)
        with torch.no_grad():
            logits = torch.stack(model(x))
        found, exits = model.predict(x, rule), decide(logits, rule)
        assert found.exits.equal(exits)
        expected = logits[exits, torch.arange(200)]
        torch.testing.assert_close(found.logits, expected)
        assert found.classes.equal(expected.argmax(-1))

    def test_only_the_rest_of_the_batch_goes_on(self):
        model, x = small(), torch.randn(300, 8)
        found = model.predict(x, Entropy(0.9))
        left = [int((found.exits >= number).sum()) for number in range(4)]
        assert [stage.seen for stage in model.stages] == [[n] for n in left if n]
        assert left[0] > left[1] > left[3] > 0

    def test_examples_do_not_depend_on_their_neighbours(self):
        model, x = small(), torch.randn(40, 8)
        whole = model.predict(x, Entropy(0.9))
        alone = [model.predict(row[None], Entropy(0.9)) for row in x]
        assert whole.exits.tolist() == [int(found.exits) for found in alone]
        torch.testing.assert_close(whole.logits, torch.cat([found.logits for found in alone]))

    def test_the_last_exit_alone_is_the_network_without_exits(self):
        net = ResNet18(6, width=4, channels=1).eval()
        x = torch.randn(3, 1, 32, 32)
        with torch.no_grad():
            expected = net(x)
            model = resnet_exits(net, 32, "conv").eval()
            torch.testing.assert_close(model(x)[-1], expected)
            torch.testing.assert_close(model.predict(x, Entropy(0.0)).logits, expected)

    def test_stages_may_pass_on_several_tensors(self):
        class Twice(nn.Module):
            def forward(self, x):
                return {"tokens": x["tokens"] * 2, "pair": (x["pair"][0], [x["pair"][1][0] + 1])}

        class Head(nn.Module):
            def forward(self, x):
                return x["tokens"] + x["pair"][1][0]

        model = EarlyExit([Twice(), Twice()], [Head(), Head()]).eval()
        x = torch.tensor([[9.0, 0.0], [0.1, 0.0], [0.0, 9.0]])
        found = model.predict({"tokens": x, "pair": (x, [x])}, Entropy(0.1))
        assert found.exits.tolist() == [0, 1, 0]
        torch.testing.assert_close(found.logits, torch.tensor([[28.0, 1.0], [2.5, 2.0], [1.0, 28.0]]))

    def test_an_empty_batch(self):
        found = small().predict(torch.randn(0, 8), Entropy(0.5))
        assert found.classes.shape == found.exits.shape == (0,)
        assert found.logits.shape == (0, 5)

    def test_mistakes_are_named(self):
        with pytest.raises(ValueError, match="got 2 stages and 1 heads"):
            EarlyExit([nn.Identity(), nn.Identity()], [nn.Identity()])
        with pytest.raises(ValueError, match=r"call \.eval\(\)"):
            small().train().predict(torch.randn(1, 8), Entropy(0.5))
        with pytest.raises(ValueError, match="got 2 for 4 exits"):
            weighted_loss(small()(torch.randn(3, 8)), torch.zeros(3, dtype=torch.long), (1.0, 0.3))

    def test_the_loss_is_the_weighted_sum(self):
        logits, target = [torch.randn(7, 3) for _ in range(2)], torch.randint(0, 3, (7,))
        expected = sum(w * nn.functional.cross_entropy(x, target, reduction="sum") for w, x in zip((1.0, 0.3), logits))
        torch.testing.assert_close(weighted_loss(logits, target, (1.0, 0.3)), expected)

    @pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("cifar", 28), ("imagenet", 64), ("cifar", 33)])
    @pytest.mark.parametrize("layout", ["linear", "conv"])
    def test_a_resnet_of_any_stem_and_size_can_be_cut(self, layout, stem, side):
        model = resnet_exits(ResNet18(4, width=2, stem=stem, channels=1), side, layout).eval()
        assert [tuple(x.shape) for x in model(torch.randn(2, 1, side, side))] == [(2, 4)] * 4

    def test_sequences_leave_one_by_one(self):
        torch.manual_seed(0)
        model = transformer_exits(6, dim=16, heads=2, layers=3)
        x = torch.randn(30, 1, 32, 32)
        with torch.no_grad():
            for _ in range(20):  # what the norms keep of a batch
                model(x)
            logits = torch.stack(model.eval()(x))
        found = model.predict(x, Entropy(entropy(logits[0]).median().item()))
        assert len(found.exits.unique()) > 1
        torch.testing.assert_close(found.logits, logits[found.exits, torch.arange(30)], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("side", "patch"), [(30, 4), (27, 3), (32, 1)])
    def test_patches_must_fill_the_picture(self, side, patch):
        with pytest.raises(ValueError, match=rf"power of 2 that divides the side {side} of the pictures, got {patch}"):
            transformer_exits(6, side=side, patch=patch)


class TestSweep:
    logits = (
        torch.randn(4, 500, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 2, 4, 8.0])[:, None, None]
    )
    labels = logits[-1].argmax(-1)
    costs = ExitCosts((10, 20, 30, 40), 38)

    def test_every_rule_goes_from_the_first_exit_to_the_last(self):
        points = sweep(self.logits, self.labels, self.costs)
        for name in RULES:
            macs = [p.macs for p in points if type(p.rule).__name__.lower() == name]
            assert min(macs) == 10
            assert max(macs) > 30
        for p in points:
            assert sum(p.shares) == pytest.approx(1)
            assert p.macs == pytest.approx(sum(s * c for s, c in zip(p.shares, self.costs.exits)))

    def test_a_floor_takes_the_cheapest_and_a_budget_the_most_accurate(self):
        points = sweep(self.logits, self.labels, self.costs)
        floor, budget = choose(points, floor=0.7), choose(points, budget=25)
        assert floor.accuracy >= 0.7
        assert all(p.macs >= floor.macs for p in points if p.accuracy >= 0.7)
        assert budget.macs <= 25
        assert all(p.accuracy <= budget.accuracy for p in points if p.macs <= 25)
        assert point(self.logits, self.labels, self.costs, floor.rule) == floor

    def test_goals_out_of_reach_are_refused(self):
        points = sweep(self.logits, self.labels, self.costs)
        with pytest.raises(ValueError, match=r"accuracy of 1\.1000; the best reaches"):
            choose(points, floor=1.1)
        with pytest.raises(ValueError, match="the first exit alone takes 10"):
            choose(points, budget=5)
        with pytest.raises(ValueError, match="one of the two"):
            choose(points)

    def test_points_that_are_timed_span_the_sweep(self):
        points = sweep(self.logits, self.labels, self.costs)
        timed = timed_points(points)
        assert len(timed) == len(set(timed)) <= 12
        assert min(p.macs for p in timed) == 10
        assert max(p.macs for p in timed) == max(p.macs for p in points)

    def test_rank_correlation(self):
        depth = torch.tensor([0, 1, 2, 3, 4, 5])
        assert spearman(depth, depth * 2)["spearman"] == pytest.approx(1)
        assert spearman(depth, torch.zeros(6)) is None


def test_measured_time_falls_with_the_exits_taken():
    torch.manual_seed(0)
    model = resnet_exits(ResNet18(6, width=8, channels=1), 32, "conv").eval()
    images = torch.randn(32, 1, 32, 32)
    calls = {"first": lambda x: model.predict(x, Patience(1)), "last": lambda x: model.predict(x, Patience(9))}
    for batch in (1, 32):
        found = latencies(calls, images[: 8 * batch], batch, rounds=5)
        assert (
            found["last"].processor > 2 * found["first"].processor
        )  # 19 times the work; other work on the machine may blur it
    with pytest.raises(ValueError, match="32 pictures do not fill a batch of 64"):
        latencies(calls, images, 64)


def test_a_head_of_convolutions_ends_small():
    head = conv_head(8, 32, 6, widest=32)
    assert [m.out_channels for m in head if isinstance(m, nn.Conv2d)] == [16, 16, 32, 32]
    assert head[:-3](torch.randn(1, 8, 32, 32)).shape == (1, 32, 4, 4)
