#include "cli/recorded.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'R', 'O', 'W'};
constexpr int kMostExtent = 1 << 16;

float half_to_float(std::uint16_t half) {
  _Float16 value = 0;
  std::memcpy(&value, &half, sizeof half);
  return static_cast<float>(value);
}

}  // namespace

template <typename T>
void RecordedRows::read_at(std::uint64_t at, T* data, std::size_t count) {
  file_.seekg(static_cast<std::streamoff>(at));
  file_.read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(count * sizeof(T)));
  if (!file_.good()) throw CliError(Exit::bad_input, fmt::format("{}: ends early", name_));
}

RecordedRows::RecordedRows(const std::filesystem::path& path) : name_(path.string()), file_(path, std::ios::binary) {
  if (!file_.is_open()) throw CliError(Exit::io, fmt::format("cannot read {}", name_));
  const std::uint64_t size = std::filesystem::file_size(path);
  char magic[8];
  read_at(0, magic, sizeof magic);
  if (std::memcmp(magic, kMagic, sizeof magic) != 0) {
    throw CliError(Exit::bad_input, fmt::format("{} does not start with KVANTROW", name_));
  }
  for (std::uint64_t at = sizeof magic; at < size;) {
    std::array<std::int32_t, 4> head{};  // layer, side, heads, dim
    std::int64_t count = 0;
    read_at(at, head.data(), head.size());
    read_at(at + sizeof head, &count, 1);
    const auto fits = [](std::int64_t x, std::int64_t most) { return x >= 1 && x <= most; };
    if (!fits(head[2], kMostExtent) || !fits(head[3], kMostExtent) || !fits(count, std::int64_t{1} << 32) ||
        head[0] < 0 || head[1] < 0 || head[1] > 1) {
      throw CliError(Exit::bad_input, fmt::format("{}: a record at byte {} is impossible", name_, at));
    }
    Stream& stream = streams_[{head[0], head[1]}];
    stream.heads = {head[2], head[3]};
    at += sizeof head + sizeof count;
    stream.records.push_back({at, count});
    const auto row = sizeof(std::int64_t) +
                     sizeof(std::uint16_t) * static_cast<std::uint64_t>(head[2]) * static_cast<std::uint64_t>(head[3]);
    at += static_cast<std::uint64_t>(count) * row;
    if (at > size) throw CliError(Exit::bad_input, fmt::format("{}: ends early", name_));
  }
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
  if (found != streams_.end()) return found->second;
  throw CliError(Exit::bad_input, fmt::format("{} has no {} of layer {}", name_, side == 0 ? "keys" : "values", layer));
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
    std::vector<std::uint16_t> halves(count * width);
    read_at(record.cells_at, cells.data(), count);
    read_at(record.cells_at + count * sizeof(std::int64_t), halves.data(), halves.size());
    for (std::size_t i = 0; i < count; ++i) {
      if (cells[i] < sinks) continue;
      for (std::size_t d = 0; d < width; ++d) rows.push_back(half_to_float(halves[i * width + d]));
    }
  }
  return rows;
}

}  // namespace kvant::cli
