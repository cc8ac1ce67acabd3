"""Hand-designed transformers: exact on every sequence, their learned twins, and where other attentions break them."""

import json

import numpy as np
import pytest
import torch

from cli_support import refusal
from linattn.cli import main
from linattn_lab import handmade
from linattn_lab.handmade import DESIGNS, TorchHead, Weights, single_head
from linattn_lab.handmade.attentions import attentions, try_attention
from linattn_lab.handmade.comparison import compare, explain
from linattn_lab.handmade.luck import MARKS, Luck
from linattn_lab.handmade.many import errors, head_of, padded, stack
from linattn_lab.handmade.training import RATE, batches

SIZES = {"identity": 1092, "first": 120, "unique": 120, "reverse": 1092, "previous": 1092, "histogram": 1092}


def random_weights(rng, d_in, d_qk, d_v, max_len=None, d_start=0, d_end=0):
    rows = d_in + d_start + d_end
    Km, Qm, Vm = (rng.normal(size=(rows, d)) for d in (d_qk, d_qk, d_v))
    start = rng.normal(size=(max_len, d_start)) if d_start else None
    end = rng.normal(size=(max_len, d_end)) if d_end else None
    return Weights(Km, Qm, Vm, start, end)


@pytest.mark.parametrize(("d_start", "d_end"), [(0, 0), (3, 0), (0, 2), (3, 2)])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_torch_twin_equals_the_numpy_reference(d_start, d_end, n):
    rng = np.random.default_rng(n)
    weights = random_weights(rng, 4, 5, 3, 7, d_start, d_end)
    tokens = rng.normal(size=(6, n, 4))
    expected = np.stack([single_head(x, weights).output for x in tokens])
    twin = TorchHead.of(weights)
    np.testing.assert_allclose(twin(torch.from_numpy(tokens)).detach().numpy(), expected, rtol=1e-10)
    single = twin.float()(torch.from_numpy(tokens).float()).detach().numpy()
    np.testing.assert_allclose(single, expected, rtol=1e-3, atol=1e-5)


def test_rows_of_attention_sum_to_one_and_shapes_are_as_said():
    weights = random_weights(np.random.default_rng(0), 3, 2, 5, 6, d_start=4)
    trace = single_head(np.eye(3)[[0, 2, 1, 1]], weights)
    np.testing.assert_allclose(trace.attention.sum(1), 1)
    shapes = [(name, x.shape) for name, x in trace.items()]
    assert shapes == [
        ("Km", (7, 2)),
        ("Qm", (7, 2)),
        ("Vm", (7, 5)),
        ("K", (4, 2)),
        ("Q", (4, 2)),
        ("V", (4, 5)),
        ("attention", (4, 4)),
        ("output", (4, 5)),
    ]


def test_folding_positions_into_the_matrices_changes_nothing():
    rng = np.random.default_rng(1)
    weights = random_weights(rng, 3, 2, 5, 6, d_start=4, d_end=3)
    tokens = rng.normal(size=(5, 3))
    folded = weights.with_plain_positions()
    assert np.array_equal(folded.pos, np.eye(6))
    np.testing.assert_allclose(single_head(tokens, folded).output, single_head(tokens, weights).output)


@pytest.mark.parametrize("name", DESIGNS)
def test_hand_weights_are_exact_on_every_sequence(name):
    design = DESIGNS[name]
    assert handmade.count_exact(design, design.weights()) == (SIZES[name], SIZES[name])


def test_what_the_tasks_ask_for():
    def expected(name, text):
        return DESIGNS[name].expected(DESIGNS[name].read(text)).tolist()

    A, B, C = np.eye(3).tolist()
    assert expected("identity", "ABC") == [A, B, C]
    assert expected("first", "BCA") == [B, B, B]
    assert expected("unique", "ABB") == [[1], [1], [-1], [-1]]
    assert expected("reverse", "AAB") == [B, A, A]
    assert expected("previous", "CAB") == [C, C, A]
    assert expected("histogram", "ABB") == [[1], [1 / 2], [1 / 3], [1 / 3]]


def test_a_gap_too_small_is_not_exact():
    design = DESIGNS["identity"]
    weights = handmade.aggregate(design.selector, design.values, gap=10)
    exact, of = handmade.count_exact(design, weights)
    assert exact == 18 < of  # only sequences of one letter repeated, which have nothing to confuse


