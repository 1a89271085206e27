#include "record.hpp"

#include <fstream>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "codec.hpp"
#include "config.hpp"

namespace kvant::llama {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'R', 'O', 'W'};
constexpr std::uint32_t kVersionAndType[] = {1, static_cast<std::uint32_t>(DType::f16)};

struct File {
  std::mutex mutex;
  std::ofstream out;

  template <typename T>
  void put(const T* data, std::size_t count) {
    out.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(count * sizeof(T)));
  }
  void open(const std::string& path) {
    out.open(path, std::ios::binary | std::ios::trunc);
    put(kMagic, sizeof kMagic);
    put(kVersionAndType, 2);
  }
};

}  // namespace

void record_rows(int layer, Side side, int heads, int dim, std::span<const std::int64_t> cells, const float* rows,
                 std::int64_t row_stride) {
  const std::string& path = config().record;
  if (path.empty()) return;
  static File file;
  const std::lock_guard lock(file.mutex);
  if (!file.out.is_open()) file.open(path);
  const std::int32_t head[] = {layer, static_cast<std::int32_t>(side), heads, dim};
  const auto count = static_cast<std::int64_t>(cells.size());
  file.put(head, 4);
  file.put(&count, 1);
  file.put(cells.data(), cells.size());
  const RowCodec half(abi::kF16);
  const std::int64_t width = std::int64_t{heads} * dim;
  std::vector<std::uint16_t> line(static_cast<std::size_t>(width));
  for (std::int64_t i = 0; i < count; ++i) {
    half.encode(rows + i * row_stride, line.data(), width);
    file.put(line.data(), line.size());
  }
  file.out.flush();  // a host that ends without unloading the plug-in leaves whole records
  if (!file.out.good()) throw std::runtime_error("KVANT_RECORD: cannot write '" + path + "'");
}

}  // namespace kvant::llama
