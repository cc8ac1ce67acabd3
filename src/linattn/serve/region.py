"""Memory of a stored snapshot: one region, which goes back to the system when the snapshot is dropped.

Snapshots come and go by the hundred, each of many tensors. In the allocator's heap they leave gaps between what stays, and the
process does not get smaller.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of tensors on a CPU, one after the other in a region of their own."""
    starts, end = [], 0
    for x in tensors:
        starts.append(end)
        end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
    region = torch.frombuffer(mmap.mmap(-1, max(end, 1)), dtype=torch.uint8)
    made = []
    for start, x in zip(starts, tensors, strict=True):
        part = region[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        made.append(part.copy_(x))
    return made
