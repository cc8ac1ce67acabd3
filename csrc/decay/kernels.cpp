/// The kernels of the decayed sums for the instruction set given by the compiler's flags; compiled once for each.
#include "core/step_checks.h"
#include "decay/backward.h"
#include "decay/decode.h"
#include "decay/layer.h"

namespace {

bool fits(const DecayCall& c) { return step_fits(c, c.per_channel ? c.dim : 1); }

const DecayKernels KERNELS = {forward_layer, forward, decode, backward, backward_state, fits, step_flags<DecayCall>};

}  // namespace

DEFINE_KERNELS(DecayKernels, decay) { return &KERNELS; }
