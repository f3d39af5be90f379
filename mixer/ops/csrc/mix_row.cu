// Generation's product, one new token of each sample: y = bias + residual + sum_{j <= position} W[position, j] x_j, where the
// earlier x_j lie in the memory and the new one, which is written there too, in x.
//
// The time is that of reading the memory once. A block owns some channels of one sample and head, and reads them of every
// token up to the position, which it finds in the device's memory: a captured graph goes on from wherever that says. Few
// samples get narrow blocks, down to one 32-byte sector of a token, so that no two blocks share a sum: one launch, no
// workspace, and the same bits each time.
//
// On Hopper the kernel may be started while the one before it in the stream ends (programmatic dependent launch), and lets the
// next one do so: both wait, on the device, for what came before. Until then it has the L2 cache fetch what it will read first
// (dev/cuda/LOG.md).
//
// A position outside the memory gives NaN and writes nothing.
#include <type_traits>

#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256, kMostThreads = 1024;  // of a block; the most where blocks are few
constexpr int kLeastAcross = 2, kMostAcross = 32;   // threads side by side on a token's channels
constexpr int kAhead = 4;                           // tokens that a thread has on their way from memory at a time
constexpr int kVectorBytes = 16;
constexpr int kMostSums = kThreads / kWarp * kMostAcross * (kVectorBytes / 2);  // blocks of more threads are kLeastAcross wide

// Some channels of a token as they come from memory: 16 bytes, or one channel where rows do not start on 16 bytes. They are
// taken apart only when they are multiplied: before that the next loads would wait for this one. Of one channel it is the bits:
// below compute capability 8.0, CUDA 12.0 has no load of a bf16 around the cache.
template <typename Element>
using Bits = std::conditional_t<sizeof(Element) == 2, unsigned short, unsigned int>;
template <typename Element, int kVector>
using Vector = std::conditional_t<kVector == 1, Bits<Element>, uint4>;

template <typename Element, int kVector>
__device__ __forceinline__ void add_product(float* sum, float factor, const Vector<Element, kVector>& vector) {
  const Element* values = reinterpret_cast<const Element*>(&vector);
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum[k] += factor * to_float(values[k]);
}

#ifdef MIXER_HOPPER
__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
#endif

// Blocks: (batch, heads, slices); a slice is `across` vectors of a head's channels. Threads: (rows, across).
template <typename Element, typename Weight, int kVector>
__global__ void __launch_bounds__(kMostThreads) mix_row_kernel(const TriangularConvParams params, int across, int slices) {
  using Read = Vector<Element, kVector>;
  __shared__ float sums[kMostSums];
  const int width = params.channels / params.heads;  // channels of a head
  const int slice = blockIdx.x % slices;
  const int head = blockIdx.x / slices % params.heads;
  const int64_t sample = blockIdx.x / slices / params.heads;
  const int rows = blockDim.x / across;  // tokens that the block reads at a time
  const int row = threadIdx.x / across;
  const int channel = (slice * across + threadIdx.x % across) * kVector;

  const int64_t* positions = static_cast<const int64_t*>(params.positions) + sample * params.positions_stride;
  const Weight* weights = static_cast<const Weight*>(params.weight) + static_cast<int64_t>(head) * params.context * params.context;
  Element* memory = static_cast<Element*>(params.memory) + sample * params.memory_batch_stride +
                    head * params.memory_head_stride + channel;
#ifdef MIXER_HOPPER
  // A position that is read before the wait may be an old one: then other lines are fetched for nothing. It is read past the L1
  // cache, where it would stay.
  const int64_t soon = __ldcg(positions);
  if (soon >= 0 && soon < params.tokens && channel < width) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int64_t token = row + ahead * rows;
      if (token >= soon) break;
      prefetch(memory + token * width);
      prefetch(weights + soon * params.context + token);
    }
  }
  // The other way round, the next kernel could start before the one before this has ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int64_t position = *positions;
  const bool exists = position >= 0 && position < params.tokens;
  const int earlier = exists && channel < width ? static_cast<int>(position) : 0;
  const Weight* weight = weights + (exists ? position : 0) * params.context;

  float sum[kVector] = {};
  for (int first = row; first < earlier; first += rows * kAhead) {
    Read vectors[kAhead];
    Weight factors[kAhead];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int token = min(first + ahead * rows, earlier - 1);  // without a branch, so that all loads are under way at once
      vectors[ahead] = __ldcs(reinterpret_cast<const Read*>(memory + static_cast<int64_t>(token) * width));
      factors[ahead] = weight[token];
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (first + ahead * rows < earlier) add_product<Element, kVector>(sum, to_float(factors[ahead]), vectors[ahead]);
    }
  }
  if (row == 0 && exists && channel < width) {
    const Element* x = static_cast<const Element*>(params.x) + sample * params.x_batch_stride +
                       static_cast<int64_t>(head) * width + channel;
    const Read vector = *reinterpret_cast<const Read*>(x);
    *reinterpret_cast<Read*>(memory + position * width) = vector;
    add_product<Element, kVector>(sum, to_float(weight[position]), vector);
  }

  // The channel that this thread finishes. What is added to it is asked for now, so that its way from memory takes no time of
  // its own.
  const int channels = across * kVector;
  const int mine = slice * channels + threadIdx.x;
  const int64_t place = static_cast<int64_t>(head) * width + mine;
  const bool finishes = threadIdx.x < channels && mine < width;
  float bias = 0;
  Element residual = from_float<Element>(0.0f);
  if (finishes && exists && params.bias != nullptr) {
    bias = load_float(params.bias, params.bias_dtype, static_cast<int64_t>(head) * params.context + position);
  }
  if (finishes && params.residual != nullptr) {
    residual = static_cast<const Element*>(params.residual)[sample * params.residual_batch_stride + place];
  }

  // The rows of a warp, then the warps, each in a fixed order.
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    for (int apart = across; apart < kWarp; apart *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], apart);
  }
  const int lane = threadIdx.x % kWarp;
  if (lane < across) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) sums[threadIdx.x / kWarp * channels + lane * kVector + k] = sum[k];
  }
  __syncthreads();
  if (!finishes) return;
  float total = 0;
