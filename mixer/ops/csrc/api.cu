// The library's C interface, called by mixer/ops/cuda.py; mixer/ops/triangular.py has checked the
// arguments. Every function returns a cudaError_t as an int; 0 is success.
#include "kernels.h"

#define MIXER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The kernel set of the GPU's architecture.
KernelSet kernels_for(const TriangularConvParams& params) {
#ifdef MIXER_HOPPER
  if (params.capability == 90) return hopper_kernels();
#endif
  return params.capability >= 80 ? ampere_kernels(params.dtype) : volta_kernels();
}

// The caller's CUDA runtime (torch's) and this library's own copy share the driver's current
// context, but on some threads, such as autograd's, none may be set yet. The caller holds a device
// guard, so there is nothing to restore.
template <typename Kernel>
int run(const TriangularConvParams& params, Kernel kernel) {
  const cudaError_t status = cudaSetDevice(params.device);
  return status == cudaSuccess ? kernel(params) : status;
}

cudaError_t grad_weight_and_bias(const TriangularConvParams& params) {
  const KernelSet kernels = kernels_for(params);
  const cudaError_t status = kernels.grad_weight(params);
  const bool is_done = params.dbias == nullptr || (kernels.with_bias && params.window == 0);
  return status == cudaSuccess && !is_done ? grad_bias(params) : status;
}

}  // namespace

MIXER_EXPORT int mixer_pack(const TriangularConvParams* params) { return run(*params, pack); }

MIXER_EXPORT int mixer_forward(const TriangularConvParams* params) {
  return run(*params, kernels_for(*params).forward);
}
MIXER_EXPORT int mixer_grad_input(const TriangularConvParams* params) {
  return run(*params, kernels_for(*params).grad_input);
}

// Bytes of workspace for mixer_grad_weight.
MIXER_EXPORT int64_t mixer_grad_weight_workspace(const TriangularConvParams* params) {
  return kernels_for(*params).grad_weight_workspace(*params);
}
// Writes every element of dweight, zeros included, and of dbias unless it is null.
MIXER_EXPORT int mixer_grad_weight(const TriangularConvParams* params) {
  return run(*params, grad_weight_and_bias);
}

// A weight by lag of up to MIXER_SHORT_WINDOW lags (short_conv.cu).
MIXER_EXPORT int mixer_short_conv(const TriangularConvParams* params) {
  return run(*params, short_conv);
}
// Bytes of workspace for mixer_short_conv_gradients.
MIXER_EXPORT int64_t mixer_short_conv_workspace(const TriangularConvParams* params) {
  return short_conv_workspace(*params);
}
// Writes every element of dx and dweight, and of dbias unless it is null.
MIXER_EXPORT int mixer_short_conv_gradients(const TriangularConvParams* params) {
  return run(*params, short_conv_gradients);
}

// One new token of each sample: writes x into the memory and computes y = bias + residual +
// W[position] memory (mix_row.cu), with a full weight or one by lag.
MIXER_EXPORT int mixer_mix_row(const TriangularConvParams* params) { return run(*params, mix_row); }

MIXER_EXPORT const char* mixer_error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
