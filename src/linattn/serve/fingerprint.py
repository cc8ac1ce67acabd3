"""A fingerprint of everything that a state depends on: a state of another model, kernel or calibration is refused."""

import hashlib
from typing import Any

import torch
from torch import nn

from ..hf.modules import attention_modules, head_dim

SAMPLES = 1024  # numbers of each parameter that enter it: reading all of a large model would take minutes


@torch.inference_mode()
def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """32 hexadecimal digits of weights (samples of each), tokenizer, attention kernels and dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        flat = x.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(flat[::step].to(torch.float64).cpu().numpy().tobytes())
    for name, module in attention_modules(model):
        kernel = getattr(module, "linattn_kernel", None)
        about = "own" if kernel is None else kernel.signature(None, head_dim(module))
        digest.update(f"{name} {about}\n".encode())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest.update(repr(vocabulary).encode())
    return digest.hexdigest()
