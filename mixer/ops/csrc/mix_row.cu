// The product for generation, one new token per sample: y = bias + residual + sum_{j <= position}
// W[position, j] x_j. The earlier x_j lie in the memory; the new one is x, which is also written to
// the memory. By lag, W[position, j] is lags[position - j], and the memory is a ring: x_j lies in
// column j modulo its columns.
//
// The time is that of reading the memory once. A block handles some channels of one sample and head
// and reads them for every token that has a weight. It reads the position from device memory, so a
// captured graph can be replayed for any position. With few samples the blocks are narrow, down to
// one 32-byte sector of a token. On Hopper clusters are used instead: their blocks split the tokens
// among themselves and read whole cache lines, and the first block adds up the partial sums that
// the others send it. One launch, no workspace, and results that are reproducible bit for bit.
//
// On Hopper the kernel may start while the previous kernel in the stream is ending (programmatic
// dependent launch), and it lets the next kernel do the same. Both wait on the device for the work
// before them.
//
// A negative position, and with a full weight one outside the memory, gives NaN, and nothing is
// written to the memory.
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kWarp = 32;
#ifdef MIXER_HOPPER
constexpr int kMostThreads = 512, kLeastAcross = 8, kMostSplits = 8;
#else
constexpr int kMostThreads = 1024, kLeastAcross = 2, kMostSplits = 1;
#endif
constexpr int kThreads = 256;    // per block; kMostThreads if there are few blocks
// threads side by side along a token's channels; kLeastAcross if there are few blocks
constexpr int kMostAcross = 32;
constexpr int kAhead = 4;        // loads in flight per thread, in tokens
constexpr int kLeastLags = 64;   // of each block of a cluster
constexpr int kVectorBytes = 16;
// blocks with more threads are kLeastAcross wide
constexpr int kMostSums = kThreads / kWarp * kMostAcross * (kVectorBytes / 2);

// Some channels of a token as loaded from memory are 16 bytes. They are unpacked only when they are
// multiplied; unpacking earlier would make the next loads wait for this one.
template <typename Element>
__device__ __forceinline__ void add_product(float* sum, float factor, const uint4& vector) {
  constexpr int kVector = kVectorBytes / sizeof(Element);
  const Element* values = reinterpret_cast<const Element*>(&vector);
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum[k] += factor * float(values[k]);
}

#ifdef MIXER_HOPPER
// Each block of a cluster arrives, then waits for all: writes before the arrival are visible after.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the same place in the shared memory of the cluster's first block.
__device__ __forceinline__ void send_to_first(float* place, float value) {
  const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(place));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(own));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
#endif

