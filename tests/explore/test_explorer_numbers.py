"""The numbers of the explorer, read in a real Chromium, are the library's."""

import base64
import contextlib
import io
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("jinja2")

import linattn
from explorer_support import GAUSSIAN, LETTERS, show
from linattn.explore.page import sample_heads
from linattn.kernels._projection import draw
from linattn.nearfar.kernel import NearFar

MEASURES = ("relative_error", "row_l1", "bad_rows", "nonpositive")
TOLERANCE = 1e-6  # of weights and errors; the bar is 1e-4
# What the page shows, by its link: every source with every kernel at least once.
LINKS = [
    f"{GAUSSIAN}&kernel=positive&features=40&seed=2",
    f"{GAUSSIAN}&kernel=positive&causal=0&norm=0.5&features=16",
    f"{GAUSSIAN}&kernel=trig&features=64&seed=1",
    f"{GAUSSIAN}&kernel=trig-raw&features=64&norm=0.3&causal=0",
    f"{GAUSSIAN}&kernel=nearfar&window=8&slots=6&sinks=2&block=4",
    f"{GAUSSIAN}&kernel=delta&beta=0.75&decay=-0.1",
    f"{LETTERS}&kernel=elu",
    f"{LETTERS}&kernel=relu&causal=0",
    f"{LETTERS}&kernel=polynomial&decay=-0.2",
    f"{LETTERS}&kernel=taylor&norm=0.7",
    f"{LETTERS}&kernel=delta&beta=1",
    f"{LETTERS}&kernel=positive&decay=-0.05&features=8",
    "source=gaussian&n=300&dim=8&kernel=nearfar&window=32&slots=16&sinks=4&block=16",
    "source=gaussian&n=9&dim=1&kernel=positive&features=4",
    "source=gaussian&n=5&dim=3&kernel=trig&features=2",
]
HANDMADE = [
    ("unique", "ABBC"),
    ("identity", "CAB"),
    ("reverse", "AABBC"),
    ("first", "BCA"),
    ("previous", "ABCA"),
    ("histogram", "ABB"),
]


def run_code(code):
    """The variables after running the lines that the page shows."""
    space = {}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Trig(normalize=False)
        exec(code, space)
    return space


def check(found, exact, implied, report=None):
    assert (found["exact"] - exact).abs().max() < TOLERANCE
    assert (found["implied"] - implied).abs().max() < TOLERANCE * max(1, implied.abs().max())
    if report is None:
        return
    for shown, true in ((found["report"], report), (found["baseline"], report.baseline)):
        for name in MEASURES:
            assert shown[name] == pytest.approx(getattr(true, name), rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.partition("kernel=")[2] or link)
def test_the_code_shown_gives_the_numbers_shown(explorer, link):
    found = show(explorer, link)
    run = run_code(found["code"])
    check(found, run["exact"][0], run["implied"][0], run.get("report"))
    right = run["exact"] @ run["v"]
    error = (run["implied"] @ run["v"] - right).norm() / right.norm()
    assert found["report"]["relative_error"] == pytest.approx(error.item(), rel=1e-5)


@pytest.mark.parametrize(("design", "letters"), HANDMADE)
def test_hand_made_heads_are_the_labs(explorer, design, letters):
    pytest.importorskip("linattn_lab")
    found = show(explorer, f"source=handmade&design={design}&text={letters}&causal=0&kernel=taylor")
    run = run_code(found["code"])
    check(found, run["exact"][0], run["implied"][0], run["report"])
    assert np.allclose(run["exact"][0], run["trace"].attention, atol=1e-12)


@pytest.mark.parametrize("kernel", ["positive", "nearfar"])
def test_a_real_head_is_read_from_the_page(explorer, kernel):
    heads = sample_heads()
    found = show(explorer, f"layer=17&head=5&kernel={kernel}")
    n, dim, layer = len(heads["tokens"]), heads["dim"], heads["layers"]["17"]

    def part(name, index, count):
        x = np.frombuffer(base64.b64decode(layer[name]), np.float16).reshape(count, n, dim)
        return torch.from_numpy(x[index : index + 1].astype(np.float64))

    q, k, v = part("q", 5, 9), part("k", 1, 3), part("v", 1, 3)  # the query head 5 of 9 reads the kv head 1 of 3
    made = NearFar(16, 8, 2, 8) if kernel == "nearfar" else linattn.kernels.Positive(64, 64)
    implied = linattn.implied_attention(q, k, made, value=v, is_causal=True)
    exact = linattn.implied_attention(q, k, "softmax", is_causal=True)
    report = linattn.measure.fidelity(q, k, v, made, is_causal=True)
    check(found, exact[0], implied[0], report)


@pytest.mark.parametrize(("rows", "dim", "orthogonal"), [(40, 16, True), (7, 3, False), (5, 8, True), (300, 4, True)])
def test_the_projections_are_the_librarys(explorer, rows, dim, orthogonal):
    script = "([r, d, o]) => [...linattnModules['random.js'].draw(r, d, 11, o)]"
    drawn = torch.tensor(explorer.evaluate(script, [rows, dim, orthogonal])).reshape(rows, dim)
    assert torch.allclose(drawn, draw(rows, dim, 11, orthogonal), atol=1e-6)


