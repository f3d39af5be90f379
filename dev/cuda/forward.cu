// The forward product: y = W x, with bias and residual if they are given.
#include "versions.cuh"

// The walk of a tile starts at token 0 and ends at the diagonal, so the last row tile is the
// heaviest.
template <int kRows, int kColumns, int kDepth>
struct Forward : ActivationTile<kRows, kColumns> {
  using Base = ActivationTile<kRows, kColumns>;
  using Base::a;
  static constexpr bool kLeftByK = false, kRightByK = true;
  int row0;

  __device__ __forceinline__ explicit Forward(const Arguments& a) : Base(a) {
    row0 = (ceil_div(a.tokens, kRows) - 1 - Base::rank) * kRows;
  }
  __device__ int steps() const { return ceil_div(min(row0 + kRows, a.tokens), kDepth); }
  __device__ Factor left(int step) const {
    return {{a.weight, a.tokens, a.columns}, row0, step * kDepth, 0};
  }
  __device__ Factor right(int step) const {
    return {sample_of(a.x, a, Base::sample), step * kDepth, Base::channel0, Base::sample};
  }
  __device__ bool skips(int step, int row, int rows) const {
    return step * kDepth > row0 + row + rows - 1;
  }
  // (Rows beyond the last token have no step of their own: the last step then serves them, with
  // zeros.)
  __device__ Span span(int consumer) const {
    return {0, min(steps(), row0 / kBox + consumer + 1)};
  }

  // The value with bias and residual.
  __device__ float finished(int token, int channel, float sum) const {
    if (!Base::inside(token, channel)) return sum;
    if (a.bias != nullptr) sum += a.bias[token];
    if (a.residual != nullptr) sum += __bfloat162float(a.residual[Base::index(token, channel)]);
    return sum;
  }
  __device__ uint32_t finished_pair(int token, int channel, float first, float second) const {
    return pack_pair(finished(token, channel, first), finished(token, channel + 1, second));
  }
  __device__ void store(int row, int column, float sum) const {
    const int token = row0 + row, channel = Base::channel0 + column;
    Base::put(token, channel, finished(token, channel, sum));
  }
  __device__ void store_pair(int row, int column, float first, float second) const {
    const int token = row0 + row, channel = Base::channel0 + column;
    Base::put_pair(token, channel, finished_pair(token, channel, first, second));
  }
  __device__ void store_warpgroup(const float (&sum)[kColumns / 2], int consumer,
                                  unsigned char* boxes, const CUtensorMap& map) const {
    const int token0 = row0 + consumer * kBox;
    store_boxes<kColumns>(sum, boxes, map, consumer, token0, Base::channel0, Base::sample,
                          [&](int row, int column, float first, float second) {
                            return finished_pair(token0 + row, Base::channel0 + column, first,
                                                 second);
                          });
  }

  static CUtensorMap right_map(const Arguments& a) {
    return tensor_map(a.x, a.batch, a.tokens, a.channels);
  }
};

// ======================================================================================= version 1
// One thread for each output element. Neighbouring threads take neighbouring channels, so their
// loads of x are next to each other in memory and W's element is one word for the whole warp. Half
// the work of the dense product is skipped from the start; what is slow is that every product
// fetches both of its factors.

__global__ void naive_kernel(const Arguments a) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int token = blockIdx.y * blockDim.y + threadIdx.y;
  if (channel >= a.channels || token >= a.tokens) return;
  const size_t sample = static_cast<size_t>(blockIdx.z) * a.tokens * a.channels;
  const bf16* weights = a.weight + static_cast<size_t>(token) * a.columns;
  const bf16* x = a.x + sample + channel;
  float sum = a.bias != nullptr ? a.bias[token] : 0.0f;
#pragma unroll 8
  for (int k = 0; k <= token; ++k) {
    sum += __bfloat162float(weights[k]) *
           __bfloat162float(x[static_cast<size_t>(k) * a.channels]);
  }
  const size_t index = sample + static_cast<size_t>(token) * a.channels + channel;
  if (a.residual != nullptr) sum += __bfloat162float(a.residual[index]);
  static_cast<bf16*>(a.output)[index] = __float2bfloat16_rn(sum);
}

Configuration naive(int across, int down) {
  return {1, text(across, " channels x ", down, " tokens a block"), [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, across), ceil_div(a.tokens, down), a.batch);
            return launch(naive_kernel, blocks, dim3(across, down), 0, a);
          }};
}

std::vector<Configuration> make_configurations() {
  return ladder<Forward>({naive(32, 8), naive(64, 4), naive(256, 1)});
}
