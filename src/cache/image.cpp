// Saving and loading a Cache; docs/format.md describes the bytes.
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "cache/store.hpp"
#include "kvant/cache.hpp"

namespace kvant {
namespace {

using cache::CellSet;
using cache::Page;

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'C', 'A', 'C'};
constexpr std::uint32_t kVersion = 1;
enum class PageKind : std::uint8_t { empty = 0, open = 1, sealed = 2 };

class Writer {
 public:
  template <typename T>
  void put(const T& value) {
    put_bytes(reinterpret_cast<const std::byte*>(&value), sizeof value);
  }
  void put_bytes(const std::byte* data, std::size_t size) { bytes_.insert(bytes_.end(), data, data + size); }
  void put_text(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    put_bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  }
  std::vector<std::byte> finish() {
    put(static_cast<std::uint64_t>(XXH64(bytes_.data(), bytes_.size(), 0)));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

[[noreturn]] void bad(const std::string& what) {
  base::fail(ErrorCode::bad_format, "cache image: " + what);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  const std::byte* take(std::size_t size) {
    if (size > bytes_.size()) bad("ends early");
    const std::byte* data = bytes_.data();
    bytes_ = bytes_.subspan(size);
    return data;
  }
  std::size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

std::size_t token_bytes(const CacheShape& shape) {
  return static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.key_dim + shape.value_dim) *
         size_of(shape.dtype);
}

// One token of a rows buffer as dense keys then values, or back.
template <bool kRead>
void move_token(const CacheShape& shape, const cache::RowsLayout& layout, std::byte* rows, int token,
                std::byte* dense) {
  const auto copy = [&](std::byte* cell, std::size_t size) {
    kRead ? std::memcpy(cell, dense, size) : std::memcpy(dense, cell, size);
    dense += size;
  };
  for (int head = 0; head < shape.kv_heads; ++head) {
    for (int d = 0; d < shape.key_dim; ++d) copy(rows + layout.key_at(head, d, token), layout.element);
  }
  for (int head = 0; head < shape.kv_heads; ++head) {
    copy(rows + layout.value_at(head, 0, token), static_cast<std::size_t>(shape.value_dim) * layout.element);
  }
}

// Within what PageStore::write accepts: a grid over larger values would have no finite step.
void check_finite(const std::byte* data, std::size_t count, DType dtype) {
  const float limit = dtype == DType::f16 ? base::kMaxHalf : base::max_finite(dtype) / 2;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = base::load_float(data, dtype, static_cast<std::int64_t>(i));
    if (!(std::fabs(value) <= limit)) bad("a stored value is not finite or too large");
  }
}

void save_page(const PageStore::Impl& impl, std::int64_t number, int length, Writer& out) {
  const Page& page = impl.pages[static_cast<std::size_t>(number)];
  out.put(page.open ? PageKind::open : (page.sealed ? PageKind::sealed : PageKind::empty));
  std::vector<std::byte> token(token_bytes(impl.shape));
  if (page.open) {
    for (int i = 0; i < length; ++i) {
      out.put(static_cast<std::uint8_t>(page.exact[static_cast<std::size_t>(i)]));
      move_token<false>(impl.shape, impl.rows, page.open.get(), i, token.data());
      out.put_bytes(token.data(), token.size());
    }
  } else if (page.sealed) {
    const cache::ExactRows& exact = page.sealed->exact;
    out.put(static_cast<std::uint32_t>(exact.cells.size()));
    const cache::RowsLayout rows(impl.shape, std::max(exact.capacity, 1));
    for (std::size_t i = 0; i < exact.cells.size(); ++i) {
      out.put(exact.cells[i]);
      move_token<false>(impl.shape, rows, exact.rows.get(), static_cast<int>(i), token.data());
      out.put_bytes(token.data(), token.size());
    }
    out.put_bytes(page.sealed->block.get(), impl.layout.page_bytes);
  }
}

void load_open(PageStore::Impl& impl, std::int64_t number, int length, Reader& in) {
  // Before a whole page is allocated for rows that a forged shape only claims to have.
  if (in.left() / (1 + token_bytes(impl.shape)) < static_cast<std::size_t>(length)) bad("ends early");
  std::byte* rows = impl.open(number);
  Page& page = impl.pages[static_cast<std::size_t>(number)];
  std::vector<std::byte> token(token_bytes(impl.shape));
  for (int i = 0; i < length; ++i) {
    page.exact.set(static_cast<std::size_t>(i), in.get<std::uint8_t>() != 0);
    std::memcpy(token.data(), in.take(token.size()), token.size());
    check_finite(token.data(), token.size() / impl.rows.element, impl.shape.dtype);
    move_token<true>(impl.shape, impl.rows, rows, i, token.data());
  }
  page.last_write = number * impl.tokens() + length;
}

void check_tile(const PageStore::Impl& impl, const TileLayout& tile, const std::byte* head_block) {
  const auto depth = static_cast<std::size_t>(tile.depth);
  check_finite(head_block + tile.min_offset, depth, impl.shape.dtype);
  check_finite(head_block + tile.max_offset, depth, impl.shape.dtype);
  const std::uint16_t* index = cache::tile_index(tile, head_block);
  for (int i = 0; i < tile.index_count; ++i) {
    if (index[i] >= tile.depth) bad("a channel index is out of range");
    // A channel that is listed twice would count its bits twice.
    if (i > 0 && index[i] <= index[i - 1]) bad("channel indices are not ascending");
  }
}

void load_sealed(PageStore::Impl& impl, std::int64_t number, Reader& in) {
  Page& page = impl.pages[static_cast<std::size_t>(number)];
  auto sealed = std::make_shared<cache::SealedPage>();
  const auto count = in.get<std::uint32_t>();
  if (count >= static_cast<std::uint32_t>(impl.tokens())) bad("more exact rows than a page has");
  if (in.left() < impl.layout.page_bytes) bad("ends early");
  cache::ExactRows& exact = sealed->exact;
  exact.capacity = base::round_up(static_cast<int>(count), tiles::kLanes);
  const cache::RowsLayout rows(impl.shape, std::max(exact.capacity, 1));
  if (count > 0) exact.rows = base::allocate_zeroed(rows.bytes);
  std::vector<std::byte> token(token_bytes(impl.shape));
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto cell = in.get<std::uint8_t>();
    if (cell >= impl.tokens() || (i > 0 && cell <= exact.cells.back())) bad("exact cells are not ascending");
    exact.cells.push_back(cell);
    page.exact.set(cell);
    std::memcpy(token.data(), in.take(token.size()), token.size());
    check_finite(token.data(), token.size() / impl.rows.element, impl.shape.dtype);
    move_token<true>(impl.shape, rows, exact.rows.get(), static_cast<int>(i), token.data());
  }
  exact.cells.shrink_to_fit();
  sealed->block = base::allocate_aligned(impl.layout.page_bytes);
  std::memcpy(sealed->block.get(), in.take(impl.layout.page_bytes), impl.layout.page_bytes);
  for (int head = 0; head < impl.shape.kv_heads; ++head) {
    const std::byte* block = sealed->block.get() + static_cast<std::size_t>(head) * impl.layout.head_bytes;
    check_tile(impl, impl.layout.key, block);
    check_tile(impl, impl.layout.value, block);
  }
  page.sealed = std::move(sealed);
  page.last_write = (number + 1) * impl.tokens();
}

Reader open_image(std::span<const std::byte> image) {
  if (image.size() < sizeof kMagic + sizeof(std::uint64_t)) bad("shorter than its frame");
  Reader in(image.first(image.size() - sizeof(std::uint64_t)));
  if (std::memcmp(in.take(sizeof kMagic), kMagic, sizeof kMagic) != 0) bad("does not start with KVANTCAC");
  const auto version = in.get<std::uint32_t>();
  if (version != kVersion) bad("is version " + std::to_string(version) + "; this build reads version 1");
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, image.data() + image.size() - sizeof checksum, sizeof checksum);
  if (checksum != XXH64(image.data(), image.size() - sizeof checksum, 0)) bad("checksum does not match");
  return in;
}

