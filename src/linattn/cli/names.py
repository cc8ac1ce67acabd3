"""Names that options take, written down here because the modules that define them import torch (a test compares both)."""

KERNELS = ("softmax", "nearfar", "positive", "trig", "polynomial", "taylor", "elu", "relu", "identity")
ENGINES = ("torch", "native")
MODELS = ("smollm2", "minilm", "gemma3")
RULES = ("retention", "gla", "gated-delta", "kda", "mamba2", "mamba1")
