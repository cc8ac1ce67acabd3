/// Feeds a sequence to near/far attention in pieces, through buffers of exactly the size they must have.
#pragma once
#include "support.h"

extern "C" {
int32_t linattn_nearfar_prefill(const NearFarCall*);
int32_t linattn_nearfar_decode(const NearFarCall*, int64_t, const void*, const void*, const void*, void*, int64_t,
                               const float*, float*, float*, float*);
}

namespace {

/// One case; `slots` is the budget of each kv head, `cap` that of the scores, `reach` the distances with biases, `recall`
/// the blocks that the last kv head recalls, stored in `bits`; the other heads recall none. `state_bits`: of the entries.
struct NearFarShape {
  int64_t batch, heads, groups, tokens, dim, value_dim, window, sinks, block, slots;
  int32_t dtype;
  bool mask;
  float cap = 0;
  int64_t reach = 0;
  int64_t recall = 0, bits = 32, state_bits = 32;

  /// Numbers of an entry in the state, and its bytes.
  int64_t entry_numbers() const {
    return dim + value_dim + (state_bits == 8 ? 2 * ((dim + 31) / 32 + (value_dim + 31) / 32) : 0);
  }
  int64_t entry_bytes() const { return entry_numbers() * state_bits / 8; }
};

/// Tokens in a block of recall.
int64_t recall_unit(const NearFarShape& s) {
  int64_t unit = 8;
  while (s.block % unit) --unit;
  return unit;
}

/// The far tokens of the last kv head of each sequence, with room for exactly so many.
struct FarTokens {
  int64_t cells;
  Buffer<uint8_t> entries, bounds;
  Buffer<int64_t> slot;
  Buffer<float> log_share;
  FarTokens(const NearFarShape& s, int64_t count)
      : cells(count),
        entries(s.batch * count * (s.dim + s.value_dim) * s.bits / 8),
        bounds(s.batch * count / recall_unit(s) * bounds_bytes(s)),
        slot(s.batch * count),
        log_share(s.batch * count) {}
  static int64_t bounds_bytes(const NearFarShape& s) {
    return s.bits == 32 ? 8 * s.dim : 4 * s.dim + (s.bits == 8 ? 2 * recall_unit(s) : 0);
  }
  /// The entries and bounds of `from`, which has fewer cells.
  void copy(const NearFarShape& s, FarTokens& from) {
    const int64_t token = (s.dim + s.value_dim) * s.bits / 8, unit = recall_unit(s), block = bounds_bytes(s);
    for (int64_t b = 0; b < s.batch; ++b) {
      std::memcpy(entries + b * cells * token, from.entries + b * from.cells * token, size_t(from.cells * token));
      std::memcpy(bounds + b * cells / unit * block, from.bounds + b * from.cells / unit * block,
                  size_t(from.cells / unit * block));
    }
  }
};

/// A state whose buffers have exactly the size they must have.
struct State {
  int64_t near_tokens, slots;
  Buffer<uint8_t> sink, near, slot;
  Buffer<float> bias, received, near_received, moments, samples;
  State(const NearFarShape& s, int64_t tokens, int64_t slots_per_head)
      : near_tokens(tokens),
        slots(slots_per_head),
        sink(s.batch * s.heads * s.sinks * s.entry_bytes()),
        near(s.batch * s.heads * tokens * s.entry_bytes()),
        slot(s.batch * s.heads * slots_per_head * s.entry_bytes()),
        bias(s.batch * s.heads * slots_per_head),
        received(s.batch * s.heads * slots_per_head * 2),
        near_received(s.batch * s.heads * s.window * 2),
        moments(s.batch * s.heads * 2 * (s.dim + 1)),
        samples(s.batch * s.heads * s.groups * s.block * (s.dim + 1)) {}
};

/// What the gradient of a prefill needs: its call, with all that this points to.
struct Tape {
  NearFarCall c;
  std::unique_ptr<State> before;
  std::vector<int64_t> seen, merged, entered, counts, first, first_new;
  std::unique_ptr<uint8_t[]> mask;
  std::unique_ptr<Buffer<float>> merges;
};

/// A sequence that is fed to the library in pieces.
struct NearFarRun {
  NearFarShape s;
  Buffer<float> q, k, v, out, band;
  Buffer<uint16_t> hq, hk, hv;
  Buffer<uint8_t> mask;
  std::vector<int64_t> seen, merged, entered, budgets;
  std::unique_ptr<State> now;
  std::unique_ptr<FarTokens> far;
  std::vector<int64_t> recall, row;
  FarCacheCall far_call;
  std::string shape, name;

