#include "methods/kvquant/packed.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "base/half.hpp"

namespace kvant::kvquant {
namespace {

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

}  // namespace

void PackedSide::reset(const SideShape& shape) {
  shape_ = shape;
  runs_.clear();
  runs_.shrink_to_fit();
  tokens_ = 0;
}

// ---- pages

std::size_t PackedSide::page_bytes(bool coded, std::int64_t capacity) const {
  const std::size_t rows = base::checked_multiply(size(shape_.all_heads()), size(capacity));
  if (!coded) return base::checked_multiply(rows, shape_.row_bytes());
  const std::size_t row = shape_.per_token ? shape_.token_bytes() : shape_.code_bytes();
  return base::checked_multiply(rows, row) + kSliceSlack;
}

Page PackedSide::make_page(bool coded, std::int64_t capacity) const {
  Page page;
  page.block_bytes = page_bytes(coded, capacity);
  page.block = base::allocate_zeroed(page.block_bytes);
  page.capacity = static_cast<std::int32_t>(capacity);
  return page;
}

// Widest elements first, so that each part is aligned: outlier values, levels, outlier indices, codes.
PackedSide::Slot PackedSide::slot_of(const Page& page, bool coded, std::int64_t head, std::int64_t slot) const {
  Slot result;
  const std::size_t row = size(head * page.capacity + slot);
  if (!coded) {
    result.row = page.block.get() + row * shape_.row_bytes();
    return result;
  }
  std::byte* part = page.block.get();
  const std::size_t rows = size(shape_.all_heads() * page.capacity);
  if (shape_.per_token) {
    const std::size_t outliers = size(shape_.token_outliers);
    const std::size_t element = size_of(shape_.type);
    result.outlier_values = part + row * outliers * element;
    part += rows * outliers * element;
    result.levels = reinterpret_cast<std::uint16_t*>(part) + row * size(shape_.level_count());
    part += rows * size(shape_.level_count()) * sizeof(std::uint16_t);
    result.outlier_indices = part + row * outliers * shape_.index_bytes();
    part += rows * outliers * shape_.index_bytes();
  }
  result.codes = reinterpret_cast<std::uint8_t*>(part) + row * shape_.code_bytes();
  return result;
}

void PackedSide::extend(Run& run, std::int64_t tokens, bool tight) {
  std::int64_t room = -run.tokens;
  for (const Page& page : run.pages) room += page.capacity;
  run.pages.reserve(run.pages.size() + size(std::max<std::int64_t>(0, tokens - room + kPageTokens - 1) / kPageTokens));
  for (; room < tokens; room += run.pages.back().capacity) {
    run.pages.push_back(make_page(run.coded, tight ? std::min<std::int64_t>(tokens - room, kPageTokens) : kPageTokens));
  }
}

// Gives back the free slots of the last page.
void PackedSide::tighten(Run& run) const {
  while (!run.pages.empty() && run.pages.back().tokens == 0) run.pages.pop_back();
  if (run.pages.empty() || run.pages.back().tokens == run.pages.back().capacity) return;
  Page& last = run.pages.back();
  Page copy = make_page(run.coded, last.tokens);
  const auto n = size(last.tokens);
  for (std::int64_t head = 0; head < shape_.all_heads(); ++head) {
    const Slot from = slot_of(last, run.coded, head, 0);
    const Slot to = slot_of(copy, run.coded, head, 0);
    if (!run.coded) {
      std::memcpy(to.row, from.row, n * shape_.row_bytes());
      continue;
    }
    std::memcpy(to.codes, from.codes, n * shape_.code_bytes());
    if (!shape_.per_token) continue;
    std::memcpy(to.levels, from.levels, n * size(shape_.level_count()) * sizeof(std::uint16_t));
    std::memcpy(to.outlier_values, from.outlier_values, n * size(shape_.token_outliers) * size_of(shape_.type));
    std::memcpy(to.outlier_indices, from.outlier_indices, n * size(shape_.token_outliers) * shape_.index_bytes());
  }
  copy.tokens = last.tokens;
  copy.outliers = std::move(last.outliers);
  copy.outlier_bytes = last.outlier_bytes;
  last = std::move(copy);
}

// ---- appending

void PackedSide::drop_empty_runs() {
  while (!runs_.empty() && runs_.back().tokens == 0) runs_.pop_back();
}

PackedSide::Places PackedSide::reserve(std::int64_t exact, std::int64_t coded, bool tight) {
  drop_empty_runs();
  runs_.reserve(runs_.size() + 2);
  const auto grow = [&](bool is_coded, std::int64_t n, bool is_tight) {
    if (n == 0) return;
    const bool starts = runs_.empty() || runs_.back().coded != is_coded || !runs_.back().levels.empty();
    if (starts) {
      if (!runs_.empty() && runs_.back().tokens > 0) tighten(runs_.back());
      runs_.push_back(Run{is_coded, 0, {}, {}});
    }
    extend(runs_.back(), n, is_tight);
  };
  grow(false, exact, tight);
  grow(true, coded, false);
  Places places;
  places.reserve(size(exact + coded));
  const auto place = [&](Run& run, std::int64_t n) {
    for (Page& page : run.pages) {
      for (std::int32_t slot = page.tokens; slot < page.capacity && n > 0; ++slot, --n) {
        places.push_back({&run, &page, slot});
      }
    }
  };
  if (exact > 0) place(coded > 0 ? runs_[runs_.size() - 2] : runs_.back(), exact);
  if (coded > 0) place(runs_.back(), coded);
  return places;
}

void PackedSide::commit(const Places& places, const std::vector<std::vector<Outlier>>& outliers) {
  std::vector<std::size_t> next(outliers.size(), 0);
  for (std::size_t row = 0; row < places.size();) {
    Page& page = *places[row].page;
    const std::size_t first = row;
    while (row < places.size() && places[row].page == &page) ++row;
    if (!outliers.empty() && places[first].run->coded) {
      std::vector<std::vector<Outlier>> entries = outliers_of(page, page.tokens);
      bool any = false;
      for (std::size_t head = 0; head < outliers.size(); ++head) {
        const std::vector<Outlier>& own = outliers[head];
        for (std::size_t& i = next[head]; i < own.size() && own[i].row < static_cast<std::int64_t>(row); ++i) {
          Outlier entry = own[i];
          entry.row = places[size(entry.row)].slot;
          entries[head].push_back(entry);
          any = true;
        }
      }
      if (any) set_outliers(page, entries);
    }
    page.tokens = places[row - 1].slot + 1;
    places[first].run->tokens += static_cast<std::int64_t>(row - first);
    tokens_ += static_cast<std::int64_t>(row - first);
  }
}

// ---- key outliers of a page

void PackedSide::set_outliers(Page& page, const std::vector<std::vector<Outlier>>& entries) const {
  std::size_t count = 0;
  for (const auto& own : entries) count += own.size();
  const std::size_t element = size_of(shape_.type);
  const std::size_t head_bytes = (entries.size() + 1) * sizeof(std::uint32_t);
  page.outlier_bytes = count == 0 ? 0 : head_bytes + count * (element + sizeof(std::uint16_t));
  page.outliers = base::allocate_aligned(page.outlier_bytes);
  if (count == 0) return;
  auto* starts = reinterpret_cast<std::uint32_t*>(page.outliers.get());
  std::byte* values = page.outliers.get() + head_bytes;
  auto* positions = reinterpret_cast<std::uint16_t*>(values + count * element);
  std::uint32_t at = 0;
  for (std::size_t head = 0; head < entries.size(); ++head) {
    starts[head] = at;
    for (const Outlier& entry : entries[head]) {
      base::store_float(values, shape_.type, at, entry.value);
      positions[at++] = static_cast<std::uint16_t>(entry.row * shape_.channels + entry.channel);
    }
  }
  starts[entries.size()] = at;
}

// The outliers of the first `tokens` slots.
std::vector<std::vector<Outlier>> PackedSide::outliers_of(const Page& page, std::int64_t tokens) const {
  std::vector<std::vector<Outlier>> entries(size(shape_.all_heads()));
  if (page.outlier_bytes == 0) return entries;
  const auto* starts = reinterpret_cast<const std::uint32_t*>(page.outliers.get());
  const std::byte* values = page.outliers.get() + (entries.size() + 1) * sizeof(std::uint32_t);
  const auto* positions =
      reinterpret_cast<const std::uint16_t*>(values + starts[entries.size()] * size_of(shape_.type));
  for (std::size_t head = 0; head < entries.size(); ++head) {
    for (std::uint32_t i = starts[head]; i < starts[head + 1]; ++i) {
      const std::int64_t slot = positions[i] / shape_.channels;
      if (slot >= tokens) break;
      entries[head].push_back({static_cast<std::int32_t>(slot),
                               static_cast<std::uint16_t>(positions[i] % shape_.channels),
                               base::load_float(values, shape_.type, i)});
    }
  }
  return entries;
}

// ---- ending runs

// The run as exact rows.
Run PackedSide::to_rows(std::size_t index, const float* live) const {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < index; ++i) first += runs_[i].tokens;
  Run rows{false, runs_[index].tokens, {}, {}};
  for (std::int64_t done = 0; done < rows.tokens;) {
    const std::int64_t n = std::min<std::int64_t>(rows.tokens - done, kPageTokens);
    rows.pages.push_back(make_page(false, n));
    rows.pages.back().tokens = static_cast<std::int32_t>(n);
    for (std::int64_t head = 0; head < shape_.all_heads(); ++head) {
      std::byte* out = slot_of(rows.pages.back(), false, head, 0).row;
      if (shape_.type == DType::f32) {
        decode(head, first + done, n, live, reinterpret_cast<std::uint32_t*>(out), shape_.channels);
      } else {
        decode(head, first + done, n, live, reinterpret_cast<std::uint16_t*>(out), shape_.channels);
      }
    }
    done += n;
  }
  return rows;
}

