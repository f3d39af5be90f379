// dweight[h,k,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c + k - middle] for j <= i < tokens, exact zeros elsewhere,
// and dbias[h,i] = sum over batch and channels of dy[b,i,c], on Hopper's tensor cores.
//
// A cluster of four thread blocks computes a job of the plan (hopper_weight_plan.h). What several of its blocks need is
// loaded once, by one of them, and multicast; of a triangle of 512 rows each box of dy and x comes once. A thread block has
// 256 rows (dy, the left operand) and 128 columns (x), or a tile on the diagonal. Two of its warpgroups multiply, with two
// row blocks each, and a thread of the third one loads.
//
// Two runs agree bit for bit: where the sums of a job are cut into pieces, these go to the workspace, and a second kernel adds
// them in a fixed order.
//
// The bias gradient comes from the same products: in a stage, eight rows of ones follow the boxes of x, which lie there from the
// last to the first. The columns up to the diagonal, and with them the ones, are so next to each other for each row block of a
// tile on the diagonal. The zeros above the diagonal are written by warps that have nothing else to do.
#include <algorithm>

#include "hopper_maps.h"
#include "hopper_shift.cuh"
#include "hopper_weight_store.cuh"
#include "kernels.h"

namespace hopper {
namespace {

constexpr int kWeightThreads = (kWeightMultipliers + 1) * kWarpgroup;
constexpr int kWeightLoaderRegisters = 40;
constexpr int kWeightMultiplierRegisters = 232;
constexpr int kStages = 3;
constexpr int kOnesBytes = 8 * kBox * 2;
constexpr int kOnes = 2 * kTileBoxes;                    // box of a stage at which the ones lie: behind 4 of dy and 4 of x
constexpr int kStageBytes = kOnes * kBoxBytes + kOnesBytes;

using WeightRing = Ring<kStages, kJobBlocks, kWeightMultipliers>;

// One thread.
__device__ __forceinline__ void load_operands(const WeightArguments& arguments, char* stages, WeightRing& ring) {
  const WeightPlan& plan = arguments.plan;
  const int rank = cluster_rank(), cluster = blockIdx.x / kJobBlocks;
  const auto load = [&](char* box, const CUtensorMap* map, uint64_t* full, int chunk, int head, int token, int sample,
                        uint16_t blocks) {
    if (blocks == 1 << rank) {
      load_box(box, map, full, chunk * kBox, head, token, sample);
    } else {
      load_box_for(box, map, full, chunk * kBox, head, token, sample, blocks);
    }
  };
  RingPosition<kStages> at;
  for (int index = 0; index < Item::count(plan, cluster); ++index) {
    const Item item(plan, cluster, index);
    const BlockTile tile(plan, item.job, rank);
    const Loads loads(item.job, tile, rank);
    const int head = item.job.matrix / plan.taps, tap = item.job.matrix % plan.taps;
    const bool shifted = tap != middle_tap(plan.taps);
    const CUtensorMap* columns = shifted ? &arguments.shifted : &arguments.x;
    const int first_sample = shifted ? copy_of_tap(tap, plan.taps) * plan.batch : 0;
#pragma unroll 1
    for (int step = item.begin; step < item.end; step += item.stride, at.advance()) {
      const int depth = item.job.kind == kLone ? step * kJobBlocks + rank : step;
      const int sample = depth / plan.chunks, chunk = depth % plan.chunks;
      // Steps of a lone tile beyond the depth: outside of all tensors, which reads as zero.
      const int column_sample = depth < plan.depth() ? first_sample + sample : plan.batch * plan.taps;
      char* stage = stages + at.slot * kStageBytes;
      uint64_t* full = &ring.full[at.slot];
      barrier_wait(&ring.empty[at.slot], at.parity ^ 1);
      barrier_arrive_expect(full, tile.boxes() * kBoxBytes);
#pragma unroll 1
      for (int slot = loads.first_slot; slot < loads.end_slot; ++slot) {
        load(stage + (kTileBoxes + slot) * kBoxBytes, columns, full, chunk, head,
             tile.first_column + (kTileBoxes - 1 - slot) * kBox, column_sample, loads.columns_for);
      }
#pragma unroll 1
      for (int row_block = loads.first_row_block; row_block < tile.row_blocks; row_block += loads.row_step) {
        load(stage + row_block * kBoxBytes, &arguments.dy, full, chunk, head, tile.first_row + row_block * kBox, sample,
             loads.rows_for);
      }
    }
  }
}

// One warpgroup.
template <typename Element>
struct WeightMultiplier {
  const WeightArguments& arguments;
  uint32_t stages;
  WeightRing& ring;
  int warpgroup;
  RingPosition<kStages> at = {};

