"""attach changes one model, not its class: threads, copies, files, graphs; packed sequences; softmax layers of a hybrid."""

import copy
import importlib
import pickle
import threading

import pytest
import torch
import transformers

from hf_support import KERNEL, WIDE, logits, tokens
from hybrid_support import build_hybrid, own
from linattn import NearFar
from linattn.functional import routing
from linattn.hf import StateCache, attach, describe, detach
from linattn.hf.hybrids.norms import NormForward
from linattn.hf.hybrids.packing import packed_bounds

transformers.logging.set_verbosity_error()
RULES = ["qwen3_next", "kimi_linear", "mamba2", "mamba", "lfm2", "minimax"]  # one of each rule
LENGTHS = [11, 1, 30, 5]


def near(found, expected, bound=1e-4):
    assert float((found - expected).norm() / expected.norm()) < bound


def is_served(model):
    return any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("family", RULES)
def test_copies_pickles_and_files(family, tmp_path):
    ids, model = tokens(2, 20), attach(build_hybrid(family))
    expected = logits(model, ids)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_served(made)
        assert torch.equal(logits(made, ids), expected)
        detach(made)
        assert not is_served(made)
        assert torch.equal(logits(made, ids), logits(own(family), ids))
    assert is_served(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not is_served(loaded)
    assert torch.equal(logits(loaded, ids), logits(own(family), ids))


@pytest.mark.parametrize("family", RULES)
def test_a_cache_of_another_batch_is_refused(family):
    """Native code would read and write beyond the end of its states."""
    model = attach(build_hybrid(family))
    for count in (1, 3, 20):
        cache = model(tokens(2, 9), use_cache=True)
        name = "cache_params" if "cache_params" in cache else "past_key_values"
        with (
            torch.no_grad(),
            pytest.raises((ValueError, RuntimeError), match=r"another batch|[Ss]izes? of tensor|shape"),
        ):
            model(tokens(3, count), use_cache=True, **{name: cache[name]})


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_a_cache_of_other_heads_is_refused(family, count):
    model = attach(build_hybrid(family))
    with torch.no_grad():
        out = model(tokens(2, 9), use_cache=True)
        name = "cache_params" if "cache_params" in out else "past_key_values"
        layer = out[name].layers[0]
        layer.recurrent_states[0] = layer.recurrent_states[0][:, 1:].clone()
        with pytest.raises(ValueError, match="another batch or another model"):
            model(tokens(2, count), use_cache=True, **{name: out[name]})


@pytest.mark.parametrize(("family", "recording"), [("kimi_linear", True), ("mamba2", False)])
def test_a_short_prompt_that_a_cache_recorded_is_refused_where_its_history_is_too_short(family, recording):
    """As by transformers, whose convolution fails then; native code would read beyond the state."""
    model = attach(build_hybrid(family))
    cache = transformers.DynamicCache(config=model.config)
    cache.activate_past_recording()
    name = "cache_params" if family == "mamba2" else "past_key_values"
    logits(model, tokens(2, 2), use_cache=True, **{name: cache})
    cache.layers[0].record_past = recording
    with pytest.raises(ValueError, match="it recorded a shorter prompt"):
        logits(model, tokens(2, 1), use_cache=True, **{name: cache})


def test_threads_share_a_class_and_a_model():
    model, theirs, results = attach(build_hybrid("mamba2")), own("mamba2"), {}
    expected = {id(m): m.generate(tokens(1, 20), max_new_tokens=8, do_sample=False) for m in (model, theirs)}

    def write(name, m):
        results[name] = torch.equal(m.generate(tokens(1, 20), max_new_tokens=8, do_sample=False), expected[id(m)])

    threads = [threading.Thread(target=write, args=(i, m)) for i, m in enumerate([model, theirs, model, theirs])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2", "mamba", "minimax"])
def test_a_compiled_model_is_the_same_and_stays_served(family):
    torch.compiler.reset()
    model, ids, nodes = attach(build_hybrid(family)), tokens(2, 20), []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    near(logits(torch.compile(model, backend=backend), ids, use_cache=False), logits(own(family), ids))
    assert any("linattn" in node for node in nodes)


@pytest.mark.parametrize(
    "family", ["qwen3_next", "olmo_hybrid", "kimi_linear", "bamba", "zamba2", "lfm2", "lfm3", "minimax"]
)
def test_packed_sequences_are_kept_apart(family):
    model, ids = attach(build_hybrid(family)), tokens(1, sum(LENGTHS))
    parts = ids.split(LENGTHS, dim=1)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None].int()
    options = {"position_ids": positions, "use_cache": False}
    found = logits(model, ids, cu_seq_lens_q=bounds, seq_idx=sequence, **options)
    near(found, torch.cat([logits(own(family), part) for part in parts], 1))


def test_packed_sequences_of_mamba_layers():
    """The models of these two families hand nothing on to their layers."""
    lengths, x = [3, 1, 9], torch.randn(1, 13, 32, generator=torch.Generator().manual_seed(0))
    sequence = torch.tensor([[0] * 3 + [1] + [2] * 9])
    for family in ("mamba", "mamba2"):
        layers = [m.backbone.layers[0].mixer for m in (attach(build_hybrid(family)), own(family))]
        with torch.inference_mode():
            found = layers[0](x, seq_idx=sequence)
            near(found, torch.cat([layers[1](part) for part in x.split(lengths, 1)], 1))
            with pytest.raises(ValueError, match="rows of seq_idx"):
                layers[0](x.repeat(2, 1, 1), seq_idx=torch.cat([sequence, sequence.flip(1)]))


def test_a_kernel_for_the_softmax_layers_of_a_hybrid():
    for family in ("qwen3_next", "bamba", "falcon_h1", "lfm3"):
        ids, model = tokens(2, 60), attach(build_hybrid(family), NearFar(**WIDE))
        near(logits(model, ids), logits(own(family), ids))
        detach(model)
        attach(model, NearFar(**KERNEL))
        assert {row.does for row in describe(model).layers} >= {"NearFar"}
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        written = model.generate(ids, past_key_values=StateCache(model), **options)
        assert torch.equal(written, model.generate(ids, use_cache=False, **options))
        cache = StateCache(model)
        logits(model, ids, past_key_values=cache)
        held = cache.nbytes
        logits(model, tokens(2, 30, seed=3), past_key_values=cache)
        assert cache.nbytes == held  # nothing grows


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen4_exp", "an indexer"),
        ("glm5_next", "an indexer"),
        ("inkling", "depends on the query"),
        ("inkling2", "query"),
    ],
)
def test_softmax_layers_that_no_kernel_has_a_form_for(family, reason):
    model, ids = build_hybrid(family), tokens(2, 20)
    for kernel in ("nearfar", "elu"):
        with pytest.raises(ValueError, match=f"cannot attach to .*: it has .*{reason}"):
            attach(model, kernel)
    assert torch.equal(logits(model, ids), logits(own(family), ids))


