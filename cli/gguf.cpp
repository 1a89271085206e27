#include "cli/gguf.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF numbers are read as they lie");

// Value types of the format, in its numbering.
enum class Type : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
constexpr std::array<std::size_t, 13> kSizes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr std::uint64_t kMaxKeyBytes = 65535;  // the limit that the format names

class Reader {
 public:
  explicit Reader(std::span<const std::byte> image) : image_(image) {}

  std::size_t left() const { return image_.size() - offset_; }

  [[noreturn]] void fail(const std::string& what) const {
    throw CliError(Exit::bad_input, fmt::format("not a valid GGUF file: {} at byte {}", what, offset_));
  }

  void need(std::uint64_t bytes) const {
    if (bytes > left()) fail(fmt::format("{} bytes expected, {} left", bytes, left()));
  }

  template <typename T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    need(sizeof(T));
    T value{};
    std::memcpy(&value, image_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }

  std::string take_string(std::uint64_t limit) {
    const auto bytes = take<std::uint64_t>();
    if (bytes > limit) fail(fmt::format("text of {} bytes", bytes));
    need(bytes);
    std::string text(reinterpret_cast<const char*>(image_.data() + offset_), bytes);
    offset_ += bytes;
    return text;
  }

  void skip(std::uint64_t bytes) {
    need(bytes);
    offset_ += bytes;
  }

  Type take_type() {
    const auto type = take<std::uint32_t>();
    if (type >= kSizes.size()) fail(fmt::format("unknown value type {}", type));
    return static_cast<Type>(type);
  }

  double take_number(Type type) {
    switch (type) {
      case Type::u8:
      case Type::boolean:
        return take<std::uint8_t>();
      case Type::i8:
        return take<std::int8_t>();
      case Type::u16:
        return take<std::uint16_t>();
      case Type::i16:
        return take<std::int16_t>();
      case Type::u32:
        return take<std::uint32_t>();
      case Type::i32:
        return take<std::int32_t>();
      case Type::f32:
        return take<float>();
      case Type::u64:
        return static_cast<double>(take<std::uint64_t>());
      case Type::i64:
        return static_cast<double>(take<std::int64_t>());
      case Type::f64:
        return take<double>();
      default:
        fail("a number was expected");
    }
  }

 private:
  std::span<const std::byte> image_;
  std::size_t offset_ = 0;
};

void skip_strings(Reader& reader, std::uint64_t count) {
  if (count > reader.left() / sizeof(std::uint64_t)) reader.fail(fmt::format("array of {} texts", count));
  for (std::uint64_t i = 0; i < count; ++i) reader.skip(reader.take<std::uint64_t>());
}

GgufValue take_array(Reader& reader) {
  const Type type = reader.take_type();
  GgufValue value;
  value.array = true;
  value.count = reader.take<std::uint64_t>();
  if (type == Type::array) reader.fail("array of arrays");
  if (type == Type::string) {
    skip_strings(reader, value.count);
    return value;
  }
  const std::size_t size = kSizes[static_cast<std::size_t>(type)];
  if (value.count > reader.left() / size) reader.fail(fmt::format("array of {} numbers", value.count));
  if (value.count > kGgufKeptElements) {
    reader.skip(value.count * size);
    return value;
  }
  for (std::uint64_t i = 0; i < value.count; ++i) value.numbers.push_back(reader.take_number(type));
  return value;
}

GgufValue take_value(Reader& reader) {
  const Type type = reader.take_type();
  if (type == Type::array) return take_array(reader);
  GgufValue value;
  if (type == Type::string) {
    value.text = reader.take_string(reader.left());
  } else {
    value.numbers.push_back(reader.take_number(type));
  }
  return value;
}

// A file mapped for reading.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw CliError(Exit::io, fmt::format("cannot open {}: {}", path, std::strerror(errno)));
    struct stat status {};
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    }
    close(file);
    if (data_ == MAP_FAILED) throw CliError(Exit::bad_input, path + " is not a readable file, or empty");
  }
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_ = MAP_FAILED;
  std::size_t size_ = 0;
};

}  // namespace

GgufMetadata GgufMetadata::parse(std::span<const std::byte> image) {
  Reader reader(image);
  constexpr std::array<char, 4> kMagic = {'G', 'G', 'U', 'F'};
  if (reader.take<std::array<char, 4>>() != kMagic) reader.fail("the magic GGUF is missing");
  const auto version = reader.take<std::uint32_t>();
  if (version != 2 && version != 3) reader.fail(fmt::format("version {}, this reader knows 2 and 3", version));
  reader.take<std::uint64_t>();  // number of tensors
  const auto pairs = reader.take<std::uint64_t>();
  GgufMetadata result;
  result.file_bytes_ = image.size();
  for (std::uint64_t i = 0; i < pairs; ++i) {
    std::string key = reader.take_string(kMaxKeyBytes);
    GgufValue value = take_value(reader);
    if (!result.values_.emplace(std::move(key), std::move(value)).second) reader.fail("a key appears twice");
  }
  return result;
}

GgufMetadata GgufMetadata::read(const std::string& path) {
  const Mapping mapping(path);
  try {
    return parse(mapping.bytes());
  } catch (const CliError& error) {
    throw CliError(error.code(), path + ": " + error.what());
  }
}

const GgufValue* GgufMetadata::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

std::optional<double> GgufMetadata::number(const std::string& key) const {
  const GgufValue* value = find(key);
  if (value == nullptr || value->array || value->numbers.empty()) return std::nullopt;
  return value->numbers.front();
}

std::string GgufMetadata::text(const std::string& key) const {
  const GgufValue* value = find(key);
  return value == nullptr ? std::string() : value->text;
}

}  // namespace kvant::cli
