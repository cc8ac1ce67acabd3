/// The kernels of the delta rule for the instruction set given by the compiler's flags; compiled once for each.
#include "core/step_checks.h"
#include "delta/backward.h"
#include "delta/decode.h"
#include "delta/layer.h"

namespace {

bool fits(const DeltaCall& c) {
  return step_fits(c, c.channels ? c.dim : 1) && rows_finite(c.beta, c.beta_stride, c.batch, c.heads, 1, FLOAT32);
}

const DeltaKernels KERNELS = {forward_layer, forward, backward, decode, fits, step_flags<DeltaCall>, step_gates};

}  // namespace

DEFINE_KERNELS(DeltaKernels, delta) { return &KERNELS; }
