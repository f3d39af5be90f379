// The functions of the kernels' library that `mixer.ops.cuda` calls, for the set `kernels`.
#pragma once

extern "C" {
int mixer_forward(const TriangularConvParams* params) { return kernels.forward(*params); }
int mixer_grad_input(const TriangularConvParams* params) { return kernels.grad_input(*params); }
int mixer_grad_weight(const TriangularConvParams* params) { return kernels.grad_weight(*params); }
int64_t mixer_grad_weight_workspace(const TriangularConvParams* params) {
  return kernels.grad_weight_workspace(*params);
}
}
