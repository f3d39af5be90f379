// The kernels for sm_70 and sm_75, fp16 alone.
#include "tensor_grad_weight.cuh"
#include "volta_tile.cuh"

KernelSet volta_kernels() { return tensor::kernel_set<volta::Set>(); }
