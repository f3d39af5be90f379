// The tiles of a lower triangle.
#pragma once

#include "numeric.cuh"

__host__ __device__ __forceinline__ int64_t lower_tiles(int tokens, int tile) {
  const int64_t tiles = ceil_div(tokens, tile);
  return tiles * (tiles + 1) / 2;
}

// Tiles are numbered along the rows of the triangle: row_tile * (row_tile + 1) / 2 + column_tile.
struct LowerTile {
  int row, column;  // in tiles
};

__device__ __forceinline__ LowerTile locate_lower_tile(int tile) {
  int row = static_cast<int>((sqrtf(8.0f * tile + 1.0f) - 1.0f) / 2.0f);
  while (row * (row + 1) / 2 > tile) --row;
  while ((row + 1) * (row + 2) / 2 <= tile) ++row;
  return {row, tile - row * (row + 1) / 2};
}
