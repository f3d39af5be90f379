// The functions of the kernels' library that `mixer.ops.cuda` calls, for the sets `kernels`.
#pragma once

using Params = TriangularConvParams;

extern "C" {
int mixer_forward(const Params* p) { return kernels(p->dtype).forward(*p); }
int mixer_grad_input(const Params* p) { return kernels(p->dtype).grad_input(*p); }
int mixer_grad_weight(const Params* p) { return kernels(p->dtype).grad_weight(*p); }
int64_t mixer_grad_weight_workspace(const Params* p) {
  return kernels(p->dtype).grad_weight_workspace(*p);
}
}
