/// One token of near/far attention inside a block: nothing is merged, and the state is read in place.
#pragma once
#include "nearfar/prefill.h"
#include "nearfar/recall_token.h"

namespace {

/// Consecutive entries (n) of a state, and their biases (n) or null. first: the position of the first token; slots have
/// none.
template <class Number>
struct Span {
  const Number* at;
  const float* bias;
  int64_t n, first;
};

/// What number d of a key or value is multiplied with: the step of its code, at an address, or 1.
template <class Number>
INLINE float step_of(const Number* steps, int64_t d) {
  return sizeof(Number) == 1 ? load_step(reinterpret_cast<const char*>(steps), d) : 1;
}

/// x (row_stride(D)) times a key (D), summed over lanes by the caller. steps: of the key's codes.
template <class Number>
INLINE vec key_product(const Number* key, const Number* steps, int64_t D, const float* x) {
  const int64_t full = D / VL * VL, group = sizeof(Number) == 1 ? CODE_GROUP : imax(D, 1);
  vec total = {};
  for (int64_t at = 0; at < D; at += group) {
    vec part = {};
    for (int64_t d = at; d < imin(at + group, full); d += VL) part += load_numbers(key + d) * load(x + d);
    if (full < D && full < at + group) part += load_some_numbers(key + full, D - full) * load(x + full);
    total += part * step_of(steps, at);
  }
  return total;
}

/// to (n rounded up to whole vectors): logits of x (row_stride(D)) with the span's keys, MASKED_LOGIT behind the last. x
/// and the logits are in units of log2.
template <class Number>
void span_logits(const NearFarCall& c, const Span<Number>& span, const Scores& scores, int64_t position, const float* x,
                 float* to) {
  const int64_t D = c.dim, width = entry_width(c);
  for (int64_t i = 0; i < span.n; i += VL) {
    vec dots[VL];
    UNROLL(16)
    for (int k = 0; k < VL; ++k) {
      const Number* row = span.at + imin(i + k, span.n - 1) * width;
      dots[k] = key_product(row, row + D + c.value_dim, D, x);
    }
    vec l = reduce<false>(dots);
    if (scores.cap > 0) l = capped(l, scores.cap);
    if (span.bias) l += vmax(load_some(span.bias + i, span.n - i) * LOG2E_F, splat(MASKED_LOGIT));
    if (i + VL > span.n) l = lanes() < splat(float(span.n - i)) ? l : splat(MASKED_LOGIT);
    store(to + i, l);
  }
  if (scores.band && !span.bias) add_band(scores, position, span.first, span.n, to);
}

/// acc += columns [j, j + W VL) of the span's values, weighted (n).
template <int W, class Number>
INLINE void add_values(const NearFarCall& c, const Span<Number>& span, const float* weight, int64_t j, vec (&acc)[W]) {
  const int64_t left = c.value_dim - j, width = entry_width(c);
  const Number *row = span.at + c.dim + j, *steps = span.at + c.dim + c.value_dim + steps_bytes(c.dim);
  for (int64_t i = 0; i < span.n; ++i, row += width, steps += width) {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      acc[w] +=
          (W == 1 ? load_some_numbers(row, left) : load_numbers(row + w * VL)) * (weight[i] * step_of(steps, j + w * VL));
    }
  }
}

/// out: columns [j, j + W VL) of the weighted values of three spans times `factor`. `bad` becomes NaN if one is not finite.
template <int W, class Number>
INLINE void write_output(const NearFarCall& c, const Span<Number>* spans, const float* weights, float factor, int64_t j,
                         float* out, vec& bad) {
  vec acc[W] = {};
  for (int p = 0; p < 3; ++p) {
    add_values<W>(c, spans[p], weights, j, acc);
    weights += round_up(spans[p].n, VL);
  }
  UNROLL(4)
  for (int w = 0; w < W; ++w) {
    acc[w] *= factor;
    bad += acc[w] * 0.0f;
    store_some(out + j + w * VL, acc[w], c.value_dim - j - w * VL);
  }
}

/// Writes the block's query samples with those of this token, if it is sampled, and the moments, if it ends the block.
void update_moments(const NearFarCall& c, int64_t head, int64_t position, float* space) {
  const int64_t D = c.dim, groups = c.heads / c.kv_heads, samples = c.block / c.stride, rows = groups * samples;
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads, sample = position % c.block / c.stride;
  float *row = carve(space, row_stride(D)), *queries = c.query_samples_new + head * rows * (D + 1);
  copy_row(queries, c.query_samples + head * rows * (D + 1), rows * (D + 1));
  for (int64_t g = 0; g < groups && position % c.stride == 0; ++g) {
    load_row(c.dtype, token_ptr(c.dtype, c.query, c.query_stride, b, kv * groups + g, 0), D, c.sqrt_scale, row);
    copy_row(queries + (g * samples + sample) * (D + 1), row, D);
    queries[(g * samples + sample) * (D + 1) + D] = 1;
  }
  if (!c.moments_new) return;
  const int64_t size = 2 * (D + 1);
  if (position % c.block != c.block - 1) return copy_row(c.moments_new + head * size, c.moments + head * size, size);
  const QueryMoments m(D, rows, space);
  for (int64_t i = 0; i < rows; ++i) copy_row(m.samples + i * m.ld, queries + i * (D + 1), D + 1);
  m.load_moments(c.moments + head * size);
  m.finish_block();
  m.store_moments(c.moments_new + head * size);
}

