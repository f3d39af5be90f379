// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c].
#include "hopper_product.cuh"

cudaError_t hopper::forward(const TriangularConvParams& params) {
  ProductArguments arguments = {};
  cudaError_t status = make_arguments<false>(params, &arguments);
  if (status != cudaSuccess) return status;
  arguments.bias = params.bias;
  arguments.bias_dtype = params.bias_dtype;
  if (params.residual == nullptr) return launch_type<false, false>(params, arguments);
  status = encode_activations(&arguments.residual, params.residual, params.residual_batch_stride,
                              params.residual_token_stride, params);
  return status == cudaSuccess ? launch_type<false, true>(params, arguments) : status;
}
