#include "cache/saliency.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/half.hpp"
#include "cache/query_block.hpp"

namespace kvant::cache {
namespace {

constexpr std::int64_t kBlockVectors = 96;  // as attention has

// One KV head's queries of some probes, as attention wants them.
class ProbeBlocks {
 public:
  ProbeBlocks(const PageStore::Impl& store, int head, std::span<const std::size_t> probes)
      : store_(store), head_(head) {
    const Probes& all = *store.probes;
    heads_ = all.query_heads();
    for (const std::size_t i : probes) {
      queries_.insert(queries_.end(), all.query(i).begin(), all.query(i).end());
      clocks_.push_back(all.clock(i));
      lse_.insert(lse_.end(), all.lse(i).begin(), all.lse(i).end());
    }
    options_.softcap = all.softcap;
    plan_.store = &store;
    plan_.options = &options_;
    plan_.queries = dense_view(queries_.data(), DType::f32, count(), heads_, store.shape.key_dim);
    plan_.n_cells = store.cells;
    plan_.rows = count();
    plan_.group = heads_ / store.shape.kv_heads;
    plan_.block_rows = static_cast<int>(std::clamp<std::int64_t>(kBlockVectors / plan_.group, 1, count()));
    plan_.scale = all.scale != 0 ? all.scale : 1.0F / std::sqrt(static_cast<float>(store.shape.key_dim));
    plan_.slopes.assign(static_cast<std::size_t>(heads_), 1.0F);
    arena_.reset(QueryBlock::arena_bytes(plan_));
  }

  std::int64_t count() const { return static_cast<std::int64_t>(clocks_.size()); }

  // Adds each probe's probabilities to sums[cell], and to seen[cell] that it can see it.
  void add_to(std::int64_t page, std::vector<double>& sums, std::vector<double>& seen) {
    for (std::int64_t first = 0; first < count(); first += plan_.block_rows) {
      const auto rows = static_cast<int>(std::min<std::int64_t>(plan_.block_rows, count() - first));
      arena_.reset(0);
      QueryBlock block(plan_, arena_);
      block.start(head_, first, rows);
      find_lse(block, first, rows);
      block.score_open(page, store_.tokens());
      const Page& own = store_.pages[static_cast<std::size_t>(page)];
      for (int n = 0; n < block.vectors(); ++n) {
        const std::int64_t row = first + n / plan_.group;
        const float total = *lse(row, n % plan_.group);
        if (!std::isfinite(total)) continue;  // it saw nothing at all
        for (std::size_t cell = 0; cell < sums.size(); ++cell) {
          if (own.clocks[cell] > clocks_[static_cast<std::size_t>(row)]) continue;
          sums[cell] += probability(block.logits(n)[cell], total);
          if (n % plan_.group == 0) seen[cell] += 1;
        }
      }
    }
  }

 private:
  float* lse(std::int64_t row, int in_group) {
    return lse_.data() + row * heads_ + std::ptrdiff_t{head_} * plan_.group + in_group;
  }

  // Over sealed pages as they are and open ones up to each probe's own token.
  void find_lse(QueryBlock& block, std::int64_t first, int rows) {
    bool known = true;
    for (int n = 0; n < rows * plan_.group; ++n) known &= !std::isnan(*lse(first + n / plan_.group, n % plan_.group));
    if (known) return;
    for (std::int64_t page = 0; page < static_cast<std::int64_t>(store_.pages.size()); ++page) {
      block.add_scores(page, clocks_.data() + first);
    }
    for (int n = 0; n < block.vectors(); ++n) {
      float& value = *lse(first + n / plan_.group, n % plan_.group);
      if (std::isnan(value)) value = block.maximum()[n] + std::log(block.sum()[n]);
    }
  }

  // At most 1: a host's log-sum-exp may be over other cells than these (several sequences in one store).
  double probability(float logit, float total) const {
    if (options_.softcap > 0) logit = options_.softcap * std::tanh(logit / options_.softcap);
    return logit < total ? std::exp(static_cast<double>(logit - total)) : 1.0;
  }

  const PageStore::Impl& store_;
  int head_;
  int heads_ = 0;
  std::vector<float> queries_;  // [probes][query_heads][key_dim]
  std::vector<float> lse_;      // [probes][query_heads]
  std::vector<std::int64_t> clocks_;
  AttentionOptions options_;
  AttentionPlan plan_;
  Workspace::Arena arena_;
};

}  // namespace

std::vector<std::size_t> probes_of(const PageStore::Impl& store, std::int64_t page) {
  const ProbeSpan span(store.recipe);
  const std::int64_t end = store.pages[static_cast<std::size_t>(page)].last_write + store.recipe.window;
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < store.probes->size(); ++i) {
    if (span.holds(end, store.probes->clock(i))) result.push_back(i);
  }
  return result;
}

std::vector<double> attention_saliency(const PageStore::Impl& store, std::int64_t page, int head,
                                       std::span<const std::size_t> probes) {
  std::vector<double> sums(static_cast<std::size_t>(store.tokens())), seen(sums.size());
  ProbeBlocks(store, head, probes).add_to(page, sums, seen);
  for (std::size_t cell = 0; cell < sums.size(); ++cell) {
    if (seen[cell] > 0) sums[cell] /= seen[cell];
  }
  return sums;
}

std::vector<double> norm_saliency(const PageStore::Impl& store, std::int64_t page, int head) {
  std::vector<double> squares(static_cast<std::size_t>(store.tokens()));
  std::vector<float> row(squares.size());
  const std::byte* open = store.pages[static_cast<std::size_t>(page)].open.get();
  for (int d = 0; d < store.shape.key_dim; ++d) {
    tiles::kernels().widen(open + store.rows.key_at(head, d, 0), store.shape.dtype, row.data(), store.tokens());
    for (std::size_t cell = 0; cell < row.size(); ++cell) {
      squares[cell] += static_cast<double>(row[cell]) * static_cast<double>(row[cell]);
    }
  }
  return squares;  // ranks as the norms do
}

void store_token_order(const PageLayout& layout, const std::vector<double>& scores, const CellSet& skip, int head,
                       std::byte* block) {
  std::vector<std::uint8_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::uint8_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::uint8_t a, std::uint8_t b) {
    return skip[a] != skip[b] ? skip[b] : !skip[a] && scores[a] > scores[b];
  });
  std::sort(order.begin(), order.begin() + layout.salient);
  std::sort(order.begin() + layout.salient, order.end());
  std::byte* stored = block + static_cast<std::size_t>(head) * layout.head_bytes + layout.tokens_offset;
  std::copy_n(reinterpret_cast<const std::byte*>(order.data()), order.size(), stored);
}

}  // namespace kvant::cache