  explicit NearFarRun(const NearFarShape& shape_of_run)
      : s(shape_of_run),
        q(s.batch * s.heads * s.groups * s.tokens * s.dim, true),
        k(s.batch * s.heads * s.tokens * s.dim, true),
        v(s.batch * s.heads * s.tokens * s.value_dim, true),
        out(s.batch * s.heads * s.groups * s.tokens * s.value_dim),
        band(s.heads * s.groups * s.reach, true),
        hq(int64_t(q.size)),
        hk(int64_t(k.size)),
        hv(int64_t(v.size)),
        mask(s.batch * s.tokens),
        budgets(size_t(s.heads), s.slots) {
    for (size_t i = 0; i < hq.size; ++i) hq[i] = uint16_t(0x3800 + i % 512);
    for (size_t i = 0; i < hk.size; ++i) hk[i] = uint16_t(0x3000 + i * 7 % 1900);
    for (size_t i = 0; i < hv.size; ++i) hv[i] = uint16_t(0x3400 + i % 900);
    for (size_t i = 0; i < mask.size; ++i) mask[i] = i % 5 != 0;
    shape = "near/far dtype " + std::to_string(s.dtype) + " heads " + std::to_string(s.batch * s.heads) + " tokens " +
            std::to_string(s.tokens) + " dim " + std::to_string(s.dim) + " values " + std::to_string(s.value_dim) +
            " window " + std::to_string(s.window) + " block " + std::to_string(s.block) + " slots " +
            std::to_string(s.slots) + (s.cap > 0 ? " capped" : "") + (s.reach > 0 ? " biased" : "") +
            (s.state_bits == 16  ? " half"
             : s.state_bits == 8 ? " codes"
                                 : "") +
            (s.recall ? " recall " + std::to_string(s.recall) + " bits " + std::to_string(s.bits) : "");
    recall.assign(size_t(s.heads), 0), row.assign(size_t(s.heads), 0);
    recall.back() = s.recall;
    name = std::string(linattn_isa()) + " " + shape;
  }

  /// Starts with an empty state.
  void restart() {
    seen.assign(size_t(s.batch), 0), merged.assign(size_t(s.batch), 0), entered.assign(size_t(s.batch), 0);
    now.reset(new State(s, 0, 0));
    far.reset(new FarTokens(s, 0));
  }

  /// Adds the far tokens to a call, which writes to `next`, or to nothing.
  void add_far(NearFarCall& c, FarTokens* next) {
    if (!s.recall) return;
    FarTokens& to = next ? *next : *far;
    const bool placed = s.bits < 32 && s.reach == 0;
    far_call = {1,
                recall_unit(s),
                s.bits,
                s.window % s.block,
                to.cells,
                far->cells,
                to.cells,
                placed ? s.dim - 1 : -1,
                0.01f,
                0,
                recall.data(),
                row.data(),
                to.entries,
                to.bounds,
                far->slot,
                far->log_share,
                nullptr,
                nullptr};
    if (next) far_call.slot_new = to.slot, far_call.log_share_new = to.log_share;
    c.far = &far_call;
  }

