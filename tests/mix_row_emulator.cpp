// mix_row.cu on the CPU, as a library with the kernels' own interface: test_mix_row.py makes `mix_row.inc` of its source, with
// `emulator::launch` in place of <<<>>>.
//
// The threads of a block are fibers that take turns, and __syncthreads and shuffles are where they wait for each other; blocks
// run one after another, in a random order. Not emulated: time, registers, races.
#include <ucontext.h>

#include "emulated_cuda.h"

#undef __shared__
#define __shared__ static
#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define __syncthreads() emulator::wait()
#define __shfl_xor_sync(mask, value, distance) emulator::exchange(value, distance)
#define __ldcs(address) (*(address))
#define cudaGetLastError() cudaSuccess

namespace emulator {

constexpr int kMostThreads = 1024, kStackBytes = 64 << 10;

struct Index {
  int x;
};
Index thread_index, block_index, block_size;
ucontext_t scheduler, fibers[kMostThreads];
bool is_done[kMostThreads];
float exchanged[kMostThreads];
const std::function<void()>* kernel;

void wait() { swapcontext(&fibers[thread_index.x], &scheduler); }

float exchange(float value, int distance) {
  const int thread = thread_index.x;
  exchanged[thread] = value;
  wait();
  const float other = exchanged[thread ^ distance];
  wait();
  return other;
}

void run_thread() {
  (*kernel)();
  is_done[thread_index.x] = true;
  wait();
}

void run_block(int block, int threads) {
  static std::vector<char> stacks(static_cast<size_t>(kMostThreads) * kStackBytes);
  block_index.x = block;
  block_size.x = threads;
  for (int thread = 0; thread < threads; ++thread) {
    is_done[thread] = false;
    getcontext(&fibers[thread]);
    fibers[thread].uc_stack = {&stacks[static_cast<size_t>(thread) * kStackBytes], 0, kStackBytes};
    fibers[thread].uc_link = nullptr;
    makecontext(&fibers[thread], run_thread, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (int thread = 0; thread < threads; ++thread) {
      if (is_done[thread]) continue;
      thread_index.x = thread;
      swapcontext(&scheduler, &fibers[thread]);
      running |= !is_done[thread];
    }
  }
}

void launch(int blocks, int threads, std::function<void()> work) {
  static std::mt19937 random;
  std::vector<int> order(blocks);
  for (int block = 0; block < blocks; ++block) order[block] = block;
  std::shuffle(order.begin(), order.end(), random);
  kernel = &work;
  for (int block : order) run_block(block, threads);
}

}  // namespace emulator

#include "mix_row.inc"

extern "C" int mixer_mix_row(const TriangularConvParams* params) { return mix_row(*params); }
