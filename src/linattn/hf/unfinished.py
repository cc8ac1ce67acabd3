"""Rows that a long measurement has finished, kept in a file, so that it goes on where it was stopped."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._tensor_files import read_tensors, write_tensors
from .fingerprint import weights_digest

NAME = "linattn-unfinished.safetensors"


class Unfinished:
    """Name -> its row. Without a folder, nothing is kept.

    Args:
        folder: where the file lies while the measurement is not finished.
        model, ids, *setting: what is measured; rows of another model, text or setting are not taken.
    """

    def __init__(self, folder: Path | None, model: Any, ids: Tensor, *setting: object):
        self.path = None if folder is None else folder / NAME
        self.rows: dict[str, Tensor] = {}
        self.mark = _fingerprint(model, ids, setting) if folder is not None else ""
        if self.path is not None and self.path.is_file():
            try:
                rows, about = read_tensors(self.path)
            except (ValueError, OSError):  # half a file, of a process that was killed
                return
            if about.get("measured") == self.mark:
                self.rows = dict(rows)

    def add(self, name: str, row: Tensor) -> Tensor:
        """Keeps a finished row, and returns it."""
        self.rows[name] = row
        if self.path is not None:
            write_tensors(self.path, {key: x.contiguous() for key, x in self.rows.items()}, {"measured": self.mark})
        return row

    def finish(self) -> None:
        """The whole result is saved: the file has served its purpose."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _fingerprint(model: Any, ids: Tensor, setting: tuple[object, ...]) -> str:
    found = hashlib.sha256(repr(setting).encode())
    found.update(model.config.to_json_string().encode())
    found.update(weights_digest(model))
    found.update(ids.detach().to(torch.int64).cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
