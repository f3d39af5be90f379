// Runs the Volta kernels of mixer/ops/csrc on the CPU and compares them with plain loops:
//
//     emulator SEED COUNT
//
// ends with status 0, or with 1 at the first case that differs. test_volta.py makes `volta_kernels.inc` of the kernels' own
// source, with the functions of this file in place of PTX, __shared__ and <<<>>>.
//
// The threads of a block are fibers. A random warp goes on until it has to wait, one for long or all in turn, so that a
// missing barrier shows; shared memory starts as NaN, and so does everything around tensors. mma.m8n8k4 is what the PTX
// manual says. Inputs are small integers: every sum is exact, whatever its order. Not emulated: time, registers, bank
// conflicts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads() emulator::meet(emulator::kBlock, __LINE__)
#define __syncwarp() emulator::meet(emulator::kWarp, __LINE__)

using std::max;
using std::min;

namespace emulator {

struct Index {
  int x;
};
Index thread_index, block_index;
std::mt19937_64 random_bits;

constexpr int kMostThreads = 256, kStackBytes = 256 << 10;
enum Group { kBlock, kWarp };

struct Fiber {
  ucontext_t start;
  jmp_buf place;  // setjmp and longjmp, once it has started: they ask nothing of the operating system
  std::vector<char> stack;
  bool has_started, is_done, is_waiting;
  Group group;
  int line;  // where it waits
};
Fiber fibers[kMostThreads];
jmp_buf scheduler;
int threads;
alignas(128) unsigned char shared[96 << 10];

void go_on(int thread) {
  thread_index.x = thread;
  if (_setjmp(scheduler)) return;
  if (fibers[thread].has_started) _longjmp(fibers[thread].place, 1);
  fibers[thread].has_started = true;
  setcontext(&fibers[thread].start);
}

void wait() {
  Fiber& me = fibers[thread_index.x];
  me.is_waiting = true;
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

// Waits for all threads of the block or the warp, which must come to the same place. The last one does `work` for all.
template <typename Work>
void meet(Group group, int line, Work work) {
  Fiber& me = fibers[thread_index.x];
  me.group = group;
  me.line = line;
  const int begin = group == kWarp ? thread_index.x / 32 * 32 : 0, end = group == kWarp ? begin + 32 : threads;
  bool all = true;
  for (int i = begin; i < end; ++i) all = all && (i == thread_index.x || fibers[i].is_waiting);
  if (!all) return wait();
  for (int i = begin; i < end; ++i) {
    if (fibers[i].is_done || fibers[i].group != group || fibers[i].line != line) {
      printf("threads %d and %d of a group wait at different places\n", thread_index.x, i);
      exit(1);
    }
    fibers[i].is_waiting = false;
  }
  work();
}
void meet(Group group, int line) { meet(group, line, [] {}); }

struct Operands {
  float* sum;
  uint32_t left[2], right[2];
};
Operands operands[kMostThreads];

float half_of(const uint32_t (&registers)[2], int i) {
  const __half_raw raw = {static_cast<unsigned short>(registers[i / 2] >> i % 2 * 16)};
  return __half2float(__half(raw));
}

// mma.sync.aligned.m8n8k4.LEFT.RIGHT.f32.f16.f16.f32: each quad pair multiplies 8 x 4 by 4 x 8.
void multiply_quad_pair(int first, bool left_row, bool right_row) {
  float left[8][4], right[4][8];
  for (int t = 0; t < 8; ++t) {
    const Operands& lane = operands[first + t % 4 + t / 4 * 16];
    for (int i = 0; i < 4; ++i) {
      (left_row ? left[t][i] : left[i + t / 4 * 4][t % 4]) = half_of(lane.left, i);
      (right_row ? right[t % 4][i + t / 4 * 4] : right[i][t]) = half_of(lane.right, i);
    }
  }
  for (int t = 0; t < 8; ++t) {
    for (int i = 0; i < 8; ++i) {
      const int row = t % 2 + (i & 2) + t / 4 * 4, column = (i & 4) + (t & 2) + (i & 1);
      float& sum = operands[first + t % 4 + t / 4 * 16].sum[i];
      for (int k = 0; k < 4; ++k) sum += left[row][k] * right[k][column];
    }
  }
}

void mma(float (&sum)[8], uint2 left, uint2 right, const char* layouts) {
  operands[thread_index.x] = {sum, {left.x, left.y}, {right.x, right.y}};
  meet(kWarp, -1, [&] {
    const int warp = thread_index.x / 32 * 32;
    for (int pair = 0; pair < 4; ++pair) multiply_quad_pair(warp + pair * 4, layouts[0] == 'r', layouts[4] == 'r');
  });
}

const std::function<void()>* kernel;
void run_fiber() {
  (*kernel)();
  Fiber& me = fibers[thread_index.x];
  me.is_done = me.is_waiting = true;
  me.line = 0;
  _longjmp(scheduler, 1);
}

void run_block() {
  memset(shared, 0xff, sizeof(shared));
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.has_started = fiber.is_done = fiber.is_waiting = false;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, run_fiber, 0);
  }
  const int warps = (threads + 31) / 32, patience[] = {1, 64, 4096};
  const int turns = patience[random_bits() % 3];  // that one warp has before the others, about
  int start = 0;
  for (;;) {
    if (random_bits() % turns == 0) start = random_bits() % warps;
    bool went_on = false;
    for (int w = 0; w < warps && !went_on; ++w) {
      const int warp = (start + w) % warps;
      for (int i = warp * 32; i < std::min(warp * 32 + 32, threads); ++i) {
        if (fibers[i].is_waiting) continue;
        go_on(i);
        went_on = true;
      }
    }
    if (went_on) continue;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].is_done) continue;
      printf("thread %d waits for ever at line %d\n", i, fibers[i].line);
      exit(1);
    }
    return;
  }
}

