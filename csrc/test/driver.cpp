/// Runs every entry over ragged shapes on buffers of exact size, so that AddressSanitizer sees any access outside,
/// UndefinedBehaviorSanitizer any misuse and ThreadSanitizer any race. Checks that chunked, split and stateless calls
/// agree, and every instruction set with the portable one. csrc/test/check.py builds and runs it:
///   driver [few | threads] [--write file] [--against file]
/// `few`: fewer shapes, for an emulator. `threads`: shapes whose work is shared by threads in every way there is.
/// Results can be written, and compared with those of another compiler or machine.
#include "decay.h"
#include "delta.h"
#include "layers.h"
#include "linear.h"
#include "mixer.h"
#include "nearfar.h"
#include "output_pool.h"
#include "scan.h"

extern "C" {
int32_t linattn_set_isa(int32_t);
void linattn_set_parallel_for(int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*));
}

namespace {

/// The shapes of a run.
struct Plan {
  std::vector<int64_t> tokens, nearfar_tokens, decay_tokens;
  std::vector<LinearShape> sizes;
  bool all_types;
};

const std::vector<LinearShape> SIZES = {{1, 1, 1, 0, 1, 1, 1, 0, 0, false, false},
                                        {2, 1, 2, 0, 7, 5, 9, 0, 0, true, true},
                                        {1, 2, 1, 0, 16, 33, 40, 0, 0, false, true},
                                        {1, 1, 3, 0, 20, 80, 130, 0, 0, true, false}};
const Plan ALL = {{1, 5, 64, 131, 300}, {1, 5, 64, 131}, {1, 5, 64, 131, 600}, SIZES, true};
const Plan FEW = {{1, 150}, {131}, {1, 300}, SIZES, false};
/// Fewer heads than threads, which then share the tokens of a head, and more, where a head moves between threads.
const Plan THREADS = {{1, 300},
                      {131},
                      {1, 600},
                      {{1, 1, 2, 0, 7, 5, 9, 0, 0, true, true}, {2, 3, 1, 0, 16, 5, 24, 0, 0, false, true}},
                      false};

/// All shapes of a plan on the current instruction set; returns how many.
int run_shapes(const Plan& plan) {
  int count = nearfar_shapes(plan.nearfar_tokens, plan.all_types) + delta_shapes(plan.nearfar_tokens, plan.all_types);
  count += scan_shapes(plan.nearfar_tokens, plan.all_types) + decay_shapes(plan.decay_tokens, plan.all_types);
  count += mixer_shapes(plan.all_types) + layer_shapes();
  for (const int32_t map : {MAP_EXP, MAP_TRIG, MAP_IDENTITY, MAP_ELU, MAP_RELU, MAP_QUADRATIC}) {
    for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
      if (dtype != FLOAT32 && map != MAP_EXP && !plan.all_types) break;
      for (const int64_t tokens : plan.tokens) {
        for (LinearShape s : plan.sizes) {
          s.tokens = tokens, s.map = map, s.dtype = dtype;
          check_linear(s);
          ++count;
        }
      }
    }
  }
  return count;
}

/// Decoding steps so large that threads share them, and calls from several threads at once; returns how many.
int run_threads() {
  check_linear({1, 24, 1, 1, 20, 80, 130, MAP_EXP, FLOAT32, false, false});
  check_nearfar({1, 8, 8, 131, 64, 64, 128, 0, 16, 4, FLOAT32, false});
  std::vector<std::thread> callers;
  for (const int32_t map : {MAP_EXP, MAP_ELU, MAP_QUADRATIC}) {
    callers.emplace_back([map] {
      check_linear({2, 2, 1, 150, 7, 5, 9, map, FLOAT32, true, false});
      check_nearfar({2, 2, 2, 64, 7, 5, 9, 3, 8, 6, FLOAT32, true});
    });
  }
  for (std::thread& caller : callers) caller.join();
  return 2 + 2 * int(callers.size());
}

}  // namespace

/// Exit status 0 if nothing failed, 1 if something did, 2 for wrong arguments.
int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const Plan* plan = &ALL;
  const char* written = nullptr;
  for (size_t i = 0; i < given.size(); ++i) {
    const bool more = i + 1 < given.size();
    if (given[i] == "few") {
      plan = &FEW;
    } else if (given[i] == "threads") {
      plan = &THREADS;
    } else if (given[i] == "--write" && more) {
      written = given[++i].c_str();
    } else if (given[i] == "--against" && more) {
      digests.read(given[++i].c_str());
    } else {
      std::printf("driver [few | threads] [--write file] [--against file]\n");
      return 2;
    }
  }
  linattn_set_parallel_for(side_by_side);
  check_output_pool();
  int shapes = 0;
  std::string sets;
  for (int32_t isa = 0; isa < 3; ++isa) {
    if (!linattn_set_isa(isa)) continue;
    shapes += run_shapes(*plan) + (plan == &FEW ? 0 : run_threads());
    sets += std::string(" ") + linattn_isa();
  }
  if (written) digests.write(written);
  std::printf("%d shapes on%s, %d wrong\n", shapes, sets.c_str(), failures.load());
  return failures != 0;
}