  // The products of an item: kHigh columns of the high row block and kLow of the low one, from the tile's slots on; none
  // where kHigh or kLow is 0. With kCorner, the high row block has the 64 columns before them, too.
  template <int kHigh, int kLow, bool kCorner>
  __device__ __forceinline__ void run(const Item& item, const BlockTile& tile) {
    const int high_row_block = kTileBoxes - 1 - warpgroup;
    const uint32_t high_left = operand(stages + high_row_block * kBoxBytes);
    const uint32_t low_left = operand(stages + warpgroup * kBoxBytes);
    const uint32_t corner_right = operand(stages + kTileBoxes * kBoxBytes);
    const uint32_t high_right = operand(stages + (kTileBoxes + tile.slot_of(high_row_block) + kCorner) * kBoxBytes);
    const uint32_t low_right = operand(stages + (kTileBoxes + tile.slot_of(warpgroup)) * kBoxBytes);
    // Zeros, although the first products need none: what nothing had written would be kept from one item to the next, for each
    // instance of this function in registers of its own.
    float corner[32] = {}, high[kHigh > 0 ? kHigh / 2 : 1] = {}, low[kLow > 0 ? kLow / 2 : 1] = {};
    const int steps = item.steps();
#pragma unroll 1
    for (int step = 0; step < steps; ++step, at.advance()) {
      barrier_wait(&ring.full[at.slot], at.parity);
      const uint32_t stage = at.slot * (kStageBytes / 16);
      wgmma_fence();
      if constexpr (kCorner) multiply_box<Element, 64, false, false>(corner, high_left + stage, corner_right + stage, true);
      if constexpr (kHigh > 0) multiply_box<Element, kHigh, false, false>(high, high_left + stage, high_right + stage, true);
      if constexpr (kLow > 0) multiply_box<Element, kLow, false, false>(low, low_left + stage, low_right + stage, true);
      wgmma_commit();
      wgmma_wait<0>();
      ring.release(at.slot);
    }
    const int high_groups = tile.is_diagonal ? 8 * (high_row_block + 1) + 1 : 16;
    if constexpr (kHigh == 128 || kLow == 128) {
      if (item.slot < 0) {
        if constexpr (kHigh > 0) write_complete(item, tile, high_row_block, high);
        write_complete(item, tile, warpgroup, low);
        return;
      }
    }
    if constexpr (kCorner) write(item, 0, corner);
    if constexpr (kHigh > 0) write(item, kCorner ? 8 : 0, high);
    if constexpr (kLow > 0) write(item, high_groups, low);
  }

  // The sums of a row block of a rectangle to dweight.
  __device__ __forceinline__ void write_complete(const Item& item, const BlockTile& tile, int row_block, float (&sum)[64]) {
    if (arguments.gradient_dtype == MIXER_FLOAT32) {
      write_complete<float>(item, tile, row_block, sum);
    } else if (arguments.gradient_dtype == MIXER_FLOAT16) {
      write_complete<__half>(item, tile, row_block, sum);
    } else {
      write_complete<__nv_bfloat16>(item, tile, row_block, sum);
    }
  }

  template <typename Gradient>
  __device__ __forceinline__ void write_complete(const Item& item, const BlockTile& tile, int row_block, float (&sum)[64]) {
    pin(sum);
    const int context = arguments.context;
    const int row = tile.first_row + row_block * kBox + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const int column = tile.first_column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + half * 8;
      if (i >= context) continue;
      const bool is_token = i < arguments.plan.tokens;  // else zero, whatever the sum
      Gradient* place = static_cast<Gradient*>(arguments.dweight) +
                        (static_cast<int64_t>(item.job.matrix) * context + i) * context + column;
#pragma unroll
      for (int group = 0; group < 16; ++group) {
        const float* value = sum + group * 4 + half * 2;
        const int offset = (1 - group / 8) * kBox + group % 8 * 8;  // the second column box comes first
        store_two(place + offset, context % 2 == 0, is_token ? value[0] : 0.0f, is_token ? value[1] : 0.0f);
      }
    }
  }

  // Sums of this thread to the workspace, as groups from `first_group` on.
  template <int kCount>
  __device__ __forceinline__ void write(const Item& item, int first_group, float (&sum)[kCount]) {
    pin(sum);
    float4* partial = reinterpret_cast<float4*>(arguments.partials) +
                      (static_cast<int64_t>(item.slot) * kJobBlocks + cluster_rank()) * (kSlotFloats / 4) +
                      first_group * kMultiplyingThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      partial[i * kMultiplyingThreads] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    }
  }

  __device__ __forceinline__ void run_all() {
    const WeightPlan& plan = arguments.plan;
    const int cluster = blockIdx.x / kJobBlocks;
    for (int index = 0; index < Item::count(plan, cluster); ++index) {
      const Item item(plan, cluster, index);
      const BlockTile tile(plan, item.job, cluster_rank());
      const bool has_high = kTileBoxes - 1 - warpgroup < tile.row_blocks, has_low = warpgroup < tile.row_blocks;
      if (!has_low) {
        run<0, 0, false>(item, tile);
      } else if (!tile.is_diagonal) {
        has_high ? run<128, 128, false>(item, tile) : run<0, 128, false>(item, tile);
      } else if (warpgroup == 0) {
        has_high ? run<200, 72, true>(item, tile) : run<0, 72, false>(item, tile);
      } else {
        has_high ? run<200, 136, false>(item, tile) : run<0, 136, false>(item, tile);
      }
    }
  }
};

