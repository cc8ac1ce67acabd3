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


def build(family, **changes):
    torch.manual_seed(0)
    configs = {
        "llama": lambda: transformers.LlamaConfig(**{**GQA, **changes}),
        "qwen2": lambda: transformers.Qwen2Config(**{**GQA, **changes}),
        "qwen3": lambda: transformers.Qwen3Config(**{**GQA, "head_dim": 8, **changes}),
        "mistral": lambda: transformers.MistralConfig(**{**GQA, "sliding_window": None, **changes}),
        "gemma": lambda: transformers.GemmaConfig(**{**GQA, "head_dim": 8, **changes}),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **{
                **GQA,
                "head_dim": 8,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                **changes,
            }
        ),
        "gemma2": lambda: transformers.Gemma2Config(
            **{
                **GQA,
                "head_dim": 8,
                "attn_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 8,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "attn_implementation": "eager",  # the only one of transformers that keeps the cap
                **changes,
            }
        ),
        "bloom": lambda: transformers.BloomConfig(
            vocab_size=60, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=59
        ),
        "mpt": lambda: transformers.MptConfig(
            vocab_size=60, d_model=32, n_layers=2, n_heads=4, max_seq_len=512, pad_token_id=0, eos_token_id=59
        ),
        "falcon": lambda: transformers.FalconConfig(**{**FALCON, **changes}),
        "falcon_alibi": lambda: transformers.FalconConfig(
            **{**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, **changes}
        ),
        "falcon_grouped": lambda: transformers.FalconConfig(
            **{**FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, **changes}
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **{
                **GQA,
                "head_dim": 8,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                **changes,
            }
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=60,
            n_positions=512,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=59,
            pad_token_id=0,
        ),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**SIZES, **changes}),
        "bert": lambda: transformers.BertConfig(**{**SIZES, **changes}),
        "bart": lambda: transformers.BartConfig(
            vocab_size=60,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=59,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
        ),
        "t5": lambda: transformers.T5Config(**T5),
        "mt5": lambda: transformers.MT5Config(**T5),
        "umt5": lambda: transformers.UMT5Config(**{**T5, "relative_attention_max_distance": 24}),
        "switch": lambda: transformers.SwitchTransformersConfig(**{**T5, "num_decoder_layers": 2, "num_experts": 2}),
        "longt5": lambda: transformers.LongT5Config(**{**T5, "local_radius": 5, **changes}),
        "pop2piano": lambda: transformers.Pop2PianoConfig(**T5),
        "udop": lambda: transformers.UdopConfig(**{**T5, "image_size": 32, "patch_size": 16}),
    }
    config = configs[family]()
    kinds = {
        "bert": transformers.AutoModel,
        "bart": transformers.AutoModelForSeq2SeqLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "mt5": transformers.AutoModelForSeq2SeqLM,
        "umt5": transformers.AutoModelForSeq2SeqLM,
        "switch": transformers.AutoModelForSeq2SeqLM,
        "longt5": transformers.AutoModelForSeq2SeqLM,
        "pop2piano": transformers.Pop2PianoForConditionalGeneration,
        "udop": transformers.UdopForConditionalGeneration,
    }
    kind = kinds.get(family, transformers.AutoModelForCausalLM)
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
