"""Decayed sums: S <- exp(g_t) S;  S <- S + k_t v_t^T;  out_t = scale q_t^T S. There is no denominator.

With g constant per head it is retention and lightning attention, with g per head and token Mamba-2 (SSD) and simple GLA, with
g per channel gated linear attention (GLA), and without g plain unnormalised linear attention.
"""
