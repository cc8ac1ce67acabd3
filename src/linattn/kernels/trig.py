"""Random Fourier features: sines and cosines whose products average to the Gaussian kernel."""

import math
import warnings

import torch
from torch import Tensor, nn

from ._projection import draw
from .base import Kernel, softmax_similarity
from .native_form import FeatureMap, NativeForm
from .precondition import Precondition, named, prepare_key, prepare_query


class Trig(Kernel):
    """phi(x) = sqrt(1/r) [sin(w_1.x) .. sin(w_r.x), cos(w_1.x) .. cos(w_r.x)], w ~ N(0, I / sigma^2).

    Queries and keys are brought to length 1 first, as RFA does: the similarity is exp(q.k / (|q| |k| temperature)),
    with sigma^2 = temperature. The plain form (`normalize=False`) stands for exp(q.k / sqrt(dim)) itself, with
    sigma^2 = sqrt(dim); about half of its denominators come out negative on ordinary data, so it warns.

    >>> import torch, linattn
    >>> kernel = linattn.kernels.Trig(64, features=128)
    >>> kernel.query_features(torch.randn(10, 64)).shape
    torch.Size([10, 256])

    Args:
        dim: of queries and keys.
        features: r, the number of frequencies; there are 2 r features.
        normalize: bring queries and keys to length 1.
        temperature: sigma^2 of the normalised form.
        learn_temperature: makes it a parameter (of its logarithm, so that it stays positive).
        orthogonal: frequencies orthogonal in blocks of dim.
        precondition: centring and balancing from given statistics, for the plain form.
        seed: of the frequencies, which are a buffer.
    """

    stands_for_softmax = True
    only_parameters = True
    positive = False

    def __init__(
        self,
        dim: int,
        features: int = 256,
        *,
        normalize: bool = True,
        temperature: float = 1.0,
        learn_temperature: bool = False,
        orthogonal: bool = False,
        precondition: Precondition | None = None,
        seed: int = 0,
    ):
        super().__init__(dim)
        if features < 1:
            raise ValueError(f"Trig: features must be at least 1, got {features}.")
        if not temperature > 0:
            raise ValueError(f"Trig: temperature must be positive, got {temperature}.")
        if not normalize and (temperature != 1.0 or learn_temperature):
            raise ValueError("Trig: the plain form has sigma^2 = sqrt(dim); temperature goes with normalize=True.")
        if normalize and precondition is not None:
            raise ValueError("Trig: precondition goes with normalize=False; normalised vectors cannot be shifted.")
        if not normalize:
            warnings.warn(
                "Trig(normalize=False) is for study: its denominators are not positive in about half of the rows of "
                "ordinary data. Trig() normalises queries and keys; Positive() keeps their norms.",
                UserWarning,
                stacklevel=2,
            )
        self.features, self.normalize, self.orthogonal, self.seed = features, normalize, orthogonal, seed
        self.learn_temperature, self.given_temperature = learn_temperature, temperature
        self.precondition = precondition
        self.register_buffer("projection", draw(features, dim, seed, orthogonal))
        self.projection: Tensor  # (r, dim), standard normal: divided by sigma where it is used
        self.log_temperature: Tensor
        if learn_temperature:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        else:
            self.register_buffer("log_temperature", torch.tensor(math.log(temperature), device="cpu"))

    def features_for(self, dim: int) -> int:
        return 2 * self.features

    def projection_flops(self, dim: int) -> int:
        return 2 * dim * self.features

    @property
    def temperature(self) -> Tensor:
        """sigma^2 of the normalised form."""
        return self.log_temperature.exp()

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        if not self.normalize:
            return softmax_similarity(self, query, key, scale)
        x, y = self._unit(query, scale), self._unit(key, scale)
        return (x @ y.mT).exp()

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
        if self.normalize:
            return self._waves(self._unit(query, scale), None)
        return self._waves(*prepare_query(self, query, scale, self.precondition))

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
        if self.normalize:
            return self._waves(self._unit(key, scale), None)
        return self._waves(*prepare_key(self, key, scale, self.precondition))

    def _unit(self, x: Tensor, scale: float | None) -> Tensor:
        """x / (|x| sigma); a given scale multiplies the logit by its ratio to the default."""
        x = self.widen(x)
        gain = 1.0 if scale is None else math.sqrt(scale / self.default_scale(x.shape[-1]))
        return nn.functional.normalize(x, dim=-1) * (gain * (-self.log_temperature / 2).exp()).to(x.dtype)

    def _waves(self, x: Tensor, log_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        angles = x @ self.projection.T.to(x.dtype)
        features = torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(self.features)
        norm = x.square().sum(-1) / 2  # exp(x.y) = exp(|x|^2/2) exp(-|x-y|^2/2) exp(|y|^2/2)
        return features, norm if log_weight is None else norm + log_weight

    def native_form(self, dim: int, scale: float | None) -> NativeForm:
        return NativeForm(
            FeatureMap.TRIG,
            2 * self.features,
            log_weighted=True,
            norm_factor=0.5 / math.log(2),
            input_scale=1 / math.sqrt(self.features),
            projection=self.projection.detach().double(),
            prepared=True,
        )

    def native_inputs(self, x: Tensor, scale: float | None, *, is_key: bool) -> tuple[Tensor, Tensor | None]:
        if self.normalize:
            return self._unit(x, scale), None
        return (prepare_key if is_key else prepare_query)(self, x, scale, self.precondition)

    def extra_repr(self) -> str:
        text = f"dim={self.dim}, features={self.features}, normalize={self.normalize}, seed={self.seed}"
        text = ", ".join([text, *["orthogonal=True"] * self.orthogonal, *named(self.precondition)])
        if self.learn_temperature:
            return text + ", learn_temperature=True"
        return text if self.given_temperature == 1 else f"{text}, temperature={self.given_temperature:g}"
