#include "cli/recorded.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'R', 'O', 'W'};
constexpr std::int64_t kMostExtent = 1024;
constexpr std::int64_t kMostRows = std::int64_t{1} << 32;

// Infinities and NaN become infinities: both are refused later.
float half_to_float(std::uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  float magnitude = std::numeric_limits<float>::infinity();
  if (exponent < 31)
    magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return half >> 15 != 0 ? -magnitude : magnitude;
}

bool fits(std::int64_t value, std::int64_t least, std::int64_t most) {
  return value >= least && value <= most;
}

}  // namespace

void RecordedRows::bad(const std::string& why) const {
  throw CliError(Exit::bad_input, fmt::format("{}: {}", name_, why));
}

template <typename T>
void RecordedRows::read_at(std::uint64_t at, T* data, std::size_t count) {
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(at));
  file_.read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(count * sizeof(T)));
  if (!file_.good()) bad("ends early");
}

RecordedRows::RecordedRows(const std::filesystem::path& path) : name_(path.string()), file_(path, std::ios::binary) {
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(path, error);
  if (error || !file_.is_open()) throw CliError(Exit::io, fmt::format("cannot read {}", name_));
  char magic[8];
  std::array<std::uint32_t, 2> version_and_type{};
  read_at(0, magic, sizeof magic);
  if (std::memcmp(magic, kMagic, sizeof magic) != 0) bad("does not start with KVANTROW");
  read_at(sizeof magic, version_and_type.data(), 2);
  if (version_and_type[0] != 1) bad(fmt::format("is version {}; this build reads version 1", version_and_type[0]));
  if (version_and_type[1] > 1) bad(fmt::format("has rows of type {}; allowed: 0 and 1", version_and_type[1]));
  halves_ = version_and_type[1] == 1;
  for (std::uint64_t at = sizeof magic + sizeof version_and_type; at < size;) at = read_head(at, size);
}

// The record at `at`; returns where the next one is.
std::uint64_t RecordedRows::read_head(std::uint64_t at, std::uint64_t size) {
  std::array<std::int32_t, 4> head{};  // layer, side, heads, dim
  std::int64_t count = 0;
  read_at(at, head.data(), head.size());
  read_at(at + sizeof head, &count, 1);
  if (!fits(head[0], 0, 9999) || !fits(head[1], 0, 1) || !fits(head[2], 1, kMostExtent) ||
      !fits(head[3], 1, kMostExtent) || !fits(count, 1, kMostRows)) {
    bad(fmt::format("the record at byte {} is impossible", at));
  }
  Stream& stream = streams_[{head[0], head[1]}];
  if (!stream.records.empty() && (stream.heads.count != head[2] || stream.heads.dim != head[3])) {
    bad(fmt::format("the record at byte {} has other heads than earlier ones of its layer", at));
  }
  stream.heads = {head[2], head[3]};
  at += sizeof head + sizeof count;
  stream.records.push_back({at, count});
  const auto width = static_cast<std::uint64_t>(head[2]) * static_cast<std::uint64_t>(head[3]);
  at += static_cast<std::uint64_t>(count) * (sizeof(std::int64_t) + width * (halves_ ? 2 : 4));
  if (at > size) bad("ends early");
  return at;
}

std::vector<int> RecordedRows::layers() const {
  std::vector<int> layers;
  for (const auto& [key, stream] : streams_) {
    if (key.second == 0 && streams_.contains({key.first, 1})) layers.push_back(key.first);
  }
  return layers;
}

const RecordedRows::Stream& RecordedRows::stream(int layer, int side) const {
  const auto found = streams_.find({layer, side});
  if (found == streams_.end()) bad(fmt::format("has no {} of layer {}", side == 0 ? "keys" : "values", layer));
  return found->second;
}

RecordedRows::Heads RecordedRows::heads(int layer, int side) const {
  return stream(layer, side).heads;
}

std::vector<float> RecordedRows::read(int layer, int side, std::int64_t sinks) {
  const Stream& from = stream(layer, side);
  const auto width = static_cast<std::size_t>(from.heads.count) * static_cast<std::size_t>(from.heads.dim);
  std::vector<float> rows;
  for (const Record& record : from.records) {
    const auto count = static_cast<std::size_t>(record.count);
    std::vector<std::int64_t> cells(count);
    read_at(record.cells_at, cells.data(), count);
    std::vector<float> all(count * width);
    const std::uint64_t rows_at = record.cells_at + count * sizeof(std::int64_t);
    if (halves_) {
      std::vector<std::uint16_t> halves(count * width);
      read_at(rows_at, halves.data(), halves.size());
      std::transform(halves.begin(), halves.end(), all.begin(), half_to_float);
    } else {
      read_at(rows_at, all.data(), all.size());
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (cells[i] < sinks) continue;
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(i * width);
      rows.insert(rows.end(), first, first + static_cast<std::ptrdiff_t>(width));
    }
  }
  return rows;
}

}  // namespace kvant::cli
