// make bench-gpu: decode and prefill attention on one GPU, graph replay over more than 220 MB of rotating pages, decode
// against the read bandwidth measured in the same run. One JSON line per figure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/half.hpp"
#include "cuda/attend.hpp"
#include "pages.cuh"
#include "timing.cuh"

namespace kvant::cuda {
namespace {

constexpr double kRotate = 220e6;  // bytes: several times the L2 cache

// ---- cases

struct Case {
  std::string name;
  std::string recipe;
  CacheShape shape{8, 128, 128, DType::f16};
  int group = 4;
  int batch = 1;
  std::int64_t tokens = 4096;
  std::int64_t shortest = 0;  // > 0: lengths from here to `tokens`, log-uniform
  int rows = 1;
};

struct Set {
  std::vector<Sequence> sequences;
  std::unique_ptr<Batch> batch;
  std::unique_ptr<AttendPlan> plan;
};

class Runner {
 public:
  Runner(const Case& c, double bandwidth) : case_(c), bandwidth_(bandwidth) {
    std::mt19937 random(7);
    const Recipe recipe = parse_recipe(c.recipe);
    std::int64_t pages = 0;
    for (int b = 0; b < c.batch; ++b) {
      std::int64_t tokens = c.tokens;
      if (c.shortest > 0) {
        const double share = static_cast<double>(b) / std::max(1, c.batch - 1);
        tokens =
            static_cast<std::int64_t>(static_cast<double>(c.shortest) *
                                      std::pow(static_cast<double>(c.tokens) / static_cast<double>(c.shortest), share));
      }
      pages_.push_back(tokens / kPage);
      pages += pages_.back();
    }
    std::shuffle(pages_.begin(), pages_.end(), random);
    bytes_ = static_cast<double>(pages) * static_cast<double>(page_bytes(recipe, c.shape));
    const int sets = static_cast<int>(std::max(1.0, std::ceil(kRotate / bytes_)));
    pool_ = std::make_unique<PagePool>(recipe, c.shape, static_cast<int>(pages) * sets, 0);
    pool_->set_key_rotation(make_rotation({RotaryPairs::halves, c.shape.key_dim}));
    fill_pool(*pool_->impl(), static_cast<int>(pages) * sets);
    std::vector<std::int32_t> numbers;
    for (int i = 0; i < pages * sets; ++i) numbers.push_back(pool_->impl()->page_numbers.take());
    std::shuffle(numbers.begin(), numbers.end(), random);
    std::size_t next = 0;
    for (int s = 0; s < sets; ++s) {
      sets_.emplace_back();
      Set& set = sets_.back();
      std::vector<Sequence*> pointers;
      set.sequences.reserve(pages_.size());
      for (const std::int64_t count : pages_) {
        set.sequences.emplace_back(*pool_);
        Sequence::Impl& sequence = set.sequences.back().impl();
        for (std::int64_t i = 0; i < count; ++i) sequence.pages.push_back(numbers[next++]);
        sequence.length = count * kPage;
        pointers.push_back(&set.sequences.back());
      }
      set.batch = std::make_unique<Batch>(*pool_, c.batch, c.tokens);
      set.batch->bind(pointers, nullptr);
    }
    const auto vectors = static_cast<std::size_t>(c.batch * c.rows * c.group * c.shape.kv_heads);
    q_ = DeviceBuffer<std::uint16_t>(vectors * static_cast<std::size_t>(c.shape.key_dim));
    out_ = DeviceBuffer<std::uint16_t>(vectors * static_cast<std::size_t>(c.shape.value_dim));
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> q(q_.count());
    for (std::size_t i = 0; i < q.size(); ++i) {
      base::store_float(q.data(), c.shape.dtype, static_cast<std::int64_t>(i), normal(random));
    }
    q_.copy_from(q.data(), q.size());
  }

  // Relative error against binary64 over the same pages.
  double error() {
    AttendOptions options;
    const std::vector<float> got = result(AttendPlan(*sets_[0].batch, heads(), case_.rows, options, 0));
    const std::vector<float> want =
        result(AttendPlan(*sets_[0].batch, heads(), case_.rows, options, 0, AttendPath::reference));
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      difference += (got[i] - want[i]) * static_cast<double>(got[i] - want[i]);
      norm += want[i] * static_cast<double>(want[i]);
    }
    return std::sqrt(difference / norm);
  }

