// What each .cu file offers to api.cu. Every function launches on params.stream and returns the launch's status.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

// Any architecture.
cudaError_t pack(const TriangularConvParams& params);
cudaError_t grad_bias(const TriangularConvParams& params);

namespace portable {  // sm_70 and newer: fp32 arithmetic, any shape, any stride between rows
cudaError_t forward(const TriangularConvParams& params);
cudaError_t grad_input(const TriangularConvParams& params);
int64_t grad_weight_workspace(const TriangularConvParams& params);
cudaError_t grad_weight(const TriangularConvParams& params);
}  // namespace portable