  /// A call for `count` tokens from `begin` on, without what it writes to.
  NearFarCall call(int64_t begin, int64_t count) {
    NearFarCall c;
    std::memset(&c, 0, sizeof c);
    c.batch = s.batch, c.heads = s.heads * s.groups, c.kv_heads = s.heads, c.tokens = count;
    c.dim = s.dim, c.value_dim = s.value_dim, c.window = s.window, c.sinks = s.sinks, c.block = s.block, c.stride = 1;
    c.threads = 3, c.dtype = s.dtype, c.sqrt_scale = 0.7f, c.alpha = 0.25f;
    c.entry_dtype = s.state_bits == 16 ? FLOAT16 : s.state_bits == 8 ? CODES : FLOAT32;
    c.logit_cap = s.cap, c.reach = s.reach, c.band = s.reach > 0 ? static_cast<float*>(band) : nullptr;
    const int64_t T = s.tokens;
    const int64_t strides[3][3] = {{s.heads * s.groups * T * s.dim, T * s.dim, s.dim},
                                   {s.heads * T * s.dim, T * s.dim, s.dim},
                                   {s.heads * T * s.value_dim, T * s.value_dim, s.value_dim}};
    std::memcpy(c.query_stride, strides[0], 24), std::memcpy(c.key_stride, strides[1], 24);
    std::memcpy(c.value_stride, strides[2], 24);
    const bool wide = s.dtype == FLOAT32;
    c.query = wide ? static_cast<void*>(q + begin * s.dim) : hq + begin * s.dim;
    c.key = wide ? static_cast<void*>(k + begin * s.dim) : hk + begin * s.dim;
    c.value = wide ? static_cast<void*>(v + begin * s.value_dim) : hv + begin * s.value_dim;
    c.seen = seen.data(), c.merged = merged.data(), c.entered = entered.data(), c.budgets = budgets.data();
    c.near_tokens = now->near_tokens, c.slots = s.heads * now->slots;
    c.sink = now->sink, c.near = now->near, c.slot = now->slot, c.bias = now->bias;
    c.received = now->received, c.near_received = now->near_received;
    c.moments = now->moments, c.query_samples = now->samples;
    const int64_t E = s.entry_numbers();
    c.near_stride[0] = s.heads * now->near_tokens * E, c.near_stride[1] = now->near_tokens * E;
    return c;
  }

