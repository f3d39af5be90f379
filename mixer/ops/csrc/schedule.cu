#include "schedule.h"

#include <algorithm>
#include <queue>

namespace schedule {

namespace {

// The input of one group of columns must fit in this much of the L2 cache: half of Hopper's 50 MB,
// because each of the cache's two halves may hold a copy.
constexpr int64_t kGroupBytes = 25 << 20;

int workers(const TriangularConvParams& params) { return std::max(1, params.processors / 2); }

int column_chunks(int row_blocks) { return 16 / row_blocks; }

int64_t column_tiles(const TriangularConvParams& params, int row_blocks) {
  const int64_t width = params.channels / params.heads;
  const int64_t chunks = params.batch * ((width + kBlock - 1) / kBlock);
  return (chunks + column_chunks(row_blocks) - 1) / column_chunks(row_blocks);  // of each head
}

}  // namespace

int64_t Shape::cost(int row_tile) const {
  int64_t steps = 0;
  const int first = row_tile * height, last = std::min(first + height, blocks());
  for (int block = first; block < last; ++block) steps += block + 1;
  return steps + (last - first);
}

int choose_row_blocks(const TriangularConvParams& params) {
  return params.tokens <= 4 * kBlock && params.taps == 1 ? 4 : 8;
}

int choose_height(const TriangularConvParams& params) {
  const int tiles = Shape{params.tokens, choose_row_blocks(params)}.row_tiles();
  const int height = (Shape{params.tokens, 1}.blocks() + tiles - 1) / tiles;
  return height + height % 2;
}

std::vector<std::vector<Tile>> assign(const TriangularConvParams& params) {
  const Shape shape = {params.tokens, choose_height(params)};
  const int row_blocks = choose_row_blocks(params), chunks = column_chunks(row_blocks);
  const int64_t columns = column_tiles(params, row_blocks);
  std::vector<int> row_tiles;  // longest first
  for (int row_tile = 0; row_tile < shape.row_tiles(); ++row_tile) row_tiles.push_back(row_tile);
  std::stable_sort(row_tiles.begin(), row_tiles.end(),
                   [&](int a, int b) { return shape.cost(a) > shape.cost(b); });

  // Longest tile first, to the worker with the least work so far.
  using Worker = std::pair<int64_t, int>;  // work, index
  std::priority_queue<Worker, std::vector<Worker>, std::greater<Worker>> idlest;
  for (int worker = 0; worker < workers(params); ++worker) idlest.push({0, worker});
  std::vector<std::vector<Tile>> tiles(workers(params));
  for (int row_tile : row_tiles) {
    for (int head = 0; head < params.heads; ++head) {
      for (int64_t column = 0; column < columns; ++column) {
        const Worker next = idlest.top();
        idlest.pop();
        tiles[next.second].push_back({row_tile, head, int32_t(column * chunks), 0});
        idlest.push({next.first + shape.cost(row_tile), next.second});
      }
    }
  }

  // Each worker got tiles from all columns, evenly spread. It takes them group by group, so that
  // all workers are on the same columns at the same time.
  const int64_t column_bytes = int64_t(params.tokens) * chunks * kBlock * 2;
  const int64_t group = std::max<int64_t>(1, kGroupBytes / column_bytes);
  const auto group_of = [&](const Tile& tile) {
    return (tile.head * columns + tile.chunk / chunks) / group;
  };
  for (auto& list : tiles) {
    std::stable_sort(list.begin(), list.end(),
                     [&](const Tile& a, const Tile& b) { return group_of(a) < group_of(b); });
  }
  return tiles;
}

std::vector<int32_t> flatten(const std::vector<std::vector<Tile>>& tiles) {
  std::vector<int32_t> flat;
  int32_t offset = 0;
  for (const auto& list : tiles) {
    flat.push_back(offset);
    offset += int32_t(list.size());
  }
  flat.push_back(offset);
  flat.resize((flat.size() + 3) / 4 * 4);
  for (const auto& list : tiles) {
    for (const Tile& tile : list)
      flat.insert(flat.end(), {tile.row_tile, tile.head, tile.chunk, tile.unused});
  }
  return flat;
}

}  // namespace schedule
