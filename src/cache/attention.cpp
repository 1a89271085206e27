// Attention over a store: checks, the split of the work over KV heads, query rows and pages, and the merge of the
// parts.
#include "kvant/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "cache/query_block.hpp"

namespace kvant {

std::shared_ptr<Workspace> make_workspace() {
  return std::make_shared<Workspace>();
}

std::size_t bytes_of(const Workspace& workspace) {
  std::size_t bytes = workspace.partials.capacity();
  for (const Workspace::Arena& arena : workspace.threads) bytes += arena.capacity();
  return bytes;
}

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Query vectors per block: enough that unpacking and preparing a page is shared, few enough that scores stay in L2.
constexpr int kBlockVectors = 96;
constexpr int kItemsPerThread = 4;                // parts per thread, so that threads finish together
constexpr int kMinPagesPerItem = 2;               // below this, merging costs more than it spreads
constexpr std::int64_t kWorkPerThread = 1 << 17;  // multiply-adds that pay for waking a thread (a few microseconds)

constexpr std::int64_t kLastPosition = std::int64_t{1} << 40;  // no store has more cells

void check_shapes(const PageStore& store, std::int64_t n_cells, const ConstView& queries, const View& out,
                  const AttentionOptions& options) {
  const CacheShape& shape = store.shape();
  const auto refuse = [](const std::string& text) { base::fail(ErrorCode::invalid_argument, text); };
  if (n_cells < 0 || n_cells > store.cells()) {
    refuse("n_cells is " + std::to_string(n_cells) + "; the store has " + std::to_string(store.cells()));
  }
  if (queries.extent[2] != shape.key_dim) {
    refuse("queries have " + std::to_string(queries.extent[2]) + " channels; keys have " +
           std::to_string(shape.key_dim));
  }
  cache::check_query_heads(shape, queries.extent[1]);
  if (options.first_position < -1 || options.first_position > kLastPosition) {
    refuse("first_position is " + std::to_string(options.first_position) + "; allowed: -1 to 2^40");
  }
  if (options.sliding_window < 0) {
    refuse("sliding_window is " + std::to_string(options.sliding_window) + "; allowed: 0 and more");
  }
  if (out.extent[0] != queries.extent[0] || out.extent[1] != queries.extent[1] || out.extent[2] != shape.value_dim) {
    refuse("out does not have the shape [query rows, query heads, value_dim]");
  }
  if (queries.extent[0] < 0) refuse("queries have " + std::to_string(queries.extent[0]) + " rows");
  if (queries.extent[0] > 0 && (queries.data == nullptr || out.data == nullptr)) refuse("queries or out have no data");
  const auto is_limit = [](float value) { return value >= 0 && std::isfinite(value); };
  if (!is_limit(options.softcap) || !is_limit(options.max_bias) || !std::isfinite(options.scale)) {
    refuse("scale must be finite, softcap and max_bias finite and not negative");
  }
}

// ALiBi slopes (Press et al. 2022, section 3, with the interleaving for head counts that are no power of two).
std::vector<float> make_slopes(int heads, float max_bias) {
  std::vector<float> slopes(static_cast<std::size_t>(heads), 1.0F);
  if (max_bias <= 0) return slopes;
  const auto power = static_cast<int>(std::exp2(std::floor(std::log2(heads))));
  const float base = std::exp2(-max_bias / static_cast<float>(power));
  const float between = std::exp2(-max_bias / 2.0F / static_cast<float>(power));
  for (int h = 0; h < heads; ++h) {
    slopes[static_cast<std::size_t>(h)] = h < power ? std::pow(base, static_cast<float>(h + 1))
                                                    : std::pow(between, static_cast<float>(2 * (h - power) + 1));
  }
  return slopes;
}

// As many threads as the work can feed.
int threads_for(const cache::AttentionPlan& plan) {
  const CacheShape& shape = plan.store->shape;
  const std::int64_t work = plan.n_cells * plan.rows * plan.query_heads() * (shape.key_dim + shape.value_dim);
  return static_cast<int>(
      std::clamp<std::int64_t>(work / kWorkPerThread, 1, base::thread_count(plan.options->threads)));
}

// The work: items = KV head x block of query rows x run of pages. Runs of one block are merged afterwards.
struct Split {
  std::int64_t blocks = 1;
  std::int64_t runs = 1;
  std::int64_t pages = 0;
  std::int64_t items = 1;

