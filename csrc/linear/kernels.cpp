/// The kernels of linear attention for the instruction set given by the compiler's flags; compiled once for each. Only the
/// function at the end has external linkage, or the linker could mix instruction sets.
#include "linear/causal_backward.h"
#include "linear/decode.h"

namespace {

/// Floats of a state in work space, for forward and backward calls.
int64_t state_size(const LinearCall& c) { return imax(state_floats(c), transposed_floats(c)); }

/// The state before any key, at `at`.
void clear_state_at(const LinearCall& c, float* at) { clear_state(c, state_view(c, at)); }

const LinearKernels KERNELS = {
    state_size,          load_state,      store_state,     clear_state_at,  merge_states,
    update_state,        read_state,      causal_forward,  decode,          update_state_backward,
    read_state_backward, causal_backward, load_grad_state, store_grad_state};

}  // namespace

DEFINE_KERNELS(LinearKernels, linear) { return &KERNELS; }
