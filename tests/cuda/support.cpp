#include "cuda/support.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cuda/attend.hpp"

namespace kvant::cuda::test {
namespace {

constexpr std::size_t kGuard = 4096;
constexpr std::uint8_t kPoison = 0xA5;

int total_pages(const Shape& shape) {
  std::int64_t pages = 0;
  for (const std::int64_t length : shape.lengths) pages += length / 128 + 3;
  return static_cast<int>(pages);
}

}  // namespace

Guarded::Guarded(std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes + 2 * kGuard) != cudaSuccess) throw std::bad_alloc();
  memory_ = static_cast<std::uint8_t*>(memory);
  cudaMemset(memory_, kPoison, bytes + 2 * kGuard);
}
Guarded::~Guarded() {
  cudaFree(memory_);
}
void* Guarded::data() const {
  return memory_ + kGuard;
}
void Guarded::write(const void* from) {
  cudaMemcpy(data(), from, bytes_, cudaMemcpyHostToDevice);
}
void Guarded::poison() {
  cudaMemset(data(), 0xFF, bytes_);  // NaN in every float type
}
std::vector<std::uint8_t> Guarded::read() const {
  std::vector<std::uint8_t> all(bytes_ + 2 * kGuard);
  EXPECT_EQ(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  for (std::size_t i = 0; i < kGuard; ++i) {
    if (all[i] != kPoison || all[all.size() - 1 - i] != kPoison) {
      ADD_FAILURE() << "a kernel wrote outside its output";
      break;
    }
  }
  return {all.begin() + kGuard, all.end() - kGuard};
}

std::vector<std::uint16_t> random_rows(std::mt19937& random, DType type, std::int64_t rows, int heads, int dim,
                                       float spread) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * heads * dim));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    const float scale = 1.0F + spread * static_cast<float>(channel * 37 % 11);
    base::store_float(out.data(), type, static_cast<std::int64_t>(i), normal(random) * scale);
  }
  return out;
}

std::vector<float> widen(std::span<const std::uint16_t> x, DType type) {
  std::vector<float> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = base::load_float(x.data(), type, static_cast<std::int64_t>(i));
  return out;
}

double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return std::numeric_limits<double>::infinity();
    if (a[i] == b[i]) continue;  // infinities of empty rows among them
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  }
  for (const float x : b) norm += std::isinf(x) ? 0.0 : static_cast<double>(x) * x;
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

double tolerance(DType type) {
  return type == DType::bf16 ? 3e-3 : 1e-3;
}

std::string text_of(const Shape& shape) {
  std::string text = std::string(shape.recipe) + " " + std::to_string(shape.cache.key_dim) + "x" +
                     std::to_string(shape.cache.value_dim) + " " + name_of(shape.cache.dtype) + " group " +
                     std::to_string(shape.group) + " rows " + std::to_string(shape.rows) + " lengths";
  for (const std::int64_t length : shape.lengths) text += " " + std::to_string(length);
  return text;
}

KeyRotation usual_rotation(const CacheShape& shape) {
  return make_rotation({RotaryPairs::halves, shape.key_dim});
}

void turn_alike(PagePool& pool, std::span<Cache> caches, const KeyRotation& rotation) {
  pool.set_key_rotation(rotation);
  for (Cache& cache : caches) cache.set_key_rotation(rotation);
}

void expect_agreement(const Shape& shape, unsigned seed) {
  SCOPED_TRACE(text_of(shape));
  const Twins twins(shape, seed);
  const Twins::Result cpu = twins.on_cpu();
  for (const AttendPath path : {AttendPath::reference, AttendPath::integer}) {
    const Twins::Result gpu = twins.on_gpu(path);
    const double error = relative_error(gpu.out, cpu.out);
    EXPECT_LE(error, tolerance(shape.cache.dtype)) << (path == AttendPath::integer ? "integer" : "reference");
    EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3) << "log-sum-exp";
    if (path == AttendPath::integer) ::testing::Test::RecordProperty("error", std::to_string(error));
  }
}

