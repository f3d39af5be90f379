// y = W x + bias + residual (kTransposed = false) and dx = W^T dy (kTransposed = true). One kernel
// does both: transposing only flips the triangle. Row tile [r, r + 64) of y reads tokens [0, r +
// 64); row tile [r, r + 64) of dx reads tokens [r, tokens).
#pragma once

#include "kernels.h"
#include "portable_tile.cuh"

namespace portable {

// left[k][row] = W[row, k], or W[k, row] when transposed; zero beyond `tokens`.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void load_weight(Slices& slices, const Element* weight, int row0,
                                            int depth0, int tokens, int columns) {
  // Neighbouring threads read neighbouring columns of W, for coalescing: along k, or along the rows
  // of the result when transposed.
  constexpr int kAcross = kTransposed ? kTile : kDepth;
  constexpr int kStep = kThreads / kAcross;
  const int across = threadIdx.x % kAcross;
  const int column = (kTransposed ? row0 : depth0) + across;
#pragma unroll
  for (int down = threadIdx.x / kAcross; down < kTile * kDepth / kAcross; down += kStep) {
    const int row = (kTransposed ? depth0 : row0) + down;
    float value = 0.0f;
    if (row < tokens && column < tokens)
      value = to_float(weight[static_cast<int64_t>(row) * columns + column]);
    if (kTransposed) {
      slices.left[down][across] = value;
    } else {
      slices.left[across][down] = value;
    }
  }
}

// right[k][column] = input[k, column + shift]; zero beyond `tokens` and outside the head.
template <typename Element>
__device__ __forceinline__ void load_input(Slices& slices, const Element* input,
                                           int64_t token_stride, int depth0, int tokens,
                                           int channel0, int width) {
  const int across = threadIdx.x % kTile;
  const int channel = channel0 + across;
  const bool inside = channel >= 0 && channel < width;
#pragma unroll
  for (int down = threadIdx.x / kTile; down < kDepth; down += kThreads / kTile) {
    float value = 0.0f;
    if (inside && depth0 + down < tokens)
      value = to_float(input[(depth0 + down) * token_stride + channel]);
    slices.right[down][across] = value;
  }
}

// Blocks, fastest index first: column tiles, batch, heads, row tiles. The row tiles with the
// longest sums start first.
template <typename Element, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    product_kernel(const TriangularConvParams params) {
  __shared__ Slices slices;
  const int tokens = params.tokens;
  const int width = params.channels / params.heads;  // channels of a head
  const int row_tiles = static_cast<int>(ceil_div(tokens, kTile));
  const int column_tiles = static_cast<int>(ceil_div(width, kTile));
  int block = blockIdx.x;
  const int column0 = block % column_tiles * kTile;
  block /= column_tiles;
  const int sample = block % params.batch;
  block /= params.batch;
  const int head = block % params.heads;
  block /= params.heads;
  const int row0 = (kTransposed ? block : row_tiles - 1 - block) * kTile;

  const int64_t batch_stride = kTransposed ? params.dy_batch_stride : params.x_batch_stride;
  const int64_t token_stride = kTransposed ? params.dy_token_stride : params.x_token_stride;
  const Element* input = static_cast<const Element*>(kTransposed ? params.dy : params.x) +
                         sample * batch_stride + static_cast<int64_t>(head) * width;
  const int first = kTransposed ? row0 : 0;
  const int last = kTransposed ? tokens : min(row0 + kTile, tokens);

  Accumulator sum;
  for (int tap = 0; tap < params.taps; ++tap) {
    const Element* weight =
        static_cast<const Element*>(params.packed) +
        (static_cast<int64_t>(head) * params.taps + tap) * tokens * params.columns;
    const int shift = kTransposed ? -tap_shift(tap, params.taps) : tap_shift(tap, params.taps);
    for (int depth0 = first; depth0 < last; depth0 += kDepth) {
      __syncthreads();  // all threads have read the slices of the previous step
      load_weight<Element, kTransposed>(slices, weight, row0, depth0, tokens, params.columns);
      load_input(slices, input, token_stride, depth0, tokens, column0 + shift, width);
      __syncthreads();
      const bool on_diagonal = kTransposed ? depth0 < row0 + kTile - 1 : depth0 + kDepth - 1 > row0;
      if (on_diagonal) {
        const KeepTriangle<kTransposed> keep{row0 + thread_row(), depth0};
        multiply(slices, thread_row(), thread_column(), sum, keep);
      } else {
        multiply(slices, thread_row(), thread_column(), sum, KeepAll());
      }
      if ((depth0 + kDepth) % kChunk == 0) sum.close_chunk();
    }
    // done here too, so that the sum of a row does not depend on how many tokens follow it
    sum.close_chunk();
  }

#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = row0 + thread_row() + r;
    if (row >= tokens) break;
    const bool has_bias = !kTransposed && params.bias != nullptr;
    const float bias = has_bias ? load_float(params.bias, params.bias_dtype,
                                             static_cast<int64_t>(head) * params.context + row)
                                : 0.0f;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const int channel = column0 + thread_column() + c;
      if (channel >= width) break;
      const int64_t position = static_cast<int64_t>(head) * width + channel;
      float value = sum.total[r][c] + bias;
      if (!kTransposed && params.residual != nullptr) {
        const Element* residual = static_cast<const Element*>(params.residual);
        value += to_float(residual[sample * params.residual_batch_stride +
                                   row * params.residual_token_stride + position]);
      }
      Element* output = static_cast<Element*>(kTransposed ? params.dx : params.y);
      output[(static_cast<int64_t>(sample) * tokens + row) * params.channels + position] =
          from_float<Element>(value);
    }
  }
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t tiles =
      ceil_div(params.tokens, kTile) * ceil_div(params.channels / params.heads, kTile);
  const int64_t blocks = tiles * params.batch * params.heads;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    product_kernel<decltype(element), kTransposed>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace portable
