// What each .cu file offers to api.cu. Every function launches on params.stream and returns the
// launch's status.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

// Any architecture.
cudaError_t pack(const TriangularConvParams& params);
cudaError_t grad_bias(const TriangularConvParams& params);
cudaError_t mix_row(const TriangularConvParams& params);

namespace volta {  // sm_70 and newer: mma.m8n8k4; fp16
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
int64_t grad_weight_workspace(const TriangularConvParams& params);
cudaError_t grad_weight(const TriangularConvParams& params);  // dweight alone
}  // namespace volta

namespace ampere {  // sm_80 and newer: mma.sync; 16-bit types, and fp32 as tf32
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
int64_t grad_weight_workspace(const TriangularConvParams& params);
cudaError_t grad_weight(const TriangularConvParams& params);  // dweight alone
}  // namespace ampere

namespace hopper {  // sm_90a (MIXER_HOPPER): TMA and wgmma; 16-bit types; at least one value of x
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
int64_t grad_weight_workspace(const TriangularConvParams& params);
// dweight and, of a full weight, dbias
cudaError_t grad_weight(const TriangularConvParams& params);
}  // namespace hopper
