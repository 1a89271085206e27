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

// What all blocks of one attend() share.
struct AttentionPlan {
  const PageStore::Impl* store = nullptr;
  const AttentionOptions* options = nullptr;
  ConstView queries;
  std::int64_t n_cells = 0;
  std::int64_t rows = 0;
  int group = 1;       // query heads per KV head
  int block_rows = 1;  // query rows of a block
  float scale = 1;
  std::vector<float> slopes;  // per query head, 1 without ALiBi

  int query_heads() const { return group * store->shape.kv_heads; }
};

// Vector n of a block is query row n / group, query head head * group + n % group.
class QueryBlock {
 public:
  QueryBlock(const AttentionPlan& plan, Workspace::Arena& arena);
  static std::size_t arena_bytes(const AttentionPlan& plan);

  // Loads the queries of rows [first_row, first_row + rows) of one KV head and empties the running state.
  void start(int head, std::int64_t first_row, int rows);
  // Attends to the cells of pages [first, last).
  void add_pages(std::int64_t first, std::int64_t last);
  // Brings the output together; after the last page.
  void finish();

  // For probes, where only log-sum-exps matter: the same without values, over the cells of a page that were written
  // when the store's row count was clocks[row] or less, one per query row; all of a sealed page.
  void add_scores(std::int64_t page, const std::int64_t* clocks);
  // Logits of one open page, without softcap and mask: [vectors] rows of as many floats as `cells`, by cell.
  void score_open(std::int64_t page, int cells) { score_page(store_.pages[static_cast<std::size_t>(page)], cells); }
  const float* logits(int vector) const { return scores_ + vector * score_stride_; }

  int vectors() const { return vectors_; }
  const float* maximum() const { return maximum_; }
  const float* sum() const { return sum_; }
  // The sums, after finish().
  const float* output(int vector) const { return plain_.values + vector * output_stride_; }

 private:
  // One over the largest code per stored depth index, and half of that code; only tiles of own widths change them from
  // page to page.
  struct Levels {
    const TileLayout* tile = nullptr;
    float* inverse = nullptr;
    float* half = nullptr;
  };
  static constexpr int kKinds = 3;  // of tiles: key, key_rest, value

  void add_page(std::int64_t page);
  // Whether all of a sealed page is visible to all vectors and quantized.
  bool is_whole(std::int64_t page);
  // Several whole pages with one softmax: what one page's product leaves idle while its results come in, the next uses.
  void add_batch(std::int64_t first, int count);
  tiles::Ahead ahead_of(std::int64_t page, Side side) const;
  enum class RowMask : std::uint8_t { plain, hidden, mixed };
  RowMask classify(std::int64_t row, int query_head, std::int64_t first_cell, int cells) const;
  bool load_mask(std::int64_t page, int cells);
  bool load_clocks(const Page& page, int cells, const std::int64_t* clocks);
  // Masks by cell become masks by place.
  void order_masks(const std::uint8_t* tokens);
  // Open pages are read up to the last written cell, in whole row tiles; sealed ones always as a whole.
  int read_cells(const Page& page) const;
  // What user mask, positions and ALiBi add to `cells` scores of one vector; true if a cell is visible.
  bool mask_row(std::int64_t row, int query_head, std::int64_t first_cell, int cells, float* out) const;
  bool is_plain(std::int64_t first_cell, int cells) const;
  void score_page(const Page& page, int cells);
  void score_exact(const ExactRows& exact, const std::uint8_t* tokens);
  // The codes of a sealed page.
  void score_tiles(const Page& page);
  // The same where keys are stored before RoPE (src/cache/query_turned.cpp).
  void score_turned(const Page& page);
  void turn_outliers(const TileView& view);
  void mix_page(const Page& page, int cells);
  void mix_exact(const ExactRows& exact, const std::uint8_t* tokens);
  void mix_factored(const TileView& view);
  void multiply_open(const void* tile, std::int64_t stride, int rows, int depth, const float* v, std::int64_t v_stride,
                     float* out, std::int64_t out_stride, tiles::Ahead ahead = {});
  // Rounds v * step to integers in the tile's stored order; bias_ gets v * min and the rounding.
  void pack_tile(const TileView& view, const float* v, std::int64_t v_stride);
  // out, begun as `start` says with alpha_ and bias_, gets the tile times what pack_tile packed
  void multiply_tile(const TileView& view, tiles::Start start, tiles::Ahead ahead, float* out, std::int64_t out_stride);
  // What the tile's outliers add to multiply_tile; needs the steps that pack_tile loaded.
  void add_outliers(const TileView& view, const float* v, std::int64_t v_stride, float* out, std::int64_t out_stride);
  const Levels& levels_of(const TileView& view);
  // The queries in the tile's order.
  const float* gather(const TileView& view);

