"""torch.nn.MultiheadAttention with a kernel."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..functional import routing
from ..functional.attention import attention
from ..functional.implied_attention import implied_attention
from ..kernels import Kernel, KernelName, Softmax, resolve
from ..states import State
from .masks import causal_by, key_mask_of


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, its arguments and its state_dict, with any kernel in place of softmax.

    >>> import torch, linattn
    >>> module = linattn.nn.MultiheadAttention(64, 4, batch_first=True, kernel="elu")
    >>> x = torch.randn(2, 1000, 64)
    >>> out, weights = module(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([2, 1000, 64]), None)

    What differs from torch's:

    - weights are the N x N matrix that a linear kernel avoids, so `need_weights` defaults to False (kernel="softmax" returns
      them by default, as torch does);
    - `is_causal=True` needs no mask; an `attn_mask` must be causal, any other has no linear form and is refused (in a
      compiled graph, which cannot read masks, `is_causal=True` is trusted);
    - dropout of attention weights has no linear form and must be 0 in training;
    - `state` and `return_state` work as in `linattn.attention`; a call that goes on from a state has no weights;
    - checkpoints of torch's module load; those of this module also hold the kernel's tensors, if any.

    Args:
        kernel: a Kernel (copied, so that layers do not share weights by accident) or a name.
        Other arguments are torch's.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Kernel | KernelName = "softmax",
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.take(kernel)

    def take(self, kernel: Kernel | KernelName) -> None:
        device = self.out_proj.weight.device
        self.kernel = copy.deepcopy(resolve(kernel, self.head_dim, device)).to(device)
        self.kernel.check_dim(self.head_dim)
        # torch's encoder layer has a fast path of its own that would compute softmax from the weights; this turns it off.
        self._qkv_same_embed_dim = False
        self.register_load_state_dict_pre_hook(_keep_kernel)

    def forward(  # type: ignore[override]  # a state is a third result
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        state: State | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, State | None]:
        """(out, weights) as torch's, or (out, weights, state) with return_state; layout by `batch_first`, batch optional."""
        if self.dropout > 0 and self.training:
            raise ValueError(
                f"attention dropout (here {self.dropout}) drops single weights, which a linear kernel never forms: "
                "set dropout=0 on the module and put dropout on its output instead."
            )
        if need_weights is None:  # over shards no process has all keys, and after a state nobody has those before it
            need_weights = isinstance(self.kernel, Softmax) and routing.current() is None and state is None
        if need_weights and state is not None:
            raise ValueError(
                "need_weights: the weights of a call that goes on from a state would leave out the keys before it: call the "
                "module on all tokens to see them."
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if routing.current() is not None:
            _refuse_over_shards(need_weights, attn_mask, is_causal)
        is_causal = causal_by(attn_mask, is_causal, query.shape[1], key.shape[1])
        key_mask = key_mask_of(key_padding_mask, key.shape[0], key.shape[1])
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        if state is None:  # else they are in the state
            k, v, key_mask = self._extend(k, v, key_mask)
        options: dict[str, Any] = {"kernel": self.kernel, "is_causal": is_causal, "key_mask": key_mask}
        new_state: State | None = None
        if return_state:
            out, new_state = attention(q, k, v, state=state, return_state=True, **options)
        else:
            out = attention(q, k, v, state=state, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = self._weights(q, k, v, average_attn_weights, options) if need_weights else None
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return (out, weights, new_state) if return_state else (out, weights)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=False))

    def _split_heads(self, x: Tensor) -> Tensor:  # (B, N, heads * D) -> (B, heads, N, D)
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _extend(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Puts the learned and the zero token of add_bias_kv and add_zero_attn first, where every query sees them."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append([self._split_heads(x.expand(key.shape[0], -1, -1)) for x in (self.bias_k, self.bias_v)])
        if self.add_zero_attn:
            extra.append(
                [
                    torch.zeros_like(x[:, :, :1]) if x.shape[2] else x.new_zeros(*x.shape[:2], 1, x.shape[3])
                    for x in (key, value)
                ]
            )
        if not extra:
            return key, value, key_mask
        if routing.current() is not None:
            raise ValueError(
                "add_bias_kv and add_zero_attn add a token in front of every shard, not of the sequence: leave them out under "
                "sequence_parallel."
            )
        key = torch.cat([*(k for k, _ in extra), key], 2)
        value = torch.cat([*(v for _, v in extra), value], 2)
        if key_mask is not None:
            key_mask = torch.cat([key_mask.new_ones(key_mask.shape[0], len(extra)), key_mask], 1)
        return key, value, key_mask

    def _weights(self, q: Tensor, k: Tensor, v: Tensor, average: bool, options: dict[str, Any]) -> Tensor:
        """The attention matrix in torch's order of keys: the added tokens last."""
        weights = implied_attention(q, k, value=v, **options).to(q.dtype)
        added = (self.bias_k is not None) + bool(self.add_zero_attn)
        weights = torch.cat([weights[..., added:], weights[..., :added]], -1)
        return weights.mean(1) if average else weights


def _refuse_over_shards(need_weights: bool, attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raises for what one shard cannot know."""
    if need_weights:
        raise ValueError("need_weights: under sequence_parallel no process has the keys of all tokens.")
    if attn_mask is not None and not is_causal:
        raise ValueError(
            "a mask of one shard does not say what the others do: pass is_causal=True under sequence_parallel."
        )


def _keep_kernel(module: MultiheadAttention, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keeps the present kernel when a checkpoint of torch's module is loaded."""
    own = {f"{prefix}kernel.{name}": tensor for name, tensor in module.kernel.state_dict().items()}
    if not any(name in state_dict for name in own):
        state_dict.update(own)
