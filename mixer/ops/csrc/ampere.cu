// The kernels for sm_80 and newer.
#include "ampere_tile.cuh"
#include "tensor_grad_weight.cuh"

KernelSet ampere_kernels(int dtype) {
  return dtype == MIXER_FLOAT16 ? tensor::kernel_set<ampere::Set<__half>>()
                                : tensor::kernel_set<ampere::Set<__nv_bfloat16>>();
}