  /// Tokens [begin, begin + count) in one call; outputs to rows (B, Hq, count, M). tape: takes what the gradient needs.
  void prefill(int64_t begin, int64_t count, float* rows, Tape* tape = nullptr) {
    NearFarCall c = call(begin, count);
    std::vector<int64_t> counts(size_t(s.batch), count), first(size_t(s.heads)), first_new(size_t(s.heads));
    std::unique_ptr<uint8_t[]> part(new uint8_t[size_t(s.batch * count)]);
    for (int64_t b = 0; b < s.batch && s.mask; ++b) {
      counts[size_t(b)] = 0;
      for (int64_t t = 0; t < count; ++t) {
        counts[size_t(b)] += part[size_t(b * count + t)] = mask[b * s.tokens + begin + t];
      }
    }
    const int64_t E = s.entry_numbers(), room = now->slots + count + s.block, slots = room < s.slots ? room : s.slots;
    const int64_t grown = now->near_tokens + count, most = s.window + s.block, near_tokens = grown < most ? grown : most;
    std::unique_ptr<State> next(new State(s, near_tokens, slots));
    for (int64_t h = 0; h < s.heads; ++h) first[size_t(h)] = h * now->slots, first_new[size_t(h)] = h * slots;
    c.mask = s.mask ? part.get() : nullptr, c.counts = counts.data();
    c.first_slot = first.data(), c.first_slot_new = first_new.data();
    c.near_tokens_new = near_tokens, c.slots_new = s.heads * slots;
    c.sink_new = next->sink, c.near_new = next->near, c.slot_new = next->slot, c.bias_new = next->bias;
    c.received_new = next->received, c.near_received_new = next->near_received;
    c.moments_new = next->moments, c.query_samples_new = next->samples;
    c.near_new_stride[0] = s.heads * near_tokens * E, c.near_new_stride[1] = near_tokens * E;
    c.out = rows;
    int64_t cells = far->cells;
    for (size_t b = 0; b < seen.size(); ++b) {
      const int64_t frontier = (seen[b] + counts[b] - 1) / s.block * s.block - s.window;
      const int64_t before = merged[b] > s.sinks ? merged[b] : s.sinks;
      if (counts[b] && frontier > before && frontier + s.window % s.block > cells) cells = frontier + s.window % s.block;
    }
    std::unique_ptr<FarTokens> far_next(new FarTokens(s, cells));
    far_next->copy(s, *far);
    add_far(c, far_next.get());
    if (tape) {
      c.merge_blocks = (seen_phase() + count + s.block - 1) / s.block, c.merge_rows = s.slots + s.block;
      tape->merges.reset(new Buffer<float>(s.batch * s.heads * c.merge_blocks * (2 * c.merge_rows + s.dim)));
      tape->seen = seen, tape->merged = merged, tape->entered = entered;
      c.merges = *tape->merges, c.seen = tape->seen.data(), c.merged = tape->merged.data(),
      c.entered = tape->entered.data();
    }
    expect(linattn_nearfar_prefill(&c) == OK, name + ": prefill");
    far = std::move(far_next);
    for (size_t b = 0; b < seen.size(); ++b) {
      const int64_t end = seen[b] + counts[b], last = (end - 1) / s.block * s.block;
      if (counts[b] && last - s.window > merged[b]) merged[b] = last - s.window;
      if (counts[b] && last > entered[b]) entered[b] = last;
      seen[b] = end;
    }
    if (tape) {
      tape->c = c, tape->before = std::move(now), tape->mask = std::move(part);
      tape->counts = std::move(counts), tape->first = std::move(first), tape->first_new = std::move(first_new);
    }
    now = std::move(next);
  }

  /// The largest offset of a sequence's next token in its block.
  int64_t seen_phase() const {
    int64_t most = 0;
    for (const int64_t t : seen) most = t % s.block > most ? t % s.block : most;
    return most;
  }

  /// One token: inside a block by the decode entry, else by a prefill.
  void decode(int64_t t, float* rows) {
    if (seen[0] % s.block == 0 || seen[0] < s.sinks) return prefill(t, 1, rows);
    const int64_t near_tokens = now->near_tokens + 1, per_head = near_tokens * s.entry_bytes();
    NearFarCall c = call(t, 1);
    std::vector<int64_t> first(size_t(s.heads));
    for (int64_t h = 0; h < s.heads; ++h) first[size_t(h)] = h * now->slots;
    c.first_slot = first.data();
    add_far(c, nullptr);
    const bool ends = seen[0] % s.block == s.block - 1;
    Buffer<uint8_t> near(s.batch * s.heads * per_head);
    Buffer<float> queries(int64_t(now->samples.size)), moments(int64_t(now -> moments.size));
    for (int64_t i = 0; i < s.batch * s.heads; ++i) {
      const int64_t before = per_head - s.entry_bytes();
      std::memcpy(near + i * per_head, now->near + i * before, size_t(before));
    }
    c.near_new_stride[1] = near_tokens * s.entry_numbers(), c.near_new_stride[0] = s.heads * c.near_new_stride[1];
    const int32_t flags = linattn_nearfar_decode(&c, 0, c.query, c.key, c.value, near, near_tokens - 1, now->samples,
                                                 queries, ends ? static_cast<float*>(moments) : nullptr, rows);
    expect(flags == OK, name + ": decode");
    now->near_tokens = near_tokens, now->near = std::move(near), now->samples = std::move(queries);
    if (ends) now->moments = std::move(moments);
    ++seen[0];
  }
};

}  // namespace
