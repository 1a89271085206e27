// Saving and loading a Cache; docs/format.md describes the bytes.
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/byte_io.hpp"
#include "base/half.hpp"
#include "cache/feedback.hpp"
#include "cache/image_v1.hpp"
#include "cache/store.hpp"
#include "kvant/cache.hpp"

namespace kvant {
namespace {

using cache::CellSet;
using cache::Page;

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'C', 'A', 'C'};
// 1 had lists of boosted channels, no order of channels and no query statistics. 3 is 2 with rotation and positions,
// and is written only where keys are stored before RoPE, so that older readers know all other images.
constexpr std::uint32_t kVersion = 3;
constexpr std::uint32_t kVersionUnturned = 2;
enum class PageKind : std::uint8_t { empty = 0, open = 1, sealed = 2 };

using Writer = base::ByteWriter;

[[noreturn]] void bad(const std::string& what) {
  base::fail(ErrorCode::bad_format, "cache image: " + what);
}

struct Reader : base::ByteReader {
  explicit Reader(std::span<const std::byte> bytes) : ByteReader(bytes, "cache image") {}

  std::uint32_t version = kVersion;
};

// Query statistics: a byte that says whether there are any, then the sums.
void save_sums(const double* sums, std::size_t count, Writer& out) {
  out.put(static_cast<std::uint8_t>(sums != nullptr));
  if (sums != nullptr) out.put_bytes(reinterpret_cast<const std::byte*>(sums), count * sizeof(double));
}

// False when there are none. Sums of squares are finite and not negative.
bool load_sums(Reader& in, double* sums, std::size_t count) {
  if (in.get<std::uint8_t>() == 0) return false;
  std::memcpy(sums, in.take(count * sizeof(double)), count * sizeof(double));
  for (std::size_t i = 0; i < count; ++i) {
    if (!(sums[i] >= 0 && std::isfinite(sums[i]))) bad("a query statistic is not a sum of squares");
  }
  return true;
}

// Lower triangles of sums of q q' per head. Sums that no queries have may make attention worse, but nothing else.
void load_moments(Reader& in, const CacheShape& shape, std::vector<float>& moments) {
  std::memcpy(moments.data(), in.take(moments.size() * sizeof(float)), moments.size() * sizeof(float));
  const float* moment = moments.data();
  for (int head = 0; head < shape.kv_heads; ++head) {
    for (int i = 0; i < shape.key_dim; ++i, moment += i) {
      if (!std::all_of(moment, moment + i + 1, [](float x) { return std::isfinite(x); }) || moment[i] < 0) {
        bad("a second moment of queries is not one");
      }
    }
  }
}

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
  const float limit = base::largest_stored(dtype);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = base::load_float(data, dtype, static_cast<std::int64_t>(i));
    if (!(std::fabs(value) <= limit)) bad("a stored value is not finite or too large");
  }
}

// The rotation of keys that are stored before RoPE: a byte that says whether there is one, then what KeyRotation has.
void save_rotation(const cache::Rotation* rotation, Writer& out) {
  out.put(static_cast<std::uint8_t>(rotation != nullptr));
  if (rotation == nullptr) return;
  const KeyRotation& key = rotation->key_rotation();
  out.put(key.pairs);
  out.put(key.magnitude);
  out.put(static_cast<std::uint32_t>(key.frequencies.size()));
  for (const double frequency : key.frequencies) out.put(frequency);
}

std::shared_ptr<const cache::Rotation> load_rotation(Reader& in, int key_dim) {
  if (in.get<std::uint8_t>() == 0) return nullptr;
  KeyRotation key;
  const auto pairs = in.get<std::uint8_t>();
  if (pairs > static_cast<std::uint8_t>(RotaryPairs::halves)) bad("the kind of the key rotation is unknown");
  key.pairs = static_cast<RotaryPairs>(pairs);
  key.magnitude = in.get<double>();
  const auto count = in.get<std::uint32_t>();
  if (count > static_cast<std::uint32_t>(key_dim)) bad("the key rotation has too many pairs");
  for (std::uint32_t i = 0; i < count; ++i) key.frequencies.push_back(in.get<double>());
  try {
    return std::make_shared<const cache::Rotation>(key, key_dim);
  } catch (const Error& error) {
    bad(error.what());
  }
}

void load_positions(PageStore::Impl& impl, Page& page, int cells, Reader& in) {
  const std::size_t bytes = static_cast<std::size_t>(cells) * sizeof(std::int32_t);
  const std::byte* stored = in.take(bytes);
  page.positions = impl.make_positions(nullptr);
  std::memcpy(page.positions.get(), stored, bytes);
}