  void plan(bool overlap, const Split* split = nullptr, bool few_warps = true) {
    AttendOptions options;
    options.overlap = overlap;
    options.pages_settled = overlap;
    for (Set& set : sets_) {
      set.plan = std::make_unique<AttendPlan>(*set.batch, heads(), case_.rows, options, 0);
      if (split == nullptr) continue;
      auto& impl = const_cast<AttendPlan::Impl&>(set.plan->impl());
      DecodeVariant variant = impl.kernel->variant;
      variant.half = split->half;
      variant.cluster = split->half || few_warps;
      const DecodeKernel* kernel = find_decode_kernel(variant);
      if (kernel == nullptr) base::fail(ErrorCode::unsupported, "no kernel for this split");
      impl.kernel = kernel;
      impl.load(*split, impl.describe_sequences(0, split->half ? 2 : 1));
    }
  }

  double time() {
    return time(static_cast<int>(std::clamp<double>(std::ceil(2e9 / bytes_), static_cast<double>(sets_.size()), 200)));
  }
  // Per launch, of `count` launches in one graph.
  double time(int count) {
    return time_graph(count, [&](int i, cudaStream_t stream) {
      sets_[static_cast<std::size_t>(i) % sets_.size()].plan->run(q_.get(), out_.get(), nullptr, stream);
    });
  }

  void report_prefill(double us, double error) const {
    const double seen = static_cast<double>(case_.tokens) - (case_.rows - 1) / 2.0;  // by a row, on average
    const double operations =
        2.0 * (case_.shape.key_dim + case_.shape.value_dim) * heads() * case_.batch * case_.rows * seen;
    std::printf(
        "{\"case\": \"%s\", \"recipe\": \"%s\", \"batch\": %d, \"tokens\": %lld, \"rows\": %d, \"kind\": \"prefill\", "
        "\"us\": %.1f, \"TFLOP/s\": %.0f, \"error\": %.2e, \"split\": \"%s\"}\n",
        case_.name.c_str(), case_.recipe.c_str(), case_.batch, static_cast<long long>(case_.tokens), case_.rows, us,
        operations / us * 1e-6, error, sets_[0].plan->describe().c_str());
    std::fflush(stdout);
  }

  void report(const char* kind, double us, double error) const {
    const double rate = bytes_ / us * 1e-3;
    std::printf(
        "{\"case\": \"%s\", \"recipe\": \"%s\", \"batch\": %d, \"tokens\": %lld, \"kind\": \"%s\", \"us\": %.2f, "
        "\"GB/s\": %.0f, \"percent\": %.1f, \"error\": %.2e, \"split\": \"%s\", \"cost\": %.0f}\n",
        case_.name.c_str(), case_.recipe.c_str(), case_.batch, static_cast<long long>(case_.tokens), kind, us, rate,
        100 * rate / bandwidth_, error, sets_[0].plan->describe().c_str(),
        sets_[0].plan->impl().plan.split.segment_cost);
    std::fflush(stdout);
  }

 private:
  int heads() const { return case_.group * case_.shape.kv_heads; }
  std::vector<float> result(const AttendPlan& plan) {
    need(cudaMemset(out_.get(), 0xFF, out_.bytes()), "poison");
    plan.run(q_.get(), out_.get(), nullptr, nullptr);
    need(cudaDeviceSynchronize(), "attention");
    std::vector<std::uint16_t> raw(out_.count());
    need(cudaMemcpy(raw.data(), out_.get(), out_.bytes(), cudaMemcpyDeviceToHost), "copy");
    std::vector<float> x(raw.size());
    for (std::size_t i = 0; i < raw.size(); ++i) {
      x[i] = base::load_float(raw.data(), case_.shape.dtype, static_cast<std::int64_t>(i));
    }
    return x;
  }

