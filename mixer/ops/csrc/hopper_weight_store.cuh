// How the weight gradient gets to memory, but for sums that are complete: the second kernel, which adds the pieces, and the zeros.
#pragma once

#include "hopper_weight_tile.cuh"

namespace hopper {

// Writes two neighbours, at once where they lie on a multiple of their size.
template <typename Gradient>
__device__ __forceinline__ void store_two(Gradient* place, bool is_aligned, float first, float second) {
  if (is_aligned) {
    struct alignas(2 * sizeof(Gradient)) Pair { Gradient first, second; };
    *reinterpret_cast<Pair*>(place) = {from_float<Gradient>(first), from_float<Gradient>(second)};
  } else {
    place[0] = from_float<Gradient>(first);
    place[1] = from_float<Gradient>(second);
  }
}

// Writes two columns of a row; zeros above the diagonal and beyond the tokens, whatever the sum: it may be zero times something
// infinite.
template <typename Gradient>
__device__ __forceinline__ void store_pair(Gradient* matrix, int context, int tokens, int row, int column, float2 sum) {
  if (row >= context || column >= context) return;
  Gradient* place = matrix + static_cast<int64_t>(row) * context + column;
  const float first = column <= row && row < tokens ? sum.x : 0.0f;
  const float second = column + 1 <= row && row < tokens ? sum.y : 0.0f;
  if (column + 1 < context) {
    store_two(place, context % 2 == 0, first, second);
  } else {
    *place = from_float<Gradient>(first);
  }
}

__device__ __forceinline__ void store_float(void* values, int dtype, int64_t index, float value) {
  if (dtype == MIXER_FLOAT16) {
    static_cast<__half*>(values)[index] = from_float<__half>(value);
  } else if (dtype == MIXER_BFLOAT16) {
    static_cast<__nv_bfloat16*>(values)[index] = from_float<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(values)[index] = value;
  }
}

// Two sums at (row, column) of a tile.
__device__ __forceinline__ void store_gradient(const WeightArguments& arguments, const Job& job, const BlockTile& tile,
                                               const Place& place, int below, float2 sum) {
  const int context = arguments.context, tokens = arguments.plan.tokens;
  const int row = tile.first_row + place.row + below, column = tile.first_column + place.column;
  if (place.is_bias) {  // all columns are the same
    const bool brings_bias = arguments.dbias != nullptr && job.matrix % arguments.plan.taps == 0;
    if (brings_bias && place.column % 8 == 0 && row < tokens) {
      const int64_t head = job.matrix / arguments.plan.taps;
      store_float(arguments.dbias, arguments.gradient_dtype, head * context + row, sum.x);
    }
    return;
  }
  const int64_t offset = static_cast<int64_t>(job.matrix) * context * context;
  if (arguments.gradient_dtype == MIXER_FLOAT32) {
    store_pair(static_cast<float*>(arguments.dweight) + offset, context, tokens, row, column, sum);
  } else if (arguments.gradient_dtype == MIXER_FLOAT16) {
    store_pair(static_cast<__half*>(arguments.dweight) + offset, context, tokens, row, column, sum);
  } else {
    store_pair(static_cast<__nv_bfloat16*>(arguments.dweight) + offset, context, tokens, row, column, sum);
  }
}

constexpr int kFinishBlocks = 2 * kMostGroups;  // of one block's tile

// Adds the sums of the pieces of a job, two in a thread. Blocks: (jobs with slots or left over, 4 blocks, kFinishBlocks).
static __global__ void __launch_bounds__(kMultiplyingThreads) finish_kernel(const __grid_constant__ WeightArguments arguments) {
  const WeightPlan& plan = arguments.plan;
  const int group = blockIdx.x % kFinishBlocks / 2;
  const int rank = blockIdx.x / kFinishBlocks % kJobBlocks;
  const int number = blockIdx.x / kFinishBlocks / kJobBlocks;
  const int rest = number - plan.whole_slots();
  const Job job = rest >= 0 ? rest_job(plan, rest)
                  : number < plan.whole[kTriangle] ? Job(plan, kTriangle, number)
                                                   : Job(plan, kLone, number - plan.whole[kTriangle]);
  const int first_slot = rest >= 0 ? plan.first_slot[rest] : number;
  const int slots = rest >= 0 ? plan.slots_of[rest] : 1;
  const BlockTile tile(plan, job, rank);
  const int pair = blockIdx.x % 2 * kMultiplyingThreads + threadIdx.x;  // two in each multiplying thread
  const Place place(tile, pair / 2, group);
  if (slots == 0 || place.row / kBox >= tile.row_blocks || (!tile.is_diagonal && group >= 32)) return;
  if (job.kind == kLone && rank > 0) return;

  // The four blocks of a lone tile's cluster have a part of the same sums each.
  const int parts = job.kind == kLone ? slots * kJobBlocks : slots;
  const int64_t stride = (job.kind == kLone ? 1 : kJobBlocks) * (kSlotFloats / 2);
  const float2* partial = reinterpret_cast<const float2*>(arguments.partials) +
                          (static_cast<int64_t>(first_slot) * kJobBlocks + rank) * (kSlotFloats / 2) +
                          group * (2 * kMultiplyingThreads) + pair;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 16
  for (int part = 0; part < parts; ++part) {
    const float2 value = partial[part * stride];
    sum.x += value.x;
    sum.y += value.y;
  }
  store_gradient(arguments, job, tile, place, pair % 2 * 8, sum);
}

// What no row block covers: columns right of each one's last 64, rows below the last one. `warp` of `warps` in the grid.
template <typename Gradient>
__device__ __forceinline__ void write_zeros(const WeightArguments& arguments, int warp, int warps) {
  const int lane = threadIdx.x % 32;
  const int context = arguments.context, tokens = arguments.plan.tokens;
  const int64_t rows = static_cast<int64_t>(arguments.matrices) * context;
  const int row_blocks = (tokens + kBox - 1) / kBox;
  const bool wide = context * sizeof(Gradient) % 16 == 0;
  constexpr int kWide = 16 / sizeof(Gradient);
  for (int64_t matrix_row = warp; matrix_row < rows; matrix_row += warps) {
    const int row = static_cast<int>(matrix_row % context);
    const int first = row / kBox < row_blocks ? (row / kBox + 1) * kBox : 0;
    Gradient* values = static_cast<Gradient*>(arguments.dweight) + matrix_row * context;
    if (wide) {
      for (int column = first + lane * kWide; column < context; column += 32 * kWide) {
        *reinterpret_cast<uint4*>(values + column) = make_uint4(0, 0, 0, 0);
      }
    } else {
      for (int column = first + lane; column < context; column += 32) values[column] = from_float<Gradient>(0.0f);
    }
    const int64_t matrix = matrix_row / context;
    if (lane == 0 && arguments.dbias != nullptr && row >= tokens && matrix % arguments.plan.taps == 0) {
      store_float(arguments.dbias, arguments.gradient_dtype, matrix / arguments.plan.taps * context + row, 0.0f);
    }
  }
}

__device__ __forceinline__ void write_zeros(const WeightArguments& arguments, int warp, int warps) {
  if (arguments.gradient_dtype == MIXER_FLOAT32) {
    write_zeros<float>(arguments, warp, warps);
  } else {
    write_zeros<__half>(arguments, warp, warps);  // a zero is a zero in both 16-bit types
  }
}

}  // namespace hopper
