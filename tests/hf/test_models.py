"""attach, detach and StateCache on tiny models of each family, with random weights."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import linattn
from hf_support import KERNEL, WIDE, build, logits, tokens
from linattn import NearFar
from linattn.hf import StateCache, attach, detach
from linattn.hf.learned_sinks import Tokens, as_a_token

DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "falcon"]
BIASED = ["gemma2", "bloom", "mpt", "falcon_alibi", "falcon_grouped"]  # capped logits, and ALiBi


@pytest.mark.parametrize("family", [*DECODERS, *BIASED, "bert"])
def test_attached_models_agree_with_their_own_attention_while_keys_fit_and_detach_restores(family):
    model, ids = build(family), tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    state_dict = list(model.state_dict())
    own, own_padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    attach(model, NearFar(**WIDE))
    torch.testing.assert_close(logits(model, ids), own, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask)[0, 7:], own_padded[0, 7:], atol=1e-4, rtol=1e-4)
    detach(model)
    attach(model, NearFar(**KERNEL))
    assert not torch.allclose(logits(model, ids), own, atol=1e-4)
    detach(model)
    assert torch.equal(logits(model, ids), own)
    assert list(model.state_dict()) == state_dict


@pytest.mark.parametrize("family", [*DECODERS, *BIASED])
def test_the_cache_gives_what_one_call_gives_token_by_token_and_in_chunks(family):
    model, ids = attach(build(family), NearFar(**KERNEL)), tokens()
    whole = logits(model, ids, use_cache=False)
    for lengths in ([1] * 90, [50, 1, 1, 30, 8]):
        cache, outs, i = StateCache(model), [], 0
        for n in lengths:
            outs.append(logits(model, ids[:, i : i + n], past_key_values=cache))
            i += n
        torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-4, rtol=1e-4)
        assert cache.get_seq_length() == 90


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss", "falcon", *BIASED])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}])
def test_generate_with_the_cache_is_generate_without(family, options):
    model, ids = attach(build(family), NearFar(**KERNEL)), tokens(length=60)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    ids[0, :11] = 0
    options = {**options, "attention_mask": mask, "max_new_tokens": 20, "min_new_tokens": 20}
    torch.manual_seed(1)
    slow = model.generate(ids, use_cache=False, **options)
    torch.manual_seed(1)
    quick = model.generate(
        ids, past_key_values=StateCache(model), use_cache=True, **options
    )  # off in MPT's configuration
    assert torch.equal(quick, slow)


@pytest.mark.parametrize(("family", "off"), [("mpt", {}), ("llama", {"use_cache": False})])
def test_a_state_cache_needs_caches_to_be_on(family, off):
    """With caches off, generate would give the cache the whole text again at every step."""
    model, ids = attach(build(family), NearFar(**KERNEL)), tokens(length=20)
    with pytest.raises(ValueError, match="pass use_cache=True"):
        model.generate(ids, past_key_values=StateCache(model), max_new_tokens=2, **off)
    detach(model)
    assert model.generate(ids, max_new_tokens=2, **off).shape[1] <= 22


def test_chunked_prefill_and_a_prompt_used_twice():
    model, ids = attach(build("llama"), NearFar(**KERNEL)), tokens(1, 70)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(
        model.generate(ids, past_key_values=StateCache(model), prefill_chunk_size=16, **options), expected
    )
    prompt = StateCache(model)
    logits(model, ids[:, :50], past_key_values=prompt)
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=prompt.clone(), **options), expected)
        assert torch.equal(model.generate(ids, past_key_values=copy.deepcopy(prompt), **options), expected)
    assert prompt.get_seq_length() == 50


def test_a_saved_prompt_goes_on_as_before(tmp_path):
    model, ids = attach(build("llama"), NearFar(**KERNEL)), tokens(2, 70)
    cache = StateCache(model)
    logits(model, ids[:, :60], past_key_values=cache)
    cache.save(tmp_path)
    loaded = StateCache(model).load(tmp_path)
    rest = [logits(model, ids[:, 60:], past_key_values=c) for c in (loaded, cache)]
    assert torch.equal(*rest)


def test_memory_does_not_grow_and_the_cache_can_forget():
    model = attach(build("llama"), NearFar(**KERNEL))
    ids, sizes = tokens(1, 300), []
    cache = StateCache(model)
    for i in range(0, 300, 100):
        logits(model, ids[:, i : i + 100], past_key_values=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] == sizes[2]
    before = cache.clone()
    logits(model, tokens(1, 3, seed=5), past_key_values=cache)
    cache.crop(-3)
    ends = [logits(model, tokens(1, 2, seed=6), past_key_values=c) for c in (cache, before)]
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-5)


def test_without_our_cache_the_whole_past_is_seen():
    model, ids = attach(build("llama"), NearFar(**WIDE)), tokens(2, 40)
    whole = logits(model, ids, use_cache=False)
    cache = DynamicCache(config=model.config)
    first = logits(model, ids[:, :30], past_key_values=cache)
    rest = [logits(model, ids[:, i : i + 1], past_key_values=cache) for i in range(30, 40)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["bart", "t5", "mt5", "umt5", "switch", "longt5"])
def test_encoder_decoder(family):
    model, source, target = build(family), tokens(2, 80), tokens(2, 60, seed=1)
    own = logits(model, source, decoder_input_ids=target)
    attach(model, NearFar(**WIDE))
    torch.testing.assert_close(logits(model, source, decoder_input_ids=target), own, atol=1e-4, rtol=1e-4)
    detach(model)
    attach(model, NearFar(**KERNEL))
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    slow = model.generate(source, use_cache=False, **options)
    cache = EncoderDecoderCache(StateCache(model), DynamicCache())
    quick = model.generate(source, past_key_values=cache, **options)
    assert quick.shape == slow.shape
    assert (quick == slow).float().mean() > 0.9  # cross attention is exact for one query, compressed for forty


def test_masks_that_hide_keys_in_any_form():
    """Switch Transformers hands the padding of its encoder on as numbers that are added; Pop2Piano reads embeddings."""
    source, target, mask = tokens(2, 40), tokens(2, 30, seed=1), torch.ones(2, 40, dtype=torch.long)
    mask[0, 25:] = 0
    for family in ("switch", "longt5", "pop2piano"):
        model = build(family)
        given = {"attention_mask": mask, "decoder_input_ids": target, "inputs_embeds": model.shared(source)}
        with torch.no_grad():
            own = model(**given).logits
            torch.testing.assert_close(attach(model, NearFar(**WIDE))(**given).logits, own, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoder_with_a_bounded_cross_cache(family):
    model, source = build(family), tokens(2, 80)
    mask = torch.ones_like(source)
    mask[0, 60:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "min_new_tokens": 30}
    for search in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}):
        own = model.generate(source, **options, **search)
        attach(model, NearFar(**WIDE))
        caches = EncoderDecoderCache(StateCache(model), StateCache(model))
        assert torch.equal(model.generate(source, past_key_values=caches, **options, **search), own)
        detach(model)
    attach(model, NearFar(**KERNEL))
    sizes = []
    for length in (200, 400):
        caches = EncoderDecoderCache(StateCache(model), StateCache(model))
        model.generate(tokens(2, length), past_key_values=caches, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        sizes.append(caches.cross_attention_cache.nbytes)
    assert sizes[0] == sizes[1]


def test_a_learned_sink_stays_exact_beyond_the_window():
    """With no slots, near/far is a softmax over the first tokens and a window: a dense twin in float64 has them all."""
    kernel, block, window = NearFar(window=16, slots=0, sinks=2, block=8), 8, 16
    q, k, v = torch.randn(3, 2, 4, 90, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    sinks, tokens_, scale = torch.tensor([3.0, -2.0, 0.0, 1.0]), 90, 8**-0.5
    kernel.sinks += 1
    shown = as_a_token(Tokens(q, k, v, None), sinks, scale, True)
    out = linattn.attention(*shown[:3], kernel=kernel, scale=scale, is_causal=True)[:, :, 1:]
    at = torch.arange(tokens_ + 1)  # as near/far counts them: the sink is token 0
    visible = (at[None] <= at[:, None]) & ((at[None] < 3) | (at[None] >= (at // block * block - window)[:, None]))
    visible = visible[1:, 1:]
    logits_ = (q.double() @ k.double().mT * scale).masked_fill(~visible, -torch.inf)
    sink = sinks.double().reshape(1, -1, 1, 1).expand(2, -1, tokens_, 1)
    weights = torch.cat([logits_, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=1e-5, rtol=1e-4)


def test_sliding_layers_keep_their_own_attention():
    model = attach(build("gemma3"), NearFar(**KERNEL))
    kinds = [hasattr(layer.self_attn, "linattn_kernel") for layer in model.model.layers]
    assert kinds == [False, True]
    with pytest.raises(ValueError, match="sliding window"):
        attach(build("mistral", sliding_window=16), "nearfar")


@pytest.mark.parametrize("wrong", [2, -1, None])
def test_a_layer_that_is_not_there_is_named(wrong):
    kernel = NearFar(**KERNEL)
    for options in ({"kernel": {0: kernel, wrong: kernel}}, {"kernel": kernel, "budgets": {0: [4, 4], wrong: [4, 4]}}):
        with pytest.raises(ValueError, match=rf"no attention in a layer {wrong}: those with it are \[0, 1\]"):
            attach(build("llama"), **options)


def test_kernels_per_layer_and_budgets_per_head():
    model, ids = build("llama"), tokens()
    own = logits(model, ids)
    attach(model, {0: NearFar(**WIDE)})
    assert StateCache(model).layers[1].__class__.__name__ == "DynamicLayer"
    torch.testing.assert_close(logits(model, ids), own, atol=1e-4, rtol=1e-4)
    detach(model)
    attach(model, NearFar(**KERNEL), budgets={0: [4, 30], 1: [8, 8]})
    assert model.model.layers[0].self_attn.linattn_kernel.slots == (4, 30)
    cached = logits(model, ids, past_key_values=StateCache(model))
    torch.testing.assert_close(cached, logits(model, ids, use_cache=False), atol=1e-4, rtol=1e-4)
    detach(model)
    attach(model, "elu")
    assert logits(model, ids).isfinite().all()


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(
        ValueError, match=r"a relative position bias other than T5's .*, which near/far has no form for"
    ):
        attach(build("udop"), "nearfar")
    reasons = {"t5": "relative position bias", "gemma2": "capped logits", "bloom": "ALiBi", "falcon_alibi": "ALiBi"}
    for family, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            attach(build(family), "elu")
    odd = attach(build("gemma3", attn_logit_softcapping=3.0), "nearfar")  # transformers names that cap, and ignores it
    with pytest.raises(ValueError, match="softcap=None"):
        logits(odd, tokens())
    with pytest.raises(TypeError, match="PreTrainedModel"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match='pass kernel="nearfar"'):
        attach(build("llama"))
    model = attach(build("llama"), "nearfar")
    with pytest.raises(ValueError, match="already"):
        attach(model)
    with pytest.raises(ValueError, match="mask"):
        logits(model, tokens(2, 5), attention_mask=torch.ones(2, 1, 5, 5, dtype=torch.bool))
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="packed"):
        logits(model, tokens(1, 5), position_ids=packed, use_cache=False)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        model(tokens())
    with pytest.raises(ValueError, match="attach"):
        StateCache(build("llama"))
    with pytest.raises(ValueError, match="no linattn"):
        detach(build("llama"))


def test_training_through_an_attached_model():
    model, ids = attach(build("llama"), NearFar(**KERNEL)).train(), tokens()
    model(ids, labels=ids).loss.backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_the_package_imports_hf_when_it_is_asked_for():
    """And transformers not before: tests/test_layers.py."""
    assert linattn.__getattr__("hf").attach is attach
