/// The kernels of the delta rule for the instruction set given by the compiler's flags; compiled once for each.
#include "delta/backward.h"
#include "delta/decode.h"

namespace {

const DeltaKernels KERNELS = {forward, backward, decode};

}  // namespace

DEFINE_KERNELS(DeltaKernels, delta) { return &KERNELS; }
