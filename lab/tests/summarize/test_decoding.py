"""Beam search, greedy decoding and sampling."""

import itertools

import pytest
import torch

from linattn_lab.summarize import decoding as decode
from linattn_lab.summarize.model import END, START, padded
from seq2seq_support import VOCABULARY, batch, make


def best_by_force(model, source, tokens, penalty):
    """The best sequence of at most `tokens`, its end included, of all there are."""
    best, found = -torch.inf, None
    stack = [([], 0.0, model.start(model.encode(source)), START)]
    while stack:
        words, score, writing, last = stack.pop()
        step, writing = model.step(torch.tensor([last]), writing)
        for token in range(END, VOCABULARY):
            if token == END and not words:
                continue
            total = score + float(step.log_probs[0, token])
            length = len(words) + 1
            if token == END or length == tokens:
                if total / length**penalty > best:
                    best, found = total / length**penalty, words + [token] * (token != END)
            else:
                stack.append(([*words, token], total, writing, token))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["softmax", "elu"])
def test_a_wide_beam_finds_the_best_of_all(kernel):
    model = make(kernel, seed=3)
    source = batch(2)[0]
    wide = decode.beam_search(model, source, beam=VOCABULARY - 2, max_tokens=2, length_penalty=1.0)
    assert wide == [best_by_force(model, source[i : i + 1], 2, 1.0) for i in range(2)]


@torch.no_grad()
def test_one_beam_is_greedy_and_documents_do_not_disturb_each_other():
    model = make(seed=5)
    rows = [row[:n] for row, n in zip(batch(4)[0].tolist(), (19, 11, 15, 7))]
    together = decode.write(model, padded(rows), 12)
    assert together == decode.beam_search(model, padded(rows), 1, 12, 1.0)
    assert together == [decode.write(model, padded([row]), 12)[0] for row in rows]
    beams = decode.beam_search(model, padded(rows), 3, 12, 1.0)
    assert beams == [decode.beam_search(model, padded([row]), 3, 12, 1.0)[0] for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_no_pair_of_tokens_is_written_twice(beam):
    model = make(seed=5)
    model.output_bias[7] = 20.0  # left to itself it would write nothing else
    model.pointer.gate.bias += 20.0
    for row in decode.beam_search(model, batch(3)[0], beam, 12, 1.0) + decode.write(model, batch(3)[0], 12):
        assert row[:2] == [7, 7]
        pairs = list(itertools.pairwise(row))
        assert len(pairs) == len(set(pairs))


def test_sampling_keeps_to_the_top():
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = decode.by_chance(top_p=0.75, generator=generator)(log_probs)
    assert set(drawn.tolist()) == {0, 1}
    assert (drawn == 0).float().mean() == pytest.approx(0.625, abs=0.04)
    assert set(decode.by_chance(temperature=0.01, generator=generator)(log_probs).tolist()) == {0}
    with pytest.raises(ValueError, match="top_p"):
        decode.by_chance(top_p=0.0)
