// The gradient with respect to the input: dx = W^T dy. No transposed copy of W is made.
#include "versions.cuh"

// The walk of a tile starts at the diagonal and ends at the last token, so the first row tile is
// the heaviest. W's tile lies with k as its row.
template <int kRows, int kColumns, int kDepth>
struct GradInput : ActivationTile<kRows, kColumns> {
  using Base = ActivationTile<kRows, kColumns>;
  using Base::a;
  static constexpr bool kLeftByK = true, kRightByK = true;
  int row0;

  __device__ __forceinline__ explicit GradInput(const Arguments& a) : Base(a) {
    row0 = Base::rank * kRows;
  }
  __device__ int steps() const { return ceil_div(a.tokens - row0, kDepth); }
  __device__ Factor left(int step) const {
    return {{a.weight, a.tokens, a.columns}, row0 + step * kDepth, row0, 0};
  }
  __device__ Factor right(int step) const {
    return {sample_of(a.dy, a, Base::sample), row0 + step * kDepth, Base::channel0, Base::sample};
  }
  __device__ bool skips(int step, int row, int) const { return step * kDepth + kDepth - 1 < row; }
  // (Rows beyond the last token have no step of their own: the last step then serves them, with
  // zeros.)
  __device__ Span span(int consumer) const { return {min(consumer, steps() - 1), steps()}; }

  __device__ void store(int row, int column, float sum) const {
    Base::put(row0 + row, Base::channel0 + column, sum);
  }
  __device__ void store_pair(int row, int column, float first, float second) const {
    Base::put_pair(row0 + row, Base::channel0 + column, pack_pair(first, second));
  }
  __device__ void store_warpgroup(const float (&sum)[kColumns / 2], int consumer,
                                  unsigned char* boxes, const CUtensorMap& map) const {
    store_boxes<kColumns>(
        sum, boxes, map, consumer, row0 + consumer * kBox, Base::channel0, Base::sample,
        [](int, int, float first, float second) { return pack_pair(first, second); });
  }

  static CUtensorMap right_map(const Arguments& a) {
    return tensor_map(a.dy, a.batch, a.tokens, a.channels);
  }
};

// ======================================================================================= version 1
// As forward, one thread for each element, from the diagonal to the last token.

__global__ void naive_kernel(const Arguments a) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int token = blockIdx.y * blockDim.y + threadIdx.y;
  if (channel >= a.channels || token >= a.tokens) return;
  const size_t sample = static_cast<size_t>(blockIdx.z) * a.tokens * a.channels;
  const bf16* dy = a.dy + sample + channel;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = token; k < a.tokens; ++k) {
    sum += __bfloat162float(a.weight[static_cast<size_t>(k) * a.columns + token]) *
           __bfloat162float(dy[static_cast<size_t>(k) * a.channels]);
  }
  const size_t index = sample + static_cast<size_t>(token) * a.channels + channel;
  static_cast<bf16*>(a.output)[index] = __float2bfloat16_rn(sum);
}

Configuration naive(int across, int down) {
  return {1, text(across, " channels x ", down, " tokens a block"), [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, across), ceil_div(a.tokens, down), a.batch);
            return launch(naive_kernel, blocks, dim3(across, down), 0, a);
          }};
}

std::vector<Configuration> make_configurations() {
  return ladder<GradInput>({naive(32, 8), naive(64, 4), naive(256, 1)});
}
