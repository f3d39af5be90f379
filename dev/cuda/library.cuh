// The last version of each ladder: the trainer's own kernels, from the shared library that
// mixer/ops/build.py builds from mixer/ops/csrc. It is loaded at run time: --library FILE or
// $MIXER_KERNELS.
#pragma once

#include "../../mixer/ops/csrc/params.h"
#include "common.cuh"

class Library {
 public:
  static Library& get() {
    static Library library;
    return library;
  }
  const std::string& problem() const { return problem_; }

  cudaError_t run(Operation operation, const Arguments& a) {
    TriangularConvParams params = {};
    params.packed = const_cast<bf16*>(a.weight);
    params.batch = a.batch, params.tokens = params.context = a.tokens, params.channels = a.channels;
    params.columns = a.columns, params.heads = params.taps = 1;
    params.dtype = MIXER_BFLOAT16,
    params.bias_dtype = params.gradient_dtype = params.weight_dtype = MIXER_FLOAT32;
    params.capability = 10 * device().major + device().minor,
    params.processors = device().multiProcessorCount;
    params.x = a.x, params.dy = a.dy, params.bias = a.bias, params.residual = a.residual;
    params.y = a.y, params.dx = a.dx, params.dweight = a.dweight;
    const int64_t row = a.channels, sample = row * a.tokens;
    params.x_token_stride = params.dy_token_stride = params.residual_token_stride = row;
    params.x_batch_stride = params.dy_batch_stride = params.residual_batch_stride = sample;
    if (operation == kGradWeight) {
      params.workspace = scratch(static_cast<size_t>(workspace_(&params)));
    } else {
      params.schedule = schedule_on_device(operation, params);
    }
    return static_cast<cudaError_t>(entries_[operation](&params));
  }

 private:
  using Entry = int (*)(const TriangularConvParams*);
  using Size = int64_t (*)(const TriangularConvParams*);
  using Fill = void (*)(const TriangularConvParams*, void*);

  Library() {
    const char* path = getenv("MIXER_KERNELS");
    if (path == nullptr || *path == '\0') {
      problem_ =
          "needs the library: --library FILE or MIXER_KERNELS, "
          "`python -m mixer.ops.build` prints where it is";
      return;
    }
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      problem_ =
          std::string("cannot load it (") + dlerror() + "); build it: `python -m mixer.ops.build`";
      return;
    }
    const auto version = find<int (*)()>("mixer_abi_version");
    const auto size = find<int (*)()>("mixer_params_size");
    entries_[kForward] = find<Entry>("mixer_forward");
    entries_[kGradInput] = find<Entry>("mixer_grad_input");
    entries_[kGradWeight] = find<Entry>("mixer_grad_weight");
    workspace_ = find<Size>("mixer_grad_weight_workspace");
    // these two may be missing: then no kernel needs a schedule
    schedule_size_ = find<Size>("mixer_schedule_size");
    schedule_ = find<Fill>("mixer_schedule");
    const bool complete = version && size && workspace_ && entries_[kForward] &&
                          entries_[kGradInput] && entries_[kGradWeight];
    if (!complete || version() != MIXER_ABI_VERSION ||
        size() != static_cast<int>(sizeof(TriangularConvParams))) {
      problem_ =
          std::string(path) +
          " has another interface than params.h; build both anew: `python -m mixer.ops.build`";
    }
  }

  template <typename Function>
  Function find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  // The order in which persistent blocks take the tiles: computed once per shape on the host, as in
  // the trainer.
  const void* schedule_on_device(Operation operation, const TriangularConvParams& params) {
    const int64_t bytes = schedule_size_ && schedule_ ? schedule_size_(&params) : 0;
    if (bytes <= 0) return nullptr;
    void*& copy = schedules_[{operation, params.batch, params.tokens, params.channels}];
    if (copy == nullptr) {
      std::vector<unsigned char> host(static_cast<size_t>(bytes));
      schedule_(&params, host.data());
      CHECK(cudaMalloc(&copy, host.size()));
      CHECK(cudaMemcpy(copy, host.data(), host.size(), cudaMemcpyHostToDevice));
    }
    return copy;
  }

  void* library_ = nullptr;
  Entry entries_[3] = {};
  Size workspace_ = nullptr, schedule_size_ = nullptr;
  Fill schedule_ = nullptr;
  std::map<std::vector<int>, void*> schedules_;
  std::string problem_;
};

inline Version library_version(Operation operation) {
  const auto run = [operation](const Arguments& a) { return Library::get().run(operation, a); };
  return {7,
          "the trainer's own kernel: persistent blocks, tiles dealt out evenly, multicast",
          true,
          {{"as the trainer calls it", run}},
          Library::get().problem()};
}