  Split(const cache::AttentionPlan& plan, int threads) {
    blocks = (plan.rows + plan.block_rows - 1) / plan.block_rows;
    pages = (plan.n_cells + plan.store->tokens() - 1) / plan.store->tokens();
    const std::int64_t per_run = plan.store->shape.kv_heads * blocks;
    if (threads > 1 && per_run < std::int64_t{threads} * kItemsPerThread) {
      runs = (std::int64_t{threads} * kItemsPerThread + per_run - 1) / per_run;
      runs = std::clamp<std::int64_t>(runs, 1, std::max<std::int64_t>(1, pages / kMinPagesPerItem));
    }
    items = per_run * runs;
  }
};

// One vector's (maximum, sum, output), merged from the runs that saw different pages. Empty runs have sum 0.
struct State {
  float maximum = kMinusInfinity;
  float sum = 0;
  std::vector<float> output;

  void merge(float other_maximum, float other_sum, const float* other_output) {
    if (other_maximum == kMinusInfinity) return;
    const float peak = std::max(maximum, other_maximum);
    const float mine = maximum == kMinusInfinity ? 0.0F : std::exp(maximum - peak);
    const float theirs = std::exp(other_maximum - peak);
    for (std::size_t d = 0; d < output.size(); ++d) {
      output[d] = mine * output[d] + (other_output != nullptr ? theirs * other_output[d] : 0.0F);
    }
    sum = mine * sum + theirs * other_sum;
    maximum = peak;
  }
};

class Attention {
 public:
  Attention(cache::AttentionPlan plan, const View& out, float* lse, Workspace& workspace)
      : plan_(std::move(plan)),
        out_(out),
        lse_(lse),
        workspace_(workspace),
        threads_(threads_for(plan_)),
        split_(plan_, threads_) {
    value_dim_ = plan_.store->shape.value_dim;
    record_ = static_cast<std::size_t>(value_dim_) + 2;
  }

  void run() {
    prepare();
    base::parallel_for(split_.items, threads_, [&](std::int64_t item, int thread) { run_item(item, thread); });
    if (split_.runs == 1) return;
    base::parallel_for(plan_.rows * plan_.query_heads(), threads_,
                       [&](std::int64_t vector, int) { merge_runs(vector); });
  }

 private:
  void prepare() {
    workspace_.threads.resize(std::max(workspace_.threads.size(), static_cast<std::size_t>(threads_)));
    const std::size_t bytes = cache::QueryBlock::arena_bytes(plan_);
    const auto used = std::min<std::int64_t>(threads_, split_.items);
    for (std::int64_t i = 0; i < used; ++i) workspace_.threads[static_cast<std::size_t>(i)].reset(bytes);
    if (split_.runs == 1) return;
    const auto vectors = static_cast<std::size_t>(plan_.rows * plan_.query_heads());
    const std::size_t count = vectors * static_cast<std::size_t>(split_.runs) * record_;
    workspace_.partials.reset(Workspace::Arena::padded<float>(count));
    partials_ = workspace_.partials.take<float>(count);
  }