// The same per cell of an open page, as bfloat16.
void save_query(const PageStore::Impl& impl, const Page& page, std::size_t token, Writer& out) {
  out.put(static_cast<std::uint8_t>(page.observed[token]));
  if (!page.observed[token]) return;
  const std::uint16_t* cell = impl.query_cell(page, token);
  out.put_bytes(reinterpret_cast<const std::byte*>(cell), impl.query_values() * sizeof *cell);
}

void load_query(PageStore::Impl& impl, Page& page, std::size_t token, Reader& in) {
  if (in.get<std::uint8_t>() == 0) return;
  const std::size_t count = impl.query_sums.size();
  const std::byte* data = in.take(impl.query_values() * sizeof(std::uint16_t));
  if (!page.queries) page.queries = std::make_unique<std::uint16_t[]>(impl.layout.query_bytes / sizeof(std::uint16_t));
  std::uint16_t* cell = impl.query_cell(page, token);
  std::memcpy(cell, data, impl.query_values() * sizeof *cell);
  constexpr std::uint16_t kInfinity = 0x7F80;
  if (std::any_of(cell, cell + count, [](std::uint16_t bits) { return bits >= kInfinity; })) {
    bad("a query statistic is not a sum of squares");
  }
  for (std::size_t i = count; i < impl.query_values(); ++i) {
    if (!(std::fabs(base::bfloat_to_float(cell[i])) <= cache::kLargestQuery)) bad("a query is not finite or too large");
  }
  page.observed.set(token);
}

