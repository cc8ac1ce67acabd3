"""The model: any kernel in every attention, cached decoding equal to teacher forcing, the pointer."""

import pytest
import torch

from linattn_lab.summarize import decoding as decode
from linattn_lab.summarize.initial_embeddings import from_company, log_frequency
from linattn_lab.summarize.model import PAD
from linattn_lab.summarize.pointer import log_likelihood, log_mixture
from seq2seq_support import VOCABULARY, batch, make, step_by_step

KERNELS = ["softmax", "nearfar", "elu", "relu", "positive", "taylor", "polynomial", "trig"]


CACHED = {"polynomial": 1e-3}  # its similarities grow with the square of the norms


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_cached_decoding_is_teacher_forcing(kernel, norm_first):
    model = make(kernel, norm_first=norm_first)
    source, given, target = batch()
    source[1, 12:] = PAD
    cached = step_by_step(model, source, given)
    assert torch.allclose(cached.exp().sum(-1), torch.ones(3, 9), atol=1e-5)
    picked = cached.gather(-1, target[..., None]).squeeze(-1)
    assert torch.allclose(picked, model(source, given, target), atol=CACHED.get(kernel, 1e-4), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_changes_nothing(kernel):
    model = make(kernel)
    source, given, target = batch()
    alone = model(source[1:2, :12], given[1:2], target[1:2])
    source[1, 12:] = PAD
    assert torch.allclose(model(source, given, target)[1:2], alone, atol=1e-5)
    target[1, 6:] = PAD
    assert (model(source, given, target)[1] == 0).tolist() == [False] * 6 + [True] * 3


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["softmax", "elu", "nearfar"])
def test_a_selected_state_goes_on_as_that_document(kernel):
    model = make(kernel)
    source, given, _ = batch()
    order = torch.tensor([2, 0, 0])
    whole = step_by_step(model, source[order], given[order])
    writing = model.start(model.encode(source))
    for token in given[:, :4].unbind(1):
        _, writing = model.step(token, writing)
    writing = writing.select(order)
    for t in range(4, 9):
        step, writing = model.step(given[order, t], writing)
        assert torch.allclose(step.log_probs, whole[:, t], atol=1e-4)


@torch.no_grad()
def test_the_state_of_a_linear_kernel_does_not_grow_with_the_document():
    sizes = {}
    for kernel in ("elu", "softmax"):
        model = make(kernel)
        pages = [model.encode(batch(1, source=n)[0]) for n in (50, 500)]
        sizes[kernel] = [layer.document.nbytes for page in pages for layer in model.start(page).layers[:1]]
    assert sizes["elu"][0] == sizes["elu"][1]
    assert sizes["softmax"][1] > 9 * sizes["softmax"][0]


def test_the_mixture_at_the_target_is_the_mixture():
    torch.manual_seed(0)
    logits, weights, gate = torch.randn(2, 3, 7), torch.rand(2, 3, 5).softmax(-1), torch.randn(2, 3)
    source, target = torch.randint(0, 7, (2, 5)), torch.randint(0, 7, (2, 3))
    whole = log_mixture(logits, weights, gate, source)
    written = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    expected = whole.gather(-1, target[..., None]).squeeze(-1)
    assert torch.allclose(log_likelihood(written, weights, gate, source, target), expected, atol=1e-6)


def test_the_pointer_prefers_to_go_on_where_it_is():
    model = make()
    source = torch.tensor([[5, 6, 7, 8, 9, 6, 11]])
    page = model.encode(source)
    x = torch.zeros(1, 1, model.config.dim)
    none = torch.zeros(1, 1, 7, dtype=torch.bool)
    plain, _ = model.pointer(x, torch.tensor([[[50, 51]]]), none, page)
    after_6, _ = model.pointer(x, torch.tensor([[[6, 5]]]), none, page)  # "5 6" was written: 7 follows both, 11 only 6
    ratio = (after_6 / plain)[0, 0]
    assert ratio.argmax() == 2
    assert ratio[6] > 2 * ratio[[0, 1, 3, 4, 5]].max()
    again, _ = model.pointer(x, torch.tensor([[[50, 51]]]), source[:, None] == 6, page)
    assert ((again / plain)[0, 0] < 1).tolist() == [token == 6 for token in source[0].tolist()]


@torch.no_grad()
def test_a_long_document_is_read():
    model = make("elu")
    source = torch.randint(3, VOCABULARY, (1, 65536))
    page = model.encode(source)
    assert torch.isfinite(page.memory).all()
    assert len(decode.write(model, source, 2)[0]) > 0


def test_tokens_of_like_company_get_like_vectors():
    # 10 and 11 stand in the same places, 12 in others
    texts = [[3, x, 4, 5] for x in (10, 11)] * 20 + [[6, 12, 7, 8]] * 20
    vectors = from_company(texts, 20, 6)
    assert vectors[10] @ vectors[11] > 0.9 > 0.5 > vectors[10] @ vectors[12]
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(20), atol=1e-5)
    assert log_frequency(texts, 20).exp().sum() == pytest.approx(1.0)