// Blocks: (batch, heads, slices, splits). A slice is `across` vectors of a head's channels; a split
// is a share of the tokens; the splits of a slice form a cluster. Threads: (rows, across).
template <typename Element, typename Weight>
__global__ void __launch_bounds__(kMostThreads, 1)
    mix_row_kernel(const TriangularConvParams params, int across, int slices, int splits) {
  constexpr int kVector = kVectorBytes / sizeof(Element);
  __shared__ float sums[kMostSums];
#ifdef MIXER_HOPPER
  __shared__ float sent[kMostSplits][kLeastAcross * kVectorBytes / 2];
  if (splits > 1) arrive_cluster();  // this block has started, so others can send to it
  // In the opposite order, the next kernel could start before the previous one has ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int width = params.channels / params.heads;  // channels of a head
  const int split = blockIdx.x % splits;
  const int group = blockIdx.x / splits;
  const int slice = group % slices;
  const int head = group / slices % params.heads;
  const int64_t sample = group / slices / params.heads;
  const int rows = blockDim.x / across;  // tokens that the block reads at a time
  const int row = threadIdx.x / across;
  const int channel = (slice * across + threadIdx.x % across) * kVector;

  const int64_t position =
      static_cast<const int64_t*>(params.positions)[sample * params.positions_stride];
  const bool by_lag = params.window > 0;
  const bool exists = position >= 0 && (by_lag || position < params.tokens);
  const int own = exists ? static_cast<int>(position % params.tokens) : 0;  // column of x
  // The earlier tokens that are read: the first ones, or by lag from the nearest on.
  const int64_t most = by_lag ? min(params.window, params.tokens) - 1 : params.tokens;
  const int earlier = exists && channel < width ? static_cast<int>(min(position, most)) : 0;
  const int share = ceil_div(earlier, splits), end = min(earlier, (split + 1) * share);
  const int64_t row_of_weight =
      by_lag ? static_cast<int64_t>(head) * params.window
             : (static_cast<int64_t>(head) * params.context + own) * params.context;
  const Weight* weight = static_cast<const Weight*>(params.weight) + row_of_weight;
  const Weight own_weight = weight[by_lag ? 0 : own];
  Element* memory = static_cast<Element*>(params.memory) + sample * params.memory_batch_stride +
                    head * params.memory_head_stride + channel;

  float sum[kVector] = {};
  for (int first = split * share + row; first < end; first += rows * kAhead) {
    uint4 vectors[kAhead];
    Weight factors[kAhead];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      // no branch, so that all loads are in flight at once
      const int token = min(first + ahead * rows, end - 1);
      int column = token;
      if (by_lag) column = own - 1 - token < 0 ? own - 1 - token + params.tokens : own - 1 - token;
      vectors[ahead] =
          __ldcs(reinterpret_cast<const uint4*>(memory + static_cast<int64_t>(column) * width));
      factors[ahead] = weight[by_lag ? token + 1 : token];
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (first + ahead * rows < end)
        add_product<Element>(sum, float(factors[ahead]), vectors[ahead]);
    }
  }
  if (split == 0 && row == 0 && exists && channel < width) {
    const Element* x = static_cast<const Element*>(params.x) + sample * params.x_batch_stride +
                       static_cast<int64_t>(head) * width + channel;
    const uint4 vector = *reinterpret_cast<const uint4*>(x);
    *reinterpret_cast<uint4*>(memory + static_cast<int64_t>(own) * width) = vector;
    add_product<Element>(sum, float(own_weight), vector);
  }

  // The channel that this thread finishes. Its bias and residual are requested now, so that their
  // latency is hidden.
  const int channels = across * kVector;
  const int mine = slice * channels + threadIdx.x;
  const int64_t place = static_cast<int64_t>(head) * width + mine;
  const bool adds = threadIdx.x < channels && mine < width, finishes = adds && split == 0;
  float bias = 0;
  Element residual = Element(0.0f);
  if (finishes && exists && params.bias != nullptr) {
    const int64_t last = params.context - 1;  // whose bias later tokens have
    bias = load_float(params.bias, params.weight_dtype,
                      static_cast<int64_t>(head) * params.context + min(position, last));
  }
  if (finishes && params.residual != nullptr) {
    residual =
        static_cast<const Element*>(params.residual)[sample * params.residual_batch_stride + place];
  }

  // Adds the rows of a warp, then the warps, each in a fixed order.
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    for (int apart = across; apart < kWarp; apart *= 2)
      sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], apart);
  }
  const int lane = threadIdx.x % kWarp;
  if (lane < across) {
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      sums[threadIdx.x / kWarp * channels + lane * kVector + k] = sum[k];
  }
  __syncthreads();
  float total = 0;
  if (adds) {
#pragma unroll 8
    for (int warp = 0; warp < blockDim.x / kWarp; ++warp)
      total += sums[warp * channels + threadIdx.x];
  }
#ifdef MIXER_HOPPER
  if (splits > 1) {
    wait_cluster();
    if (adds && split > 0) send_to_first(&sent[split][threadIdx.x], total);
    arrive_cluster();
    wait_cluster();
    for (int other = 1; finishes && other < splits; ++other) total += sent[other][threadIdx.x];
  }
#endif
  if (!finishes) return;
  total += bias;
  total += float(residual);
  static_cast<Element*>(params.y)[sample * params.channels + place] =
      Element(exists ? total : nanf(""));
}

template <typename Element, typename Weight>
cudaError_t launch_row(const TriangularConvParams& params) {
  const int64_t pairs = static_cast<int64_t>(params.batch) * params.heads;
  const int64_t vectors = params.channels / params.heads * sizeof(Element) / kVectorBytes;
  const auto blocks = [&](int across) { return pairs * ceil_div(vectors, across); };
  const int64_t wanted = 2 * static_cast<int64_t>(params.processors);
  int across = kMostAcross;
  while (across > kLeastAcross && (across / 2 >= vectors || blocks(across) < wanted)) across /= 2;
  int splits = 1;
  while (across == kLeastAcross && splits < kMostSplits &&
         2 * splits * blocks(across) <= params.processors &&
         (params.window == 0 || 2 * splits * kLeastLags <= params.window))
    splits *= 2;
  const int threads = across == kLeastAcross && blocks(across) < wanted ? kMostThreads : kThreads;
  const int64_t grid = blocks(across) * splits;
  const int slices = static_cast<int>(ceil_div(vectors, across));
#ifdef MIXER_HOPPER
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = splits;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = threads;
  config.stream = static_cast<cudaStream_t>(params.stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, mix_row_kernel<Element, Weight>, params, across, slices,
                            splits);
#else
  return launch(params, mix_row_kernel<Element, Weight>, grid, threads, 0, params, across, slices,
                splits);
#endif
}

}  // namespace

cudaError_t mix_row(const TriangularConvParams& params) {
  return with_dtypes(params, [&](auto element, auto weight) {
    return launch_row<decltype(element), decltype(weight)>(params);
  });
}