def test_linear_states_of_other_rules_are_named():
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3}
    rwkv = transformers.RwkvConfig(**sizes)
    griffin = transformers.RecurrentGemmaConfig(**sizes, intermediate_size=48, num_attention_heads=4, lru_width=32)
    for config, name in ((rwkv, "RwkvSelfAttention"), (griffin, "RecurrentGemmaRecurrentBlock")):
        with pytest.raises(ValueError, match=f"is not served: the linear state of {name}"):
            attach(transformers.AutoModelForCausalLM.from_config(config))


def test_a_gated_norm_rounds_as_its_family_does():
    """In bfloat16: Kimi's weight stays in float32, Qwen's does not."""
    x, gate = (torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    for family, name in (("kimi_linear", "KimiLinear"), ("qwen4_exp", "Qwen4ExpText"), ("glm5_next", "Glm5NextText")):
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        norm = getattr(modeling, f"{name}RMSNormGated")(64, activation="sigmoid").bfloat16()
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            assert torch.equal(NormForward(norm)(x, gate), norm(x, gate))


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "mamba"])  # experts have no float64
def test_float64_goes_through_the_torch_engine(family):
    ids, model = tokens(2, 20), attach(build_hybrid(family).double())
    near(logits(model, ids), logits(own(family), ids), 1e-5)


def test_the_description():
    model = attach(build_hybrid("qwen3_next"))
    linear, softmax = describe(model).layers
    assert (linear.does, linear.engine) == ("gated delta rule", "native")
    assert (softmax.does, softmax.engine, softmax.state_bytes) == ("softmax", "transformers", None)
    cache = logits_cache(model)
    assert describe(model).state_bytes == sum(
        x.numel() * x.element_size()
        for layer in cache.layers[:1]
        for x in (layer.conv_states[0], layer.recurrent_states[0])
    )
    assert "gated delta rule" in str(describe(model))
    with pytest.raises(ValueError, match="attach"):
        describe(own("qwen3_next"))


@torch.inference_mode()
def logits_cache(model):
    return model(tokens(1, 10), use_cache=True).past_key_values


def test_packed_sequences_over_shards_are_refused():
    with routing.routed(object()), pytest.raises(ValueError, match="no form over shards"):
        packed_bounds(cu_seqlens=[0, 4, 10], tokens=10)
    assert packed_bounds(cu_seqlens=[0, 4, 10], tokens=10) == [0, 4, 10]
