/// The kernels of the steps around an update rule for the instruction set given by the compiler's flags; compiled once for
/// each.
#include "mixer/conv_step.h"
#include "mixer/gated_norm.h"
#include "mixer/project.h"
#include "mixer/project_many.h"
#include "mixer/ssd_step.h"

namespace {

const MixerKernels KERNELS = {gated_norm, conv_step, ssd_step, project, project_many};

}  // namespace

DEFINE_KERNELS(MixerKernels, mixer) { return &KERNELS; }
