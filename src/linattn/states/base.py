"""The base class of all states: copying, moving, selecting, comparing, saving and loading."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from .._tensor_files import read_tensors, write_tensors
from ..kernels.base import is_plain
from . import layout
from .layout import Spec

VERSION = 1
UNUSABLE = "this state cannot be used: "
Self = TypeVar("Self", bound="State")


class Packed(Protocol):
    """The tensors of a state in an engine's own layout, from which it continues without unpacking them."""

    def tensors(self) -> dict[str, Tensor]: ...


@dataclass(eq=False, repr=False)
class State:
    """The state after a call: pass it as `state=` to continue from there.

    Fields are tensors whose leading dimensions are the call's batch dimensions. Two states are equal if they
    have the same type and kernel and all their tensors are equal in dtype, shape and values. States cannot be hashed.
    """

    kernel: str

    form: ClassVar[str] = ""
    # Of the fields that are tensors. The default of an optional one must be a field(default_factory=lambda: None): a plain
    # None would be an attribute of the class, and hide the tensor of a packed state.
    table: ClassVar[dict[str, Spec]] = {}

    # Tensors, packed or not -------------------------------------------------------------------------------------------

    @classmethod
    def packed(cls: type[Self], kernel: str, pack: Packed) -> Self:
        """A state whose tensors are unpacked at the first access; a decoding step never needs them.

        Engines trust a pack that was never unpacked: no other code had access to its tensors.
        """
        made = object.__new__(cls)
        fields = made.__dict__
        fields["kernel"], fields["_pack"] = kernel, pack
        return made

    def __getattr__(self, name: str) -> Any:
        """Unpacks a packed state at the first access to one of its tensors."""
        fields = self.__dict__
        if name in type(self).table:
            pack = fields.get("_pack")
            if pack is not None:
                for key, x in pack.tensors().items():
                    fields.setdefault(key, x)
                fields["_unpacked"] = pack
                fields.pop("_pack", None)  # last: another thread may be unpacking too
            if name in fields:
                return fields[name]
            if type(self).table[name].optional:
                return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def tensors(self) -> dict[str, Tensor]:
        """Field -> tensor, without the fields that are None."""
        found = {name: getattr(self, name) for name in self.table}
        return {name: x for name, x in found.items() if x is not None}

    def _peek(self) -> dict[str, Tensor]:
        """Like `tensors`, for reading only: a packed state stays packed."""
        fields = self.__dict__
        pack = fields.get("_pack")
        found = fields if pack is None else {**pack.tensors(), **fields}
        return {name: found[name] for name in self.table if found.get(name) is not None}

    def map(self: Self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """The same state with every tensor changed by change(field name, tensor)."""
        changed: dict[str, Any] = {name: change(name, x) for name, x in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    # Validation -------------------------------------------------------------------------------------------------------

    def validate(self, *, finite: bool = False) -> tuple[tuple[int, ...], dict[str, int]]:
        """Checks every tensor against the others: kinds, shapes, ranges. Returns the batch dimensions and named sizes.

        finite: also check for NaN and infinity, which reads every number.
        """
        if not isinstance(self.kernel, str):
            raise ValueError(f"{UNUSABLE}its kernel must be a name, got {type(self.kernel).__name__}.")
        tensors = self._peek()
        try:
            batch, sizes = layout.check_shapes(tensors, self.table)
            self._check_sizes(tensors, sizes)
            if is_plain(next(iter(tensors.values()))):  # all are on one device
                layout.check_values(tensors, self.table, finite)
                self._check_values(tensors, sizes)
        except ValueError as error:
            raise ValueError(f"{UNUSABLE}{error}") from None
        return batch, sizes

    def _check_sizes(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        """Checks of sizes beyond the table; raises a ValueError about "its" tensors."""

    def _check_values(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        """Checks of values beyond the table, called where they can be read without a graph break or a device sync."""

    def cast(self: Self, dtype: torch.dtype) -> Self:
        """Floats in dtype, counts in int64, as the engines need it. Returns self if nothing changes."""
        tensors = self._peek()
        new = {name: layout.cast(x, self.table[name].kind, dtype) for name, x in tensors.items()}
        changed: dict[str, Any] = {name: x for name, x in new.items() if x is not tensors[name]}
        return dataclasses.replace(self, **changed) if changed else self

    # Copies -----------------------------------------------------------------------------------------------------------

    def clone(self: Self) -> Self:
        """An independent copy, to fork a prompt."""
        return type(self)(self.kernel, **{name: x.clone() for name, x in self._peek().items()})

    def detach(self: Self) -> Self:
        """The same state, detached from the autograd graph."""
        return self.map(lambda _, x: x.detach())

    def to(
        self: Self,
        *where: torch.device | torch.dtype | Tensor | str | int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self:
        """Moves tensors as `Tensor.to` does: by device, dtype, both, or like another tensor. Counts keep their type."""
        for x in where:
            if isinstance(x, Tensor):
                device, dtype = x.device, x.dtype
            elif isinstance(x, torch.dtype):
                dtype = x
            elif isinstance(x, (torch.device, str)) or type(x) is int:
                device = x
            else:
                raise TypeError(f"to takes a device, a dtype or a tensor, got {type(x).__name__}.")
        if dtype is not None and dtype not in layout.FLOATS:
            raise TypeError(f"a state holds floating-point numbers: it cannot be moved to {dtype}.")

        def move(_: str, x: Tensor) -> Tensor:
            kind = dtype if x.is_floating_point() else None
            return x.to(device=device, dtype=kind, non_blocking=non_blocking, copy=copy)

        return self.map(move)

    def select(self: Self, batch_index: Tensor | Sequence[int] | Sequence[bool]) -> Self:
        """The states of the given batch entries, in that order; repeats are allowed, as in beam search.

        Negative indices count from the end. A bool mask, one entry for each of the batch, keeps those that are True.
        """

        def pick(name: str, x: Tensor) -> Tensor:
            if x.dim() <= len(self.table[name].dims):
                raise ValueError("this state has no batch dimension to select from.")
            return x[_read_index(batch_index, x.shape[0], x.device)]

        return self.map(pick)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold plain tensors: without a history of gradients, or larger storages behind them."""
        return {"kernel": self.kernel, **{name: _compact(x.detach()) for name, x in self._peek().items()}}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(dict.fromkeys(self.table))
        self.__dict__.update({name: x for name, x in fields.items() if name == "kernel" or name in self.table})

    def __copy__(self: Self) -> Self:
        return dataclasses.replace(self)

    # Comparing and showing --------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        if type(self) is not type(other) or self.kernel != other.kernel:
            return False
        mine, theirs = self._peek(), other._peek()
        return mine.keys() == theirs.keys() and all(_same(x, theirs[name]) for name, x in mine.items())

    def __repr__(self) -> str:
        tensors = self._peek()
        about = [repr(self.kernel)]
        try:
            batch, sizes = layout.check_shapes(tensors, self.table)
            self._check_sizes(tensors, sizes)
        except ValueError:
            shapes = (f"{name}={_shape(x)}" for name, x in tensors.items())
            return f"{type(self).__name__}({', '.join([*about, *shapes])}, cannot be used)"
        heads = [f"heads={sizes['H']}"] if "H" in sizes else []
        about += [f"batch={batch}", *heads, *self._describe(sizes)]
        tokens = tensors.get("tokens")
        if tokens is not None:
            about.append(f"tokens={_range(tokens)}")
        first = next(iter(tensors.values()))
        about.append(str(first.dtype).removeprefix("torch."))
        if first.device.type != "cpu":
            about.append(str(first.device))
        return f"{type(self).__name__}({', '.join(about)}, {self.nbytes / 1024:.1f} KiB)"

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        """Further sizes for `repr`."""
        return []

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self._peek().values())).device

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self._peek().values())

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        header = {"format": "linattn-state", "version": str(VERSION), "form": self.form, "kernel": self.kernel}
        write_tensors(path, self._peek(), header)

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Reads a file written by `save`. State.load reads any kind of state, a subclass only its own.

        Raises ValueError if the file is truncated, damaged or not a state.
        """
        name = os.fspath(path)
        tensors, header = read_tensors(path)
        if header.get("format") != "linattn-state":
            raise ValueError(f"{name} is a safetensors file, but not a linattn state.")
        version, form = header.get("version"), header.get("form")
        if version != str(VERSION):
            raise ValueError(f"{name} has state version {version}; this linattn reads version {VERSION}.")
        found = next((made for made in State.__subclasses__() if made.form == form), None)
        if found is None or "kernel" not in header or not set(tensors) <= set(found.table):
            raise ValueError(f"{name} holds no state of a known form (form={form!r}).")
        if not issubclass(found, cls):
            raise ValueError(f"{name} holds a state of form {form!r}; {cls.__name__}.load reads {cls.form!r}.")
        empty: dict[str, Any] = dict.fromkeys(found.table)
        state = found(kernel=header["kernel"], **{**empty, **tensors})
        try:
            state.validate(finite=True)
        except ValueError as error:
            raise ValueError(f"{name} holds a damaged state: {str(error).removeprefix(UNUSABLE)}") from None
        return state


def pack_of(state: State) -> Any:
    """The pack of a state, in the class of the engine that made it; None once a tensor was accessed or set."""
    fields = state.__dict__
    return fields.get("_pack") if len(fields) == 2 else None


def _read_index(index: Tensor | Sequence[int] | Sequence[bool], batch: int, device: torch.device) -> Tensor:
    """A 1-D index into a batch, checked."""
    found = torch.as_tensor(index, device=device)
    if found.shape == (0,) and found.dtype != torch.bool:
        found = found.to(torch.int64)  # an empty list has no type of its own
    if found.dim() != 1 or (found.dtype not in layout.INTEGERS[:-1] and found.dtype != torch.bool):
        raise ValueError(f"select takes a 1-D tensor of indices, got {found.dtype} of {tuple(found.shape)}.")
    if found.dtype == torch.bool:
        if found.shape[0] != batch:
            raise ValueError(f"select: a mask of {found.shape[0]} does not fit a batch of {batch}.")
        return found
    found = found.to(torch.int64)
    if found.numel():
        low, high = layout.extremes(found)
        if high >= batch or low < -batch:
            raise ValueError(f"select: index {high if high >= batch else low} is outside a batch of {batch}.")
    return found


def _compact(x: Any) -> Any:
    """A copy if the tensor is part of a larger storage, which a pickle would hold in full."""
    if (
        isinstance(x, Tensor)
        and x.device.type != "meta"
        and x.untyped_storage().nbytes() > x.numel() * x.element_size()
    ):
        return x.clone()
    return x


def _same(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    if x.dtype != y.dtype or x.shape != y.shape or x.device != y.device or x.device.type == "meta":
        return False
    return torch.equal(x, y)


def _shape(x: object) -> object:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__


def _range(counts: Tensor) -> str:
    """One number if all counts are equal, otherwise a range."""
    if counts.numel() == 0 or counts.device.type == "meta":
        return "?"
    low, high = layout.extremes(counts)
    return str(low) if low == high else f"{low}..{high}"
