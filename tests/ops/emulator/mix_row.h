// What mix_row.cu does with a cluster of blocks on Hopper.
#pragma once

#include "threads.h"

namespace emulator {

inline void arrive_cluster() {}
inline void wait_cluster() { meet_cluster(-1); }
inline void send_to_first(float* place, float value) {
  const auto offset = reinterpret_cast<char*>(place) - own_block().shared;
  *reinterpret_cast<float*>(blocks[0].shared + offset) = value;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                            Arguments... arguments) {
  int together = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      together = config->attrs[i].val.clusterDim.x;
  }
  launch(config->gridDim.x, config->blockDim.x, [=] { kernel(arguments...); }, together);
  return cudaSuccess;
}

}  // namespace emulator

#define cudaLaunchKernelEx emulator::launch_clusters