  void run_item(std::int64_t item, int thread) {
    const std::int64_t run = item % split_.runs;
    const std::int64_t block_number = item / split_.runs % split_.blocks;
    const int head = static_cast<int>(item / split_.runs / split_.blocks);
    Workspace::Arena& arena = workspace_.threads[static_cast<std::size_t>(thread)];
    arena.reset(0);
    cache::QueryBlock block(plan_, arena);
    const std::int64_t first_row = block_number * plan_.block_rows;
    block.start(head, first_row, static_cast<int>(std::min<std::int64_t>(plan_.block_rows, plan_.rows - first_row)));
    block.add_pages(split_.pages * run / split_.runs, split_.pages * (run + 1) / split_.runs);
    block.finish();
    for (int n = 0; n < block.vectors(); ++n) {
      const std::int64_t row = first_row + n / plan_.group;
      const int query_head = head * plan_.group + n % plan_.group;
      if (split_.runs == 1) {
        finish(row, query_head, block.maximum()[n], block.sum()[n], block.output(n));
        continue;
      }
      float* record = partial(row * plan_.query_heads() + query_head, run);
      record[0] = block.maximum()[n];
      record[1] = block.sum()[n];
      std::copy_n(block.output(n), value_dim_, record + 2);
    }
  }

  float* partial(std::int64_t vector, std::int64_t run) const {
    return partials_ + static_cast<std::size_t>(vector * split_.runs + run) * record_;
  }

  void merge_runs(std::int64_t vector) {
    State state{kMinusInfinity, 0, std::vector<float>(static_cast<std::size_t>(value_dim_))};
    for (std::int64_t run = 0; run < split_.runs; ++run) {
      const float* record = partial(vector, run);
      state.merge(record[0], record[1], record + 2);
    }
    finish(vector / plan_.query_heads(), static_cast<int>(vector % plan_.query_heads()), state.maximum, state.sum,
           state.output.data());
  }

  // Adds the learned sink to the denominator, normalises and stores; rows that saw nothing are zeros.
  void finish(std::int64_t row, int query_head, float maximum, float sum, const float* output) const {
    float rescale = 1;
    if (plan_.options->sinks != nullptr && plan_.options->sinks[query_head] != kMinusInfinity) {
      const float sink = plan_.options->sinks[query_head];
      const float peak = std::max(maximum, sink);
      rescale = maximum == kMinusInfinity ? 0.0F : std::exp(maximum - peak);
      sum = sum * rescale + std::exp(sink - peak);
      maximum = peak;
    }
    const float factor = sum > 0 || std::isnan(sum) ? rescale / sum : 0.0F;
    const std::int64_t at = row * out_.stride[0] + query_head * out_.stride[1];
    const auto result = [&](int d) { return factor == 0 ? 0.0F : output[d] * factor; };
    if (out_.type == DType::f32 && out_.stride[2] == 1) {
      float* to = static_cast<float*>(out_.data) + at;
      for (int d = 0; d < value_dim_; ++d) to[d] = result(d);
    } else {
      for (int d = 0; d < value_dim_; ++d) {
        base::store_float(out_.data, out_.type, at + d * out_.stride[2], result(d));
      }
    }
    if (lse_ != nullptr) {
      lse_[row * plan_.query_heads() + query_head] =
          sum > 0 || std::isnan(sum) ? maximum + std::log(sum) : kMinusInfinity;
    }
  }

  cache::AttentionPlan plan_;
  View out_;
  float* lse_;
  Workspace& workspace_;
  int threads_;
  Split split_;
  int value_dim_ = 0;
  std::size_t record_ = 0;
  float* partials_ = nullptr;
};

}  // namespace

void attend(const PageStore& store, std::int64_t n_cells, const ConstView& queries, const View& out,
            const AttentionOptions& options, Workspace& workspace, float* lse) {
  check_shapes(store, n_cells, queries, out, options);
  if (queries.extent[0] == 0) return;
  cache::AttentionPlan plan;
  plan.store = &store.impl();
  plan.options = &options;
  plan.queries = queries;
  plan.n_cells = n_cells;
  plan.rows = queries.extent[0];
  plan.group = static_cast<int>(queries.extent[1] / store.shape().kv_heads);
  plan.block_rows = static_cast<int>(std::clamp<std::int64_t>(kBlockVectors / plan.group, 1, plan.rows));
  plan.scale = options.scale != 0 ? options.scale : 1.0F / std::sqrt(static_cast<float>(store.shape().key_dim));
  plan.slopes = make_slopes(plan.query_heads(), options.max_bias);
  Attention(std::move(plan), out, lse, workspace).run();
}

}  // namespace kvant
