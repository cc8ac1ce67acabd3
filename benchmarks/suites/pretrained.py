"""Hybrid models of transformers with `linattn.hf.attach` against transformers alone."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from registry import Row, Settings, case
from timer import seconds

# Tokens of a prompt, and bars for prompt and token. transformers takes twenty seconds for 4096 tokens of KDA.
LAYER_KINDS = (("Mamba-2", 4096, 5.0, 2.0), ("Qwen3-Next", 4096, 2.5, 2.0), ("Kimi Linear", 1024, None, None))


def _layers(kind: str) -> tuple[Any, list[Any]]:
    """A configuration of width 768, and four linear layers of it."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 100, "hidden_size": 768, "num_hidden_layers": 4}
    if kind == "Mamba-2":
        config: Any = transformers.Mamba2Config(**sizes, num_heads=24, head_dim=64, state_size=128, n_groups=1)
    elif kind == "Kimi Linear":
        heads = {"linear_num_heads": 8, "linear_head_dim": 128, "pad_token_id": 0}
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        softmax = {"num_attention_heads": 4, "n_group": 1, "topk_group": 1, "intermediate_size": 16}
        layers = {"layer_types": ["linear_attention"] * 4}
        config = transformers.KimiLinearConfig(**sizes, **heads, **experts, **softmax, **layers)
    else:
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        experts = {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        config = transformers.Qwen3NextConfig(**sizes, **heads, **experts, layer_types=["linear_attention"] * 4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return config, model


def _one_token(config: Any, layers: list[Any]) -> Callable[[], None]:
    from transformers import DynamicCache

    cache, token = DynamicCache(config=config), torch.randn(1, 1, 768)
    for layer in layers:
        layer(torch.randn(1, 64, 768), cache_params=cache)

    def step() -> None:
        for layer in layers:
            layer(token, cache_params=cache)

    return step


def _prefill(layers: list[Any], x: Any) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            layer(x)

    return run


def _products(layers: list[Any], tokens: int) -> Callable[[], None]:
    """The matrix products of the layers' projections alone, by the product that serves them."""
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(1, tokens, m.in_features) for m in linears}

    def run() -> None:
        for m in linears:
            m(inputs[m.in_features])

    return run


@case("hybrid layers")
def hybrid_layers(settings: Settings) -> Iterator[Row]:
    """Four layers of width 768, Mamba-2, Qwen3-Next and Kimi Linear style: times transformers alone, prompt and one token."""
    import linattn
    from linattn.hf.hybrids.layers import linear_layers

    clock = time.perf_counter
    if torch.get_num_threads() == 1:
        clock = time.process_time  # on a busy machine the only figure that means something
    for kind, length, bar, token_bar in LAYER_KINDS:
        tokens = 256 if settings.quick else length
        config, theirs = _layers(kind)
        ours = linattn.hf.attach(copy.deepcopy(theirs))
        modules = {"theirs": theirs, "ours": ours}
        parts = {name: [layer.module for layer in linear_layers(model)] for name, model in modules.items()}
        x = torch.randn(1, tokens, 768)
        with torch.inference_mode():
            calls = {n: _prefill(p, x) for n, p in parts.items()} | {"products": _products(parts["ours"], tokens)}
            best = seconds(calls, budget=settings.budget, least=2, clock=clock)
            yield Row(f"{kind}, {tokens} tokens, four layers", best["ours"] * 1e3, "milliseconds")
            yield Row(f"transformers / attached, {kind}, {tokens} tokens", best["theirs"] / best["ours"], "times", bar)
            yield Row(f"transformers / projections alone, {kind}", best["theirs"] / best["products"], "times")
            steps = {name: _one_token(config, part) for name, part in parts.items()}
            best = seconds(steps, budget=settings.budget / 2, clock=clock)
            yield Row(f"{kind}, one token, four layers", best["ours"] * 1e6, "microseconds")
            yield Row(f"transformers / attached, {kind}, one token", best["theirs"] / best["ours"], "times", token_bar)


@case("hybrid families", slow=True)
def hybrid_families(settings: Settings) -> Iterator[Row]:
    """Whole models of every family with linear layers, width 512, four layers: times transformers alone."""
    import hybrid_models

    tokens = 64 if settings.quick else 1024
    for family in hybrid_models.FAMILIES:
        read, written = ratios(family, tokens)
        yield Row(f"transformers / attached, {family}, {tokens} tokens read", read, "times")
        yield Row(f"transformers / attached, {family}, one token", written, "times")


def ratios(family: str, tokens: int) -> tuple[float, float]:
    """How many times faster the attached model reads a prompt and writes a token."""
    import hybrid_models

    ids = torch.randint(3, 1000, (1, tokens))
    models = hybrid_models.build(family)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.inference_mode():
        read = hybrid_models.times([hybrid_models.read(model, ids) for model in models], 3, clock)
        written = hybrid_models.times([hybrid_models.write(model, ids[:, :64]) for model in models], 5, clock)
    return read[0] / read[1], written[0] / written[1]
