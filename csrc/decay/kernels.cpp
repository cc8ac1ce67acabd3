/// The kernels of the decayed sums for the instruction set given by the compiler's flags; compiled once for each.
#include "decay/backward.h"
#include "decay/decode.h"

namespace {

const DecayKernels KERNELS = {forward, decode, backward, backward_state};

}  // namespace

DEFINE_KERNELS(DecayKernels, decay) { return &KERNELS; }