  // Sums of weighted values. A page's softmax rescales all that came before; values as they are and rotated ones are
  // kept apart, and the sum that a page does not touch is rescaled when its turn comes.
  struct Mixed {
    float* values = nullptr;  // [vectors][value_dim]
    float* owed = nullptr;    // [vectors]: factor not applied yet
    bool is_zero = true;      // nothing was added
  };
  // Rescales `to` by what it owes and the page's alpha and adds bias_; the other sum goes on owing alpha.
  void rescale(Mixed& to, Mixed& other);
  // The same without touching values: alpha_ becomes what `to` must be multiplied by.
  void settle(Mixed& to, Mixed& other);

  const AttentionPlan& plan_;
  const PageStore::Impl& store_;
  const tiles::Kernels& kernels_;
  tiles::ProductScope products_{kernels_};
  int capacity_ = 0;  // vectors a block may have
  int head_ = 0;
  std::int64_t first_row_ = 0;
  int rows_ = 0;
  int vectors_ = 0;

  std::int64_t query_stride_ = 0;
  std::int64_t output_stride_ = 0;
  int batch_ = 1;                  // pages with one softmax
  std::int64_t score_stride_ = 0;  // of a batch; with two key tiles 16 more, the padding of the second one's rows
  float* queries_ = nullptr;       // [vectors][key_dim], scaled
  float* scores_ = nullptr;        // [vectors][batch][page], of a sealed page by place, of an open one by cell
  Mixed plain_;
  Mixed rotated_;           // of sealed pages whose values are stored rotated; unused otherwise
  float* exact_ = nullptr;  // [vectors][page]: scores or weights of exact cells
  float* maximum_ = nullptr;
  float* sum_ = nullptr;
  float* alpha_ = nullptr;
  float* bias_ = nullptr;
  float* slope_ = nullptr;
  float* middle_ = nullptr;  // grids of the current tile
  float* step_ = nullptr;
  float* min_ = nullptr;  // only where it has outliers or is decoded
  float* max_ = nullptr;
  Levels levels_[kKinds];
  // The outliers of a tile: what each adds to its code's level, and where.
  float* residuals_ = nullptr;
  std::uint16_t* outlier_rows_ = nullptr;
  std::uint16_t* outlier_depths_ = nullptr;
  float* lanes_ = nullptr;
  std::uint16_t* order_ = nullptr;
  float* page_sum_ = nullptr;  // [vectors][value_dim]: what one page adds, before its channel factors
  float* factors_ = nullptr;
  float* query_lanes_ = nullptr;  // queries_ as [vectors / 4][key_dim][4]; only for tiles with an order
  bool has_lanes_ = false;        // they are made when the first such tile comes
  float* gathered_ = nullptr;     // [vectors][key_dim] in the order of a key tile
  float* mask_ = nullptr;         // [vectors][page]
  // Keys stored before RoPE: a page of them decoded and rotated, [key_dim][page], and the angles.
  float* turned_ = nullptr;
  tiles::TurnBlock* turn_blocks_ = nullptr;
  float* turn_room_ = nullptr;
  std::int32_t* positions_ = nullptr;  // by place
  tiles::Ahead ahead_key_;             // what a page's key product asks for
  tiles::Ahead ahead_value_;
  const float** mask_rows_ = nullptr;
  std::int32_t* packed_ = nullptr;
  float* x_scale_ = nullptr;  // [vectors]
};

}  // namespace kvant::cache
