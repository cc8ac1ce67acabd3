"""Tiny models of transformers for tests."""

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 59,
}
GQA = {**SIZES, "num_key_value_heads": 2}
T5 = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 16,
    "pad_token_id": 0,
    "eos_token_id": 59,
    "decoder_start_token_id": 1,
    "attn_implementation": "eager",
}
FALCON = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 59,
}
KERNEL = {"window": 16, "slots": 12, "sinks": 2, "block": 8}


WIDE = {"window": 16, "slots": 500, "sinks": 2, "block": 8}  # everything fits, so that it is softmax


HALF_SLIDING = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
BART = {
    **{
        f"{part}_{name}": n
        for part in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    },
    "vocab_size": 60,
    "d_model": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 59,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
SHORT = {"vocab_size": 60, "pad_token_id": 0, "eos_token_id": 59}
# Family -> the configuration's class, its arguments, and the class of the model if it is no plain language model.
FAMILIES = {
    "llama": ("LlamaConfig", GQA),
    "qwen2": ("Qwen2Config", GQA),
    "qwen3": ("Qwen3Config", {**GQA, "head_dim": 8}),
    "mistral": ("MistralConfig", {**GQA, "sliding_window": None}),
    "gemma": ("GemmaConfig", {**GQA, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**GQA, **HALF_SLIDING, "sliding_window": 8}),
    "gemma2": (
        "Gemma2Config",
        {
            **GQA,
            **HALF_SLIDING,
            "sliding_window": 16,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
            "attn_implementation": "eager",  # the only one of transformers that keeps the cap
        },
    ),
    "bloom": ("BloomConfig", {**SHORT, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}),
    "mpt": ("MptConfig", {**SHORT, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "falcon": ("FalconConfig", FALCON),
    "falcon_alibi": (
        "FalconConfig",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon_grouped": (
        "FalconConfig",
        {**FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**GQA, **HALF_SLIDING, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "gpt2": (
        "GPT2Config",
        {**SHORT, "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1},
    ),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "bert": ("BertConfig", SIZES, "AutoModel"),
    "bart": ("BartConfig", BART, "AutoModelForSeq2SeqLM"),
    "t5": ("T5Config", T5, "AutoModelForSeq2SeqLM"),
    "mt5": ("MT5Config", T5, "AutoModelForSeq2SeqLM"),
    "umt5": ("UMT5Config", {**T5, "relative_attention_max_distance": 24}, "AutoModelForSeq2SeqLM"),
    "switch": (
        "SwitchTransformersConfig",
        {**T5, "num_decoder_layers": 2, "num_experts": 2},
        "AutoModelForSeq2SeqLM",
    ),
    "longt5": ("LongT5Config", {**T5, "local_radius": 5}, "AutoModelForSeq2SeqLM"),
    "pop2piano": ("Pop2PianoConfig", T5, "Pop2PianoForConditionalGeneration"),
    "udop": ("UdopConfig", {**T5, "image_size": 32, "patch_size": 16}, "UdopForConditionalGeneration"),
}


def build(family, **changes):
    """A model of a family with random weights; changes: of its configuration."""
    torch.manual_seed(0)
    config, arguments, *kind = FAMILIES[family]
    config = getattr(transformers, config)(**{**arguments, **changes})
    kind = getattr(transformers, *kind) if kind else transformers.AutoModelForCausalLM
    model = (kind.from_config if hasattr(kind, "from_config") else kind)(config).eval()
    with torch.no_grad():  # random weights attend almost evenly; make them care
        for name, p in model.named_parameters():
            if any(word in name for word in ("q_proj", "k_proj", "query", "key", "c_attn", "query_key_value", "Wqkv")):
                p.mul_(20)
            if name.endswith(("Attention.q.weight", "Attention.k.weight")):
                p.mul_(3)
            if "relative_attention_bias" in name:
                p.normal_(0, 2)
            if name.endswith("sinks"):
                p.normal_(0, 2)
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder that calibrations are kept in; tests that import it leave the user's alone."""
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens(batch=2, length=90, seed=0):
    return torch.randint(2, 58, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(model, ids, **options):
    out = model(ids, **options)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state
