"""Depthwise causal convolution along the tokens: out_t = act(bias + sum_i weight_i x_(t - width + 1 + i)).

Every form takes a CausalConv1dCall (call.py).
"""
