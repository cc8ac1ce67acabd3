"""Decode of the torch engine: a few tokens inside a block that was entered before, so that nothing is merged."""

from dataclasses import replace

import torch
from torch import Tensor

from .block_attention import attend_block
from .kernel import NearFar
from .merge import query_moments
from .positions import BlockLayout
from .prefill import fill_sinks, view_of_last
from .state import HeadGroup


def decode(
    kernel: NearFar, group: HeadGroup, query: Tensor, entries: Tensor, layout: BlockLayout
) -> tuple[Tensor, HeadGroup]:
    """`prefill` where `layout.inside_block` holds: output (B, H, G, L, M), and the group after the tokens."""
    phase, L, stride = layout.phases[0], layout.length, kernel.stride
    tokens = torch.cat([group.near, entries], 2)
    group = replace(group, sink=fill_sinks(group.sink, entries, layout))
    out = attend_block(group, query, tokens, view_of_last(kernel, layout, tokens.shape[2]))
    queries, moments = group.queries, group.moments
    skip = -phase % stride
    if skip < L:
        x = query.detach()[..., skip::stride, :]
        first = (phase + skip) // stride
        queries = queries.clone()
        queries[..., first : first + x.shape[3], :] = torch.nn.functional.pad(x, (0, 1), value=1.0)
    if phase + L == kernel.block:
        moments = moments + query_moments(queries.flatten(2, 3))
    near = tokens[:, :, max(0, tokens.shape[2] - kernel.window - kernel.block) :]
    positions = layout.positions.after(kernel, layout.counts)
    return out, replace(group, positions=positions, near=near, moments=moments, queries=queries)