void PackedSide::close_run(const float* levels) {
  drop_empty_runs();
  if (runs_.empty() || !runs_.back().coded || !runs_.back().levels.empty()) return;
  Run& run = runs_.back();
  const std::size_t table = size(shape_.heads * shape_.level_count() * shape_.channels);
  std::size_t coded = table * sizeof(std::uint16_t);
  for (const Page& page : run.pages) coded += page_bytes(true, page.tokens) + page.outlier_bytes;
  if (page_bytes(false, shape_.all_heads() == 0 ? 0 : run.tokens) < coded) {
    run = to_rows(runs_.size() - 1, levels);
    return;
  }
  tighten(run);
  std::vector<std::uint16_t> halves(table);
  for (std::size_t i = 0; i < table; ++i) halves[i] = base::float_to_half(levels[i]);
  run.levels = std::move(halves);
}

void PackedSide::truncate(std::int64_t tokens) {
  while (tokens_ > tokens) {
    Run& run = runs_.back();
    if (run.tokens <= tokens_ - tokens) {
      tokens_ -= run.tokens;
      runs_.pop_back();
      continue;
    }
    while (run.pages.back().tokens <= tokens_ - tokens) {
      run.tokens -= run.pages.back().tokens;
      tokens_ -= run.pages.back().tokens;
      run.pages.pop_back();
    }
    Page& page = run.pages.back();
    const auto dropped = static_cast<std::int32_t>(tokens_ - tokens);
    if (dropped > 0 && page.outlier_bytes > 0) set_outliers(page, outliers_of(page, page.tokens - dropped));
    page.tokens -= dropped;
    run.tokens -= dropped;
    tokens_ -= dropped;
  }
}

std::size_t PackedSide::bytes() const {
  std::size_t total = runs_.capacity() * sizeof(Run);
  for (const Run& run : runs_) {
    total += run.pages.capacity() * sizeof(Page) + run.levels.capacity() * sizeof(std::uint16_t);
    for (const Page& page : run.pages) total += page.block_bytes + page.outlier_bytes;
  }
  return total;
}

}  // namespace kvant::kvquant