// A warp per page, and teams in one part and in several.
static void expect_few_forms(const Twins& twins, const Twins::Result& cpu) {
  for (const TeamSplit& split : {TeamSplit{0, 1}, TeamSplit{1, 3}, TeamSplit{2, 1}, TeamSplit{4, 2}}) {
    if (split.teams > 0 && twins.pool.needs_rotation()) continue;  // teams know no angles
    const AttendPlan plan(twins.batch, twins.query_heads(), twins.shape.rows, twins.shape.options);
    auto& impl = const_cast<AttendPlan::Impl&>(plan.impl());
    impl.split_few(split, impl.describe_sequences(0, 1));
    const Twins::Result gpu = twins.on_gpu(plan);
    const double most = twins.shape.cache.dtype == DType::bf16 ? 5e-3 : 1e-3;
    EXPECT_LE(relative_error(gpu.out, cpu.out), most) << plan.describe();
    EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3) << plan.describe();
    EXPECT_EQ(plan.describe().find("teams") != std::string::npos, split.teams > 0);
  }
}

void expect_blocks(const Shape& shape, unsigned seed) {
  SCOPED_TRACE(text_of(shape));
  const Twins twins(shape, seed);
  const Twins::Result cpu = twins.on_cpu();
  const AttendPlan plan(twins.batch, twins.query_heads(), shape.rows, shape.options);
  ASSERT_NE(plan.path(), AttendPath::reference);
  EXPECT_NE(plan.describe().find("CPU blocks"), std::string::npos) << plan.describe();
  const Twins::Result gpu = twins.on_gpu(plan);
  const double error = relative_error(gpu.out, cpu.out);
  const bool bfloat = shape.cache.dtype == DType::bf16;
  EXPECT_LE(error, bfloat ? 5e-3 : 1e-3) << plan.describe();  // dequantized keys and values are rounded to the type
  EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3) << "log-sum-exp";
  std::printf("[ error    ] %.2e %s\n", error, text_of(shape).c_str());
  if (plan.path() == AttendPath::integer) expect_few_forms(twins, cpu);
  if (twins.pool.needs_rotation()) {
    EXPECT_LE(relative_error(twins.on_gpu(AttendPath::prefill).out, cpu.out), bfloat ? 5e-3 : 1e-3) << "many vectors";
  }
  const Twins::Result reference = twins.on_gpu(AttendPath::reference);
  EXPECT_LE(relative_error(reference.out, cpu.out), bfloat ? 3e-3 : 4e-4) << "reference";
  EXPECT_LE(relative_error(reference.lse, cpu.lse), 1e-3) << "reference, log-sum-exp";
}

void expect_same_blocks(const Sequence& sequence, const Cache& cache) {
  ASSERT_EQ(sequence.length(), cache.length());
  ASSERT_EQ(sequence.sealed_pages(), cache.counts().sealed_pages);
  for (std::int64_t page = 0; page * 128 < cache.length(); ++page) {
    const auto block = cache.store().sealed_block(page);
    if (block.empty()) continue;
    const std::vector<std::byte> device = sequence.download_block(page);
    EXPECT_TRUE(std::equal(block.begin(), block.end(), device.begin(), device.end())) << "page " << page;
  }
}