#pragma unroll 8
  for (int warp = 0; warp < blockDim.x / kWarp; ++warp) total += sums[warp * channels + threadIdx.x];
  total += bias;
  total += to_float(residual);
  static_cast<Element*>(params.y)[sample * params.channels + place] = from_float<Element>(exists ? total : nanf(""));
}

// Whether every row of the memory and of x starts on 16 bytes.
bool is_aligned(const TriangularConvParams& params, int vector) {
  const int64_t together = params.memory_batch_stride | params.memory_head_stride | params.x_batch_stride |
                           static_cast<int64_t>(params.channels / params.heads);
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(params.memory) | reinterpret_cast<uintptr_t>(params.x);
  return together % vector == 0 && addresses % kVectorBytes == 0;  // a vector's size is a power of two
}

template <typename Element, typename Weight, int kVector>
cudaError_t launch(const TriangularConvParams& params) {
  const int64_t pairs = static_cast<int64_t>(params.batch) * params.heads;
  const int64_t vectors = params.channels / params.heads / kVector;
  const auto blocks = [&](int across) { return pairs * ceil_div(vectors, across); };
  const int64_t wanted = 2 * static_cast<int64_t>(params.processors);
  int across = kMostAcross;
  while (across > kLeastAcross && (across / 2 >= vectors || blocks(across) < wanted)) across /= 2;
  const int threads = across == kLeastAcross && blocks(across) < wanted ? kMostThreads : kThreads;
  if (blocks(across) > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const unsigned grid = static_cast<unsigned>(blocks(across));
  const int slices = static_cast<int>(ceil_div(vectors, across));
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
#ifdef MIXER_HOPPER
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, mix_row_kernel<Element, Weight, kVector>, params, across, slices);
#else
  mix_row_kernel<Element, Weight, kVector><<<grid, threads, 0, stream>>>(params, across, slices);
  return cudaGetLastError();
#endif
}

}  // namespace

cudaError_t mix_row(const TriangularConvParams& params) {
  return dispatch_dtype(params.dtype, [&](auto element) {
    using Element = decltype(element);
    constexpr int kVector = kVectorBytes / sizeof(Element);
    const bool aligned = is_aligned(params, kVector);
    if (params.weight_dtype == params.dtype) {
      return aligned ? launch<Element, Element, kVector>(params) : launch<Element, Element, 1>(params);
    }
    if (params.weight_dtype != MIXER_FLOAT32) return cudaErrorInvalidValue;
    return aligned ? launch<Element, float, kVector>(params) : launch<Element, float, 1>(params);
  });
}
