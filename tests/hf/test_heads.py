"""Heads of pretrained models, as their attention sees them."""

import pytest

pytest.importorskip("transformers")

from hf_support import build, tokens
from linattn.hf.heads import layer_numbers, read_heads


def test_heads_of_each_layer():
    found = read_heads(build("llama"), tokens(1, 20))
    assert list(found) == layer_numbers(build("llama")) == [0, 1]
    assert all(
        q.shape == (4, 20, 8) and k.shape == v.shape == (2, 20, 8) and causal for q, k, v, causal in found.values()
    )


def test_layers_that_a_number_does_not_tell_apart_are_refused():
    """The first layer of an encoder, of its decoder, and its attention to the encoder: the last one was returned for all."""
    for read in (layer_numbers, lambda model: read_heads(model, tokens(1, 20))):
        with pytest.raises(ValueError, match="several attentions of the same number"):
            read(build("bart"))
