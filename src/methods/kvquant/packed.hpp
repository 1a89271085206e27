// One side (keys or values) of a KVQuant cache as it is held: runs of tokens, exact or coded, in pages of 64 tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.hpp"
#include "exact/archive.hpp"
#include "kvant/types.hpp"
#include "methods/kvquant/nuq.hpp"

namespace kvant::kvquant {

constexpr int kPageTokens = 64;

struct SideShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t channels = 0;
  int bits = 3;
  DType type = DType::f16;
  bool per_token = false;           // values: every row has its own levels and a fixed number of outliers
  std::int64_t token_outliers = 0;  // that number

  std::int64_t all_heads() const { return batch * heads; }
  int level_count() const { return 1 << bits; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(channels) * size_of(type); }
  std::size_t code_bytes() const { return slice_bytes(channels, bits); }
  std::size_t index_bytes() const { return channels <= 256 ? 1 : 2; }
  // A coded row of a per-token side, all-in.
  std::size_t token_bytes() const {
    return code_bytes() + 2 * static_cast<std::size_t>(level_count()) +
           static_cast<std::size_t>(token_outliers) * (size_of(type) + index_bytes());
  }
  // True where rows are smaller than their codes, levels and outliers: then rows are what is held.
  bool rows_are_smaller() const { return per_token && token_bytes() >= row_bytes(); }
};

// A cell that keeps its exact value, as handed to PackedSide::add_outliers.
struct Outlier {
  std::int32_t row = 0;  // token of the call
  std::uint16_t channel = 0;
  float value = 0;
};

struct Page {
  base::AlignedBytes block;  // rows, or codes (and levels and outliers of a per-token side)
  std::size_t block_bytes = 0;
  // Outliers of a key page: [all_heads + 1] u32 starts, the values in the cached type, u16 positions
  // (slot * channels + channel, ascending).
  base::AlignedBytes outliers;
  std::size_t outlier_bytes = 0;
  std::int32_t capacity = 0;
  std::int32_t tokens = 0;
};

// Consecutive tokens that are stored the same way.
struct Run {
  bool coded = false;
  std::int64_t tokens = 0;
  std::vector<Page> pages;            // all full but the last
  std::vector<std::uint16_t> levels;  // keys, once other levels are in force: fp16 [heads][levels][channels]
};

class PackedSide {
 public:
  void reset(const SideShape& shape);  // empties it

  const SideShape& shape() const { return shape_; }
  std::int64_t tokens() const { return tokens_; }

  // Where one row of the tokens that are being appended goes.
  struct Place {
    Run* run = nullptr;
    Page* page = nullptr;
    std::int32_t slot = 0;
  };
  using Places = std::vector<Place>;
  struct Slot {
    std::byte* row = nullptr;              // exact runs
    std::uint8_t* codes = nullptr;         // coded runs
    std::uint16_t* levels = nullptr;       // per-token runs from here on
    std::byte* outlier_values = nullptr;   // [token_outliers] in the cached type
    std::byte* outlier_indices = nullptr;  // [token_outliers], index_bytes each
  };

  // Makes room for `exact` rows and then `coded` ones. Nothing counts before commit: what an abandoned call leaves is
  // reused by the next. `tight` gives the exact rows no room to grow.
  Places reserve(std::int64_t exact, std::int64_t coded, bool tight);
  Slot slot(const Place& place, std::int64_t head) const {
    return slot_of(*place.page, place.run->coded, head, place.slot);
  }
  // Counts the rows; `outliers` has one list per head, rows (indices into places) ascending, for keys.
  void commit(const Places& places, const std::vector<std::vector<Outlier>>& outliers);

  // Ends the last coded run: later coded rows have other levels. `levels` fp32 [heads][levels][channels] are its own.
  // Keeps its rows instead where those are smaller than codes and table.
  void close_run(const float* levels);

  // Rows first..first+n-1 of a head in the cached type: T is uint16_t for 2-byte types, uint32_t for f32.
  // `live` are the fp32 levels of the last coded run of keys.
  template <typename T>
  void decode(std::int64_t head, std::int64_t first, std::int64_t n, const float* live, T* out,
              std::int64_t out_stride) const;
  void decode_float(std::int64_t head, std::int64_t first, std::int64_t n, const float* live, float* out,
                    std::int64_t out_stride) const;

  void truncate(std::int64_t tokens);
  std::size_t bytes() const;  // what the allocator holds for it

  // Runs and pages, to an archive or from it; the shape is set already.
  void transfer(exact::Archive& archive);
  // Does a coded run need the levels that are in force?
  bool needs_live_levels() const;

 private:
  void transfer_run(exact::Archive& archive, Run& run);
  void transfer_page(exact::Archive& archive, bool coded, Page& page);
  bool has_valid_outliers(const Page& page, bool coded) const;
  std::size_t page_bytes(bool coded, std::int64_t capacity) const;
  Page make_page(bool coded, std::int64_t capacity) const;
  Slot slot_of(const Page& page, bool coded, std::int64_t head, std::int64_t slot) const;
  void extend(Run& run, std::int64_t tokens, bool tight);
  void tighten(Run& run) const;
  void drop_empty_runs();
  Run to_rows(std::size_t run, const float* live) const;
  void set_outliers(Page& page, const std::vector<std::vector<Outlier>>& entries) const;
  std::vector<std::vector<Outlier>> outliers_of(const Page& page, std::int64_t tokens) const;
  template <typename T>
  void decode_page(const Run& run, const Page& page, std::int64_t head, std::int64_t slot, std::int64_t n,
                   const T* table, T* out, std::int64_t out_stride) const;
  template <typename T>
  void overlay(const Page& page, std::int64_t head, std::int64_t slot, std::int64_t n, T* out,
               std::int64_t out_stride) const;
  template <typename T>
  std::vector<T> key_table(const Run& run, std::int64_t head, const float* live) const;

  SideShape shape_;
  std::vector<Run> runs_;
  std::int64_t tokens_ = 0;
};

}  // namespace kvant::kvquant
