// Runs mix_row.cu on the CPU, as a library with the kernels' own interface. test_mix_row.py makes
// `mix_row.inc` from its source, with calls to the emulator in place of <<<>>>, __shared__ and
// instructions.
//
// The threads of a block (on Hopper, of a cluster of blocks) are fibers that take turns, in an
// order that changes with each round. A round ends at __syncthreads, a shuffle or the cluster's
// barrier. Blocks or clusters run one after another, in a random order. Not emulated: time,
// registers, and the memory ordering of a barrier beyond its round.
#include <ucontext.h>

#include "emulated_cuda.h"

namespace emulator {

constexpr int kMostThreads = 4096, kStackBytes = 16 << 10, kSharedBytes = 64 << 10, kMostBlocks = 8;

struct Index {
  int x;
};
Index thread_index, block_index, block_size;
int current, first_block;  // fiber that runs, and the first block of its cluster
ucontext_t scheduler, fibers[kMostThreads];
bool is_done[kMostThreads];
float exchanged[kMostThreads];
int taken[kMostThreads];  // bytes of shared memory that a thread has seen declared
alignas(16) char memory[kMostBlocks][kSharedBytes];
const std::function<void()>* kernel;
std::mt19937 generator;

void wait() { swapcontext(&fibers[current], &scheduler); }

float exchange(float value, int distance) {
  const int mine = current;
  exchanged[mine] = value;
  wait();
  const float other = exchanged[mine - thread_index.x + (thread_index.x ^ distance)];
  wait();
  return other;
}

char* shared(int bytes) {
  char* place = memory[block_index.x - first_block] + taken[current];
  taken[current] += bytes;
  return place;
}

void arrive_cluster() {}
void wait_cluster() { wait(); }
void send_to_first(float* place, float value) {
  const auto offset = reinterpret_cast<char*>(place) - memory[block_index.x - first_block];
  *reinterpret_cast<float*>(memory[0] + offset) = value;
}

void run_thread() {
  (*kernel)();
  is_done[current] = true;
  wait();
}

void run_cluster(int first, int blocks, int threads) {
  static std::vector<char> stacks(static_cast<size_t>(kMostThreads) * kStackBytes);
  const int count = blocks * threads;
  if (count > kMostThreads || blocks > kMostBlocks) std::abort();
  std::fill_n(&memory[0][0], sizeof(memory), static_cast<char>(-1));  // as floats, NaN
  std::vector<int> order(count);
  first_block = first;
  block_size.x = threads;
  for (int fiber = 0; fiber < count; ++fiber) {
    order[fiber] = fiber;
    is_done[fiber] = false;
    taken[fiber] = 0;
    getcontext(&fibers[fiber]);
    fibers[fiber].uc_stack = {&stacks[static_cast<size_t>(fiber) * kStackBytes], 0, kStackBytes};
    fibers[fiber].uc_link = nullptr;
    makecontext(&fibers[fiber], run_thread, 0);
  }
  for (bool running = true; running;) {
    running = false;
    std::shuffle(order.begin(), order.end(), generator);
    for (int fiber : order) {
      if (is_done[fiber]) continue;
      current = fiber;
      thread_index.x = fiber % threads;
      block_index.x = first + fiber / threads;
      swapcontext(&scheduler, &fibers[fiber]);
      running |= !is_done[fiber];
    }
  }
}

void launch(int blocks, int threads, std::function<void()> work, int together = 1) {
  std::vector<int> order(blocks / together);
  for (size_t cluster = 0; cluster < order.size(); ++cluster)
    order[cluster] = static_cast<int>(cluster) * together;
  std::shuffle(order.begin(), order.end(), generator);
  kernel = &work;
  for (int first : order) run_cluster(first, together, threads);
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

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads() emulator::wait()
#define __shfl_xor_sync(mask, value, distance) emulator::exchange(value, distance)
#define __ldcs(address) (*(address))
#define cudaGetLastError() cudaSuccess
#define cudaLaunchKernelEx emulator::launch_clusters
#include "mix_row.inc"

extern "C" int mixer_mix_row(const TriangularConvParams* params) { return mix_row(*params); }
