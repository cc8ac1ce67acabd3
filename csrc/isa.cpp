// Everything above, for the instruction set given by the compiler's flags. Compiled once for each; nothing in here but
// the one function at the end may be visible outside, or the linker could mix instruction sets.
#include "causal_backward.h"
#include "nearfar_step.h"
#include "step.h"

namespace {

int64_t sums_size(const Call& c) { return imax(sums_floats(c), turned_floats(c)); }
void clear_sums(const Call& c, float* at) { clear(c, view(c, at)); }

#define TEXT(x) #x
#define NAME(x) TEXT(x)
const Pieces PIECES = {NAME(LINATTN_ISA), sums_size,       load_sums,     store_sums,      clear_sums,
                       merge_sums,        absorb,          read,          causal,          step,
                       absorb_backward,   read_backward,   causal_backward, load_grad,     store_grad,
                       {walk, step, merge}};

}  // namespace

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
extern "C" __attribute__((visibility("hidden"))) const Pieces* JOIN(linattn_, LINATTN_ISA)() { return &PIECES; }
