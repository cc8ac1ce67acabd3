"""Depthwise causal convolution along the tokens: out_t = act(bias + sum_i weight_i x_(t - width + 1 + i)).

Every form takes the same canonical tensors, checked by linattn.functional: x (b, c, t), weight (c, w), bias (c) or None, mask
(b, t) or None, bounds of n sequences in every batch entry or None (one sequence), state (b * n, c, w - 1) or None: the inputs
before the first token of a sequence, zeros without a state.

Masked tokens are skipped: the tokens around them become neighbours, their output is 0, and they do not enter the state.
"""
