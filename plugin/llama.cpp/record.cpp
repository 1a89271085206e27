#include "record.hpp"

#include <fstream>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "codec.hpp"
#include "config.hpp"

namespace kvant::llama {
namespace {

struct File {
  std::mutex mutex;
  std::ofstream out;
};

template <typename T>
void put(std::ofstream& out, const T* data, std::size_t count) {
  out.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(count * sizeof(T)));
}

}  // namespace

void record_rows(int layer, Side side, int heads, int dim, std::span<const std::int64_t> cells, const float* rows,
                 std::int64_t row_stride) {
  const std::string& path = config().record;
  if (path.empty()) return;
  static File file;
  const std::lock_guard lock(file.mutex);
  if (!file.out.is_open()) {
    file.out.open(path, std::ios::binary | std::ios::trunc);
    file.out.write("KVANTROW", 8);
  }
  const std::int32_t head[] = {layer, static_cast<std::int32_t>(side), heads, dim};
  const auto count = static_cast<std::int64_t>(cells.size());
  put(file.out, head, 4);
  put(file.out, &count, 1);
  put(file.out, cells.data(), cells.size());
  const RowCodec half(abi::kF16);
  const std::int64_t width = std::int64_t{heads} * dim;
  std::vector<std::uint16_t> line(static_cast<std::size_t>(width));
  for (std::int64_t i = 0; i < count; ++i) {
    half.encode(rows + i * row_stride, line.data(), width);
    put(file.out, line.data(), line.size());
  }
  file.out.flush();
  if (!file.out.good()) throw std::runtime_error("KVANT_RECORD: cannot write '" + path + "'");
}

}  // namespace kvant::llama
