// Which block works on which tiles of forward and grad-input, decided on the host: the cost of
// every tile is known, so a fixed assignment loses nothing to a queue on the device, and no block
// has to ask for its next tile.
//
// A *row tile* is up to 8 blocks of 64 rows, all tiles but the last of the same height; its last
// block needs as many steps of the depth as there are blocks up to it (grad-input counts blocks
// from the last token on, which makes it the same triangle). A *column tile* is two or four chunks:
// 64 channels of one head of one sample. A *worker* is a cluster of two thread blocks.
#pragma once

#include <stdint.h>

#include <vector>

#include "params.h"

namespace schedule {

constexpr int kBlock = 64;       // rows of a row block, columns of a chunk

struct Tile {
  int32_t row_tile, head, chunk, unused;
};

// Where a product's rows end and how many steps of the depth each takes.
struct Shape {
  int tokens, height;  // blocks of a row tile

  int blocks() const { return (tokens + kBlock - 1) / kBlock; }
  int row_tiles() const { return (blocks() + height - 1) / height; }
  // Blocks of 64 x 64 of the weight that row tile r multiplies, and what its output costs (of the
  // order of one block a row block).
  int64_t cost(int row_tile) const;
};

// A tile has room for 8 row blocks by 2 chunks, or 4 by 4 where there are not more.
int choose_row_blocks(const TriangularConvParams& params);

// Row blocks that a tile does have, so that the last one is not much lower than the others: as few
// as make no more tiles, an even number, since two thread blocks share them.
int choose_height(const TriangularConvParams& params);

// For each worker the tiles it takes, in order: group by group of columns whose input stays in the
// L2 cache, in a group long tiles first.
std::vector<std::vector<Tile>> assign(const TriangularConvParams& params);

// The same as one array: workers + 1 offsets, in tiles, padded to a multiple of 4; then the tiles.
std::vector<int32_t> flatten(const std::vector<std::vector<Tile>>& tiles);

}  // namespace schedule
