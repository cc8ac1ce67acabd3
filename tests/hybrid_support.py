"""Tiny models of every family of transformers that has linear layers, with random weights."""

import copy
import functools

import torch
import transformers

SIZES = {"vocab_size": 60, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 59}
SOFTMAX = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    **SIZES,
    **SOFTMAX,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KDA = {
    **SIZES,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA1 = {**SIZES, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4}
SSD = {
    **SIZES,
    **SOFTMAX,
    "num_hidden_layers": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
PLE = {
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 100,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}
INKLING = {
    **SIZES,
    "num_hidden_layers": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}

FAMILIES = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**DELTA),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16),
    "qwen4_exp": lambda: transformers.Qwen4ExpTextConfig(
        **{name: size for name, size in DELTA.items() if name != "intermediate_size"},
        **MOE,
        **PLE,
        shared_expert_intermediate_size=16,
        hc_count=2,
        hc_lowrank=8,
        output_gate_type="sigmoid",
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**DELTA),
    "kimi_linear": lambda: transformers.KimiLinearConfig(**KDA),
    "bailing_hybrid": lambda: transformers.BailingHybridConfig(
        **KDA, head_dim=8, num_mtp_layers=0, first_k_dense_replace=1
    ),
    "glm5_next": lambda: transformers.Glm5NextConfig(
        text_config={
            **{name: size for name, size in KDA.items() if name not in ("num_local_experts", "qk_rope_head_dim")},
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "q_lora_rank": 16,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "hc_mult": 2,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "intermediate_size": 16,
            "projection_intermediate_size": 16,
            "image_size": 28,
        },
    ),
    "mamba": lambda: transformers.MambaConfig(**MAMBA1),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(**MAMBA1),
    "jamba": lambda: transformers.JambaConfig(
        **SIZES,
        **SOFTMAX,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "zamba": lambda: transformers.ZambaConfig(
        **SIZES,
        **SOFTMAX,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        **SIZES, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=16
    ),
    "bamba": lambda: transformers.BambaConfig(**SSD, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(**SSD, layer_types=["mamba", "attention"]),
    "falcon_h1": lambda: transformers.FalconH1Config(**{**SSD, "mamba_d_ssm": 64}),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **SIZES,
        **SOFTMAX,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **SIZES,
        intermediate_size=48,
        num_attention_heads=4,
        max_position_embeddings=512,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=16,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **SIZES, **SOFTMAX, num_hidden_layers=2, layer_types=["conv", "full_attention"]
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SIZES, **SOFTMAX, **MOE, num_hidden_layers=2, layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "lfm3": lambda: transformers.Lfm3Config(
        **SIZES,
        **SOFTMAX,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "sliding_attention"],
        head_dim=8,
        sliding_window=16,
    ),
    "inkling": lambda: transformers.InklingTextConfig(
        **INKLING, intermediate_size=48, mlp_layer_types=["dense", "sparse"], n_shared_experts=1
    ),
    "inkling2": lambda: transformers.Inkling2TextConfig(
        **INKLING, unpadded_vocab_size=60, n_layers_per_attn_res_block=1
    ),
    "minimax": lambda: transformers.MiniMaxConfig(
        **SIZES,
        **SOFTMAX,
        **MIXED,
        num_hidden_layers=2,
        head_dim=8,
        block_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}


KINDS = {"glm5_next": transformers.AutoModelForImageTextToText}  # which has no model of text alone


@functools.cache
def own(family):
    """The model as transformers has it; tests must not change it."""
    torch.manual_seed(0)
    kind = KINDS.get(family, transformers.AutoModelForCausalLM)
    model = kind.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():  # random weights of the usual size hardly use their states; make them matter
        for name, p in model.named_parameters():
            if p.dim() >= 2 and any(word in name for word in ("in_proj", "q_proj", "k_proj", "v_proj", "conv")):
                p.mul_(4)
            if "x_proj" in name:  # Zamba's start as zeros
                p.normal_(0, 0.3)
    return model


def build_hybrid(family):
    """A copy of own(family)."""
    return copy.deepcopy(own(family))
