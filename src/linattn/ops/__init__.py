"""The update rules: for each a step-by-step definition (reference) and a chunked form in torch (chunk).

Every form of a rule takes one description of a call (<rule>/call.py), with canonical tensors checked by linattn.functional:

    query (B, Hq, T, D), key (B, Hk, T, D), value (B, H, T, M), log_decay None, (B, H, T) or (B, H, T, D), mask (B, T) or None,
    state (B * n, H, D, M) or None, with n sequences in every batch entry, whose bounds are cu_seqlens (None: n = 1).

H is the number of state heads. State head h uses key head h * Hk // H. Of the max(Hq, H) output heads, head o reads query head
o * Hq // Ho and state head o * H // Ho. A masked token neither writes nor decays.
"""
