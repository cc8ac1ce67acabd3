/// The backward pass of the delta rule over one head, chunk by chunk from the last to the first. The states where chunks
/// start are made again from the checkpoints, a segment at a time.
///
/// With U = D E, D = diag(beta), the forward pass of a chunk is E = V - exp(G) K S - F U, out = exp(G) Q S + P U and
/// S' = exp(G_n) S + (exp(G_n - G) K)^T U. Backward, dS' given: dU = P^T dout + exp(G_n - G) K dS' - F^T Z, where Z = D dU
/// is the gradient of E; then dV = Z, dbeta_i = E_i . dU_i, dF = -Z U^T, dP = dout U^T, and dS as written in state_grads.
/// A token's log decay takes part wherever the state crosses it: pairs j < t <= i, incoming and outgoing states. Pairs
/// i = j are left out of those sums on both sides, so that strong decays are not lost in rounding errors of what cancels.
#pragma once
#include "core/channel_decay_backward.h"
#include "delta/forward.h"

namespace {

constexpr int64_t CHUNKS = SEGMENT / CHUNK;

/// Work space beside Space. What is kept of each chunk of a segment is in `kept`.
struct GradSpace {
  float* kept;  // (CHUNKS, kept_floats): S^T (columns, ld_key), U (C, ld), E (C, ld)
  int64_t kept_floats;
  float *dS, *dS_t;                   // (full, ld), (columns, ld_key): gradient of the state, and transposed
  float *dU, *Z;                      // (C, ld)
  float* U_t;                         // (columns, LD_SCORE)
  float *dP, *dF;                     // (C, LD_SCORE): strictly lower
  float *dq, *dk_read, *dk_written;   // (C, ld_key): of queries; of keys by rows of F; by columns of F and P
  float* dk_rest;                     // (C, ld_key): of keys through the outgoing state and their own score
  float *query_in, *key_out, *pairs;  // (C, ld_key): decay of channels only: exp(G) Q; exp(G_n - G) K; work space
  float* own;                         // (C): gradient of P's diagonal
  float* log_decay;                   // (C, full) or (C): gradients
  float *inverse_k, *inverse_q;       // (C)
  float *S_t, *U, *E;                 // of the chunk at hand, in `kept`
};

/// Floats of a GradSpace.
int64_t grad_floats(const DeltaCall& c, const Space& s) {
  const int64_t kept = s.columns * s.ld_key + 2 * CHUNK * s.ld;
  return CHUNKS * kept + s.full * s.ld + s.columns * s.ld_key + 2 * CHUNK * s.ld + s.columns * LD_SCORE +
         2 * CHUNK * LD_SCORE + 4 * CHUNK * s.ld_key + 3 * CHUNK +
         (c.channels ? 2 * CHUNK * s.ld_key + channel_backward_floats(CHUNK, s.ld_key) : 0) + CHUNK * s.full + 16 * 24;
}

/// The space at `at`, which moves behind it.
GradSpace make_grad_space(const DeltaCall& c, const Space& s, float*& at) {
  GradSpace g;
  g.kept_floats = s.columns * s.ld_key + 2 * CHUNK * s.ld;
  g.kept = carve(at, CHUNKS * g.kept_floats);
  g.dS = carve(at, s.full * s.ld), g.dS_t = carve(at, s.columns * s.ld_key);
  g.dU = carve(at, CHUNK * s.ld), g.Z = carve(at, CHUNK * s.ld), g.U_t = carve(at, s.columns * LD_SCORE);
  g.dP = carve(at, CHUNK * LD_SCORE), g.dF = carve(at, CHUNK * LD_SCORE);
  memset(g.dP, 0, size_t(2 * CHUNK * LD_SCORE) * 4);
  g.dq = carve(at, CHUNK * s.ld_key), g.dk_read = carve(at, CHUNK * s.ld_key);
  g.dk_written = carve(at, CHUNK * s.ld_key), g.dk_rest = carve(at, CHUNK * s.ld_key);
  g.query_in = c.channels ? carve(at, CHUNK * s.ld_key) : nullptr;
  g.key_out = c.channels ? carve(at, CHUNK * s.ld_key) : nullptr;
  g.pairs = c.channels ? carve(at, channel_backward_floats(CHUNK, s.ld_key)) : nullptr;
  g.own = carve(at, CHUNK), g.inverse_k = carve(at, CHUNK), g.inverse_q = carve(at, CHUNK);
  g.log_decay = carve(at, CHUNK * s.full);
  return g;
}

/// Lets S_t, U and E be those of a chunk of the segment.
void select_chunk(const Space& s, int64_t index, GradSpace& g) {
  g.S_t = g.kept + index * g.kept_floats;
  g.U = g.S_t + s.columns * s.ld_key;
  g.E = g.U + CHUNK * s.ld;
}

/// Goes through the chunks of tokens [begin, end) once more and keeps S^T, U and E of each. S holds the state at `begin`.
void replay_segment(const DeltaCall& c, const Place& at, int64_t begin, int64_t end, Space& s, GradSpace& g) {
  for (int64_t t = begin; t < end; t += CHUNK) {
    select_chunk(s, (t - begin) / CHUNK, g);
    transpose(s.S, s.ld, s.full, s.columns, g.S_t, s.ld_key);
    const int64_t padded = prepare_chunk(c, at, t, imin(CHUNK, end - t), g.inverse_k, g.E, s);
    one_score(c, padded, s.K, 1, s.F, s);
    invert_blocks<ERRORS>(s.F, s.beta, padded, s.X);
    subtract_read(c, padded, s, g.E, nullptr);
    solve_errors(s.F, s.X, s.beta, padded, s.columns, g.E, g.U, s.ld, s.rest);
    if (t + CHUNK >= end) return;
    memcpy(s.U, g.U, size_t(padded * s.ld) * 4);
    update_state(c, padded, s, nullptr);
  }
}

/// s.O (n, columns): the gradient of the outputs of n tokens from t on, padded with 0.
void load_grad_out(const DeltaCall& c, const Place& at, int64_t group, int64_t t, int64_t n, Space& s) {
  const void* row = token_ptr(c.dtype, c.grad_out, c.grad_out_stride, at.p.batch, at.out_head(group), t);
  row = static_cast<const char*>(row) + at.p.begin * dtype_size(c.dtype);
  load_chunk(c.dtype, row, c.grad_out_stride[2], at.p.end - at.p.begin, n, round_up(n, BLOCK), nullptr, 1.0f, nullptr, s.O,
             s.ld);
}

/// dU and Z of the chunk's tokens; F, and P and grad_out of the last group, stay in work space.
void write_grads(const DeltaCall& c, const Place& at, int64_t t, int64_t n, int64_t padded, Space& s, GradSpace& g) {
  const Operand later{c.channels ? g.key_out : s.K, s.ld_key, 1, g.dS, s.ld, s.full};
  gemm(padded, s.columns, &later, 1, StoreRows{g.dU, s.ld, c.channels ? nullptr : s.head.to_end});
  for (int64_t group = at.groups() - 1; group >= 0; --group) {
    load_queries(c, at, group, t, n, g.inverse_q, s);
    load_grad_out(c, at, group, t, n, s);
    if (group == 0) {
      chunk_scores(c, padded, s);
    } else {
      one_score(c, padded, s.Q, 0, s.P, s);
    }
    const Operand rows{s.P, 1, LD_SCORE, s.O, s.ld, padded, FROM_ROW};
    gemm(padded, s.columns, &rows, 1, DecayAdd{g.dU, s.ld, nullptr});
  }
  invert_blocks<GRADS>(s.F, s.beta, padded, s.X);
  solve_grads(s.F, s.X, s.beta, padded, s.columns, g.dU, g.Z, s.ld, s.rest);
}

/// Gradients of values and beta; Z becomes -Z.
void value_grads(const DeltaCall& c, const Place& at, int64_t t, int64_t n, int64_t part, Space& s, GradSpace& g) {
  const int64_t head = at.p.batch * c.heads + at.p.head;
  store_rows(FLOAT32, g.Z, s.ld, n, at.p.end - at.p.begin, c.grad_value + (head * c.tokens + t) * c.value_dim + at.p.begin,
             c.value_dim);
  float* const grad_beta = c.grad_beta + (part * c.batch * c.heads + head) * c.tokens + t;
  const uint8_t* mask = at.mask(t);
  for (int64_t i = 0; i < n; ++i) {
    grad_beta[i] = mask && !mask[i] ? 0 : dot(g.E + i * s.ld, g.dU + i * s.ld, s.columns);
  }
  for (int64_t i = 0; i < round_up(n, BLOCK); ++i) {
    for (int64_t j = 0; j < s.columns; j += VL) store(g.Z + i * s.ld + j, -load(g.Z + i * s.ld + j));
  }
}

/// What the outgoing state gives: dk_rest = exp(G_n - G) U dS'^T, and the log decays' share, as sums over tokens before t.
/// `base` (full) gets that of the incoming state, which crosses the whole chunk.
void outgoing_grads(const DeltaCall& c, int64_t padded, Space& s, GradSpace& g, float* base) {
  const Operand o{g.U, s.ld, 1, g.dS_t, s.ld_key, s.columns};
  if (c.channels) {
    gemm(padded, s.full, &o, 1, StoreRows{g.dk_rest, s.ld_key, nullptr});
    decay_to_end(s.channel, g.dk_rest, g.dk_rest);
  } else {
    gemm(padded, s.full, &o, 1, StoreRows{g.dk_rest, s.ld_key, s.head.to_end});
  }
  if (!c.log_decay) return;
  for (int64_t d = 0; d < s.full; d += VL) {
    vec both = {}, more = {};
    for (int64_t m = 0; m < s.columns; m += 2) {
      both += load(g.S_t + m * s.ld_key + d) * load(g.dS_t + m * s.ld_key + d);
      more += load(g.S_t + (m + 1) * s.ld_key + d) * load(g.dS_t + (m + 1) * s.ld_key + d);
    }
    store(base + d, (both + more) * load(s.decay + d));
  }
  if (c.channels) {
    for (int64_t d = 0; d < s.full; d += VL) {
      vec before = load(base + d);
      for (int64_t i = 0; i < padded; ++i) {
        store(g.log_decay + i * s.full + d, before);
        before += load(s.K + i * s.ld_key + d) * load(g.dk_rest + i * s.ld_key + d);
      }
    }
    return;
  }
  float before = 0;
  for (int64_t d = 0; d < s.full; ++d) before += base[d];
  for (int64_t i = 0; i < padded; ++i) {
    g.log_decay[i] = before;
    before += dot(s.K + i * s.ld_key, g.dk_rest + i * s.ld_key, s.full);
  }
}

/// Gradients of a group's queries and what its scores give to keys: dq, dk_written, and with the first group dk_read. Pairs
/// j < i only; those of i = j go to `own`.
void score_grads(const DeltaCall& c, int64_t group, int64_t padded, Space& s, GradSpace& g) {
  const Operand scores{s.O, s.ld, 1, g.U_t, LD_SCORE, s.columns}, keys{g.Z, s.ld, 1, g.U_t, LD_SCORE, s.columns};
  const float* L = c.channels ? nullptr : s.L;
  gemm(padded, padded, &scores, 1, DecayedScores{g.dP, L, 0}, nullptr, true);
  for (int64_t i = 0; i < padded; ++i) g.own[i] = g.dP[i * LD_SCORE + i], g.dP[i * LD_SCORE + i] = 0;
  if (group == 0) gemm(padded, padded, &keys, 1, DecayedScores{g.dF, L, 1}, nullptr, true);
  if (c.channels) {
    const Operand in{s.O, s.ld, 1, g.S_t, s.ld_key, s.columns}, read{g.Z, s.ld, 1, g.S_t, s.ld_key, s.columns};
    gemm(padded, s.full, &in, 1, StoreRows{g.dq, s.ld_key, nullptr});
    decay_from_start(s.channel, s.Q, g.query_in);
    if (group == 0) {
      gemm(padded, s.full, &read, 1, StoreRows{g.dk_read, s.ld_key, nullptr});
      channel_scores_backward<2>(s.channel, s.K, {s.Q, s.K}, {g.dP, g.dF}, LD_SCORE, {g.dq, g.dk_read}, g.dk_written,
                                 g.pairs);
    } else {
      float* const more = g.key_out;  // no longer needed
      channel_scores_backward<1>(s.channel, s.K, {s.Q}, {g.dP}, LD_SCORE, {g.dq}, more, g.pairs);
      for (int64_t i = 0; i < padded * s.ld_key; i += VL) store(g.dk_written + i, load(g.dk_written + i) + load(more + i));
    }
    return;
  }
  scale_rows(s.O, s.ld, padded, s.columns, s.head.from_start);
  const Operand rows[2] = {{s.O, s.ld, 1, g.S_t, s.ld_key, s.columns},
                           {g.dP, LD_SCORE, 1, s.K, s.ld_key, padded, UP_TO_ROW}};
  gemm(padded, s.full, rows, 2, StoreRows{g.dq, s.ld_key, nullptr});
  const Operand columns[2] = {{g.dP, 1, LD_SCORE, s.Q, s.ld_key, padded, FROM_ROW},
                              {g.dF, 1, LD_SCORE, s.K, s.ld_key, padded, FROM_ROW}};
  if (group > 0) {
    gemm(padded, s.full, columns, 1, DecayAdd{g.dk_written, s.ld_key, nullptr});
    return;
  }
  gemm(padded, s.full, columns, 2, StoreRows{g.dk_written, s.ld_key, nullptr});
  scale_rows(g.Z, s.ld, padded, s.columns, s.head.from_start);
  const Operand read[2] = {{g.Z, s.ld, 1, g.S_t, s.ld_key, s.columns},
                           {g.dF, LD_SCORE, 1, s.K, s.ld_key, padded, UP_TO_ROW}};
  gemm(padded, s.full, read, 2, StoreRows{g.dk_read, s.ld_key, nullptr});
}

/// dS' becomes dS = exp(G_n) dS' + (exp(G) Q)^T dout - (exp(G) K)^T Z; dout and -Z have been multiplied by exp(G) where the
/// decay is the head's.
void state_grads(const DeltaCall& c, int64_t group, int64_t padded, Space& s, GradSpace& g) {
  const float* const keys = c.channels ? s.key_in : s.K;
  const float* const queries = c.channels ? g.query_in : s.Q;
  const Operand o[2] = {{queries, 1, s.ld_key, s.O, s.ld, padded}, {keys, 1, s.ld_key, g.Z, s.ld, padded}};
  if (group == 0) {
    gemm(s.full, s.columns, o, 2, DecayAdd{g.dS, s.ld, s.decay});
  } else {
    gemm(s.full, s.columns, o, 1, DecayAdd{g.dS, s.ld, nullptr});
  }
}

/// rows_i += x_i o dx_i for gradients of log decays (C, full), or their sums (C).
void add_decay_rows(const DeltaCall& c, int64_t padded, const Space& s, const float* x, const float* dx, float sign,
                    float* to) {
  for (int64_t i = 0; i < padded; ++i) {
    if (!c.channels) {
      to[i] += sign * dot(x + i * s.ld_key, dx + i * s.ld_key, s.full);
      continue;
    }
    for (int64_t d = 0; d < s.full; d += VL) {
      const int64_t at = i * s.ld_key + d;
      store(to + i * s.full + d, load(to + i * s.full + d) + sign * load(x + at) * load(dx + at));
    }
  }
}

/// Of x = factor x / sqrt(|x|^2 + 1e-6), from the gradient dx of what the chunk used: the gradient of x as given.
void normalize_grad(const float* x, float* dx, int64_t full, const float* inverse, float factor) {
  if (!inverse) {
    for (int64_t d = 0; factor != 1.0f && d < full; d += VL) store(dx + d, load(dx + d) * factor);
    return;
  }
  const float along = factor != 0 ? dot(x, dx, full) / factor : 0;
  for (int64_t d = 0; d < full; d += VL) store(dx + d, (load(dx + d) * factor - load(x + d) * along) * *inverse);
}

/// Adds the own scores to dq and dk_rest, and writes the group's dq out.
void query_grads(const DeltaCall& c, const Place& at, int64_t group, int64_t t, int64_t n, int64_t part, Space& s,
                 GradSpace& g) {
  const int64_t heads = c.heads * at.groups(), head = at.p.batch * heads + at.out_head(group);
  float* const to = c.grad_query + ((part * c.batch * heads + head) * c.tokens + t) * c.dim;
  for (int64_t i = 0; i < n; ++i) {
    float *dq = g.dq + i * s.ld_key, *dk = g.dk_rest + i * s.ld_key;
    const float *q = s.Q + i * s.ld_key, *k = s.K + i * s.ld_key, own = g.own[i];
    for (int64_t d = 0; d < s.full; d += VL) {
      store(dq + d, load(dq + d) + load(k + d) * own);
      store(dk + d, load(dk + d) + load(q + d) * own);
    }
    normalize_grad(q, dq, s.full, c.normalize ? g.inverse_q + i : nullptr, c.scale);
  }
  store_rows(FLOAT32, g.dq, s.ld_key, n, c.dim, to, c.dim);
}

/// Writes out the gradients of keys, and those of log decays as sums over the tokens from t on.
void key_grads(const DeltaCall& c, const Place& at, int64_t t, int64_t n, int64_t padded, int64_t part, Space& s,
               GradSpace& g, float* crossing) {
  const int64_t head = (part * c.batch + at.p.batch) * c.heads + at.p.head, width = c.channels ? s.full : 1;
  const uint8_t* mask = at.mask(t);
  if (c.log_decay) {
    add_decay_rows(c, padded, s, s.K, g.dk_read, 1.0f, crossing);
    add_decay_rows(c, padded, s, s.K, g.dk_written, -1.0f, crossing);
    for (int64_t i = padded - 1; i >= 0; --i) {
      for (int64_t d = 0; d < width; ++d) {
        if (i + 1 < padded) crossing[i * width + d] += crossing[(i + 1) * width + d];
        g.log_decay[i * width + d] = mask && i < n && !mask[i] ? 0 : g.log_decay[i * width + d] + crossing[i * width + d];
      }
    }
    const int64_t D = c.channels ? c.dim : 1;
    store_rows(FLOAT32, g.log_decay, width, n, D, c.grad_log_decay + (head * c.tokens + t) * D, D);
  }
  for (int64_t i = 0; i < n; ++i) {
    float* const dk = g.dk_read + i * s.ld_key;
    if (mask && !mask[i]) {
      memset(dk, 0, size_t(s.full) * 4);
      continue;
    }
    for (int64_t d = 0; d < s.full; d += VL) {
      store(dk + d, load(dk + d) + load(g.dk_written + i * s.ld_key + d) + load(g.dk_rest + i * s.ld_key + d));
    }
    normalize_grad(s.K + i * s.ld_key, dk, s.full, c.normalize ? g.inverse_k + i : nullptr, 1.0f);
  }
  store_rows(FLOAT32, g.dk_read, s.ld_key, n, c.dim, c.grad_key + (head * c.tokens + t) * c.dim, c.dim);
}

/// One chunk, whose state, U and E are selected; dS goes from its end to its start. crossing: (C, full).
void backward_chunk(const DeltaCall& c, const Place& at, int64_t t, int64_t n, int64_t part, Space& s, GradSpace& g,
                    float* crossing) {
  const int64_t padded = prepare_chunk(c, at, t, n, g.inverse_k, nullptr, s);
  if (c.channels) decay_to_end(s.channel, s.K, g.key_out);
  transpose(g.dS, s.ld, s.full, s.columns, g.dS_t, s.ld_key);
  write_grads(c, at, t, n, padded, s, g);
  value_grads(c, at, t, n, part, s, g);
  outgoing_grads(c, padded, s, g, crossing);
  transpose(g.U, s.ld, padded, s.columns, g.U_t, LD_SCORE);
  memset(crossing, 0, size_t(CHUNK * (c.channels ? s.full : 1)) * 4);
  for (int64_t group = 0; group < at.groups(); ++group) {
    if (group > 0) {
      load_queries(c, at, group, t, n, g.inverse_q, s);
      load_grad_out(c, at, group, t, n, s);
    }
    score_grads(c, group, padded, s, g);
    state_grads(c, group, padded, s, g);
    if (c.log_decay) add_decay_rows(c, padded, s, s.Q, g.dq, 1.0f, crossing);
    query_grads(c, at, group, t, n, part, s, g);
  }
  key_grads(c, at, t, n, padded, part, s, g, crossing);
}

/// All tokens of one part.
void backward(const DeltaCall& c, const DeltaPart& p, int64_t part) {
  const Place at(c, p);
  const int64_t columns = p.end - p.begin;
  Space shape;
  shape.full = round_up(c.dim, 16), shape.ld_key = row_stride(c.dim);
  shape.columns = round_up(columns, 16), shape.ld = row_stride(columns);
  float* space = scratch(space_floats(c, columns) + grad_floats(c, shape) + CHUNK * shape.full + 64);
  Space s = make_space(c, columns, space);
  GradSpace g = make_grad_space(c, s, space);
  float* const crossing = carve(space, CHUNK * s.full);
  load_state(s, at, c.grad_state_new ? c.grad_state_new + at.state_at() : nullptr, g.dS);
  const int64_t segments = (at.last - at.first + SEGMENT - 1) / SEGMENT;
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = at.first + segment * SEGMENT, end = imin(begin + SEGMENT, at.last);
    const float* state = segment > 0 ? at.checkpoint(segment) : c.state ? c.state + at.state_at() : nullptr;
    load_state(s, at, state, s.S);
    replay_segment(c, at, begin, end, s, g);
    for (int64_t chunk = (end - begin - 1) / CHUNK; chunk >= 0; --chunk) {
      const int64_t t = begin + chunk * CHUNK;
      select_chunk(s, chunk, g);
      backward_chunk(c, at, t, imin(CHUNK, end - t), part, s, g, crossing);
    }
  }
  store_state(s, at, g.dS, c.grad_state + at.state_at());
}

}  // namespace
