// Appending rows to exact pages.
#include "cuda/check.hpp"
#include "cuda/seal.hpp"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 16;  // of a block: a prompt's chunk needs many blocks to be written at the memory's speed

__global__ void append_kernel(const AppendArgs args, const ExactFormat format) {
  const int sequence = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int length = args.lengths[sequence];
  const int begin = args.tail_begin[sequence];
  const int width = format.key_dim + format.value_dim;
  const int row0 = static_cast<int>(blockIdx.z) * kRows;
  const int rows = min(kRows, args.rows - row0);
  unsigned invalid = 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows * width; i += kThreads) {
    const int row = row0 + i / width;
    const int d = i % width;
    const int at = length + row - begin;
    const std::int32_t number = args.exact_table[sequence * args.exact_table_stride + 1 + at / kPage];
    std::uint8_t* page =
        args.exact + number * args.exact_stride + static_cast<std::int64_t>(head) * format.page_bytes();
    const std::int64_t source = (static_cast<std::int64_t>(sequence) * args.rows + row) * args.kv_heads + head;
    const int c = d - format.key_dim;
    const std::uint16_t bits =
        c < 0 ? args.keys[source * format.key_dim + d] : args.values[source * format.value_dim + c];
    const int place = c < 0 ? format.key_at(at % kPage, d) : format.value_at(at % kPage, c);
    // What seals and attends may rely on numbers: a NaN among the values to rank made lists of outliers without an end.
    const bool valid = (bits & 0x7FFFU) <= args.largest;
    *reinterpret_cast<std::uint16_t*>(page + place) = valid ? bits : 0;
    if (!valid) ++invalid;
  }
  if (invalid > 0) atomicAdd(args.invalid, invalid);
}

// A kernel of its own: every block of the append reads the old lengths.
__global__ void grow_kernel(std::int32_t* lengths, int sequences, int rows) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < sequences) lengths[i] += rows;
}

}  // namespace

void launch_append(const DeviceFormat& format, const AppendArgs& args, int sequences, void* stream) {
  const dim3 grid(static_cast<unsigned>(sequences), static_cast<unsigned>(args.kv_heads),
                  static_cast<unsigned>((args.rows + kRows - 1) / kRows));
  append_kernel<<<grid, kThreads, 0, as_stream(stream)>>>(args, format.exact);
  grow_kernel<<<static_cast<unsigned>((sequences + 255) / 256), 256, 0, as_stream(stream)>>>(args.lengths, sequences,
                                                                                             args.rows);
  check(cudaGetLastError(), "launch of the append kernels");
}

}  // namespace kvant::cuda
