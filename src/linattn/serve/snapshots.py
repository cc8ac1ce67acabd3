"""Snapshots: the cache of a sequence after some tokens, and the safetensors file that it is saved as."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .._tensor_files import read_header, read_tensors, write_tensors
from ..states import State
from .caches import KeyValueLayer, tensors_of

FORMAT, VERSION = "linattn-snapshot", "1"
PLAIN = (int, float, bool, str, type(None))


class MismatchError(ValueError):
    """A state of another model, kernel or calibration."""


@dataclass
class Snapshot:
    """A cache after `tokens`. The cache is never changed: continue from `caches.fork(cache)`.

    Attributes:
        about: what else is stored with it, such as its name and the messages it was made of; JSON.
    """

    tokens: list[int]
    cache: Cache
    about: dict[str, Any] = field(default_factory=dict)


def save(path: str | os.PathLike[str], snapshot: Snapshot, fingerprint: str) -> None:
    """Writes one file, atomically: after a crash there is the whole file or none."""
    tensors: dict[str, Tensor] = {"tokens": torch.tensor(snapshot.tokens, dtype=torch.int32)}
    layers = []
    for i, layer in enumerate(snapshot.cache.layers):
        tensors |= {f"{i}.{name}": x for name, x in tensors_of(layer)}
        layers.append({"class": type(layer).__name__, **_plain_fields(layer)})
    header = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "tokens": str(len(snapshot.tokens)),
        "about": json.dumps(snapshot.about),
        "layers": json.dumps(layers),
    }
    write_tensors(path, tensors, header)
    _sync_folder(Path(path).parent)


def read_about(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The header of a file and its `about`, without reading the tensors. ValueError if it is not a snapshot."""
    name = os.fspath(path)
    header = read_header(path)
    if header.get("format") != FORMAT:
        raise ValueError(f"{name} is not a saved state of `linattn serve` or `linattn read`.")
    if header.get("version") != VERSION:
        raise ValueError(f"{name} has version {header.get('version')}; this linattn reads version {VERSION}.")
    try:
        about = json.loads(header["about"])
        if not isinstance(about, dict) or int(header["tokens"]) < 0:
            raise ValueError("its header does not say what it is.")
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    return header, about


def load(path: str | os.PathLike[str], empty: Cache, fingerprint: str) -> Snapshot:
    """Reads a file into an empty cache of the same model. ValueError if it is damaged, MismatchError if it is another's."""
    name = os.fspath(path)
    header, about = read_about(path)
    if header.get("fingerprint") != fingerprint:
        raise MismatchError(
            f"{name} is a state of another model, kernel or calibration: read the document again with this one."
        )
    tensors, _ = read_tensors(path)
    try:
        tokens = [int(i) for i in tensors.pop("tokens")]
        if len(tokens) != int(header["tokens"]):
            raise ValueError(f"it has {len(tokens)} tokens in place of {header['tokens']}.")
        layers = json.loads(header["layers"])
        for i, (layer, fields) in enumerate(zip(empty.layers, layers, strict=True)):
            own = {key.partition(".")[2]: x for key, x in tensors.items() if key.startswith(f"{i}.")}
            _restore(layer, fields, own)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    return Snapshot(tokens, empty, about)


def _plain_fields(layer: Any) -> dict[str, Any]:
    """Numbers and flags of a layer, the kinds of its states, and its dtypes."""
    found: dict[str, Any] = {}
    for name, x in layer.__dict__.items():
        if isinstance(x, State):
            found[name] = {"form": x.form, "kernel": x.kernel}
        elif isinstance(x, PLAIN):
            found[name] = x
        elif isinstance(x, torch.dtype):
            found[name] = {"dtype": str(x).removeprefix("torch.")}
        elif isinstance(x, dict) and all(isinstance(y, PLAIN) for y in x.values()):
            found[name] = {"entries": list(x.items())}
    return found


def _restore(layer: Any, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if fields.pop("class") != type(layer).__name__:
        raise ValueError(f"a layer is a {type(layer).__name__} here.")
    if isinstance(layer, KeyValueLayer):
        if tensors:
            layer.restore(tensors["key"], tensors["value"])
        return
    for name, x in fields.items():
        if not isinstance(x, dict):
            layer.__dict__[name] = x
        elif "dtype" in x:
            layer.__dict__[name] = getattr(torch, x["dtype"])
        elif "form" in x:
            own = {key.partition(".")[2]: y for key, y in tensors.items() if key.startswith(f"{name}.")}
            layer.__dict__[name] = _state(x["form"], x["kernel"], own)
        else:
            layer.__dict__[name] = {key: y for key, y in x["entries"]}  # noqa: C416
    for key, x in tensors.items():
        name, _, entry = key.partition(".")
        if not entry:
            layer.__dict__[name] = x
        elif isinstance(layer.__dict__.get(name), dict):
            layer.__dict__[name][int(entry)] = x
    if hasattr(layer, "device") and tensors:
        layer.device = next(iter(tensors.values())).device


def _state(form: str, kernel: str, tensors: dict[str, Tensor]) -> State:
    kind = next((made for made in State.__subclasses__() if made.form == form), None)
    if kind is None or not set(tensors) <= set(kind.table):
        raise ValueError(f"it holds no state of a known form ({form!r}).")
    empty: dict[str, Any] = dict.fromkeys(kind.table)
    state = kind(kernel=kernel, **{**empty, **tensors})
    state.validate(finite=True)
    return state


def _sync_folder(folder: Path) -> None:
    """The name of a new file survives a power failure only if its folder is synced too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
