"""What type checkers see of the public functions: checked by mypy in `make lint`, run by tests/functional/test_surface.py."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import linattn
from linattn import State
from linattn.states import ConvState, ScanState


def calls(flag: bool = True) -> None:
    x = torch.randn(1, 2, 5, 8)
    assert_type(linattn.attention(x, x, x, kernel="elu"), Tensor)
    assert_type(linattn.attention(x, x, x, None, 0.0, True, kernel="nearfar", return_state=False), Tensor)
    assert_type(linattn.attention(x, x, x, kernel=linattn.kernels.Elu(), return_state=True), tuple[Tensor, State])
    assert_type(linattn.attention(x, x, x, kernel="elu", return_state=flag), Tensor | tuple[Tensor, State])
    _, state = linattn.attention(x, x, x, kernel="elu", is_causal=True, return_state=True)
    assert_type(state.clone().select([0]).detach(), State)
    assert_type(linattn.implied_attention(x, x, "softmax"), Tensor)


def scans(flag: bool = True) -> None:
    x, A, B = torch.randn(1, 2, 5), -torch.rand(2, 3), torch.randn(1, 3, 5)
    assert_type(linattn.selective_scan(x, x.abs(), A, B, B), Tensor)
    assert_type(linattn.selective_scan(x, x.abs(), A, B, B, return_state=True), tuple[Tensor, ScanState])
    assert_type(linattn.selective_scan(x, x.abs(), A, B, B, return_state=flag), Tensor | tuple[Tensor, ScanState])
    assert_type(linattn.causal_conv1d(x, A), Tensor)
    assert_type(linattn.causal_conv1d(x, A, activation="silu", return_state=True), tuple[Tensor, ConvState])
    assert_type(linattn.causal_conv1d(x, A, return_state=flag), Tensor | tuple[Tensor, ConvState])
