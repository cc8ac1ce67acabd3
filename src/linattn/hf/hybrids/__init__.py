"""The linear layers of hybrid models (Qwen3-Next, Kimi Linear, Mamba, ..) on this library's engines.

transformers' modelling files call a handful of functions for the rule, the convolution and the update by one token, and fall
back to slow reference code where no GPU package is installed. delta, ssd, scan and conv have functions with the same arguments;
forward gives them to one layer of one model; layers finds the layers.
"""