  Case case_;
  double bandwidth_;
  double bytes_ = 0;
  std::vector<std::int64_t> pages_;
  std::unique_ptr<PagePool> pool_;
  std::vector<Set> sets_;
  DeviceBuffer<std::uint16_t> q_, out_;
};

double time_seal(const char* recipe, int pages) {
  const CacheShape shape{8, 128, 128, DType::f16};
  PagePool pool(parse_recipe(recipe), shape, pages, pages);
  pool.set_key_rotation(make_rotation({RotaryPairs::halves, shape.key_dim}));
  const PagePool::Impl& p = *pool.impl();
  std::vector<std::uint16_t> rows(p.exact.bytes() / 2);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (auto& x : rows) x = base::float_to_half(normal(random));
  need(cudaMemcpy(p.exact.get(), rows.data(), p.exact.bytes(), cudaMemcpyHostToDevice), "copy");
  std::vector<BlockSealJob> jobs;
  for (int i = 0; i < pages; ++i) jobs.push_back({i, i, 0, i * kPage});
  p.seal(jobs, nullptr);
  return time_graph(20, [&](int, cudaStream_t stream) { p.seal(jobs, stream); });
}

std::vector<Case> table_cases() {
  std::vector<Case> cases;
  for (const auto& [name, recipe] : {std::pair{"2-bit", "kivi:k=2,v=2"},
                                     {"kitty 25 %", "kitty:sink=0"},
                                     {"small", "small:sink=0"},
                                     {"balanced", "balanced:sink=0"},
                                     {"4-bit", "kivi:k=4,v=4"},
                                     {"kvquant 3", "kvquant:k=3,v=3,sink=0"},
                                     {"kvquant 2", "kvquant:k=2,v=2,sink=0"},
                                     {"before RoPE", "kvquant:k=3,v=3,sink=0,rope=before"},
                                     {"zipcache", "zipcache"}}) {
    for (const auto& [batch, tokens] :
         {std::pair{32, 32768}, {32, 8192}, {8, 32768}, {1, 131072}, {1, 32768}, {1, 8192}, {1, 4096}}) {
      Case c;
      c.name = name;
      c.recipe = recipe;
      c.batch = batch;
      c.tokens = tokens;
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<Case> more_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, const char* recipe, int dim, DType type, int group, int batch, int tokens,
                       int shortest, int rows) {
    Case c;
    c.name = name;
    c.recipe = recipe;
    c.shape = {8, dim, dim, type};
    c.group = group;
    c.batch = batch;
    c.tokens = tokens;
    c.shortest = shortest;
    c.rows = rows;
    cases.push_back(c);
  };
  add("mixed 1k..64k", "kivi:k=2,v=2", 128, DType::f16, 4, 32, 65536, 1024, 1);
  add("2-bit B64", "kivi:k=2,v=2", 128, DType::f16, 4, 64, 32768, 0, 1);
  add("3-bit", "kivi:k=3,v=3", 128, DType::f16, 4, 32, 32768, 0, 1);
  add("K4 V2", "kivi:k=4,v=2", 128, DType::f16, 4, 32, 32768, 0, 1);
  add("2-bit bf16", "kivi:k=2,v=2", 128, DType::bf16, 4, 32, 32768, 0, 1);
  add("2-bit g=1", "kivi:k=2,v=2", 128, DType::f16, 1, 32, 32768, 0, 1);
  add("2-bit g=8", "kivi:k=2,v=2", 128, DType::f16, 8, 32, 32768, 0, 1);
  add("2-bit 2 rows", "kivi:k=2,v=2", 128, DType::f16, 4, 32, 32768, 0, 2);
  add("2-bit D=64", "kivi:k=2,v=2", 64, DType::f16, 4, 32, 32768, 0, 1);
  add("2-bit D=256", "kivi:k=2,v=2", 256, DType::f16, 4, 32, 32768, 0, 1);
  add("near-lossless", "near-lossless:sink=0", 128, DType::f16, 4, 32, 32768, 0, 1);
  add("small bf16", "small:sink=0", 128, DType::bf16, 4, 32, 32768, 0, 1);
  add("small g=8", "small:sink=0", 128, DType::f16, 8, 32, 32768, 0, 1);
  add("small D=64", "small:sink=0", 64, DType::f16, 4, 32, 32768, 0, 1);
  add("small mixed 1k..64k", "small:sink=0", 128, DType::f16, 4, 32, 65536, 1024, 1);
  add("4-bit D=64", "kivi:k=4,v=4", 64, DType::f16, 4, 32, 32768, 0, 1);
  return cases;
}

void run_case(const Case& c, double bandwidth, bool tune) {
  Runner runner(c, bandwidth);
  const double error = runner.error();
  runner.plan(false);
  runner.report("plain", runner.time(), error);
  runner.plan(true);
  runner.report("overlap", runner.time(), error);
  if (!tune) return;
  const int items = c.batch * c.shape.kv_heads;
  std::vector<Split> splits;
  for (const double cost : {5.0, 10.0, 20.0}) splits.push_back({1, 132, false, false, cost});
  if (items <= 66) splits.push_back({2, items, false, true});
  if (items > 66) {
    Split whole{1, 0, false, false};
    whole.whole = (items + 131) / 132;
    whole.groups = (items + whole.whole - 1) / whole.whole;
    splits.push_back(whole);
  } else {
    splits.push_back({1, 132 / items * items, false, true});
    for (const int ranks : {4, 8}) {
      if (128 / ranks >= items) splits.push_back({ranks, items, false, true});
    }
  }
  for (const Split& split : splits) {
    for (const bool few_warps : {false, true}) {
      if (split.half && !few_warps) continue;
      try {
        runner.plan(false, &split, few_warps);
        runner.report("tune", runner.time(), error);
        runner.plan(true, &split, few_warps);
        runner.report("tune+", runner.time(), error);
      } catch (const Error& refused) {
        std::printf("# %s\n", refused.what());
      }
    }
  }
}

// A chunk of a prompt at the end of 32k tokens. The error is that of a chunk of 64 rows: binary64 takes its time.
void run_prefill(const std::string& only) {
  for (const auto& [name, recipe, type] : {std::tuple{"2-bit", "kivi:k=2,v=2", DType::f16},
                                           {"kitty 25 %", "kitty:sink=0", DType::f16},
                                           {"4-bit", "kivi:k=4,v=4", DType::f16},
                                           {"2-bit bf16", "kivi:k=2,v=2", DType::bf16},
                                           {"small", "small:sink=0", DType::f16},
                                           {"balanced", "balanced:sink=0", DType::f16},
                                           {"kvquant 3", "kvquant:k=3,v=3,sink=0", DType::f16},
                                           {"before RoPE", "kvquant:k=3,v=3,sink=0,rope=before", DType::f16},
                                           {"zipcache", "zipcache", DType::f16}}) {
    if (!std::string(name).starts_with(only)) continue;
    Case c;
    c.name = name;
    c.recipe = recipe;
    c.shape.dtype = type;
    c.tokens = 32768;
    c.rows = 64;
    try {
      const double error = Runner(c, 1).error();
      for (const int rows : {64, 512, 2048}) {
        c.rows = rows;
        Runner runner(c, 1);
        runner.plan(false);
        runner.report_prefill(runner.time(12), error);
      }
    } catch (const Error& refused) {
      std::printf("# %s: %s\n", name, refused.what());
    }
  }
}

// `name`: only cases whose name (of "seal": whose recipe) begins like it.
int run(const std::string& what, const std::string& name) {
  const DeviceInfo info = device_info();
  const double bandwidth = read_bandwidth();
  std::printf("{\"device\": \"%s\", \"read GB/s\": %.0f}\n", info.name.c_str(), bandwidth);
  if (what == "table" || what == "all") {
    for (const Case& c : table_cases()) {
      if (c.name.starts_with(name)) run_case(c, bandwidth, false);
    }
  }
  if (what == "tune") {
    std::vector<Case> cases = table_cases();
    cases.push_back(more_cases().front());
    for (const Case& c : cases) {
      const bool tuned = (c.batch > 1 || c.tokens > 100000) && c.name != "4-bit";
      if (tuned && c.name.starts_with(name)) run_case(c, bandwidth, true);
    }
  }
  if (what == "more" || what == "all") {
    for (const Case& c : more_cases()) {
      if (!c.name.starts_with(name)) continue;
      try {
        run_case(c, bandwidth, false);
      } catch (const Error& error) {
        std::printf("# %s: %s\n", c.name.c_str(), error.what());
      }
    }
  }
  if (what == "prefill" || what == "all") run_prefill(name);
  if (what == "prefill") return 0;
  for (const char* recipe :
       {"kivi:k=2,v=2", "kivi:k=4,v=4", "kitty:sink=0", "small:sink=0", "balanced:sink=0", "kvquant:k=3,v=3,sink=0",
        "kvquant:k=2,v=2,sink=0", "kvquant:k=3,v=3,sink=0,rope=before", "zipcache", "kivi:k=8,v=8",
        "kitty:selector=variance", "waterfill:rotate=0", "k=zipcache,v=waterfill:3"}) {
    if (what == "seal" && !std::string(recipe).starts_with(name)) continue;
    for (const int pages : {32, 8, 1}) {  // 8 heads each
      std::printf("{\"case\": \"seal\", \"recipe\": \"%s\", \"head pages\": %d, \"us\": %.2f}\n", recipe, pages * 8,
                  time_seal(recipe, pages));
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvant::cuda

int main(int argc, char** argv) {
  try {
    return kvant::cuda::run(argc > 1 ? argv[1] : "all", argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
}