@pytest.mark.parametrize(("name", "bar"), [("identity", 1.5e-3), ("first", 1e-4), ("unique", 0.06)])
def test_learned_twins_reach_their_marks(name, bar):
    head = handmade.learn(DESIGNS[name], seed=0)
    assert handmade.mean_squared_error(DESIGNS[name], head) <= bar
    untrained = TorchHead.random(DESIGNS[name].weights(), seed=0)
    assert handmade.mean_squared_error(DESIGNS[name], untrained) > 10 * bar


def test_learning_depends_on_the_seed_alone():
    design = DESIGNS["first"]
    runs = [handmade.learn(design, seed=seed, steps=20).Km.detach() for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("name", ["identity", "unique", "reverse"])
def test_learning_takes_the_steps_of_autograd(name):
    """Without positions, with positions from the start, and from both ends."""
    design = DESIGNS[name]
    found, head = handmade.learn(design, seed=5, steps=200), TorchHead.random(design.weights(), seed=5)
    examples = [(x, y) for _, tokens, expected in batches(design) for x, y in zip(tokens, expected, strict=True)]
    optimizer = torch.optim.SGD(head.parameters(), lr=RATE)
    for index in torch.randint(len(examples), (200,), generator=torch.Generator().manual_seed(6)).tolist():
        tokens, expected = examples[index]
        optimizer.zero_grad()
        (head(tokens) - expected).square().mean().backward()
        optimizer.step()
    for own, other in zip(found.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["identity", "unique", "reverse"])
def test_padding_does_not_change_the_error(name):
    design = DESIGNS[name]
    heads = [TorchHead.random(design.weights(), seed) for seed in (0, 1)]
    found = errors(stack(heads), *padded(design)).mean(1)
    expected = [handmade.mean_squared_error(design, head) for head in heads]
    assert found.tolist() == pytest.approx(expected, rel=1e-10)
    assert handmade.mean_squared_error(design, head_of(stack(heads), 1)) == pytest.approx(expected[1], rel=1e-12)


def test_the_robust_recipe_learns_what_the_course_s_recipe_does_not():
    """With seed 105 SGD is caught in a local minimum of `unique`."""
    design = DESIGNS["unique"]
    assert handmade.mean_squared_error(design, handmade.learn(design, seed=105)) > MARKS["unique"]
    assert handmade.mean_squared_error(design, handmade.learn_robust(design, seed=105)) <= MARKS["unique"]


def test_luck_is_counted_with_an_interval():
    luck = Luck("course", "unique", {0: 0.01, 1: 0.5, 2: 0.06, 3: 0.07})
    assert luck.reached == [True, False, True, False]
    reached = luck.figures()["course|unique|seeds that reach it"]
    assert reached.value == 2
    assert reached.low == pytest.approx(4 * 0.06758599, rel=1e-6)  # Clopper and Pearson, 2 of 4
    median = luck.figures()["course|unique|median error"]
    assert (median.low, median.value, median.high) == (0.01, pytest.approx(0.065), 0.5)


def test_the_command_shows_the_luck_of_seeds(tmp_path, capsys):
    files = ["--json", str(tmp_path / "l.json"), "--figures", str(tmp_path / "f.json")]
    assert main(["lab", "handmade", "first", "--seeds", "0-1,4", "--steps", "5", *files]) == 0
    said = capsys.readouterr().out
    assert "recipe course" in said
    assert "recipe robust" in said
    assert "seed 4" in said
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["robust|first|seeds that reach it"]["seeds"] == [0, 1, 4]
    course, robust = json.loads((tmp_path / "l.json").read_text())
    assert (course["recipe"], robust["recipe"], list(course["errors"])) == ("course", "robust", ["0", "1", "4"])


def test_which_attentions_keep_the_designs_and_which_break_them():
    def outcomes(name, *kinds):
        tried = attentions(DESIGNS[name].weights().Km.shape[1])
        return [try_attention(DESIGNS[name], tried[kind]) for kind in kinds]

    for name in ("identity", "unique", "histogram"):
        softmax = outcomes(name, "softmax")[0]
        assert softmax.exact == softmax.of
    hard, relu, polynomial, elu = outcomes("identity", "argmax", "relu", "polynomial", "elu")
    assert hard.exact == relu.exact == 1092
    assert polynomial.exact == elu.exact == 18
    assert polynomial.ratio == pytest.approx(31**2)  # (30 + 1)^2 against (0 + 1)^2
    assert elu.leak > 10 * polynomial.leak
    hard = outcomes("histogram", "argmax")[0]  # counting needs shares, and argmax gives none
    assert hard.exact == 0
    assert "uneven" in hard.why()
    relu = outcomes("unique", "relu")[0]  # 2 units against 1 are e^30 to 1 for softmax, 2 to 1 for relu
    assert relu.ratio == pytest.approx(2)


def test_selectors_add_up_and_refuse_nonsense():
    same = handmade.by_content("AB", lambda query, key: query == key)
    later = handmade.by_position("AB", 3, lambda query, key: key > query)
    assert (same + 2 * later).scores("AAB").tolist() == [[1, 3, 2], [1, 1, 2], [0, 0, 1]]
    assert (same + 2 * later).selected("AAB").tolist() == [
        [False, True, False],
        [False, False, True],
        [False, False, True],
    ]
    with pytest.raises(ValueError, match="one max_len, got 3 and 4"):
        later + handmade.by_position("AB", 4, lambda query, key: True)
    with pytest.raises(ValueError, match="cannot be added"):
        same + handmade.by_content("ABC", lambda query, key: True)
    with pytest.raises(ValueError, match="B has none"):
        handmade.aggregate(same, {"A": [1.0]})
    with pytest.raises(ValueError, match="known for 4 tokens, got 5"):
        single_head(np.eye(3)[[0] * 5], DESIGNS["first"].weights())


def test_the_comparison_speaks_from_the_numbers():
    design = DESIGNS["identity"]
    itself = compare(design, design.weights(), design.read("ABBCC"))
    assert itself.row_overlap == pytest.approx(1)
    assert itself.same_keys.all()
    lines = explain(itself)
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "Km",
        "Qm",
        "Vm",
        "K",
        "Q",
        "V",
        "attention",
        "attention",
        "output",
    ]
    assert "right for 5 of 5 tokens" in lines[-2]
    assert itself.correlation == pytest.approx({"K": 1, "Q": 1, "V": 1, "scores": 1})
    assert itself.score_span == pytest.approx((30, 30))
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]  # another basis: the same scores
    turned = Weights(design.weights().Km @ turn, design.weights().Qm @ turn, design.weights().Vm)
    same = compare(design, turned, design.read("ABBCC"))
    assert same.correlation["K"] < 0.95
    assert same.correlation["scores"] == pytest.approx(1)
    assert "they differ" in " ".join(explain(same))
    broken = Weights(design.weights().Km * 0, design.weights().Qm, design.weights().Vm[:, [1, 2, 0]])
    other = compare(design, broken, design.read("ABBCC"))
    assert other.row_overlap == pytest.approx(np.array([1, 2, 2, 2, 2]) / 5)
    text = " ".join(explain(other))
    assert "another route" in text
    assert "K: hand and learned cannot be correlated" in text
    assert "right for 1 of 5 tokens" in text