@pytest.mark.parametrize("kernel", ["positive", "trig", "polynomial", "taylor", "elu", "nearfar"])
def test_costs_are_those_of_the_formulas(explorer, kernel):
    script = """kernel => { const m = linattnModules['cost.js'];
      return [false, true].map(causal => [100, 5000].map(n => [m.exactCost(n, 24, 24, causal),
        m.kernelCost({kernel, features: 48, window: 32, slots: 8, sinks: 2, block: 16, causal}, n, 24, 24)])) }"""
    made = {
        "positive": linattn.kernels.Positive(24, 48),
        "trig": linattn.kernels.Trig(24, 48),
        "nearfar": NearFar(32, 8, 2, 16),
    }.get(kernel, kernel)
    for causal, rows in zip((False, True), explorer.evaluate(script, kernel), strict=True):
        for n, (exact, own) in zip((100, 5000), rows, strict=True):
            true = linattn.measure.cost("softmax", n, 24, 24, causal)
            assert (exact["flops"], exact["bytes"]) == (true.flops, true.state_bytes)
            true = linattn.measure.cost(made, n, 24, 24, causal or kernel == "nearfar")
            assert (own["flops"], own["bytes"]) == (true.flops, true.state_bytes)


STATE = """token => { const m = linattnModules['states.js'];
  const {data, settings} = linattn.shown;
  const name = {delta: 'DeltaState', nearfar: 'SlotsState'}[settings.kernel] || 'SumsState';
  const state = new m[name](data, settings); state.goTo(data.n - 1); const now = state.goTo(token);
  if (name === 'SlotsState') return {slots: now.block.slots.map(s => [s.tokens, s.shares, s.bias]), start: now.block.start};
  return {S: [...now.S], Z: [...(now.Z || [])], level: now.level, out: [...now.out]}; }"""


def test_sums_are_the_librarys(explorer):
    show(explorer, f"{GAUSSIAN}&kernel=positive&features=40&decay=-0.1")
    found = explorer.evaluate(STATE, 30)
    run = run_code(explorer.text_content("#code"))
    q, k, v, n = (run[x][:, :31] if x != "n" else 31 for x in ("q", "k", "v", "n"))
    phi = run["kernel"].key_features(k)[0] * (-0.1 * torch.arange(n - 1, -1, -1)).exp().unsqueeze(-1)
    scale = np.exp(found["level"])
    assert torch.allclose(
        torch.tensor(found["S"], dtype=torch.float64).reshape(40, 16) * scale, phi.T @ v[0], rtol=1e-6
    )
    assert torch.allclose(torch.tensor(found["Z"], dtype=torch.float64) * scale, phi.sum(0), rtol=1e-6)
    out = linattn.attention(q, k, v, kernel=run["kernel"], is_causal=True, log_decay=run["forget"][:, :31])
    assert torch.allclose(torch.tensor(found["out"], dtype=torch.float64), out[0, -1], atol=1e-6)


def test_the_delta_rules_state_is_the_librarys(explorer):
    show(explorer, f"{GAUSSIAN}&kernel=delta&beta=0.75&decay=-0.1")
    found = explorer.evaluate(STATE, 30)
    run = run_code(explorer.text_content("#code"))
    q, k, v = (run[x][:, :31] for x in ("q", "k", "v"))
    options = {"beta": run["beta"][:, :31], "log_decay": torch.full((1, 31), -0.1, dtype=q.dtype), "normalize_qk": True}
    out = linattn.delta_rule(q, k, v, **options)
    assert torch.allclose(torch.tensor(found["out"], dtype=torch.float64), out[0, -1], atol=1e-9)
    _, state = linattn.delta_rule(q, k, v, **options, return_state=True)
    rows = []
    for unit in torch.eye(16, dtype=q.dtype):  # beta = 0 writes nothing, so that the query reads a row of the state
        asked = (unit[None, None], k[:, :1], v[:, :1])
        rows.append(linattn.delta_rule(*asked, beta=options["beta"][:, :1] * 0, scale=1.0, state=state.clone()))
    S = torch.cat(rows, 1)[0]
    assert torch.allclose(torch.tensor(found["S"], dtype=torch.float64).reshape(16, 16), S, atol=1e-9)


def test_every_far_token_is_in_one_slot(explorer):
    show(explorer, f"{GAUSSIAN}&kernel=nearfar&window=8&slots=6&sinks=2&block=4")
    found = explorer.evaluate(STATE, 45)
    assert found["start"] == 44
    assert len(found["slots"]) == 6
    assert sorted(t for tokens, _, _ in found["slots"] for t in tokens) == list(range(2, 36))
    for tokens, shares, bias in found["slots"]:
        assert sum(shares) == pytest.approx(1)
        assert len(tokens) > 1 or bias == 0
