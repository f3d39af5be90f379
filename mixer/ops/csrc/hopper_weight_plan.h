// How the weight gradient's work is cut, on the host, and what each cluster of four thread blocks finds of it, on the device.
//
// dweight is cut into *tiles* of 256 x 256. A *job* is what a cluster computes at a time, in steps of 64 channels:
//   - a rectangle: 256 rows by 512 columns left of the diagonal, 128 columns in each thread block;
//   - a triangle: two tiles on the diagonal, in the first and the last block, and the tile between them, half of it in each of the
//     others. Of the tiles on the diagonal only the ten 64 x 64 blocks that touch the lower triangle are computed;
//   - a lone tile on the diagonal, where their number is odd: each block takes every fourth step.
//
// Jobs of a kind go to the clusters in whole rounds; all clusters then walk through the depth together, and what one reads of x
// and dy the others find in the L2 cache. The jobs that are left over are cut into *pieces* along the depth, such that all
// clusters end together. Every piece of a job writes its sums to the workspace; a second kernel adds them in a fixed order.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>

#include "numeric.cuh"
#include "params.h"

namespace hopper {

constexpr int kJobBlocks = 4;                            // thread blocks of a cluster
constexpr int kTileBoxes = 4;                            // row blocks of 64 in a tile
constexpr int kTileRows = 256;
constexpr int kMostClusters = 36;
constexpr int kMostRest = 3 * kMostClusters;             // fewer than one round of each kind
constexpr int kMostPieces = 2 * kMostClusters + kMostRest;
constexpr int kPieceCost = 32;                           // of writing the sums of a piece, in products of 64 x 64 x 64

enum Kind { kRectangle, kTriangle, kLone, kKinds };

// The steps begin, begin + stride, ... < end of a job that is left over; `slot` counts the pieces of that job.
struct Piece {
  int32_t begin, end;
  int16_t job;
  uint8_t stride, slot;
};

struct WeightPlan {
  int32_t tokens, batch, taps;
  int32_t chunks;         // of 64 channels in one sample
  int32_t row_tiles;
  int32_t clusters;
  int32_t count[kKinds];  // jobs of one matrix
  int32_t whole[kKinds];  // jobs that go to the clusters in whole rounds
  int32_t rest[kKinds];   // jobs that are left over
  int32_t slots;          // of sums in the workspace
  int16_t first_slot[kMostRest], slots_of[kMostRest];  // of the jobs that are left over
  int16_t first_piece[kMostClusters + 1];              // of each cluster
  Piece pieces[kMostPieces];

  __host__ __device__ __forceinline__ int depth() const { return batch * chunks; }
  __host__ __device__ __forceinline__ int steps(int kind) const {
    return kind == kLone ? (depth() + kJobBlocks - 1) / kJobBlocks : depth();
  }
  __host__ __device__ __forceinline__ int rest_jobs() const { return rest[kRectangle] + rest[kTriangle] + rest[kLone]; }
  // Rectangles that are not cut are complete and need no slot.
  __host__ __device__ __forceinline__ int whole_slots() const { return whole[kTriangle] + whole[kLone]; }
  __host__ __device__ __forceinline__ int whole_slot(int kind, int number) const {
    return kind == kLone ? whole[kTriangle] + number : number;
  }
  // Row blocks of a row tile that hold tokens.
  __host__ __device__ __forceinline__ int row_blocks(int row_tile) const {
    const int blocks = (tokens - row_tile * kTileRows + 63) / 64;
    return blocks < kTileBoxes ? blocks : kTileBoxes;
  }
};

struct Job {
  int kind, matrix;
  int row_tile, column_tile;  // the first of them

  // Row tiles 2 s and 2 s + 1 have s rectangles each.
  __host__ __device__ __forceinline__ Job(const WeightPlan& plan, int kind, int number) : kind(kind) {
    matrix = number / plan.count[kind];
    const int index = number % plan.count[kind];
    row_tile = kind == kTriangle ? 2 * index : plan.row_tiles - 1;
    column_tile = row_tile;
    if (kind == kRectangle) {
      int pair = 1;
      while (pair * (pair + 1) <= index) ++pair;
      const int place = index - pair * (pair - 1);
      row_tile = 2 * pair + place / pair;
      column_tile = place % pair * 2;
    }
  }
};

// The job number `index` of those that are left over.
__host__ __device__ __forceinline__ Job rest_job(const WeightPlan& plan, int index) {
  int kind = kRectangle;
  while (index >= plan.rest[kind]) index -= plan.rest[kind++];
  return Job(plan, kind, plan.whole[kind] + index);
}

// Deals out what is left over; see above.
class Dealer {
 public:
  explicit Dealer(WeightPlan* plan) : plan_(*plan), jobs_(plan->rest_jobs()) {
    for (int job = 0; job < jobs_; ++job) {
      const Job found = rest_job(plan_, job);
      steps_[job] = plan_.steps(found.kind);
      cost_[job] = cost(found);
      share_[job] = 0;
    }
    share_out();
    find_end();
    deal();
  }

