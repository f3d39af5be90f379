// The kernels for sm_70 and sm_75, fp16 alone.
#include "kernels.h"
#include "tensor_grad_weight.cuh"
#include "tensor_product.cuh"
#include "volta_tile.cuh"

KernelSet volta_kernels() {
  return {tensor::launch_product<volta::Set, false>, tensor::launch_product<volta::Set, true>,
          tensor::workspace_bytes, tensor::launch_grad_weight<volta::Set>, false};
}
