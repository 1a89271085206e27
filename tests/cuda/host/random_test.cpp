// Random histories against plain lists: whatever an attention call that is not refused reads is what was appended, and
// a call that throws has changed nothing.
#include <random>

#include "cuda/host/support.hpp"

namespace kvant::cuda::host {
namespace {

constexpr int kSequences = 4;
constexpr int kPages = 20;

class History {
 public:
  History(const char* recipe, unsigned seed) : random_(seed), pool_(parse_recipe(recipe), kShape, kPages, kPages) {
    state() = State();
    state().multiprocessors = pick(1, 40);
    for (int i = 0; i < kSequences; ++i) sequences_.push_back(std::make_unique<Sequence>(pool_));
    tokens_.resize(kSequences);
    batches_.push_back(std::make_unique<Batch>(pool_, 3, 1024));
    batches_.push_back(std::make_unique<Batch>(pool_, 2, 640));
    bound_.resize(2);
    plans_.resize(2);
  }
  ~History() {
    plans_.clear();
    batches_.clear();
    sequences_.clear();
    EXPECT_EQ(pool_.free_pages(), kPages);
    EXPECT_EQ(pool_.free_exact_pages(), kPages);
    state() = State();
  }

  void step() {
    const auto b = static_cast<std::size_t>(pick(0, 1));
    Batch& batch = *batches_[b];
    const std::string before = dump_all();
    if (pick(0, 3) == 0) state().fail_after = pick(0, 4);
    try {
      switch (pick(0, 7)) {
        case 0:
          return bind_some(b);
        case 1:
        case 2:
          return append_some(b);
        case 3:
          batch.reserve(pick(0, 200), nullptr);
          return settle();
        case 4:
          batch.seal_ready(nullptr);
          return settle();
        case 5:
          return replace();
        case 6:
          if (plans_[b].size() > 3) plans_[b].clear();
          plans_[b].emplace_back(batch, 8, 1, AttendOptions{}, pick(0, 300),
                                 pick(0, 2) == 0 ? AttendPath::reference : AttendPath::integer);
          return settle();
        default:
          attend(b);
      }
    } catch (const Error&) {
      settle();
      EXPECT_EQ(dump_all(), before);
    }
  }

  int accepted() const { return accepted_; }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  void settle() { state().fail_after = -1; }

  std::string dump_all() const {
    std::string all = std::to_string(pool_.free_pages()) + " free, " + std::to_string(pool_.free_exact_pages());
    for (const auto& sequence : sequences_) all += "\n" + dump(*sequence);
    return all;
  }

  void bind_some(std::size_t b) {
    std::vector<int> which(kSequences);
    for (int i = 0; i < kSequences; ++i) which[static_cast<std::size_t>(i)] = i;
    std::shuffle(which.begin(), which.end(), random_);
    which.resize(static_cast<std::size_t>(pick(0, b == 0 ? 3 : 2)));
    std::vector<Sequence*> pointers;
    for (const int i : which) pointers.push_back(sequences_[static_cast<std::size_t>(i)].get());
    batches_[b]->bind(pointers, nullptr);
    settle();
    bound_[b] = which;
  }

  void append_some(std::size_t b) {
    const int count = pick(1, 150);
    batches_[b]->reserve(count, nullptr);  // may fail: an append whose launch fails keeps the pages it was given
    settle();
    std::vector<Tokens> rows(bound_[b].size());
    for (Tokens& sequence : rows) {
      for (int i = 0; i < count; ++i) sequence.push_back(next_++ % 60000);
    }
    const auto keys = rows_of(rows);
    batches_[b]->append(keys.data(), keys.data(), count, nullptr);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Tokens& tokens = tokens_[static_cast<std::size_t>(bound_[b][i])];
      tokens.insert(tokens.end(), rows[i].begin(), rows[i].end());
    }
  }

  // By a fork of another, or an empty one.
  void replace() {
    const auto to = static_cast<std::size_t>(pick(0, kSequences - 1));
    const auto from = static_cast<std::size_t>(pick(0, kSequences - 1));
    if (pick(0, 2) == 0) {
      settle();
      *sequences_[to] = Sequence(pool_);
      tokens_[to].clear();
      return;
    }
    Sequence copy = sequences_[from]->fork(nullptr);
    settle();
    *sequences_[to] = std::move(copy);
    tokens_[to] = Tokens(tokens_[from]);
  }

  void attend(std::size_t b) {
    for (const AttendPlan& plan : plans_[b]) {
      std::vector<Tokens> got;
      try {
        got = read(plan);
      } catch (const Error&) {
        continue;  // void by now, or made to fail
      }
      ++accepted_;
      for (std::size_t i = 0; i < bound_[b].size(); ++i) {
        const Tokens& want = tokens_[static_cast<std::size_t>(bound_[b][i])];
        if (want.empty()) continue;
        ASSERT_LT(i, got.size());
        ASSERT_EQ(got[i], want) << plan.describe();
      }
    }
    settle();
  }

  std::mt19937 random_;
  PagePool pool_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<Tokens> tokens_;
  std::vector<std::unique_ptr<Batch>> batches_;
  std::vector<std::vector<int>> bound_;  // of each batch
  std::vector<std::vector<AttendPlan>> plans_;
  unsigned next_ = 0;
  int accepted_ = 0;
};

TEST(HostRandom, HistoriesAgainstPlainLists) {
  int accepted = 0;
  for (const char* recipe :
       {"kivi:k=2,v=2", "kivi:k=2,v=2,window=0", "kivi:k=2,v=2,window=16,sink=5", "kivi:k=2,v=2,window=0,sink=128"}) {
    for (unsigned seed = 0; seed < 40; ++seed) {
      SCOPED_TRACE(std::string(recipe) + ", seed " + std::to_string(seed));
      History history(recipe, seed);
      for (int i = 0; i < 150 && !::testing::Test::HasFatalFailure(); ++i) history.step();
      accepted += history.accepted();
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace kvant::cuda::host
