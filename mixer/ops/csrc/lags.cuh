// The gradient of a weight by lag: dlags[h, l] = sum of dy[b, i, c] x[b, i - l, c] over samples,
// tokens i and channels, zero for lags beyond the tokens.
//
// The tiles of the products dy x^T on one *diagonal* of the triangle of tiles have the same lags.
// Diagonals that hold no lag of the window are left out.
// They are added up in registers, as one long product. All products of all heads lie in a line, cut
// into *steps* of equal size: head by head, diagonal by diagonal. Each worker (a thread block, or a
// cluster) has an equal share of that line: a *piece* of each diagonal that its share touches. It
// writes the sums along the diagonals inside a piece's tile, and a second kernel adds those of the
// pieces. Every order is fixed, so results are reproducible bit for bit.
//
// The line may be walked in *rounds*, each over the same number of samples: a worker does its share
// of it in every round, with the sums of a piece left in its registers. All workers then read the
// same samples at the same time, from the L2 cache.
#pragma once

#include "numeric.cuh"

struct LagPlan {
  int32_t heads, workers;
  int32_t tiles;      // along the tokens
  int32_t diagonals;  // diagonal d has tiles - d tiles
  int32_t rounds;
  int32_t depth;      // steps of one tile in a round: its parts of channels, over the samples
  int32_t share;      // steps of each worker in a round

  LagPlan(const TriangularConvParams& params, int workers, int tile, int64_t depth, int rounds)
      : heads(params.heads),
        workers(workers),
        tiles(static_cast<int32_t>(ceil_div(params.tokens, tile))),
        diagonals(min(tiles, (band(params) - 1) / tile + 2)),
        rounds(rounds),
        depth(static_cast<int32_t>(ceil_div(depth, rounds))),
        share(static_cast<int32_t>(ceil_div(heads * steps_before(diagonals), workers))) {}

  // Tiles of a diagonal.
  __host__ __device__ int along(int diagonal) const { return tiles - diagonal; }
  // Steps of a diagonal in a round, and of those of the same head before it.
  __host__ __device__ int steps(int diagonal) const { return along(diagonal) * depth; }
  __host__ __device__ int64_t steps_before(int diagonal) const {
    return (static_cast<int64_t>(diagonal) * (2 * tiles - diagonal + 1) / 2) * depth;
  }
  // From a piece to the next, the worker or the diagonal is another: their numbers in the line add
  // up to a number of the piece's own.
  __host__ __device__ int piece(int worker, int head, int diagonal) const {
    return worker + head * diagonals + diagonal;
  }
  __host__ __device__ int pieces() const { return workers + heads * diagonals; }
};

// The pieces of a worker: for (LagPieces piece(plan, worker); piece.valid(); piece.next()).
struct LagPieces {
  const LagPlan& plan;
  int worker, head, diagonal;
  int begin, end;  // steps of the diagonal, in each round
  int left;        // steps of the share from `begin` on

  __device__ __forceinline__ LagPieces(const LagPlan& plan, int worker)
      : plan(plan), worker(worker), diagonal(0) {
    const int64_t of_head = plan.steps_before(plan.diagonals);
    const int64_t place = static_cast<int64_t>(worker) * plan.share;
    const int64_t rest = plan.heads * of_head - place;
    left = rest < plan.share ? static_cast<int>(rest) : plan.share;
    if (rest <= 0) return;
    head = static_cast<int>(place / of_head);
    while (place % of_head >= plan.steps_before(diagonal + 1)) ++diagonal;
    begin = static_cast<int>(place % of_head - plan.steps_before(diagonal));
    end = min(begin + left, plan.steps(diagonal));
  }
  __device__ __forceinline__ bool valid() const { return left > 0; }
  __device__ __forceinline__ void next() {
    left -= end - begin;
    begin = 0;
    if (++diagonal == plan.diagonals) {
      diagonal = 0;
      ++head;
    }
    end = min(left, plan.steps(diagonal));
  }
  __device__ __forceinline__ int number() const { return plan.piece(worker, head, diagonal); }
};

// A piece's tile of kTile x kTile is summed in parts of kRows x kColumns. Each has kSums numbers:
// number n is the sum of its values at (r, r - lag), lag = n - (kColumns - 1).
template <int kTile_, int kRows_, int kColumns_>
struct LagParts {
  static constexpr int kTile = kTile_, kRows = kRows_, kColumns = kColumns_;
  static constexpr int kAcross = kTile / kColumns, kParts = kTile / kRows * kAcross;
  static constexpr int kSums = kRows + kColumns;  // the last one is not used

  // `part`, of kRows x kColumns, may have been written by other threads of the block.
  __device__ __forceinline__ static float sum(const float* part, int number) {
    const int lag = number - (kColumns - 1);
    const int begin = max(0, lag), end = min(kRows, lag + kColumns);
    float sum = 0.0f;
#pragma unroll 8
    for (int row = begin; row < end; ++row) sum += part[row * kColumns + row - lag];
    return sum;
  }
};

constexpr int kLagThreads = 64;

// Threads: lags of all heads. sums: (pieces, kParts, kSums).
template <typename Parts>
__global__ void __launch_bounds__(kLagThreads)
    finish_lags_kernel(const TriangularConvParams params, const LagPlan plan, const float* sums) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kLagThreads + threadIdx.x;
  if (index >= static_cast<int64_t>(params.heads) * params.window) return;
  const int head = static_cast<int>(index / params.window);
  const int lag = static_cast<int>(index % params.window);
  float sum = 0.0f;
  if (plan.share > 0 && lag < params.tokens) {
    const int above = lag / Parts::kTile;  // this diagonal and the next have the lag
    for (int diagonal = above; diagonal <= above + 1 && diagonal < plan.diagonals; ++diagonal) {
      const int64_t begin = head * plan.steps_before(plan.diagonals) + plan.steps_before(diagonal);
      const int64_t first = begin / plan.share;
      const int64_t last = (begin + plan.steps(diagonal) - 1) / plan.share;
      const int64_t piece = plan.piece(static_cast<int>(first), head, diagonal);
      const float* of_worker = sums + piece * Parts::kParts * Parts::kSums;
#pragma unroll 4
      for (int64_t worker = first; worker <= last; ++worker) {
#pragma unroll
        for (int part = 0; part < Parts::kParts; ++part) {
          const int row0 = diagonal * Parts::kTile + part / Parts::kAcross * Parts::kRows;
          const int column0 = part % Parts::kAcross * Parts::kColumns;
          const int number = lag - row0 + column0 + Parts::kColumns - 1;
          if (number >= 0 && number < Parts::kSums - 1)
            sum += of_worker[part * Parts::kSums + number];
        }
        of_worker += Parts::kParts * Parts::kSums;
      }
    }
  }
  params.dweight[index] = sum;
}

template <typename Parts>
cudaError_t finish_lags(const TriangularConvParams& params, const LagPlan& plan,
                        const float* sums) {
  const int64_t lags = static_cast<int64_t>(params.heads) * params.window;
  return launch(params, finish_lags_kernel<Parts>, ceil_div(lags, kLagThreads), kLagThreads, 0,
                params, plan, sums);
}
