"""What is left of the tokens seen so far: tensors of constant size, which can be kept, forked, cut and saved."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..kernels.base import Kernel
from . import _safetensors
from .gates import log_gates

VERSION = 1
Self = TypeVar("Self", bound="State")


@dataclass
class State:
    """The memory of an attention call: pass it as `state=` to go on where that call ended.

    Fields are tensors whose leading dimensions are the call's batch dimensions, or plain values.
    """

    kernel: str

    form: ClassVar[str] = ""
    batch_dims: ClassVar[dict[str, int]] = {}  # tensor field -> how many dimensions follow the batch dimensions

    def tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in self.batch_dims}
        return {name: x for name, x in found.items() if x is not None}

    @classmethod
    def _required(cls) -> set[str]:
        """The tensors that no state is without."""
        return {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING} & set(cls.batch_dims)

    def _replace(self: Self, change: Any) -> Self:
        return dataclasses.replace(self, **{name: change(name, x) for name, x in self.tensors().items()})

    def clone(self: Self) -> Self:
        """An independent copy, to fork a prompt's state for many continuations."""
        return self._replace(lambda _, x: x.clone())

    def detach(self: Self) -> Self:
        """The same numbers without their history of gradients."""
        return self._replace(lambda _, x: x.detach())

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Moves floating tensors as `Tensor.to` does; counts keep their type."""
        dtype_free = {k: v for k, v in kwargs.items() if k != "dtype"}

        def move(_: str, x: Tensor) -> Tensor:
            if x.is_floating_point():
                return x.to(*args, **kwargs)
            return x.to(*[a for a in args if not isinstance(a, torch.dtype)], **dtype_free) if args or dtype_free else x

        return self._replace(move)

    def select(self: Self, batch_index: Any) -> Self:
        """The states of the given batch entries, in that order, repeats allowed: what beam search needs."""

        def pick(name: str, x: Tensor) -> Tensor:
            batch = x.dim() - self.batch_dims[name]
            if batch < 1:
                raise ValueError("this state has no batch dimension to select from.")
            index = torch.as_tensor(batch_index, device=x.device)
            if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32, torch.bool):
                raise ValueError(f"select takes a 1-D tensor of indices, got {index.dtype} of {tuple(index.shape)}.")
            if index.dtype != torch.bool and index.numel() and int(index.max()) >= x.shape[0]:
                raise ValueError(f"select: index {int(index.max())} is outside a batch of {x.shape[0]}.")
            return x[index]

        return self._replace(pick)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        header = {"format": "linattn-state", "version": str(VERSION), "form": self.form, "kernel": self.kernel}
        _safetensors.save(path, self.tensors(), header)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "State":
        """Reads what `save` wrote. A file that is cut short, damaged or something else is a ValueError that says so."""
        tensors, header = _safetensors.load(path)
        if header.get("format") != "linattn-state":
            raise ValueError(f"{os.fspath(path)} is a safetensors file, but not a linattn state.")
        if header.get("version") != str(VERSION):
            raise ValueError(
                f"{os.fspath(path)} has state version {header.get('version')}; this linattn reads version {VERSION}."
            )
        forms = {cls.form: cls for cls in State.__subclasses__()}
        cls = forms.get(header.get("form", ""))
        if cls is None or not cls._required() <= set(tensors) <= set(cls.batch_dims):
            raise ValueError(f"{os.fspath(path)} holds no state of a known form (form={header.get('form')!r}).")
        return cls(kernel=header["kernel"], **tensors)


class Pack:
    """S, Z, log_scale, tokens and guarded in one buffer of float32, each at a multiple of 16: see csrc/forward_calls.h."""

    __slots__ = ("about", "buffer", "sizes")

    def __init__(self, buffer: Tensor, sizes: tuple[int, int, int, int], about: Any):
        self.buffer, self.sizes, self.about = buffer, sizes, about

    @staticmethod
    def floats(sizes: tuple[int, int, int, int]) -> int:
        """What the buffer of B, H, r, M needs."""
        return sum(-(-size // 16) * 16 for size in Pack._parts(sizes))

    @staticmethod
    def _parts(sizes: tuple[int, int, int, int]) -> list[int]:
        B, H, r, M = sizes
        return [B * H * r * M, B * H * r, B * H, 2 * B * H, 2 * B * H]

    def tensors(self) -> dict[str, Tensor]:
        at, found = 0, []
        for size in self._parts(self.sizes):
            found.append(self.buffer[at : at + size])
            at += -(-size // 16) * 16
        S, Z, log_scale, tokens, guarded = found
        B, H, r, M = self.sizes
        return {
            "S": S.view(B, H, r, M),
            "Z": Z.view(B, H, r),
            "log_scale": log_scale.view(B, H),
            "tokens": tokens.view(torch.int64).view(B, H),
            "guarded": guarded.view(torch.int64).view(B, H),
        }


class Nothing:
    """The sums of no token, made only when somebody looks at one: an engine that knows them by this name needs none."""

    def __init__(self, shape: tuple[int, ...], features: int, value_dim: int, options: dict[str, Any]):
        self.shape, self.features, self.value_dim, self.options = shape, features, value_dim, options

    def tensors(self) -> dict[str, Tensor]:
        device = self.options["device"]
        return {
            "S": torch.zeros(*self.shape, self.features, self.value_dim, **self.options),
            "Z": torch.zeros(*self.shape, self.features, **self.options),
            "log_scale": torch.full(self.shape, -torch.inf, **self.options),
            "tokens": torch.zeros(self.shape, dtype=torch.int64, device=device),
            "guarded": torch.zeros(self.shape, dtype=torch.int64, device=device),
        }


@dataclass
class Sums(State):
    """S and Z of a linear kernel, for each kv head; true sums are S exp(log_scale) and Z exp(log_scale).

    Attributes:
        S: (..., kv_heads, features, value_dim), sum of phi(k) v.
        Z: (..., kv_heads, features), sum of phi(k).
        log_scale: (..., kv_heads); -inf while no key was seen.
        tokens: (..., kv_heads), keys seen, masked ones not counted.
        guarded: (..., kv_heads), rows so far whose denominator was too small to divide by, and which got 0.
    """

    S: Tensor
    Z: Tensor
    log_scale: Tensor
    tokens: Tensor
    guarded: Tensor

    form: ClassVar[str] = "sums"
    batch_dims: ClassVar[dict[str, int]] = {"S": 3, "Z": 2, "log_scale": 1, "tokens": 1, "guarded": 1}

    @staticmethod
    def packed(kernel: str, pack: "Pack | Nothing") -> "Sums":
        """A state taken apart into tensors only when somebody looks at one: a quick step never does."""
        made = object.__new__(Sums)
        fields = made.__dict__
        fields["kernel"], fields["_pack"] = kernel, pack
        return made

    def __getattr__(self, name: str) -> Tensor:
        """Of a packed state: its tensors. If they share a buffer, it is theirs from now on."""
        fields = self.__dict__
        pack = fields.get("_pack")
        if name in Sums.batch_dims:
            if pack is not None:
                fields.update(pack.tensors())
                fields.pop("_pack", None)  # last: another thread may be looking too
            if name in fields:
                return fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **self.tensors()}  # copies are made of tensors

    @staticmethod
    def empty(
        kernel: str,
        batch: tuple[int, ...],
        heads: int,
        features: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "Sums":
        """The state before any token."""
        nothing = Nothing((*batch, heads), features, value_dim, {"dtype": dtype, "device": device})
        if torch.compiler.is_compiling():
            return Sums(kernel=kernel, **nothing.tensors())
        return Sums.packed(kernel, nothing)

    @property
    def untouched(self) -> bool:
        """Whether this is the state before any token, and nobody has looked at its tensors."""
        return isinstance(self.__dict__.get("_pack"), Nothing)

    def subtract(
        self,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> "Sums":
        """The state before its last tokens, whose keys, values, mask and gates are given again: a roll-back.

        Exact up to rounding. Where those tokens outweigh all others by more than float32's digits, nothing is left to
        recover, and an error says so: keep a clone() from before them instead.
        """
        if kernel.signature(scale) != self.kernel:
            raise ValueError(
                f"this state was made by {self.kernel}; {kernel.signature(scale)} cannot take tokens out of it."
            )
        if key_mask is not None:
            hidden = ~key_mask[..., None, :, None]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        features, log_weight = kernel.scaled_key_features(key, scale=scale)
        level = features.new_zeros(features.shape[:-1]) if log_weight is None else log_weight
        total = features.new_zeros(())
        log_decay, log_input = log_gates(decay, gate)
        if log_decay is not None:
            total = log_decay.sum(-1)
            level = level + total.unsqueeze(-1) - log_decay.cumsum(-1) + (0 if log_input is None else log_input)
        if key_mask is not None:
            level = level.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
        weighted = features * (level - self.log_scale.unsqueeze(-1)).exp().to(features.dtype).unsqueeze(-1)
        taken = weighted.sum(-2)
        Z = self.Z - taken
        tokens = self.tokens - _visible(key, key_mask)
        # Features that are never negative leave sums that are not either, so that what cannot be undone shows.
        if bool((self.Z >= 0).all()) and bool((taken >= 0).all()):
            if bool((-1e-3 * self.Z.amax(-1, keepdim=True) > Z).any()):
                raise ValueError(
                    "these tokens are not the last ones of this state: more would be taken out than it holds."
                )
            if bool(((Z.sum(-1) < 1e-4 * self.Z.sum(-1)) & (tokens > 0)).any()):
                raise ValueError(
                    "the last tokens outweigh all earlier ones, so these cannot be recovered by subtraction: "
                    "keep a clone() of the state from before them."
                )
        if bool((tokens < 0).any()):
            raise ValueError(f"cannot take {key.shape[-2]} tokens out of a state of {int(self.tokens.min())}.")
        return dataclasses.replace(
            self,
            S=self.S - weighted.mT @ value.to(weighted.dtype),
            Z=Z,
            log_scale=(self.log_scale - total).to(self.log_scale.dtype).masked_fill(tokens == 0, -torch.inf),
            tokens=tokens,
        )

    @property
    def feature_dim(self) -> int:
        return self.S.shape[-2]

    @property
    def value_dim(self) -> int:
        return self.S.shape[-1]


@dataclass
class Cache(State):
    """Keys and values themselves: the state of exact softmax, which grows with every token.

    Attributes:
        key, value: (..., kv_heads, tokens, dim).
        visible: (..., tokens), False where the key was masked.
    """

    key: Tensor
    value: Tensor
    visible: Tensor

    form: ClassVar[str] = "cache"
    batch_dims: ClassVar[dict[str, int]] = {"key": 3, "value": 3, "visible": 1}

    def drop_last(self, tokens: int) -> "Cache":
        """Without its last tokens."""
        keep = self.key.shape[-2] - tokens
        if tokens < 0 or keep < 0:
            raise ValueError(f"cannot drop {tokens} of {self.key.shape[-2]} tokens.")
        return dataclasses.replace(
            self, key=self.key[..., :keep, :], value=self.value[..., :keep, :], visible=self.visible[..., :keep]
        )


def _visible(key: Tensor, key_mask: Tensor | None) -> Tensor | int:
    return key.shape[-2] if key_mask is None else key_mask.sum(-1, keepdim=True)
