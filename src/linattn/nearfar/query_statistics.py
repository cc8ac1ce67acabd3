"""Mean and covariance of the queries of a sequence, which the merging rule needs: sampled, and updated block by block."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .kernel import NearFar
from .merge import anchor_and_metric, query_moments
from .positions import BlockLayout
from .state import HeadGroup

BLOCKS_AT_ONCE = 32  # blocks whose means and covariances are computed together


class QueryStatistics:
    """The statistics of one call as its blocks are entered.

    Attributes:
        moments: (B, H, 2, D + 1), of all blocks that were finished so far; see NearFarState.
        queries: (B, H, G, s, D + 1), the samples of the last block.
    """

    def __init__(self, kernel: NearFar, group: HeadGroup, query: Tensor | None, layout: BlockLayout):
        """query: (B, H, G, L, D), or None if the new tokens have no queries."""
        self.layout, self.moments = layout, group.moments
        self._earlier = group.queries
        self._samples = _sample(kernel, group.queries, query, layout)
        B, H, G, _, s, width = self._samples.shape
        last = [(p + max(n, 1) - 1) // layout.block for p, n in zip(layout.phases, layout.counts, strict=True)]
        index = torch.tensor(last, device=self._samples.device).reshape(B, 1, 1, 1, 1, 1)
        self.queries = self._samples.gather(3, index.expand(-1, H, G, 1, s, width)).squeeze(3)
        if not all(layout.counts):  # sequences without a new token keep what they have
            some = torch.tensor([n > 0 for n in layout.counts], device=index.device).reshape(B, 1, 1, 1, 1)
            self.queries = torch.where(some, self.queries, self._earlier)

    def before(self, i: int) -> Tensor:
        """The samples (B, H, G, s, D + 1) of the block before block i."""
        return self._earlier if i == 0 else self._samples[:, :, :, i - 1]

    def by_block(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Anchor and metric (B, H, 1, D) as each block is entered; `moments` are final after the last one."""
        blocks = self.layout.blocks
        for first in range(0, blocks, BLOCKS_AT_ONCE):
            running = []
            for i in range(first, min(first + BLOCKS_AT_ONCE, blocks)):
                running.append(self.moments)
                self.moments = self._after_block(i)
            with torch.no_grad():
                anchors, metrics = anchor_and_metric(torch.stack(running, 2))
            for j in range(len(running)):
                yield anchors[:, :, j], metrics[:, :, j]

    def _after_block(self, i: int) -> Tensor:
        """The moments with the queries of block i, where it is finished. One block at a time: every split adds alike."""
        layout = self.layout
        done = [p + n >= (i + 1) * layout.block for p, n in zip(layout.phases, layout.counts, strict=True)]
        if not any(done):
            return self.moments
        x = self._samples[:, :, :, i].flatten(2, 3)  # (B, H, G s, D + 1)
        added = self.moments + query_moments(x)
        if all(done):
            return added
        return torch.where(torch.tensor(done, device=x.device)[:, None, None, None], added, self.moments)


def _sample(kernel: NearFar, earlier: Tensor, query: Tensor | None, layout: BlockLayout) -> Tensor:
    """Sampled queries with a 1 appended, (B, H, G, blocks, s, D + 1); 0 where there is no token.

    earlier: (B, H, G, s, D + 1), the samples of the first block that came in earlier calls.
    """
    stride, block = kernel.stride, kernel.block
    B, H, G, s, width = earlier.shape
    position = layout.starts().unsqueeze(-1) + torch.arange(0, block, stride, device=earlier.device)  # (B, blocks, s)
    if query is None:
        samples = earlier.new_zeros(B, H, G, layout.blocks, s, width)
    else:
        x = layout.scatter(query.detach(), 0, layout.blocks * block)
        x = x.reshape(B, H, G, layout.blocks, block, width - 1)[..., ::stride, :]
        missing = (position >= layout.ends().unsqueeze(-1))[:, None, None, :, :, None]
        samples = torch.nn.functional.pad(x, (0, 1), value=1.0).masked_fill(missing, 0)
    seen = position[:, :1] < layout.column(layout.positions.tokens).unsqueeze(-1)  # (B, 1, s)
    first = torch.where(seen[:, None, None, :, :, None], earlier.unsqueeze(3), samples[:, :, :, :1])
    return torch.cat([first, samples[:, :, :, 1:]], 3)