def test_the_command_writes_figures_for_machines(tmp_path, capsys):
    assert main(["lab", "handmade", "--steps", "3", "--json", str(tmp_path / "h.json")]) == 0
    figures = json.loads((tmp_path / "h.json").read_text())
    assert list(figures) == ["identity", "first", "unique"]
    for name, entry in figures.items():
        assert entry["exact"] == entry["of"] == SIZES[name]
        assert 0.01 < entry["learned_mse"] < 10
    assert "polynomial" in capsys.readouterr().out


def test_the_command_draws_a_users_sequence(tmp_path, capsys):
    picture = tmp_path / "p.png"
    assert main(["lab", "handmade", "reverse", "--sequence", "abc", "--steps", "3", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "off by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first", "--sequence", "ABCAB"], "first takes 1 to 4 letters, 'ABCAB' has 5"),
        (["identity", "--sequence", "ABX"], "'ABX' also has X"),
        (["identity", "--sequence", ""], "takes 1 to 6 letters"),
        (["--sequence", "AB"], "go with a task"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--seeds", "5-2"], "from low to high"),
        (["--figures", "f.json"], "--figures goes with --seeds"),
    ],
)
def test_mistakes_get_one_sentence(words, said, capfd):
    assert said in refusal(["lab", "handmade", *words], capfd)
