/// The kernels of the selective scan and the causal convolution for the instruction set given by the compiler's flags;
/// compiled once for each.
#include <type_traits>

#include "scan/conv_backward.h"
#include "scan/selective_scan_backward.h"
#include "scan/selective_scan_step.h"

namespace {

const ScanKernels KERNELS = {scan, scan_backward, scan_step, conv, conv_backward};

}  // namespace

DEFINE_KERNELS(ScanKernels, scan) { return &KERNELS; }