constexpr int kWeightSharedBytes = 1024 + kStages * kStageBytes + static_cast<int>(sizeof(WeightRing));

template <typename Element>
__global__ void __cluster_dims__(kJobBlocks) __launch_bounds__(kWeightThreads, 1)
    grad_weight_kernel(const __grid_constant__ WeightArguments arguments) {
  extern __shared__ char shared[];
  char* stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  auto& ring = *reinterpret_cast<WeightRing*>(stages + kStages * kStageBytes);
  for (int i = threadIdx.x; i < kStages * kOnesBytes / 2; i += kWeightThreads) {
    char* ones = stages + i / (kOnesBytes / 2) * kStageBytes + kOnes * kBoxBytes;
    reinterpret_cast<Element*>(ones)[i % (kOnesBytes / 2)] = from_float<Element>(1.0f);
  }
  fence_async_proxy();
  if (threadIdx.x == 0) {
    prefetch_map(&arguments.dy);
    prefetch_map(&arguments.x);
    ring.init(1);
    barrier_init_fence();
  }
  __syncthreads();
  cluster_sync();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kWeightMultipliers) {
    give_registers<kWeightLoaderRegisters>();
    const int warp = threadIdx.x % kWarpgroup / 32;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) load_operands(arguments, stages, ring);
    } else {
      write_zeros(arguments, blockIdx.x * 3 + warp - 1, gridDim.x * 3);
    }
    __syncwarp();
  } else {
    take_registers<kWeightMultiplierRegisters>();
    WeightMultiplier<Element>{arguments, shared_address(stages), ring, warpgroup}.run_all();
  }
  cluster_sync();  // the other blocks may still write into our shared memory
}

// Clusters that the device runs at a time: its processors come in groups, of which a cluster must not span two.
template <typename Element>
int clusters(const TriangularConvParams& params) {
  const int most = std::max(1, params.processors / kJobBlocks);
  thread_local int device = -1, found = 0;
  if (device != params.device) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kJobBlocks, 1, 1};
    const cudaLaunchConfig_t config = {dim3(most * kJobBlocks), dim3(kWeightThreads), kWeightSharedBytes, nullptr, &attribute, 1};
    const auto kernel = grad_weight_kernel<Element>;
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWeightSharedBytes);
    if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&found, kernel, &config);
    if (status != cudaSuccess || found == 0) {
      cudaGetLastError();
      return most;
    }
    device = params.device;
  }
  return std::min(most, found);
}

WeightPlan make_plan(const TriangularConvParams& params) {
  return make_weight_plan(params, clusters<__nv_bfloat16>(params));
}

template <typename Element>
cudaError_t launch_grad_weight(const TriangularConvParams& params, const WeightArguments& arguments) {
  const auto kernel = grad_weight_kernel<Element>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWeightSharedBytes);
  if (status != cudaSuccess) return status;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  kernel<<<arguments.plan.clusters * kJobBlocks, kWeightThreads, kWeightSharedBytes, stream>>>(arguments);
  status = cudaGetLastError();
  if (status != cudaSuccess || arguments.plan.slots == 0) return status;
  const int jobs = arguments.plan.whole_slots() + arguments.plan.rest_jobs();
  finish_kernel<<<jobs * kJobBlocks * kFinishBlocks, kMultiplyingThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return shifted_bytes(params) + int64_t(make_plan(params).slots) * kJobBlocks * kSlotFloats * sizeof(float);
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  WeightArguments arguments = {};
  arguments.plan = make_plan(params);
  arguments.dweight = params.dweight;
  arguments.dbias = params.dbias;
  char* workspace = static_cast<char*>(params.workspace);
  arguments.partials = reinterpret_cast<float*>(workspace + shifted_bytes(params));
  arguments.matrices = params.heads * params.taps;
  arguments.context = params.context;
  arguments.gradient_dtype = params.gradient_dtype;
  cudaError_t status = encode_activations(&arguments.dy, params.dy, params.dy_batch_stride, params.dy_token_stride, params);
  if (status == cudaSuccess) {
    status = encode_activations(&arguments.x, params.x, params.x_batch_stride, params.x_token_stride, params);
  }
  if (status == cudaSuccess && params.taps > 1) {
    status = shift_taps(params, params.x, params.x_batch_stride, params.x_token_stride, 1, workspace);
    if (status == cudaSuccess) status = encode_shifted(&arguments.shifted, workspace, params);
  }
  if (status != cudaSuccess) return status;
  return params.dtype == MIXER_FLOAT16 ? launch_grad_weight<__half>(params, arguments)
                                       : launch_grad_weight<__nv_bfloat16>(params, arguments);
}

}  // namespace hopper
