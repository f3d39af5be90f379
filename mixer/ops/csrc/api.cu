// The library's C interface, loaded by mixer/ops/cuda.py. Every function returns a cudaError_t as
// an int; 0 is success.
#include "kernels.h"

#define MIXER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A set of kernels: what serves one call.
struct KernelSet {
  cudaError_t (*forward)(const TriangularConvParams&);
  cudaError_t (*grad_input)(const TriangularConvParams&);
  int64_t (*grad_weight_workspace)(const TriangularConvParams&);
  cudaError_t (*grad_weight)(const TriangularConvParams&);
  bool with_bias;  // grad_weight of a full weight also writes dbias
  int capability;  // 10 * major + minor of the GPUs it is written for
};

constexpr KernelSet kVolta = {
    volta::forward, volta::grad_input, volta::grad_weight_workspace, volta::grad_weight,
    false, 70};
constexpr KernelSet kAmpere = {
    ampere::forward, ampere::grad_input, ampere::grad_weight_workspace, ampere::grad_weight,
    false, 80};
#ifdef MIXER_HOPPER
constexpr KernelSet kHopper = {
    hopper::forward, hopper::grad_input, hopper::grad_weight_workspace, hopper::grad_weight,
    true, 90};
#endif

bool has_no_outputs(const TriangularConvParams& params) {
  return params.batch == 0 || params.tokens == 0 || params.channels == 0 || params.heads == 0;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether all rows of a (batch, tokens, channels) tensor start at multiples of 16 bytes; those of a
// null pointer with zero strides do. The stride of a dimension of size one is never used, so it may
// have any value.
bool is_aligned(const TriangularConvParams& params, const void* pointer, int64_t batch_stride,
                int64_t token_stride, int64_t size) {
  return is_aligned(pointer) && (params.batch <= 1 || batch_stride * size % 16 == 0) &&
         (params.tokens <= 1 || token_stride * size % 16 == 0);
}

bool is_aligned(const TriangularConvParams& params) {
  const int64_t size = params.dtype == MIXER_FLOAT32 ? 4 : 2;
  return params.channels / params.heads * size % 16 == 0 && params.columns * size % 16 == 0 &&
         is_aligned(params.packed) && is_aligned(params.y) && is_aligned(params.dx) &&
         is_aligned(params, params.x, params.x_batch_stride, params.x_token_stride, size) &&
         is_aligned(params, params.residual, params.residual_batch_stride,
                    params.residual_token_stride, size) &&
         is_aligned(params, params.dy, params.dy_batch_stride, params.dy_token_stride, size);
}

// The only place that chooses kernels by architecture, type and shape: returns the fastest set that
// supports the call, or null. All sets move vectors of 16 bytes.
const KernelSet* kernels_for(const TriangularConvParams& params) {
  if (!is_aligned(params)) return nullptr;
#ifdef MIXER_HOPPER
  if (params.capability == 90 && params.processors >= 2 && params.dtype != MIXER_FLOAT32 &&
      !has_no_outputs(params))
    return &kHopper;
#endif
  if (params.capability >= 80) return &kAmpere;
  if (params.capability >= 70 && params.dtype == MIXER_FLOAT16) return &kVolta;
  return nullptr;
}

bool is_valid(const TriangularConvParams& params) {
  const bool sizes = params.batch >= 0 && params.channels >= 0 && params.heads >= 1 &&
                     params.tokens >= 0 && params.tokens <= params.context &&
                     params.columns >= params.tokens;
  return sizes && params.channels % params.heads == 0;
}

// Checks params and selects their device. The caller's CUDA runtime (torch's) and this library's
// own copy share the driver's current context, but on some threads, such as autograd's, none may be
// set yet. The caller holds a device guard, so there is nothing to restore.
cudaError_t enter(const TriangularConvParams& params) {
  return is_valid(params) ? cudaSetDevice(params.device) : cudaErrorInvalidValue;
}

}  // namespace

MIXER_EXPORT int mixer_pack(const TriangularConvParams* params) {
  const cudaError_t status = enter(*params);
  return status == cudaSuccess ? pack(*params) : status;
}

MIXER_EXPORT int mixer_forward(const TriangularConvParams* params) {
  const cudaError_t status = enter(*params);
  if (status != cudaSuccess || has_no_outputs(*params)) return status;
  const KernelSet* kernels = kernels_for(*params);
  return kernels ? kernels->forward(*params) : cudaErrorNotSupported;
}

MIXER_EXPORT int mixer_grad_input(const TriangularConvParams* params) {
  const cudaError_t status = enter(*params);
  if (status != cudaSuccess || has_no_outputs(*params)) return status;
  const KernelSet* kernels = kernels_for(*params);
  return kernels ? kernels->grad_input(*params) : cudaErrorNotSupported;
}

// 10 * major + minor of the GPUs that the chosen kernels are written for (70, 80 or 90), or 0 if
// none serve.
MIXER_EXPORT int mixer_kernels_capability(const TriangularConvParams* params) {
  const KernelSet* kernels = is_valid(*params) ? kernels_for(*params) : nullptr;
  return kernels ? kernels->capability : 0;
}

// Bytes of workspace for mixer_grad_weight.
MIXER_EXPORT int64_t mixer_grad_weight_workspace(const TriangularConvParams* params) {
  const KernelSet* kernels = is_valid(*params) ? kernels_for(*params) : nullptr;
  return kernels ? kernels->grad_weight_workspace(*params) : 0;
}

// Writes every element of dweight, zeros included, and of dbias unless it is null.
MIXER_EXPORT int mixer_grad_weight(const TriangularConvParams* params) {
  cudaError_t status = enter(*params);
  if (status != cudaSuccess) return status;
  const KernelSet* kernels = kernels_for(*params);
  status = kernels ? kernels->grad_weight(*params) : cudaErrorNotSupported;
  const bool has_bias = kernels != nullptr && kernels->with_bias && params->lag_zero == 0;
  return status == cudaSuccess && params->dbias != nullptr && !has_bias ? grad_bias(*params)
                                                                        : status;
}

// One new token of each sample: writes x into the memory and computes y = bias + residual +
// W[position] memory (mix_row.cu).
MIXER_EXPORT int mixer_mix_row(const TriangularConvParams* params) {
  const cudaError_t status = enter(*params);
  if (status != cudaSuccess || has_no_outputs(*params)) return status;
  return mix_row(*params);
}

MIXER_EXPORT const char* mixer_error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
MIXER_EXPORT int mixer_params_size() { return static_cast<int>(sizeof(TriangularConvParams)); }
MIXER_EXPORT int mixer_runtime_version() { return CUDART_VERSION; }

// The newest CUDA version that the driver supports (13000 is 13.0); 0 without a driver.
MIXER_EXPORT int mixer_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
