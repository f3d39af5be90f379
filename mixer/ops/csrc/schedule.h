// The assignment of tiles to thread blocks for forward and grad-input, computed on the host. The
// cost of every tile is known in advance, so a fixed assignment balances as well as a queue on the
// device would, and no block has to fetch its next tile with an atomic.
//
// A *row tile* is up to 8 blocks of 64 rows. All tiles but the last have the same height. Its last
// row block needs as many steps along the depth as there are row blocks up to it. (grad-input
// counts blocks from the last token, which gives the same triangle.) A *column tile* is two or four
// chunks; a chunk is 64 channels of one head of one sample. A *worker* is a cluster of two thread
// blocks.
#pragma once

#include <stdint.h>

#include <vector>

#include "params.h"

namespace schedule {

constexpr int kBlock = 64;       // rows of a row block, columns of a chunk

struct Tile {
  int32_t row_tile, head, chunk, unused;
};

// The rows of a product, cut into row tiles, and the cost of each.
struct Shape {
  int tokens, height;  // blocks of a row tile

  int blocks() const { return (tokens + kBlock - 1) / kBlock; }
  int row_tiles() const { return (blocks() + height - 1) / height; }
  // The cost of row tile r: the 64 x 64 blocks of the weight that it multiplies, plus about one
  // more per row block for writing the output.
  int64_t cost(int row_tile) const;
};

// A tile holds 8 row blocks by 2 chunks, or 4 by 4 if there are at most 4 row blocks.
int choose_row_blocks(const TriangularConvParams& params);

// The height of the row tiles, in row blocks. It gives the smallest number of tiles, spreads the
// rows evenly over them, and is even because two thread blocks share a tile.
int choose_height(const TriangularConvParams& params);

// The tiles of each worker, in order. Groups of columns whose input fits in the L2 cache come one
// after the other; within a group, long tiles come first.
std::vector<std::vector<Tile>> assign(const TriangularConvParams& params);

// The same as one array: workers + 1 offsets (in tiles), padded to a multiple of 4, then the tiles.
std::vector<int32_t> flatten(const std::vector<std::vector<Tile>>& tiles);

}  // namespace schedule
