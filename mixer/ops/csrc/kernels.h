// What each .cu file offers to api.cu. Every function launches on params.stream and returns the
// launch's status.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

// Any architecture.
cudaError_t pack(const TriangularConvParams& params);
cudaError_t grad_bias(const TriangularConvParams& params);
cudaError_t mix_row(const TriangularConvParams& params);

// The products, for one architecture.
struct KernelSet {
  cudaError_t (*forward)(const TriangularConvParams&);
  cudaError_t (*grad_input)(const TriangularConvParams&);
  int64_t (*grad_weight_workspace)(const TriangularConvParams&);
  cudaError_t (*grad_weight)(const TriangularConvParams&);
  bool with_bias;  // grad_weight of a full weight also writes dbias
};
extern const KernelSet kVolta;   // sm_70 and newer: mma.m8n8k4; fp16
extern const KernelSet kAmpere;  // sm_80 and newer: mma.sync; 16-bit types, and fp32 as tf32
extern const KernelSet kHopper;  // sm_90a (MIXER_HOPPER): TMA and wgmma; 16-bit types

namespace hopper {  // the parts of kHopper that have a file each
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
}  // namespace hopper
