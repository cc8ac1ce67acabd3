"""The delta rule: S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  out_t = scale q_t^T S.

Without g it is DeltaNet, with g per head the gated delta rule, with g per channel Kimi delta attention (KDA).
"""
