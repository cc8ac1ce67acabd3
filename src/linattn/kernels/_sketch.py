"""TensorSketch: a few thousand features whose products average to (x.y)^p, where exact ones would be too many."""

import torch
from torch import Tensor

from ._constants import ConstantBuffers


class TensorSketch(ConstantBuffers):
    """Multiplies `degree` independent count sketches in the Fourier domain (Pham and Pagh, 2013)."""

    def __init__(self, dim: int, degree: int, features: int, seed: int):
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.features = features
        self.register_buffer("bucket", torch.randint(features, (degree, dim), generator=generator, device="cpu"))
        sign = torch.randint(2, (degree, dim), generator=generator, device="cpu") * 2.0 - 1.0
        self.register_buffer("sign", sign)
        self.bucket: Tensor
        self.sign: Tensor

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., features)
        spectrum = None
        for bucket, sign in zip(self.bucket, self.sign.to(x.dtype), strict=False):
            counts = x.new_zeros(*x.shape[:-1], self.features).index_add(-1, bucket, x * sign)
            wave = torch.fft.rfft(counts)
            spectrum = wave if spectrum is None else spectrum * wave
        return torch.fft.irfft(spectrum, n=self.features)