// An empty cache of the recipe and shape that the image names.
Cache load_frame(Reader& in) {
  const auto size = in.get<std::uint32_t>();
  if (size > 4096) bad("recipe text is " + std::to_string(size) + " bytes");
  const auto* text = reinterpret_cast<const char*>(in.take(size));
  CacheShape shape;
  shape.kv_heads = in.get<std::int32_t>();
  shape.key_dim = in.get<std::int32_t>();
  shape.value_dim = in.get<std::int32_t>();
  const auto dtype = in.get<std::uint8_t>();
  if (dtype > static_cast<std::uint8_t>(DType::bf16)) bad("type " + std::to_string(dtype) + " is unknown");
  shape.dtype = static_cast<DType>(dtype);
  try {
    return Cache(parse_recipe(std::string_view(text, size)), shape);
  } catch (const Error& error) {
    bad(error.what());
  }
}

}  // namespace

std::vector<std::byte> Cache::save() const {
  const PageStore::Impl& impl = store_.impl();
  Writer out;
  out.put(kMagic);
  out.put(kVersion);
  out.put_text(to_text(impl.recipe));
  for (const int extent : {impl.shape.kv_heads, impl.shape.key_dim, impl.shape.value_dim}) {
    out.put(static_cast<std::int32_t>(extent));
  }
  out.put(static_cast<std::uint8_t>(impl.shape.dtype));
  out.put(length_);
  for (std::int64_t page = 0; page * impl.tokens() < length_; ++page) {
    save_page(impl, page, static_cast<int>(std::min<std::int64_t>(impl.tokens(), length_ - page * impl.tokens())), out);
  }
  return out.finish();
}

Cache Cache::load(std::span<const std::byte> image) {
  Reader in = open_image(image);
  Cache cache = load_frame(in);
  const auto length = in.get<std::int64_t>();
  if (length < 0 || length > static_cast<std::int64_t>(image.size()) * 64) bad("length does not fit its size");
  PageStore::Impl& impl = cache.store_.impl();
  const std::int64_t pages = (length + impl.tokens() - 1) / impl.tokens();
  impl.grow(pages * impl.tokens());
  for (std::int64_t number = 0; number < pages; ++number) {
    const int cells = static_cast<int>(std::min<std::int64_t>(impl.tokens(), length - number * impl.tokens()));
    const auto kind = in.get<PageKind>();
    if (kind == PageKind::open) {
      load_open(impl, number, cells, in);
    } else if (kind == PageKind::sealed && cells == impl.tokens() && impl.recipe.quantizes()) {
      load_sealed(impl, number, in);
    } else {
      bad("page " + std::to_string(number) + " has an impossible kind");
    }
    Page& page = impl.pages[static_cast<std::size_t>(number)];
    for (int i = 0; i < cells; ++i) page.key_written.set(static_cast<std::size_t>(i));
    page.value_written = page.key_written;
  }
  if (in.left() != 0) bad("has " + std::to_string(in.left()) + " bytes too many");
  impl.rows_written = length;
  cache.length_ = length;
  return cache;
}

}  // namespace kvant
