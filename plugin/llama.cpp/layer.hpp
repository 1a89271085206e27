// Layer: the K and V cache tensors of one model layer, kept in one PageStore per stream.
//
// A row is what the host calls a cell, numbered over all streams: row = stream * cells + cell.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "codec.hpp"
#include "ggml_abi.hpp"
#include "kvant/page_store.hpp"
#include "status.hpp"

namespace kvant::llama {

// What one cache tensor looks like to the host. Its memory is address space only, unless the layer is passed through.
struct CacheTensor {
  std::string name;
  void* data = nullptr;
  std::size_t bytes = 0;
  RowCodec codec;
  std::int64_t row_values = 0;
  std::size_t row_bytes = 0;
  std::int64_t cells = 0;
  std::int64_t streams = 0;
};

// The head counts and sizes, which a cache tensor does not show; the first attention that reads it does.
struct Heads {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
};

// pending: no attention was seen yet. packed: rows live in page stores. raw: plain memory, run by the host's own code.
enum class Mode : std::uint8_t { pending, packed, raw };

class Layer {
 public:
  explicit Layer(int index) : index_(index) {}

  void add(Side side, CacheTensor tensor);

  int index() const { return index_; }
  Mode mode() const { return mode_; }
  bool has(Side side) const { return tensor(side).data != nullptr; }
  const CacheTensor& tensor(Side side) const { return tensors_[static_cast<std::size_t>(side)]; }
  const std::string& reason() const { return reason_; }
  const Heads& heads() const { return heads_; }
  int dim(Side side) const { return side == Side::key ? heads_.key_dim : heads_.value_dim; }

  // pending -> packed. Throws std::exception when rows of these tensors cannot be split into such heads.
  void pack(const Recipe& recipe, const Heads& heads, const std::shared_ptr<PagePool>& pool);
  // pending -> raw; `reason` goes into the status.
  void pass_through(std::string reason);

  // Takes note of how a graph rotates the keys that it writes: `rows` is the source of a SET_ROWS. What cannot be
  // undone is an error of the first key that a recipe with rope=before stores, not before.
  void notice_rotation(const abi::Tensor* rows);
  const std::optional<KeyRotation>& rotation() const { return rotation_; }
  // Throws std::runtime_error that names the layer and why its keys cannot be turned back.
  const KeyRotation& known_rotation() const;
  bool needs_rotation() const { return !stores_.empty() && stores_.front().needs_rotation(); }
  // PageStore::shift_keys for rows of any stream.
  void shift_keys(std::span<const std::int64_t> rows, std::span<const std::int64_t> distances);

  const PageStore& store(std::int64_t stream) const { return stores_[static_cast<std::size_t>(stream)]; }

  // Rows of a packed layer. `values` is [rows, kv_heads, dim]; positions may be empty.
  void write(Side side, std::span<const std::int64_t> rows, const ConstView& values,
             std::span<const std::int64_t> positions = {});
  // The same with dense float32 values, [rows][row_values].
  void write(Side side, std::span<const std::int64_t> rows, const float* values,
             std::span<const std::int64_t> positions = {});
  void read(Side side, std::span<const std::int64_t> rows, float* values) const;
  // PageStore::observe for one stream; cells are numbered inside it.
  void observe(std::int64_t stream, std::span<const std::int64_t> cells, const ConstView& queries,
               const QueryScores& scores) {
    stores_[static_cast<std::size_t>(stream)].observe(cells, queries, scores);
  }
  bool weighs_queries() const { return stores_.front().weighs_queries(); }
  bool any_written(std::int64_t row) const { return written_[static_cast<std::size_t>(row)] != 0; }

  // The tensor's bytes as the host would see them in plain memory. With keep_gaps, zeros written to a row that holds
  // nothing leave it empty.
  void get_bytes(Side side, std::size_t offset, void* data, std::size_t size) const;
  void set_bytes(Side side, std::size_t offset, const void* data, std::size_t size, bool keep_gaps = false);

  void copy_stream(std::int64_t from, std::int64_t to);
  void clear();
  // Encodes what is ready in the streams that were written since the last call.
  void seal(int threads);

  StoreBytes bytes() const;
  std::int64_t cells_written() const { return cells_written_; }
  std::int64_t values_per_cell() const { return heads_.kv_heads * (heads_.key_dim + heads_.value_dim); }
  LayerReport report() const;

 private:
  std::int64_t stream_of(std::int64_t row) const { return row / tensors_[0].cells; }
  void mark(std::int64_t stream, std::span<const std::int64_t> cells);
  void recount(std::int64_t stream);
  template <typename Visit>
  void for_each_stream_run(std::span<const std::int64_t> rows, Visit visit) const;

  int index_;
  Mode mode_ = Mode::pending;
  std::array<CacheTensor, 2> tensors_;
  Heads heads_;
  std::string reason_;
  std::optional<KeyRotation> rotation_;
  std::string rotation_problem_ = "no graph that writes them was seen";
  std::vector<PageStore> stores_;
  std::vector<std::uint8_t> dirty_;    // per stream: written since the last seal
  std::vector<std::uint8_t> written_;  // per row: key and value are both there
  std::int64_t cells_written_ = 0;
};

}  // namespace kvant::llama
