"""The selective scan of Mamba-1.

    dt = softplus(delta + delta_bias), or delta + delta_bias;    h <- exp(dt A) h + dt B u;    out = (C . h + D u) silu(z)

Every form takes a SelectiveScanCall (call.py).
"""
