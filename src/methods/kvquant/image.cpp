// The parts of a KVQuant cache in an image (exact/archive.hpp). Whatever is read is checked before it is used: decoding
// trusts the positions of outliers.
#include <algorithm>
#include <cstring>

#include "methods/kvquant/state.hpp"

namespace kvant::kvquant {
namespace {

constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

template <typename T>
T load(const std::byte* from, std::size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

// Starts ascend, each head's positions ascend and lie in the page; a token's outliers lie in its channels.
bool PackedSide::has_valid_outliers(const Page& page, bool coded) const {
  if (coded && shape_.per_token) {
    const Slot first = slot_of(page, true, 0, 0);
    const std::size_t count = size(shape_.all_heads() * page.capacity * shape_.token_outliers);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t channel = shape_.index_bytes() == 1 ? load<std::uint8_t>(first.outlier_indices, i)
                                                             : load<std::uint16_t>(first.outlier_indices, i);
      if (channel >= shape_.channels) return false;
    }
  }
  if (page.outlier_bytes == 0) return true;
  const std::size_t heads = size(shape_.all_heads());
  const std::size_t head_bytes = (heads + 1) * sizeof(std::uint32_t);
  if (!coded || shape_.per_token || page.outlier_bytes < head_bytes) return false;
  const std::byte* data = page.outliers.get();
  const std::size_t count = load<std::uint32_t>(data, heads);
  if (page.outlier_bytes != head_bytes + count * (size_of(shape_.type) + sizeof(std::uint16_t))) return false;
  if (load<std::uint32_t>(data, 0) != 0) return false;
  const std::byte* positions = data + head_bytes + count * size_of(shape_.type);
  for (std::size_t head = 0; head < heads; ++head) {
    const std::size_t first = load<std::uint32_t>(data, head);
    const std::size_t last = load<std::uint32_t>(data, head + 1);
    if (first > last || last > count) return false;
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t position = load<std::uint16_t>(positions, i);
      if (position >= page.tokens * shape_.channels) return false;
      if (i > first && position <= load<std::uint16_t>(positions, i - 1)) return false;
    }
  }
  return true;
}

void PackedSide::transfer_page(exact::Archive& archive, bool coded, Page& page) {
  archive.number("capacity of a page", page.capacity, 1, kPageTokens);
  archive.number("tokens of a page", page.tokens, 1, page.capacity);
  auto outlier_bytes = static_cast<std::uint64_t>(page.outlier_bytes);
  archive.number(outlier_bytes);
  if (archive.reads()) {
    const std::size_t bytes = page_bytes(coded, page.capacity);
    archive.need(base::checked_add(bytes, static_cast<std::size_t>(outlier_bytes)));
    const std::int32_t tokens = page.tokens;
    page = make_page(coded, page.capacity);
    page.tokens = tokens;
    page.outlier_bytes = static_cast<std::size_t>(outlier_bytes);
    page.outliers = base::allocate_aligned(page.outlier_bytes);
  }
  archive.bytes(page.block.get(), page.block_bytes);
  archive.bytes(page.outliers.get(), page.outlier_bytes);
  archive.require(!archive.reads() || has_valid_outliers(page, coded), "outliers of a page");
}

void PackedSide::transfer_run(exact::Archive& archive, Run& run) {
  auto coded = static_cast<std::uint8_t>(run.coded);
  archive.number("kind of a run", coded, 0, 1);
  run.coded = coded != 0;
  archive.numbers(run.levels);
  const std::size_t table = size(shape_.heads * shape_.level_count() * shape_.channels);
  archive.require(run.levels.empty() || (run.coded && !shape_.per_token && run.levels.size() == table),
                  "levels of a run");
  // Pages without tokens are what an abandoned call left.
  auto pages = static_cast<std::int64_t>(
      std::count_if(run.pages.begin(), run.pages.end(), [](const Page& page) { return page.tokens > 0; }));
  archive.number("pages", pages, 1, kMaxCount);
  for (std::int64_t i = 0; i < pages; ++i) {
    if (archive.reads()) run.pages.emplace_back();
    Page& page = run.pages[size(i)];
    transfer_page(archive, run.coded, page);
    archive.require(i + 1 == pages || page.tokens == page.capacity, "a page that is not full before the last");
    if (archive.reads()) run.tokens += page.tokens;
  }
}

void PackedSide::transfer(exact::Archive& archive) {
  auto count = static_cast<std::int64_t>(
      std::count_if(runs_.begin(), runs_.end(), [](const Run& run) { return run.tokens > 0; }));
  archive.number("runs", count, 0, kMaxCount);
  for (std::int64_t i = 0; i < count; ++i) {
    if (archive.reads()) runs_.emplace_back();
    transfer_run(archive, runs_[size(i)]);
    if (archive.reads()) tokens_ += runs_.back().tokens;
  }
}

bool PackedSide::needs_live_levels() const {
  return !shape_.per_token &&
         std::any_of(runs_.begin(), runs_.end(), [](const Run& run) { return run.coded && run.levels.empty(); });
}

void KVQuantKVCache::State::transfer(exact::Archive& archive) {
  SideShape shape = has_shape ? keys.shape() : SideShape{};
  auto flag = static_cast<std::uint8_t>(has_shape);
  archive.number("has a shape", flag, 0, 1);
  if (flag != 0) {
    archive.number("batch", shape.batch, 1, 1 << 20);
    archive.number("heads", shape.heads, 1, 1 << 20);
    archive.number("channels", shape.channels, 1, kMaxChannels);
    archive.type(shape.type);
    if (archive.reads()) set_shape(shape.batch, shape.heads, shape.channels, shape.type);
    keys.transfer(archive);
    values.transfer(archive);
  }
  for (std::vector<float>* table : {&key_levels, &threshold, &value_levels}) archive.numbers(*table);
  for (std::int64_t* count : {&value_level_tokens, &tokens, &sink_kept, &outliers, &counters.compressed_key,
                              &counters.compressed_value, &counters.fp16_key, &counters.fp16_value}) {
    archive.number(*count);
  }
  const std::size_t table = size(shape.heads * level_count() * shape.channels);
  archive.require(key_levels.size() == table || (key_levels.empty() && !keys.needs_live_levels()), "key levels");
  archive.require(threshold.empty() || threshold.size() == size(shape.channels), "thresholds");
  const std::int64_t level_tokens = std::max<std::int64_t>(0, value_level_tokens);
  archive.require(value_level_tokens >= -1 && level_tokens <= kMaxCount &&
                      value_levels.size() == size(level_count() * level_tokens),
                  "value levels");
  archive.require(tokens == keys.tokens() && tokens == values.tokens() && sink_kept >= 0 && sink_kept <= tokens,
                  "tokens");
}

void KVQuantKVCache::transfer(exact::Archive& archive) {
  state_->transfer(archive);
}

}  // namespace kvant::kvquant
