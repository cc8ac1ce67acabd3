"""Whole models under sequence_parallel equal one process: see parallel_model_cases.py."""

import pytest
import torch

import linattn
from parallel_support import SIZES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["layers", "helpers"])
def test_layers_over_shards_equal_one_process(pool, case, size):
    pool.run(size, f"parallel_model_cases.{case}")


@pytest.mark.parametrize("case", ["transformer_layers", "attached"])
def test_models_over_shards_equal_one_process(pool, case):
    pool.run(3, f"parallel_model_cases.{case}")


def test_data_and_sequence_parallelism_together_train_as_one_process(pool):
    pool.run(4, "parallel_model_cases.data_and_sequence")


def test_without_torch_distributed_it_says_what_to_do():
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="torchrun"):
        linattn.parallel.attention(x, x, x, kernel="elu")