void launch(int64_t blocks, int block_threads, const std::function<void()>& body) {
  threads = block_threads;
  kernel = &body;
  for (block_index.x = 0; block_index.x < blocks; ++block_index.x) run_block();
}

inline uint32_t funnel(uint32_t low, uint32_t high, int bits) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
}

}  // namespace emulator

#define __funnelshift_r emulator::funnel
inline void __stcg(uint4* place, uint4 value) { *place = value; }
inline cudaError_t emulated_last_error() { return cudaSuccess; }
#define cudaGetLastError emulated_last_error

#include "volta_kernels.inc"

namespace {

int below(int limit) { return emulator::random_bits() % limit; }

// Values on the "device", NaN until they are set, with NaN on both sides.
template <typename Value>
struct Buffer {
  static constexpr size_t kGuard = 8192;
  size_t count;
  std::vector<uint4> memory;

  explicit Buffer(size_t count) : count(count), memory(2 * kGuard + count * sizeof(Value) / sizeof(uint4) + 1) {
    memset(memory.data(), 0xff, memory.size() * sizeof(uint4));
  }
  Value* data() { return reinterpret_cast<Value*>(memory.data() + kGuard); }
  float get(size_t i) { return static_cast<float>(data()[i]); }
  void fill() {
    for (size_t i = 0; i < count; ++i) data()[i] = static_cast<Value>(static_cast<float>(below(5) - 2));
  }
  bool is_guarded() {
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory.data());
    const size_t begin = kGuard * sizeof(uint4), end = begin + count * sizeof(Value), size = memory.size() * sizeof(uint4);
    const auto is_fill = [](unsigned char byte) { return byte == 0xff; };
    return std::all_of(bytes, bytes + begin, is_fill) && std::all_of(bytes + end, bytes + size, is_fill);
  }
};

// A tensor (batch, tokens, channels) whose rows may be further apart than their length.
struct Activation : Buffer<__half> {
  int64_t batch_stride, token_stride;
  Activation(const TriangularConvParams& p, int gap)
      : Buffer(static_cast<size_t>(p.batch) * (p.tokens * (p.channels + gap) + gap)),
        batch_stride(p.tokens * (p.channels + gap) + gap), token_stride(p.channels + gap) {}
  float at(int sample, int token, int channel) { return get(sample * batch_stride + token * token_stride + channel); }
};

bool check(const char* name, int64_t place, float got, float wanted) {
  if (got == wanted) return true;
  printf("%s[%ld] is %g, should be %g\n", name, static_cast<long>(place), got, wanted);
  return false;
}

