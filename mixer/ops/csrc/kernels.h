// What each .cu file offers to api.cu. Every function launches on params.stream and returns the
// launch's status.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

// Any architecture.
cudaError_t pack(const TriangularConvParams& params);
cudaError_t grad_bias(const TriangularConvParams& params);
cudaError_t mix_row(const TriangularConvParams& params);
cudaError_t short_conv(const TriangularConvParams& params);
cudaError_t short_conv_gradients(const TriangularConvParams& params);
int64_t short_conv_workspace(const TriangularConvParams& params);

// The products of 16-bit types, for one architecture.
struct KernelSet {
  cudaError_t (*forward)(const TriangularConvParams&);
  cudaError_t (*grad_input)(const TriangularConvParams&);
  int64_t (*grad_weight_workspace)(const TriangularConvParams&);
  cudaError_t (*grad_weight)(const TriangularConvParams&);
  bool with_bias;  // grad_weight of a full weight also writes dbias
};
KernelSet volta_kernels();            // sm_70 and sm_75: mma.m8n8k4; fp16 alone
KernelSet ampere_kernels(int dtype);  // sm_80 and newer: mma.sync
KernelSet hopper_kernels();           // sm_90a (MIXER_HOPPER): TMA and wgmma

namespace hopper {  // hopper_product.cu
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
}  // namespace hopper
