/// The kernels of near/far attention for the instruction set given by the compiler's flags; compiled once for each.
#include "nearfar/backward.h"
#include "nearfar/bidirectional.h"
#include "nearfar/decode.h"

namespace {

const NearFarKernels KERNELS = {prefill, decode, merge, backward, {read_queries, merge_part, merge_keys, attend_blocks}};

}  // namespace

DEFINE_KERNELS(NearFarKernels, nearfar) { return &KERNELS; }
