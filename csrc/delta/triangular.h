/// Unit lower triangular systems of a chunk, by blocks of 16: diagonal blocks are inverted, the rest are matrix products.
/// F (n, n) is strictly lower, rows LD_SCORE apart; D = diag(beta).
#pragma once
#include "delta/chunk.h"

namespace {

enum Inverse {
  WRITES,  // (I + D F)^-1 D: from values less what is read to what is written
  ERRORS,  // (I + F D)^-1: to the prediction errors, of which D makes what is written
  GRADS,   // (I + D F)^-1, whose transpose solves for gradients
};

/// X_b (n, 16) = the inverse for each diagonal block b of F.
template <Inverse KIND>
void invert_blocks(const float* F, const float* beta, int64_t n, float* X) {
  constexpr int V = BLOCK / VL;
  const int64_t blocks = n / BLOCK;
  for (int64_t i = 0; i < BLOCK; ++i) {
    vec row[CHUNK / BLOCK][V] = {};
    for (int64_t j = 0; j < i; ++j) {
      for (int64_t b = 0; b < blocks; ++b) {  // side by side, or each would wait for its own last step
        float f = F[(b * BLOCK + i) * LD_SCORE + b * BLOCK + j];
        if (KIND == ERRORS) f *= beta[b * BLOCK + j];
        UNROLL(4)
        for (int v = 0; v < V; ++v) row[b][v] -= f * load(X + (b * BLOCK + j) * BLOCK + v * VL);
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const float own = beta[b * BLOCK + i], factor = KIND == ERRORS ? 1.0f : own;
      for (int v = 0; v < V; ++v) row[b][v] *= factor;
      row[b][i / VL][i % VL] = KIND == WRITES ? own : 1.0f;
      for (int v = 0; v < V; ++v) store(X + (b * BLOCK + i) * BLOCK + v * VL, row[b][v]);
    }
  }
}

/// U (n, columns) <- (I + D F)^-1 D U, in place; X from invert_blocks<WRITES>. rest: (16, ld).
void solve_writes(const float* F, const float* X, int64_t n, int64_t columns, float* U, int64_t ld, float* rest) {
  for (int64_t first = 0; first < n; first += BLOCK) {
    const Operand before{F + first * LD_SCORE, LD_SCORE, 1, U, ld, first};
    gemm(BLOCK, columns, &before, 1, Residual{U + first * ld, rest, ld, nullptr});
    const Operand own{X + first * BLOCK, BLOCK, 1, rest, ld, BLOCK, UP_TO_ROW};
    gemm(BLOCK, columns, &own, 1, StoreRows{U + first * ld, ld, nullptr});
  }
}

// C = A B, and times_beta = D A B.
struct StoreBoth {
  float *c, *times_beta;
  int64_t ld;
  const float* beta;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      store(c + i * ld + j + w * VL, acc[w]);
      store(times_beta + i * ld + j + w * VL, acc[w] * beta[i]);
    }
  }
};

/// E (n, columns) <- (I + F D)^-1 E, in place, and U = D E; X from invert_blocks<ERRORS>. rest: (16, ld).
void solve_errors(const float* F, const float* X, const float* beta, int64_t n, int64_t columns, float* E, float* U,
                  int64_t ld, float* rest) {
  for (int64_t first = 0; first < n; first += BLOCK) {
    const Operand before{F + first * LD_SCORE, LD_SCORE, 1, U, ld, first};
    gemm(BLOCK, columns, &before, 1, Residual{E + first * ld, rest, ld, nullptr});
    const Operand own{X + first * BLOCK, BLOCK, 1, rest, ld, BLOCK, UP_TO_ROW};
    gemm(BLOCK, columns, &own, 1, StoreBoth{E + first * ld, U + first * ld, ld, beta + first});
  }
}

/// G (n, columns) <- (I + F^T D)^-1 G, in place, and Z = D G; X from invert_blocks<GRADS>. rest: (16, ld).
void solve_grads(const float* F, const float* X, const float* beta, int64_t n, int64_t columns, float* G, float* Z,
                 int64_t ld, float* rest) {
  for (int64_t first = n - BLOCK; first >= 0; first -= BLOCK) {
    const int64_t next = first + BLOCK;
    const Operand later{F + next * LD_SCORE + first, 1, LD_SCORE, Z + next * ld, ld, n - next};
    gemm(BLOCK, columns, &later, 1, Residual{G + first * ld, rest, ld, nullptr});
    const Operand own{X + first * BLOCK, 1, BLOCK, rest, ld, BLOCK, FROM_ROW};
    gemm(BLOCK, columns, &own, 1, StoreBoth{G + first * ld, Z + first * ld, ld, beta + first});
  }
}

}  // namespace
