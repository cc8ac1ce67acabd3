"""The selective scan of Mamba-1.

    dt = softplus(delta + delta_bias), or delta + delta_bias;    h <- exp(dt A) h + dt B u;    out = (C . h + D u) silu(z)

Every form takes the same canonical tensors, checked by linattn.functional: u, delta and z (b, c, t), A (c, n), B and C
(b, g, n, t), D and delta_bias (c), state (b, c, n). The c channels form g groups of neighbours that share B and C.
"""