 private:
  // What a step costs the thread block that has most to do, in products of 64 x 64 x 64; loads take a few, too.
  int cost(const Job& job) const {
    const int row_blocks = plan_.row_blocks(job.row_tile);
    return std::max(4, job.kind == kRectangle ? 2 * row_blocks : row_blocks * (row_blocks + 1) / 2);
  }
  double work(int job) const { return double(steps_[job]) * cost_[job]; }

  // Clusters to jobs, one by one to where they would end last. With more jobs than clusters some get none.
  void share_out() {
    double end[kMostRest];
    for (int job = 0; job < jobs_; ++job) end[job] = 1e9 * work(job);
    for (int cluster = 0; cluster < plan_.clusters && jobs_ > 0; ++cluster) {
      const int last = int(std::max_element(end, end + jobs_) - end);
      end[last] = work(last) / ++share_[last];
    }
  }

  // The earliest time until which clusters that end early can do what the others leave them.
  void find_end() {
    double early = 0, late = 0, main[kMostRest];
    for (int job = 0; job < jobs_; ++job) {
      early += work(job) / plan_.clusters;
      main[job] = work(job) / std::max(1, share_[job]);
      late = std::max(late, main[job]);
    }
    late += early + kPieceCost;
    while (late - early > kPieceCost / 4) {
      const double middle = (early + late) / 2;
      double left = 0;
      for (int job = 0; job < jobs_; ++job) {
        left += std::max(0.0, work(job) - share_[job] * middle) - share_[job] * std::max(0.0, middle - main[job] - kPieceCost);
      }
      (left > 0 ? early : late) = middle;
    }
    end_ = late;
  }

  // First each cluster's part of its own job, of which it takes every n-th step with n - 1 others; then, in clusters that have
  // time, what the others have left. So all go through the depth at about the same pace.
  void deal() {
    for (int job = 0; job < jobs_; ++job) {
      own_end_[job] = int(std::min<int64_t>(steps_[job], int64_t(std::ceil(end_ / cost_[job])) * share_[job]));
      next_[job] = own_end_[job];
    }
    int own = 0, place = 0, open = 0;  // the job of this cluster, its place in it, the first job with steps left
    for (int cluster = 0; cluster < plan_.clusters; ++cluster) {
      plan_.first_piece[cluster] = int16_t(pieces_);
      for (; own < jobs_ && place == share_[own]; ++own) place = 0;
      double free = end_;
      if (own < jobs_) free -= add(own, place++, own_end_[own], share_[own]) + kPieceCost;
      while (open < jobs_ && free > 0) {
        const int taken = std::min(steps_[open] - next_[open], int(std::ceil(free / cost_[open])));
        free -= add(open, next_[open], next_[open] + taken, 1);
        next_[open] += taken;
        if (next_[open] == steps_[open]) ++open;
      }
    }
    plan_.first_piece[plan_.clusters] = int16_t(pieces_);
  }

  // The next piece. Returns its cost.
  double add(int job, int begin, int end, int stride) {
    if (begin >= end) return 0;
    plan_.pieces[pieces_++] = {begin, end, int16_t(job), uint8_t(stride), uint8_t(plan_.slots_of[job]++)};
    return double(cost_[job]) * ((end - begin + stride - 1) / stride);
  }

  WeightPlan& plan_;
  const int jobs_;
  int pieces_ = 0;
  double end_ = 0;
  int steps_[kMostRest], cost_[kMostRest], share_[kMostRest], own_end_[kMostRest], next_[kMostRest];
};

inline WeightPlan make_weight_plan(const TriangularConvParams& params, int clusters) {
  WeightPlan plan = {};
  plan.tokens = params.tokens;
  plan.batch = params.batch;
  plan.taps = params.taps;
  plan.chunks = static_cast<int32_t>(ceil_div(params.channels / params.heads, 64));
  plan.row_tiles = static_cast<int32_t>(ceil_div(params.tokens, kTileRows));
  plan.clusters = std::min(clusters, kMostClusters);
  const int pairs = plan.row_tiles / 2, is_odd = plan.row_tiles % 2;
  const int count[kKinds] = {pairs * (pairs - 1) + is_odd * pairs, pairs, is_odd};
  for (int kind = 0; kind < kKinds; ++kind) {
    const int jobs = params.heads * params.taps * count[kind];
    plan.count[kind] = count[kind];
    plan.rest[kind] = jobs % plan.clusters;
    plan.whole[kind] = jobs - plan.rest[kind];
  }
  Dealer{&plan};
  plan.slots = plan.whole_slots();
  for (int job = 0; job < plan.rest_jobs(); ++job) {
    if (plan.slots_of[job] == 1 && job < plan.rest[kRectangle]) plan.slots_of[job] = 0;
    plan.first_slot[job] = int16_t(plan.slots);
    plan.slots += plan.slots_of[job];
  }
  return plan;
}

}  // namespace hopper