/// One token of one kv head, in a state that stores its entries as Number. Its key and value become the last entry of
/// near_new, whose other entries are in place already. Returns flags.
template <class Number>
int32_t decode_token(const NearFarCall& c, int64_t head) {
  const int64_t D = c.dim, M = c.value_dim, width = entry_width(c), b = head / c.kv_heads, kv = head % c.kv_heads;
  const int64_t groups = c.heads / c.kv_heads, position = c.seen[b] + c.step, start = position - position % c.block;
  const int64_t low = imax(imax(start - c.window, c.merged[b]), imin(start, c.sinks));
  const int64_t first = c.first_slot[kv], last = kv + 1 < c.kv_heads ? c.first_slot[kv + 1] : c.slots;
  const int64_t columns = round_up(c.sinks, VL) + round_up(last - first, VL) + round_up(position - low + 1, VL);
  const StoredEntries near = near_of(c, c.near_new, c.near_new_stride, head);
  const Number* entry = reinterpret_cast<const Number*>(near.key(c.near_tokens_new - 1));
  const Number *sink = static_cast<const Number*>(c.sink), *slot = static_cast<const Number*>(c.slot);
  const int64_t moments = c.moments_new ? QueryMoments::floats(D, groups * (c.block / c.stride)) : 0;
  const bool recalls = RecallToken::on(c, kv);
  const int64_t recalling = recalls ? RecallToken::floats(c, kv, last - first) : 0;
  float* space = scratch(3 * row_stride(D) + row_stride(M) + columns + 2 * VL + moments + recalling + 128);
  float *x = carve(space, row_stride(D)), *row = carve(space, imax(row_stride(D), row_stride(M)));
  float* weights = carve(space, columns + 2 * VL);
  load_token(c, head, 0, x, row);
  near.store(c.near_tokens_new - 1, x, row);
  const Span<Number> spans[3] = {{sink + head * c.sinks * width, nullptr, imin(c.sinks, start), 0},
                                 {slot + (b * c.slots + first) * width, c.bias + b * c.slots + first, last - first, 0},
                                 {entry - (position - low) * width, nullptr, position - low + 1, low}};
  std::optional<RecallToken> recall;
  if (recalls) recall.emplace(c, b, kv, last - first, space);
  vec bad = {};
  for (int64_t g = 0; g < groups; ++g) {
    const void* query = token_ptr(c.dtype, c.query, c.query_stride, b, kv * groups + g, 0);
    load_row(c.dtype, query, D, c.sqrt_scale * LOG2E_F, x);
    float* at = weights;
    const Scores scores = scores_of(c, kv * groups + g);
    for (const Span<Number>& span : spans) {
      span_logits(c, span, scores, position, x, at);
      at += round_up(span.n, VL);
    }
    float top;
    const float factor = softmax(weights, at - weights, &top);
    if (recall) recall->take(g, x, weights + round_up(spans[0].n, VL), factor, top);
    float* out = recall ? recall->output(g) : c.out + (b * c.heads + kv * groups + g) * M;
    int64_t j = 0;
    for (; j + NR * VL <= M; j += NR * VL) write_output<NR>(c, spans, weights, factor, j, out, bad);
    for (; j < M; j += VL) write_output<1>(c, spans, weights, factor, j, out, bad);
  }
  if (recall) {
    recall->correct(c.logit_cap * LOG2E_F);
    for (int64_t g = 0; g < groups; ++g) {
      copy_row(c.out + (b * c.heads + kv * groups + g) * M, recall->output(g), M);
      for (int64_t j = 0; j < M; ++j) bad += recall->output(g)[j] * 0.0f;
    }
  }
  if (c.query_samples_new) update_moments(c, head, position, space);
  return sum(bad) == 0 ? OK : NOT_FINITE;
}

/// One token of one kv head. Returns flags.
int32_t decode(const NearFarCall& c, int64_t head) {
  if (c.entry_dtype == CODES) return decode_token<int8_t>(c, head);
  return c.entry_dtype == FLOAT16 ? decode_token<uint16_t>(c, head) : decode_token<float>(c, head);
}

}  // namespace
