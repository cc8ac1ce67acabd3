// Runs every entry over ragged shapes on buffers of exactly the size they must have, so that AddressSanitizer sees any
// step outside and UndefinedBehaviorSanitizer any misuse. Also checks that chunked, split and whole calls agree.
#include "memory.h"
#include "near_far.h"

extern "C" {
int32_t linattn_set_isa(int32_t);
void linattn_use_threads(int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*));
int32_t linattn_absorb(const Call*);
int32_t linattn_read(const Call*);
int32_t linattn_causal(const Call*);
int32_t linattn_absorb_backward(const Call*);
int32_t linattn_read_backward(const Call*);
int32_t linattn_causal_backward(const Call*);
int32_t linattn_whole(const Call*, const void*, const void*, const void*, float*, int64_t, int32_t);
int32_t linattn_step(const Call*, const void*, const void*, const void*, const void* const*, float*, float*, float*);
}

namespace {

int64_t lead(int64_t n) { return (n + 15) / 16 * 16 + 16; }
int64_t wide(int64_t n) { return n > 64 ? lead(n) : (n + 15) / 16 * 16; }

struct Shape {
  int64_t batch, heads, groups, tokens, dim, value_dim, features;
  int32_t map, dtype;
  bool mask, decay;
};

int64_t features_of(int32_t map, int64_t dim, int64_t features) {
  if (map == MAP_TRIG) return 2 * features;
  if (map == MAP_EXP) return features;
  return map == MAP_QUADRATIC ? 1 + dim + dim * (dim + 1) / 2 : dim;
}

void run(const Shape& s) {
  const int64_t B = s.batch, H = s.heads, Hq = H * s.groups, T = s.tokens, D = s.dim, M = s.value_dim;
  const int64_t r = features_of(s.map, D, s.features), rows = s.map == MAP_TRIG ? r / 2 : r, segment = 96;
  const int64_t sums = B * H * r * M, marks = B * H * ((T + segment - 1) / segment) * (r * (M + 1) + 1);
  Buffer<float> q(B * Hq * T * D, true), k(B * H * T * D, true), v(B * H * T * M, true);
  if (s.map == MAP_IDENTITY) {  // features of both signs would make denominators near 0, where threads show their rounding
    for (size_t i = 0; i < q.size; ++i) q[i] = std::fabs(q[i]);
    for (size_t i = 0; i < k.size; ++i) k[i] = std::fabs(k[i]);
  }
  Buffer<uint16_t> hq(B * Hq * T * D), hk(B * H * T * D), hv(B * H * T * M);
  for (size_t i = 0; i < hq.size; ++i) hq[i] = uint16_t(0x3800 + i % 512);
  for (size_t i = 0; i < hk.size; ++i) hk[i] = uint16_t(0x3000 + i % 700);
  for (size_t i = 0; i < hv.size; ++i) hv[i] = uint16_t(0x3400 + i % 900);
  Buffer<float> weight(rows * wide(D), true), weight_t(D * lead(rows)), bias(lead(rows));
  for (int64_t i = 0; i < lead(rows); ++i) bias[i] = i < rows ? 0 : -1e30f;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < D; ++d) weight_t[d * lead(rows) + i] = weight[i * wide(D) + d];
  }
  Buffer<uint8_t> mask(B * T);
  Buffer<double> decay(B * H * T), log_weight(B * H * T);
  for (int64_t i = 0; i < B * T; ++i) mask[i] = i % 3 != 0;
  for (int64_t i = 0; i < B * H * T; ++i) decay[i] = -0.05 * double(i % 7), log_weight[i] = 0.1 * double(i % 5);
  Buffer<float> S(sums), Z(B * H * r), scale(B * H), S_new(sums), Z_new(B * H * r), scale_new(B * H);
  Buffer<int64_t> tokens(B * H), guarded(B * H), tokens_new(B * H), guarded_new(B * H);
  for (int64_t i = 0; i < B * H; ++i) scale[i] = -INFINITY;
  Buffer<float> out(B * Hq * T * M), again(B * Hq * T * M), kept(marks), grad_out(B * Hq * T * M, true);
  Buffer<float> gq(B * Hq * T * D), gk(B * H * T * D), gv(B * H * T * M), gS(sums), gZ(B * H * r), glog(B * H * T);

  Call c;
  std::memset(&c, 0, sizeof c);
  c.batch = B, c.heads = Hq, c.kv_heads = H, c.queries = c.keys = T, c.dim = D, c.value_dim = M, c.features = r;
  c.threads = 1, c.segment = segment, c.map = s.map, c.dtype = s.dtype, c.root = 0.5f;
  c.scaled = s.map == MAP_EXP || s.map == MAP_TRIG || s.decay;
  c.square = s.map == MAP_EXP ? -0.3 : s.map == MAP_TRIG ? 0.7 : 0;
  c.low[0] = c.low[1] = c.high[0] = c.high[1] = 1;
  c.weight = weight, c.weight_t = weight_t, c.bias = bias;
  const bool wide_input = s.dtype == FLOAT32;
  c.query = wide_input ? static_cast<void*>(q) : hq, c.key = wide_input ? static_cast<void*>(k) : hk;
  c.value = wide_input ? static_cast<void*>(v) : hv;
  const int64_t strides[3][3] = {{Hq * T * D, T * D, D}, {H * T * D, T * D, D}, {H * T * M, T * M, M}};
  std::memcpy(c.query_stride, strides[0], 24), std::memcpy(c.key_stride, strides[1], 24);
  std::memcpy(c.value_stride, strides[2], 24);
  c.mask = s.mask ? static_cast<uint8_t*>(mask) : nullptr;
  c.S = S, c.Z = Z, c.scale = scale, c.tokens = tokens, c.guarded = guarded;
  c.S_new = S_new, c.Z_new = Z_new, c.scale_new = scale_new, c.tokens_new = tokens_new, c.guarded_new = guarded_new;
  c.out = out, c.marks = kept, c.grad_out = grad_out;
  c.grad_query = gq, c.grad_key = gk, c.grad_value = gv, c.grad_S = gS, c.grad_Z = gZ, c.grad_log = glog;
  const std::string name = std::string(linattn_isa()) + " map " + std::to_string(s.map) + " dtype " +
                           std::to_string(s.dtype) + " tokens " + std::to_string(T) + " dim " + std::to_string(D) +
                           " values " + std::to_string(M) + " features " + std::to_string(r);

  // Causal: one thread, then three, which share the tokens of a head.
  c.log_decay = s.decay ? static_cast<double*>(decay) : nullptr;
  c.log_weight = s.decay ? static_cast<double*>(log_weight) : nullptr;
  expect(linattn_causal(&c) == OK, name + ": causal");
  expect(linattn_causal_backward(&c) == OK, name + ": causal backward");
  Buffer<float> first(B * H * T * D);
  std::memcpy(first, gk, first.size * 4), std::memcpy(again, out, again.size * 4);
  c.threads = 3;
  expect(linattn_causal(&c) == OK && difference(again, out, out.size) < 1e-4, name + ": causal, threads");
  expect(linattn_causal_backward(&c) == OK && difference(first, gk, gk.size) < 1e-3, name + ": backward, threads");

  // Not causal, from the state that the causal call has left.
  c.log_decay = nullptr, c.marks = nullptr, c.segment = 0;
  expect(linattn_absorb(&c) == OK, name + ": absorb");
  c.S = S_new, c.Z = Z_new, c.scale = scale_new, c.tokens = tokens_new;
  expect(linattn_read(&c) == OK, name + ": read");
  expect(linattn_read_backward(&c) == OK, name + ": read backward");
  Buffer<float> upS(sums, true), upZ(B * H * r, true);
  c.grad_S_new = upS, c.grad_Z_new = upZ;
  expect(linattn_absorb_backward(&c) == OK, name + ": absorb backward");

  // From nothing to the output: heads for every thread, and threads that share a head.
  Call plain = c;
  plain.S = plain.Z = plain.scale = nullptr, plain.tokens = plain.guarded = plain.guarded_new = nullptr;
  expect(linattn_whole(&plain, c.query, c.key, c.value, out, B * H, 0) == OK, name + ": whole");
  expect(linattn_whole(&plain, c.query, c.key, c.value, again, B * H + 2, 0) == OK, name + ": whole, shared heads");
  expect(difference(again, out, out.size) < 1e-4, name + ": whole, threads");
  if (T == 1) {
    Buffer<float> S2(sums), Z2(B * H * r), scale2(B * H);
    c.S_new = S2, c.Z_new = Z2, c.scale_new = scale2;
    Buffer<int64_t> tokens2(B * H);
    c.tokens_new = tokens2;
    expect(linattn_causal(&c) == OK, name + ": step");
    if (s.mask || s.decay) return;  // such calls go the long way
    const auto whole = [](int64_t floats) { return (floats + 15) / 16 * 16; };
    const int64_t floats = whole(sums) + whole(B * H * r) + whole(B * H) + 2 * whole(2 * B * H);
    Buffer<float> first(floats), second(floats), step_out(B * Hq * M);
    const void* apart[5] = {c.S, c.Z, c.scale, c.tokens, c.guarded};
    expect(linattn_step(&c, c.query, c.key, c.value, apart, nullptr, first, step_out) == OK, name + ": step, apart");
    expect(difference(first, S2, size_t(sums)) < 1e-6, name + ": the packed sums");
    expect(linattn_step(&c, c.query, c.key, c.value, nullptr, first, second, step_out) == OK, name + ": step, packed");
  }
}

}  // namespace

int main() {
  linattn_use_threads(side_by_side);
  lent_blocks();
  int shapes = 0;
  for (int32_t isa = 0; isa < 3; ++isa) {
    if (!linattn_set_isa(isa)) continue;
    shapes += near_far_shapes();
    for (int32_t map : {MAP_EXP, MAP_TRIG, MAP_IDENTITY, MAP_ELU, MAP_RELU, MAP_QUADRATIC}) {
      for (int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
        for (const int64_t tokens : {1, 5, 64, 131, 300}) {
          for (const auto& size : {Shape{1, 1, 1, 0, 1, 1, 1, 0, 0, false, false}, Shape{2, 1, 2, 0, 7, 5, 9, 0, 0, true, true},
                                   Shape{1, 2, 1, 0, 16, 33, 40, 0, 0, false, true}, Shape{1, 1, 3, 0, 20, 80, 130, 0, 0, true, false}}) {
            Shape s = size;
            s.tokens = tokens, s.map = map, s.dtype = dtype;
            run(s);
            ++shapes;
          }
        }
      }
    }
  }
  std::printf("%d shapes, %d wrong\n", shapes, failures);
  return failures != 0;
}