bool run_case() {
  TriangularConvParams p = {};
  const int kinds[] = {1, 7, 63, 64, 65, 127, 128, 129, 200, 257};
  p.tokens = below(2) ? kinds[below(10)] : 1 + below(160);
  p.context = p.tokens + (below(2) ? below(20) : 0);
  p.heads = 1 + below(3);
  p.taps = below(2) ? 1 : 1 + below(5);
  p.batch = 1 + below(3);
  const int width = 8 * (1 + below(below(2) ? 20 : 6));
  p.channels = p.heads * width;
  p.columns = (p.tokens + 7) / 8 * 8;
  p.dtype = MIXER_FLOAT16;
  p.capability = 70;
  p.processors = 1 + below(20);
  const bool has_bias = below(2), has_residual = below(2), wide_bias = below(2), wide_gradient = below(2);
  p.bias_dtype = wide_bias ? MIXER_FLOAT32 : MIXER_FLOAT16;
  p.gradient_dtype = wide_gradient ? MIXER_FLOAT32 : MIXER_FLOAT16;
  printf("tokens %d context %d heads %d taps %d batch %d width %d bias %d residual %d\n", p.tokens, p.context, p.heads, p.taps,
         p.batch, width, has_bias, has_residual);

  Activation x(p, 8 * below(3)), dy(p, 8 * below(3)), residual(p, 8 * below(3)), y(p, 0), dx(p, 0);
  Buffer<__half> packed(static_cast<size_t>(p.heads) * p.taps * p.tokens * p.columns), narrow(p.heads * p.context);
  Buffer<float> wide(p.heads * p.context);
  x.fill(), dy.fill(), residual.fill(), packed.fill(), wide.fill();
  for (size_t i = 0; i < narrow.count; ++i) narrow.data()[i] = __float2half_rn(wide.get(i));
  for (size_t i = 0; i < packed.count; ++i) {
    if (int(i % p.columns) > int(i / p.columns % p.tokens)) packed.data()[i] = __float2half_rn(0.0f);
  }
  const auto weight = [&](int head, int tap, int row, int column) {
    return packed.get((static_cast<int64_t>(head * p.taps + tap) * p.tokens + row) * p.columns + column);
  };
  p.x = x.data(), p.x_batch_stride = x.batch_stride, p.x_token_stride = x.token_stride;
  p.dy = dy.data(), p.dy_batch_stride = dy.batch_stride, p.dy_token_stride = dy.token_stride;
  p.packed = packed.data(), p.y = y.data(), p.dx = dx.data();
  if (has_bias) p.bias = wide_bias ? static_cast<void*>(wide.data()) : narrow.data();
  if (has_residual) {
    p.residual = residual.data();
    p.residual_batch_stride = residual.batch_stride, p.residual_token_stride = residual.token_stride;
  }
  const int64_t size = static_cast<int64_t>(p.heads) * p.taps * p.context * p.context;
  Buffer<float> workspace(volta::grad_weight_workspace(p) / sizeof(float)), wide_gradients(size);
  Buffer<__half> narrow_gradients(size);
  p.workspace = workspace.data();
  p.dweight = wide_gradient ? static_cast<void*>(wide_gradients.data()) : narrow_gradients.data();
  volta::forward(p);
  volta::grad_input(p);
  volta::grad_weight(p);

  bool good = y.is_guarded() && dx.is_guarded() && workspace.is_guarded() && wide_gradients.is_guarded() &&
              narrow_gradients.is_guarded();
  if (!good) puts("written outside of a tensor");
  std::vector<float> dweight(size);
  for (int b = 0; b < p.batch; ++b) {
    for (int c = 0; c < p.channels; ++c) {
      const int head = c / width;
      const auto inside = [&](int channel) { return channel >= head * width && channel < (head + 1) * width; };
      for (int row = 0; row < p.tokens; ++row) {
        float sum = has_bias ? wide.get(head * p.context + row) : 0.0f, back = 0.0f;
        if (has_residual) sum += residual.at(b, row, c);
        for (int tap = 0; tap < p.taps; ++tap) {
          const int shift = tap - (p.taps - 1) / 2;
          for (int k = 0; k <= row && inside(c + shift); ++k) {
            const float value = x.at(b, k, c + shift);
            sum += weight(head, tap, row, k) * value;
            dweight[(static_cast<int64_t>(head * p.taps + tap) * p.context + row) * p.context + k] += dy.at(b, row, c) * value;
          }
          for (int i = row; i < p.tokens && inside(c - shift); ++i) back += weight(head, tap, i, row) * dy.at(b, i, c - shift);
        }
        const int64_t place = (static_cast<int64_t>(b) * p.tokens + row) * p.channels + c;
        good = good && check("y", place, y.get(place), __half2float(__float2half_rn(sum)));
        good = good && check("dx", place, dx.get(place), __half2float(__float2half_rn(back)));
      }
    }
  }
  for (int64_t i = 0; i < size && good; ++i) {
    good = wide_gradient ? check("dweight", i, wide_gradients.get(i), dweight[i])
                         : check("dweight", i, narrow_gradients.get(i), __half2float(__float2half_rn(dweight[i])));
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  emulator::random_bits.seed(atoi(arguments[1]));
  for (int left = atoi(arguments[2]); left > 0; --left) {
    if (!run_case()) return 1;
  }
  return 0;
}
