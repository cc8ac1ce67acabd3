"""Models of every family of transformers with linear layers, with random weights, at sizes between a test's and a product's."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import linattn

WIDTH = 512
SIZES = {"vocab_size": 1000, "hidden_size": WIDTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SOFTMAX = {
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
DELTA = {
    **SIZES,
    **SOFTMAX,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KDA = {
    **SIZES,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_heads": 8,
    "linear_head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
SSD = {
    **SIZES,
    **SOFTMAX,
    "num_hidden_layers": 4,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
MAMBA1 = {**SIZES, "num_hidden_layers": 4, "state_size": 16}
INKLING = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3-Next": lambda: transformers.Qwen3NextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=256),
    "Qwen3.5": lambda: transformers.Qwen3_5TextConfig(**DELTA),
    "Qwen4-Exp": lambda: transformers.Qwen4ExpTextConfig(
        **{name: size for name, size in DELTA.items() if name != "intermediate_size"},
        **EXPERTS,
        shared_expert_intermediate_size=256,
        hc_lowrank=64,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=64,
        indexer_budget=2048,
        indexer_compress_ratio=16,
    ),
    "OLMo hybrid": lambda: transformers.OlmoHybridConfig(**DELTA),
    "Kimi Linear": lambda: transformers.KimiLinearConfig(**KDA),
    "Bailing hybrid": lambda: transformers.BailingHybridConfig(
        **KDA, head_dim=64, num_mtp_layers=0, first_k_dense_replace=1
    ),
    "GLM-5-Next": lambda: transformers.Glm5NextConfig(
        text_config={
            **{name: size for name, size in KDA.items() if name not in ("num_local_experts", "qk_rope_head_dim")},
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "q_lora_rank": 128,
            "index_head_dim": 64,
            "index_n_heads": 4,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "intermediate_size": 64,
        },
    ),
    "MiniMax": lambda: transformers.MiniMaxConfig(
        **SIZES,
        **SOFTMAX,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "Mamba-2": lambda: transformers.Mamba2Config(
        **SIZES, num_hidden_layers=4, num_heads=16, head_dim=64, state_size=128, n_groups=1
    ),
    "Bamba": lambda: transformers.BambaConfig(**SSD, attn_layer_indices=[3]),
    "Granite 4 hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SSD, layer_types=["mamba"] * 3 + ["attention"], shared_intermediate_size=1024
    ),
    "Falcon-H1": lambda: transformers.FalconH1Config(**SSD, mamba_d_ssm=1024),
    "Nemotron-H": lambda: transformers.NemotronHConfig(
        **SIZES,
        **SOFTMAX,
        layers_block_type=["mamba", "mlp", "mamba", "attention"],
        mamba_num_heads=16,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=1,
    ),
    "Zamba 2": lambda: transformers.Zamba2Config(
        **SIZES,
        intermediate_size=1024,
        num_attention_heads=8,
        max_position_embeddings=8192,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=128,
        n_mamba_heads=16,
        mamba_ngroups=1,
    ),
    "Mamba": lambda: transformers.MambaConfig(**MAMBA1),
    "Falcon-Mamba": lambda: transformers.FalconMambaConfig(**MAMBA1),
    "Jamba": lambda: transformers.JambaConfig(
        **SIZES, **SOFTMAX, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=3, num_experts=2
    ),
    "Zamba": lambda: transformers.ZambaConfig(
        **SIZES, **SOFTMAX, num_hidden_layers=4, layers_block_type=["mamba", "mamba", "hybrid", "hybrid"]
    ),
    "LFM2": lambda: transformers.Lfm2Config(
        **SIZES, **SOFTMAX, num_hidden_layers=4, layer_types=["conv"] * 3 + ["full_attention"]
    ),
    "LFM3": lambda: transformers.Lfm3Config(
        **SIZES, **SOFTMAX, num_hidden_layers=4, layer_types=["conv"] * 3 + ["full_attention"], head_dim=64
    ),
    "Inkling": lambda: transformers.InklingTextConfig(
        **INKLING, intermediate_size=1024, mlp_layer_types=["dense"] * 2 + ["sparse"] * 2
    ),
    "Inkling 2": lambda: transformers.Inkling2TextConfig(
        **INKLING, unpadded_vocab_size=1000, n_layers_per_attn_res_block=2
    ),
}


KINDS = {"GLM-5-Next": transformers.AutoModelForImageTextToText}  # which has no model of text alone


def build(family: str) -> tuple[Any, Any]:
    """The model as transformers has it, and attached."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    theirs = KINDS.get(family, transformers.AutoModelForCausalLM).from_config(FAMILIES[family]()).eval()
    return theirs, linattn.hf.attach(copy.deepcopy(theirs))


def read(model: Any, ids: Any) -> Callable[[], object]:
    """One pass over a prompt."""
    return lambda: model(ids, use_cache=False, logits_to_keep=1)


def write(model: Any, ids: Any, tokens: int = 8) -> Callable[[], object]:
    """`tokens` tokens one after the other, after the prompt. Divide by them."""
    out = model(ids, use_cache=True)
    name = "cache_params" if "cache_params" in out else "past_key_values"
    cache = {name: out[name]}

    def run() -> None:
        for _ in range(tokens):
            model(ids[:, :1], use_cache=True, **cache)

    return run


def times(calls: list[Callable[[], object]], least: int, clock: Callable[[], float] = time.process_time) -> list[float]:
    """Seconds of each call in its best turn; the calls take turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(least):
        for i, call in enumerate(calls):
            begun = clock()
            call()
            best[i] = min(best[i], clock() - begun)
    return best
