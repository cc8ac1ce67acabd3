"""Muon: orthogonal steps for convolutions, AdamW for the rest."""

import pytest
import torch
from torch import nn

from linattn_lab.training.muon import RATE, Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (16, 16)])
def test_all_singular_values_come_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 7
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_rest_is_adamw():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    pairs = [(ours, Muon(ours, 0.01, 0.1)), (theirs, torch.optim.AdamW(groups, lr=0.01))]
    x = torch.randn(4, 7, 5)
    for model, optimizer in pairs:
        for part in x:
            model(part).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_filters_keep_their_norm_and_step_by_the_rate():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, bias=False)
    optimizer = Muon(model, 1e-3)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    before = model.weight.detach() * 2 / model.weight.detach().norm()  # sqrt(4) filters
    optimizer.step()
    step = (model.weight.detach() - before).reshape(4, -1)
    values = torch.linalg.svdvals(step)
    assert ((values > 0.5e-3 * RATE) & (values < 1.3e-3 * RATE)).all()


def test_a_checkpoint_holds_its_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    first = Muon(model, 0.01)
    model(torch.randn(3, 1, 4, 4)).sum().backward()
    first.step()
    second = Muon(model, 0.01)
    second.load_state_dict(first.state_dict())
    for parameter in model.parameters():
        for name, value in first.state[parameter].items():
            torch.testing.assert_close(second.state[parameter][name], value)
