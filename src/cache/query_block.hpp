// The state of one block of query vectors while it goes over pages: running maximum, sum and output of the online
// softmax.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/store.hpp"
#include "cache/workspace.hpp"
#include "kvant/attention.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {

// A tile as multiply_codes takes it: planes that read the same depth indices share one packed x.
struct TilePlan {
  struct XSet {
    bool gathered = false;  // x follows the tile's index list
    int depth = 0;          // depth indices of x
    std::vector<tiles::CodePlane> planes;
    std::vector<std::size_t> offsets;  // of the planes inside the head's block
    std::vector<float> mid;            // [depth padded] mean code of each depth index
  };
  std::vector<XSet> sets;
  int depth = 0;

  explicit TilePlan(const TileLayout& tile);
};

// What all blocks of one attend() share.
struct AttentionPlan {
  const PageStore::Impl* store = nullptr;
  const AttentionOptions* options = nullptr;
  TilePlan key;
  TilePlan value;
  ConstView queries;
  std::int64_t n_cells = 0;
  std::int64_t rows = 0;
  int group = 1;       // query heads per KV head
  int block_rows = 1;  // query rows of a block
  float scale = 1;
  std::vector<float> slopes;  // per query head, 1 without ALiBi

  explicit AttentionPlan(const PageStore::Impl& s) : store(&s), key(s.layout.key), value(s.layout.value) {}
  int query_heads() const { return group * store->shape.kv_heads; }
};

// Vector n of a block is query row n / group, query head head * group + n % group.
class QueryBlock {
 public:
  QueryBlock(const AttentionPlan& plan, Workspace::Arena& arena);
  static std::size_t arena_bytes(const AttentionPlan& plan);

  // Loads the queries of rows [first_row, first_row + rows) of one KV head and empties the running state.
  void start(int head, std::int64_t first_row, int rows);
  // Attends to the cells of one page.
  void add_page(std::int64_t page);

  int vectors() const { return vectors_; }
  const float* maximum() const { return maximum_; }
  const float* sum() const { return sum_; }
  const float* output(int vector) const { return output_ + vector * output_stride_; }

 private:
  void look_ahead(std::int64_t page);
  enum class RowMask : std::uint8_t { plain, hidden, mixed };
  RowMask classify(std::int64_t row, int query_head, std::int64_t first_cell, int cells) const;
  bool load_mask(std::int64_t page, int cells);
  // What user mask, positions and ALiBi add to `cells` scores of one vector; true if a cell is visible.
  bool mask_row(std::int64_t row, int query_head, std::int64_t first_cell, int cells, float* out) const;
  bool is_plain(std::int64_t first_cell, int cells) const;
  void score_page(const Page& page, int cells);
  void score_exact(const ExactRows& exact);
  void mix_page(const Page& page, int cells);
  void mix_exact(const ExactRows& exact);
  void multiply_open(const void* tile, std::int64_t stride, int rows, int depth, const float* v, std::int64_t v_stride,
                     float* out, std::int64_t out_stride, tiles::Ahead ahead = {});
  // Rounds v * step to integers for every index set of the tile; bias_ gets v * min and the rounding.
  void pack_tile(const TileLayout& tile, const TilePlan& plan, const std::byte* head_block, const float* v,
                 std::int64_t v_stride);
  // out, begun as `start` says, gets the tile times what pack_tile packed
  void multiply_tile(const TileLayout& tile, const TilePlan& plan, const std::byte* head_block, tiles::Start start,
                     const float* alpha, tiles::Ahead ahead, float* out, std::int64_t out_stride);

  const AttentionPlan& plan_;
  const PageStore::Impl& store_;
  const tiles::Kernels& kernels_;
  int capacity_ = 0;  // vectors a block may have
  int head_ = 0;
  std::int64_t first_row_ = 0;
  int rows_ = 0;
  int vectors_ = 0;

  std::int64_t query_stride_ = 0;
  std::int64_t output_stride_ = 0;
  std::int64_t score_stride_ = 0;
  float* queries_ = nullptr;  // [vectors][key_dim], scaled
  float* scores_ = nullptr;   // [vectors][page]
  float* output_ = nullptr;   // [vectors][value_dim]
  float* exact_ = nullptr;    // [vectors][page]: scores or weights of exact cells
  float* maximum_ = nullptr;
  float* sum_ = nullptr;
  float* alpha_ = nullptr;
  float* bias_ = nullptr;
  float* slope_ = nullptr;
  float* ones_ = nullptr;
  float* min_ = nullptr;  // grids of the current tile
  float* step_ = nullptr;
  float* scratch_ = nullptr;
  float* wide_ = nullptr;   // an open tile as float, for blocks of many vectors
  float* mask_ = nullptr;   // [vectors][page]
  tiles::Ahead ahead_key_;  // of the next page
  tiles::Ahead ahead_value_;
  const float** mask_rows_ = nullptr;
  std::int32_t* packed_ = nullptr;
  float* x_scale_ = nullptr;  // [index sets][vectors]
  std::vector<tiles::CodePlane> planes_;
  std::vector<int> widths_;
};

}  // namespace kvant::cache