void save_page(const PageStore::Impl& impl, std::int64_t number, int length, Writer& out) {
  const Page& page = impl.pages[static_cast<std::size_t>(number)];
  out.put(page.open ? PageKind::open : (page.sealed ? PageKind::sealed : PageKind::empty));
  if (impl.needs_rotation()) {
    out.put_bytes(reinterpret_cast<const std::byte*>(page.positions.get()),
                  static_cast<std::size_t>(length) * sizeof(std::int32_t));
  }
  std::vector<std::byte> token(token_bytes(impl.shape));
  if (page.open) {
    for (int i = 0; i < length; ++i) {
      out.put(static_cast<std::uint8_t>(page.exact[static_cast<std::size_t>(i)]));
      if (!impl.query_sums.empty()) save_query(impl, page, static_cast<std::size_t>(i), out);
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

// Probes without log-sum-exps, which a Cache is never told.
void save_probes(const cache::Probes& probes, Writer& out) {
  out.put(static_cast<std::uint32_t>(probes.size()));
  out.put(static_cast<std::uint32_t>(probes.query_heads()));
  for (std::size_t i = 0; i < probes.size(); ++i) {
    out.put(probes.clock(i));
    const std::span<const float> query = probes.query(i);
    out.put_bytes(reinterpret_cast<const std::byte*>(query.data()), query.size_bytes());
  }
}

void load_probes(const CacheShape& shape, std::int64_t length, Reader& in, cache::Probes& probes) {
  const auto count = in.get<std::uint32_t>();
  const auto heads = in.get<std::uint32_t>();
  if (count == 0) return;
  if (heads < 1 || heads > std::uint32_t{cache::kMostQueryHeads} ||
      heads % static_cast<std::uint32_t>(shape.kv_heads) != 0)
    bad("probes have impossible heads");
  const std::size_t values = std::size_t{heads} * static_cast<std::size_t>(shape.key_dim);
  if (in.left() / (sizeof(std::int64_t) + values * sizeof(float)) < count) bad("ends early");
  probes.reserve(count, static_cast<int>(heads));
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto clock = in.get<std::int64_t>();
    if (clock < 1 || clock > length) bad("a probe is none of its tokens");
    probes.add(clock);
    const std::span<float> query = probes.query(i);
    std::memcpy(query.data(), in.take(query.size_bytes()), query.size_bytes());
    for (const float value : query) {
      if (!std::isfinite(value)) bad("a probe is not finite");
    }
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
    if (!impl.query_sums.empty()) load_query(impl, page, static_cast<std::size_t>(i), in);
    std::memcpy(token.data(), in.take(token.size()), token.size());
    check_finite(token.data(), token.size() / impl.rows.element, impl.shape.dtype);
    move_token<true>(impl.shape, impl.rows, rows, i, token.data());
    if (page.clocks) page.clocks[static_cast<std::size_t>(i)] = number * impl.tokens() + i + 1;
  }
  page.last_write = number * impl.tokens() + length;
}

// Before planes are placed by them: counts that claim more than the tile reserves would reach into what follows.
void check_counts(const TileLayout& tile, const std::byte* head_block) {
  const std::array<int, 6> counts = cache::read_counts(tile, head_block);
  int fours = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const int width = cache::kWidthOrder[i];
    if (counts[i] > 0 && (width < tile.low || width > tile.high)) bad("a channel has a width that the recipe excludes");
    fours += counts[i];
  }
  if (fours != tile.depth / tiles::kQuad) bad("the counts of widths do not add up to the channels");
  std::size_t bytes = 0;
  const cache::TilePlanes planes = cache::place_planes(counts, tile.rows, 0);  // span() points into it
  for (const PlaneLayout& plane : planes.span()) bytes += plane.bytes;
  if (bytes > tile.plane_bytes) bad("the planes of a page are larger than its budget");
}

// Each channel once, those of one width ascending: equal content has equal bytes.
void check_order(const cache::TileView& view) {
  const auto depth = static_cast<std::size_t>(view.tile->depth);
  std::vector<std::uint16_t> order(depth);
  std::vector<int> levels(depth);
  view.order(order.data());
  view.levels(levels.data());
  std::vector<bool> seen(depth);
  for (std::size_t i = 0; i < depth; ++i) {
    if (order[i] >= depth || seen[order[i]]) bad("the order of channels is not a permutation");
    seen[order[i]] = true;
    if (i > 0 && levels[i] == levels[i - 1] && order[i] < order[i - 1]) bad("channels of a width are not ascending");
  }
}

// Rows and depth indices that exist, in the order that the encoder has.
void check_outliers(const PageStore::Impl& impl, const cache::TileView& view) {
  const OutlierLayout& layout = view.tile->outliers;
  if (layout.slots == 0) return;
  const bool shared = view.tile->shared_grid;
  if (shared) {
    const std::uint32_t first = view.outlier_start(view.head);
    const std::uint32_t end = view.outlier_start(view.head + 1);
    if (view.outlier_start(0) != 0 || first > end || end > static_cast<std::uint32_t>(layout.slots)) {
      bad("the outliers of a head begin or end outside their list");
    }
  }
  const cache::OutlierList list = view.outliers();
  check_finite(list.values, static_cast<std::size_t>(list.count), impl.shape.dtype);
  std::vector<float> minima(static_cast<std::size_t>(view.tile->depth)), maxima(minima.size());
  cache::load_endpoints(view, impl.shape.dtype, minima.data(), maxima.data());
  std::int64_t last = -1;
  for (int i = 0; i < list.count; ++i) {
    const int row = list.row(i);
    const int depth = list.depth(i);
    if (row >= view.tile->rows || depth >= view.tile->depth) bad("an outlier lies outside its tile");
    const float value = base::load_float(list.values, impl.shape.dtype, i);
    const float max = maxima[static_cast<std::size_t>(depth)];
    const bool used = value < minima[static_cast<std::size_t>(depth)] || value > max;
    const std::int64_t at = std::int64_t{depth} * view.tile->rows + row;
    if (!used && (shared || row != 0 || value != max)) bad("an outlier lies inside the range of its grid");
    if (used && at <= last) bad("outliers are not ascending");
    // Behind an unused slot of a channel there are only unused ones.
    last = used ? at : std::int64_t{depth + 1} * view.tile->rows - 1;
  }
}

// Each token once, both classes ascending.
void check_tokens(const PageLayout& layout, int page, const std::byte* block, int head) {
  const std::uint8_t* tokens = cache::token_order(layout, block, head);
  CellSet seen;
  for (int i = 0; tokens != nullptr && i < page; ++i) {
    if (tokens[i] >= page || seen[tokens[i]]) bad("the order of tokens is not a permutation");
    seen.set(tokens[i]);
    if (i > 0 && i != layout.salient && tokens[i] < tokens[i - 1]) bad("tokens of a class are not ascending");
  }
}

void check_tile(const PageStore::Impl& impl, const TileLayout& tile, const std::byte* block, int head) {
  if (tile.budget > 0) check_counts(tile, block + static_cast<std::size_t>(head) * impl.layout.head_bytes);
  const cache::TileView view(impl.layout, tile, block, head);
  check_order(view);
  const auto depth = static_cast<std::size_t>(tile.depth);
  check_finite(view.grid + tile.min_offset, depth, impl.shape.dtype);
  check_finite(view.grid + tile.max_offset, depth, impl.shape.dtype);
  check_outliers(impl, view);
  if (tile.channel_factors) {
    check_finite(view.head_block + tile.factor_offset, static_cast<std::size_t>(tile.rows), impl.shape.dtype);
  }
}

void load_sealed(PageStore::Impl& impl, std::int64_t number, Reader& in) {
  Page& page = impl.pages[static_cast<std::size_t>(number)];
  auto sealed = std::make_shared<cache::SealedPage>();
  const auto count = in.get<std::uint32_t>();
  if (count >= static_cast<std::uint32_t>(impl.tokens())) bad("more exact rows than a page has");
  const bool convert = in.version == 1 && impl.layout.key.order_entry > 0;
  const std::size_t stored_bytes = convert ? cache::page_bytes_v1(impl.layout, impl.shape) : impl.layout.page_bytes;
  if (in.left() < stored_bytes) bad("ends early");
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
  sealed->block = base::allocate_zeroed(impl.layout.page_bytes);
  const std::byte* stored = in.take(stored_bytes);
  if (!convert) {
    std::memcpy(sealed->block.get(), stored, stored_bytes);
  } else if (!cache::convert_v1(impl.layout, impl.shape, stored, sealed->block.get())) {
    bad("channel indices are not ascending or out of range");
  }
  for (int head = 0; head < impl.shape.kv_heads; ++head) {
    check_tokens(impl.layout, impl.tokens(), sealed->block.get(), head);
    for (const TileLayout* tile : {&impl.layout.key, &impl.layout.key_rest, &impl.layout.value}) {
      if (tile->rows > 0) check_tile(impl, *tile, sealed->block.get(), head);
    }
  }
  page.sealed = std::move(sealed);
  page.last_write = (number + 1) * impl.tokens();
}

Reader open_image(std::span<const std::byte> image) {
  if (image.size() < sizeof kMagic + sizeof(std::uint64_t)) bad("shorter than its frame");
  Reader in(image.first(image.size() - sizeof(std::uint64_t)));
  if (std::memcmp(in.take(sizeof kMagic), kMagic, sizeof kMagic) != 0) bad("does not start with KVANTCAC");
  in.version = in.get<std::uint32_t>();
  if (in.version < 1 || in.version > kVersion) {
    bad("is version " + std::to_string(in.version) + "; this build reads versions 1 to 3");
  }
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
  out.put(impl.needs_rotation() ? kVersion : kVersionUnturned);
  out.put_text(to_text(impl.recipe));
  for (const int extent : {impl.shape.kv_heads, impl.shape.key_dim, impl.shape.value_dim}) {
    out.put(static_cast<std::int32_t>(extent));
  }
  out.put(static_cast<std::uint8_t>(impl.shape.dtype));
  out.put(length_);
  if (!impl.query_sums.empty()) {
    save_sums(impl.queries_seen ? impl.query_sums.data() : nullptr, impl.query_sums.size(), out);
    if (impl.queries_seen) {
      out.put_bytes(reinterpret_cast<const std::byte*>(impl.query_moments.data()),
                    impl.query_moments.size() * sizeof(float));
    }
  }
  if (impl.probes) save_probes(*impl.probes, out);
  if (impl.needs_rotation()) save_rotation(impl.rotation.get(), out);
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
  // Recipes with widths per page, query statistics, tables of levels or orders of tokens are younger than version 1.
  const PageLayout& layout = impl.layout;
  const bool younger = layout.key.budget > 0 || !impl.query_sums.empty() || !layout.key.table.empty() ||
                       !layout.value.table.empty() || layout.salient > 0;
  if (in.version == 1 && younger) bad("has a recipe that version 1 lacks");
  if ((in.version == kVersion) != impl.needs_rotation()) bad("is version 3 and has keys after RoPE, or the reverse");
  if (!impl.query_sums.empty()) impl.queries_seen = load_sums(in, impl.query_sums.data(), impl.query_sums.size());
  if (impl.queries_seen && !impl.query_moments.empty()) load_moments(in, impl.shape, impl.query_moments);
  if (impl.probes) load_probes(impl.shape, length, in, *impl.probes);
  if (impl.needs_rotation()) impl.rotation = load_rotation(in, impl.shape.key_dim);
  if (impl.needs_rotation() && length > 0 && !impl.rotation) bad("has keys before RoPE and no rotation");
  const std::int64_t pages = (length + impl.tokens() - 1) / impl.tokens();
  impl.grow(pages * impl.tokens());
  for (std::int64_t number = 0; number < pages; ++number) {
    const int cells = static_cast<int>(std::min<std::int64_t>(impl.tokens(), length - number * impl.tokens()));
    const auto kind = in.get<PageKind>();
    if (impl.needs_rotation()) load_positions(impl, impl.pages[static_cast<std::size_t>(number)], cells, in);
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
