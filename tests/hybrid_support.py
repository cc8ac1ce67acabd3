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
MIXED = {"layer_types": ["linear_attention", "full_attention"]}

FAMILIES = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**DELTA),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**DELTA, **MOE, shared_expert_intermediate_size=16),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**DELTA),
    "kimi_linear": lambda: transformers.KimiLinearConfig(**KDA),
    "bailing_hybrid": lambda: transformers.BailingHybridConfig(**KDA, head_dim=8, num_mtp_layers=0, first_k_dense_replace=1),
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
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, **SOFTMAX, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SIZES, **SOFTMAX, **MOE, num_hidden_layers=2, layer_types=["conv", "full_attention"], num_dense_layers=1
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


@functools.cache
def own(family):
    """The model as transformers has it; tests must not change it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
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
