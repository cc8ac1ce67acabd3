"""Prepared pairs and a model that has learned nothing."""

import dataclasses

import pytest
import torch

from debian_lists import many_lists
from linattn.cli import main
from linattn_lab.summarize.model import CONFIGS, ModelConfig, Seq2Seq
from linattn_lab.summarize.summarizer import Summarizer
from linattn_lab.summarize.tokenizer import Tokens


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """What `prepare` writes, from lists like apt's."""
    folder = tmp_path_factory.mktemp("summaries")
    lists = many_lists(folder / "lists")
    words = ["lab", "summarize", "prepare", "--lists", str(lists), "--out", str(folder / "pairs")]
    assert main([*words, "--validation", "10", "--test", "10", "--vocabulary", "400"]) == 0
    return folder / "pairs"


@pytest.fixture(scope="session")
def model(prepared):
    """A model that has learned nothing, in one file."""
    torch.manual_seed(0)
    tokens = Tokens.load(prepared / "tokens.json")
    config = ModelConfig(vocabulary=tokens.size, **CONFIGS["tiny"])
    path = prepared.parent / "model.safetensors"
    Summarizer(Seq2Seq(config).eval(), tokens, {"model": dataclasses.asdict(config)}).save(path)
    return path