void append_to_both(Batch& batch, std::span<Cache> caches, std::mt19937& random, int rows, float spread) {
  const CacheShape& shape = caches[0].shape();
  const std::int64_t all = static_cast<std::int64_t>(caches.size()) * rows;
  const auto keys = random_rows(random, shape.dtype, all, shape.kv_heads, shape.key_dim, spread);
  const auto values = random_rows(random, shape.dtype, all, shape.kv_heads, shape.value_dim, 0.0F);
  for (std::size_t b = 0; b < caches.size(); ++b) {
    const std::size_t row = b * static_cast<std::size_t>(rows * shape.kv_heads);
    caches[b].append(dense_view(keys.data() + row * static_cast<std::size_t>(shape.key_dim), shape.dtype, rows,
                                shape.kv_heads, shape.key_dim),
                     dense_view(values.data() + row * static_cast<std::size_t>(shape.value_dim), shape.dtype, rows,
                                shape.kv_heads, shape.value_dim));
  }
  Guarded device_keys(keys.size() * 2);
  Guarded device_values(values.size() * 2);
  device_keys.write(keys.data());
  device_values.write(values.data());
  batch.append(device_keys.data(), device_values.data(), rows, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the rows on the device go with this call
}

void expect_same_seals(const char* recipe, const CacheShape& shape, float spread,
                       const std::optional<KeyRotation>& rotation) {
  SCOPED_TRACE(std::string(recipe) + " " + std::to_string(shape.key_dim));
  std::mt19937 random(11);
  const Recipe parsed = parse_recipe(recipe);
  PagePool pool(parsed, shape, 32, 32);
  Batch batch(pool, 2, 2048);
  std::vector<Sequence> sequences;
  sequences.emplace_back(pool);
  sequences.emplace_back(pool);
  std::vector<Sequence*> pointers = {&sequences[0], &sequences[1]};
  batch.bind(pointers, nullptr);
  std::vector<Cache> caches(2, Cache(parsed, shape));
  turn_alike(pool, caches, rotation.value_or(usual_rotation(shape)));
  for (const int rows : {1, 60, 67, 1, 128, 200, 3, 256, 40}) {
    append_to_both(batch, caches, random, rows, spread);
    batch.seal_ready(nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  for (std::size_t b = 0; b < 2; ++b) expect_same_blocks(sequences[b], caches[b]);
  sequences.clear();
  EXPECT_EQ(pool.free_pages(), 32);
  EXPECT_EQ(pool.free_exact_pages(), 32);
}

Cache random_cache(const char* recipe, const CacheShape& shape, std::int64_t tokens, unsigned seed) {
  std::mt19937 random(seed);
  Cache cache(parse_recipe(recipe), shape);
  cache.set_key_rotation(usual_rotation(shape));
  const auto keys = random_rows(random, shape.dtype, tokens, shape.kv_heads, shape.key_dim, 0.3F);
  const auto values = random_rows(random, shape.dtype, tokens, shape.kv_heads, shape.value_dim, 0.0F);
  cache.append(dense_view(keys.data(), shape.dtype, tokens, shape.kv_heads, shape.key_dim),
               dense_view(values.data(), shape.dtype, tokens, shape.kv_heads, shape.value_dim));
  return cache;
}

void expect_append_refused(const char* recipe, const CacheShape& shape, const char* word) {
  PagePool pool(parse_recipe(recipe), shape, 1, 1);
  Batch batch(pool, 1, 128);
  Sequence sequence(pool);
  Sequence* pointer = &sequence;
  batch.bind(std::span(&pointer, 1), nullptr);
  Guarded row(static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.key_dim) * 2);
  try {
    batch.append(row.data(), row.data(), 1, nullptr);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
  EXPECT_EQ(sequence.length(), 0);
  EXPECT_EQ(pool.free_exact_pages(), 1);
}

void decode_beside_the_cpu(const char* recipe, int blind_seals) {
  Shape shape;
  shape.recipe = recipe;
  shape.lengths = {250, 139};
  Twins twins(shape, 3, 8);
  SCOPED_TRACE(twins.shape.recipe);
  std::mt19937 random(4);
  for (int step = 0; step < 30; ++step) {
    append_to_both(twins.batch, twins.caches, random, 1, 0.2F);
    twins.batch.seal_ready(nullptr);
    const Twins::Result cpu = twins.on_cpu();
    const AttendPath path = twins.pool.needs_rotation() ? AttendPath::prefill : AttendPath::integer;
    EXPECT_LE(relative_error(twins.on_gpu(path).out, cpu.out), 1e-3) << "step " << step;
  }
  for (std::size_t b = 0; b < twins.caches.size(); ++b) expect_same_blocks(twins.sequences[b], twins.caches[b]);
  EXPECT_EQ(twins.sequences[0].blind_seals(), blind_seals);
  EXPECT_EQ(twins.sequences[0].fork(nullptr).blind_seals(), blind_seals);
}

Twins::Twins(const Shape& s, unsigned seed, int spare_pages)
    : Twins(s, seed,
            PagePool(parse_recipe(s.recipe), s.cache, total_pages(s) + spare_pages, total_pages(s) + spare_pages)) {}

Twins::Twins(const Shape& s, unsigned seed, PagePool own_pool)
    : shape(s), pool(std::move(own_pool)), batch(pool, static_cast<int>(s.lengths.size()) + 1, 1 << 20) {
  std::mt19937 random(seed);
  for (const std::int64_t length : s.lengths) {
    Cache cache(parse_recipe(s.recipe), s.cache);
    turn_alike(pool, std::span(&cache, 1), s.rotation.value_or(usual_rotation(s.cache)));
    const auto keys = random_rows(random, s.cache.dtype, length, s.cache.kv_heads, s.cache.key_dim, s.spread);
    const auto values = random_rows(random, s.cache.dtype, length, s.cache.kv_heads, s.cache.value_dim, 0.0F);
    if (length > 0) {
      cache.append(dense_view(keys.data(), s.cache.dtype, length, s.cache.kv_heads, s.cache.key_dim),
                   dense_view(values.data(), s.cache.dtype, length, s.cache.kv_heads, s.cache.value_dim));
    }
    sequences.push_back(Sequence::upload(pool, cache));
    caches.push_back(std::move(cache));
  }
  queries = random_rows(random, s.cache.dtype, static_cast<std::int64_t>(s.lengths.size()) * s.rows, query_heads(),
                        s.cache.key_dim, 0.0F);
  bind();
}

void Twins::bind() {
  std::vector<Sequence*> pointers;
  for (Sequence& sequence : sequences) pointers.push_back(&sequence);
  batch.bind(pointers, nullptr);
}

Twins::Result Twins::on_cpu(const float* sinks) const {
  const std::size_t rows = sequences.size() * static_cast<std::size_t>(shape.rows * query_heads());
  Result result{std::vector<float>(rows * static_cast<std::size_t>(shape.cache.value_dim)), std::vector<float>(rows)};
  kvant::AttentionOptions options;
  options.scale = shape.options.scale;
  options.softcap = shape.options.softcap;
  options.sinks = sinks;
  options.sliding_window = shape.options.sliding_window;
  options.threads = 1;
  for (std::size_t b = 0; b < caches.size(); ++b) {
    // A sequence shorter than the query rows: the first rows see nothing. Cache::attend needs them all to exist.
    const auto skip = static_cast<int>(std::max<std::int64_t>(0, shape.rows - caches[b].length()));
    const int live = shape.rows - skip;
    const std::size_t first = b * static_cast<std::size_t>(shape.rows * query_heads());
    const std::size_t at = first + static_cast<std::size_t>(skip * query_heads());
    std::fill_n(result.lse.begin() + static_cast<std::ptrdiff_t>(first), shape.rows * query_heads(),
                -std::numeric_limits<float>::infinity());
    if (live == 0) continue;
    caches[b].attend(dense_view(queries.data() + at * static_cast<std::size_t>(shape.cache.key_dim), shape.cache.dtype,
                                live, query_heads(), shape.cache.key_dim),
                     dense_view(result.out.data() + at * static_cast<std::size_t>(shape.cache.value_dim), DType::f32,
                                live, query_heads(), shape.cache.value_dim),
                     options, result.lse.data() + at);
  }
  return result;
}

Twins::Result Twins::on_gpu(AttendPath path) const {
  return on_gpu(AttendPlan(batch, query_heads(), shape.rows, shape.options, 128, path));
}

Twins::Result Twins::on_gpu(const AttendPlan& plan) const {
  const std::size_t rows = sequences.size() * static_cast<std::size_t>(shape.rows * query_heads());
  Guarded q(queries.size() * 2);
  Guarded out(rows * static_cast<std::size_t>(shape.cache.value_dim) * 2);
  Guarded lse(rows * 4);
  q.write(queries.data());
  out.poison();
  lse.poison();
  plan.run(q.data(), out.data(), static_cast<float*>(lse.data()), nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::uint8_t> out_bytes = out.read();
  const std::vector<std::uint8_t> lse_bytes = lse.read();
  std::vector<std::uint16_t> raw(out_bytes.size() / 2);
  std::memcpy(raw.data(), out_bytes.data(), out_bytes.size());
  Result result{widen(raw, shape.cache.dtype), std::vector<float>(rows)};
  std::memcpy(result.lse.data(), lse_bytes.data(), lse_bytes.size());
  return result;
}

void expect_learned_sinks(const Shape& shape, AttendPath path) {
  Twins twins(shape);
  const std::vector<float> sinks = {0.5F, -1, 3, 100, -50, 0, 1, 2};
  Guarded memory(sinks.size() * 4);
  memory.write(sinks.data());
  twins.shape.options.sinks = static_cast<const float*>(memory.data());
  const Twins::Result cpu = twins.on_cpu(sinks.data());
  for (const AttendPath each : {AttendPath::reference, path}) {
    EXPECT_LE(relative_error(twins.on_gpu(each).out, cpu.out), 1e-3);
  }
}

void expect_refused(const std::function<void()>& body, const char* what, const char* word) {
  try {
    body();
    ADD_FAILURE() << what;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

}  // namespace kvant::cuda::test
