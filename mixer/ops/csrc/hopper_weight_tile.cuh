// The weight gradient's jobs as thread blocks and threads see them: what a cluster computes at a time, which part of it is a
// thread block's, who loads what, and where the sums of a thread belong.
#pragma once

#include "hopper_maps.h"
#include "hopper_tile.cuh"
#include "hopper_weight_plan.h"

namespace hopper {

constexpr int kWeightMultipliers = 2;                    // warpgroups; number w has the row blocks 3 - w (high) and w (low)
constexpr int kMultiplyingThreads = kWeightMultipliers * kWarpgroup;
constexpr int kMostGroups = 42;                          // of four sums of a thread
constexpr int kSlotFloats = kMostGroups * kMultiplyingThreads * 4;  // of one block

struct WeightArguments {
  CUtensorMap dy, x;
  CUtensorMap shifted;   // copies of x for all taps but the middle one, as further samples
  void* dweight;
  void* dbias;
  float* partials;       // (slots, 4 blocks, kMostGroups, 256 threads, 4)
  int32_t matrices, context, gradient_dtype;
  WeightPlan plan;
};
static_assert(sizeof(WeightArguments) <= 4096, "what a kernel takes");

// What a cluster computes at a time: a whole job, or a piece of one.
struct Item {
  Job job;
  int begin, end, stride;  // steps
  int slot;                // of its sums in the workspace, or -1: they are complete

  // The item number `index` of a cluster: rounds of whole jobs, then its pieces.
  __device__ __forceinline__ Item(const WeightPlan& plan, int cluster, int index) : job(plan, kRectangle, 0) {
    int number = index * plan.clusters + cluster;
    for (int kind = kRectangle; kind < kKinds; number -= plan.whole[kind++]) {
      if (number >= plan.whole[kind]) continue;
      job = Job(plan, kind, number);
      begin = 0;
      end = plan.steps(kind);
      stride = 1;
      slot = kind == kRectangle ? -1 : plan.whole_slot(kind, number);
      return;
    }
    const Piece piece = plan.pieces[plan.first_piece[cluster] + number / plan.clusters];
    job = rest_job(plan, piece.job);
    begin = piece.begin;
    end = piece.end;
    stride = piece.stride;
    slot = plan.slots_of[piece.job] == 0 ? -1 : plan.first_slot[piece.job] + piece.slot;
  }
  __device__ __forceinline__ static int count(const WeightPlan& plan, int cluster) {
    const int whole = plan.whole[kRectangle] + plan.whole[kTriangle] + plan.whole[kLone];
    return whole / plan.clusters + plan.first_piece[cluster + 1] - plan.first_piece[cluster];
  }
  __device__ __forceinline__ int steps() const { return (end - begin + stride - 1) / stride; }
};

// What one thread block computes of a job. Its boxes of x have slots in a stage: column box c has slot 3 - c.
struct BlockTile {
  int first_row, first_column;  // of column box 0
  int row_blocks;               // that hold tokens
  int first_slot, end_slot;
  bool is_diagonal;

  __device__ __forceinline__ BlockTile(const WeightPlan& plan, const Job& job, int rank) {
    const bool in_lower_half = job.kind == kTriangle && rank > 0;
    const int row_tile = job.row_tile + in_lower_half;
    const int column_tile = job.column_tile + (job.kind == kTriangle && rank == kJobBlocks - 1);
    is_diagonal = row_tile == column_tile;
    row_blocks = plan.row_blocks(row_tile);
    first_row = row_tile * kTileRows;
    first_column = column_tile * kTileRows + (job.kind == kRectangle ? rank * 2 * kBox : 0);
    first_slot = is_diagonal ? kTileBoxes - row_blocks : job.kind == kTriangle && rank == 2 ? 0 : 2;
    end_slot = is_diagonal ? kTileBoxes : first_slot + 2;
  }
  __device__ __forceinline__ int boxes() const { return row_blocks + end_slot - first_slot; }
  // The slots at which a row block's columns begin.
  __device__ __forceinline__ int slot_of(int row_block) const { return is_diagonal ? kTileBoxes - 1 - row_block : first_slot; }
};

// What one thread block loads of a job, and for which blocks of the cluster (a bit each).
struct Loads {
  int first_row_block, row_step, first_slot, end_slot;
  uint16_t rows_for, columns_for;

  __device__ __forceinline__ Loads(const Job& job, const BlockTile& tile, int rank)
      : first_row_block(0), row_step(1), first_slot(tile.first_slot), end_slot(tile.end_slot),
        rows_for(1 << rank), columns_for(1 << rank) {
    if (job.kind == kRectangle) {
      first_row_block = rank;
      row_step = kJobBlocks;
      rows_for = 0b1111;
    } else if (job.kind == kTriangle && rank == 0) {
      end_slot = first_slot;  // its columns come from the blocks 1 and 2, which need half of them each
    } else if (job.kind == kTriangle && rank == 3) {
      first_row_block = kTileBoxes;  // and its rows
    } else if (job.kind == kTriangle) {
      first_row_block = rank - 1;
      row_step = 2;
      rows_for = 0b1110;
      columns_for |= 0b0001;
    }
  }
};

// The place, in a block's tile, of the pairs of sums of group `group` of multiplying thread `thread`: the groups of its high row
// block first, in the order of the slots.
struct Place {
  int row, column;
  bool is_bias;  // the sums are those of dy and ones

  __device__ __forceinline__ Place(const BlockTile& tile, int thread, int group) {
    const int warpgroup = thread / kWarpgroup, high = kTileBoxes - 1 - warpgroup;
    const int high_groups = tile.is_diagonal ? 8 * (high + 1) + 1 : 16;
    const int row_block = group < high_groups ? high : warpgroup;
    const int at = tile.slot_of(row_block) * 8 + (group < high_groups ? group : group - high_groups);
    row = row_block * kBox + thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
    column = (kTileBoxes - 1 - at / 8) * kBox + at % 8 * 8 + thread % 4 * 2;
    is_bias = at == 8 * kTileBoxes;
  }
};

}  // namespace hopper
