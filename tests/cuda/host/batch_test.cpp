// What host code must refuse, and what it must leave alone when a CUDA call fails.
#include <climits>

#include "cuda/host/support.hpp"

namespace kvant::cuda::host {
namespace {

using testing::expect_error;

struct HostBatch : ::testing::Test {
  PagePool pool{parse_recipe("kivi:k=2,v=2"), kShape, 64, 64};  // window 128
  Sequence one{pool}, two{pool};

  void TearDown() override { state() = State(); }
};

TEST_F(HostBatch, PlansServeEverySequenceUntilItsHeadroomIsUsed) {
  Batch alone(pool, 1, 4096), both(pool, 2, 4096);
  bind(alone, {&one});
  append(alone, 200);
  bind(alone, {&two});
  append(alone, 120);
  bind(both, {&one, &two});
  const AttendPlan plan(both, 8, 1, {}, 50);  // pages that the second one has are full before
  for (int step = 0; step < 50; ++step) {
    append(both, 1, static_cast<std::uint16_t>(1000 + step));
    const auto tokens = read(plan);
    ASSERT_EQ(tokens[0].size(), static_cast<std::size_t>(201 + step));
    ASSERT_EQ(tokens[1].size(), static_cast<std::size_t>(121 + step));
    ASSERT_EQ(tokens[1].back(), 1000 + step);
  }
  append(both, 1);
  expect_error(ErrorCode::invalid_argument, {"grown to 251"}, [&] { read(plan); });
}

TEST_F(HostBatch, AnyHeadroomIsServed) {
  Batch batch(pool, 1, 1024);
  bind(batch, {&one});
  append(batch, 300);
  ASSERT_EQ(batch.seal_ready(nullptr), 1);
  for (const int headroom : {0, 1, 128, 1 << 20, INT_MAX}) {
    for (const AttendPath path : {AttendPath::integer, AttendPath::reference}) {
      EXPECT_EQ(read(AttendPlan(batch, 8, 1, {}, headroom, path))[0].size(), 300U) << headroom;
    }
  }
}

TEST_F(HostBatch, ReservedPagesCountForWhatABatchHolds) {
  Batch large(pool, 1, 4096), small(pool, 1, 128);
  bind(large, {&one});
  large.reserve(4000, nullptr);
  expect_error(ErrorCode::out_of_range, {"4096 tokens"}, [&] { bind(small, {&one}); });
  EXPECT_EQ(small.size(), 0);
}

TEST_F(HostBatch, ArgumentsAreNamed) {
  Batch batch(pool, 2, 1024);
  expect_error(ErrorCode::invalid_argument, {"twice"}, [&] { bind(batch, {&one, &one}); });
  expect_error(ErrorCode::invalid_argument, {"null"}, [&] { bind(batch, {&one, nullptr}); });
  bind(batch, {&one, &two});
  expect_error(ErrorCode::invalid_argument, {"tokens is -1"}, [&] { batch.reserve(-1, nullptr); });
  expect_error(ErrorCode::invalid_argument, {"max_sequences is 65536"}, [&] { Batch(pool, 65536, 1); });
  state().device = 1;
  expect_error(ErrorCode::invalid_argument, {"device is 1"}, [&] { append(batch, 1); });
  expect_error(ErrorCode::invalid_argument, {"device is 1"}, [&] { AttendPlan(batch, 8, 1, {}); });
  expect_error(ErrorCode::invalid_argument, {"device is 1"}, [&] { one.fork(nullptr); });
  state().device = 0;
  state().capturing = true;
  expect_error(ErrorCode::invalid_argument, {"captured"}, [&] { append(batch, 1); });
  EXPECT_EQ(pool.free_exact_pages(), 64);
  state().capturing = false;
  batch.reserve(1, nullptr);
  state().capturing = true;
  append(batch, 1);
  EXPECT_EQ(one.length(), 1);
}

// A batch's tables are those of the sequences as it knows them.
TEST_F(HostBatch, ChangesByAnotherBatchAreNoticed) {
  Batch a(pool, 1, 1024), b(pool, 1, 1024);
  bind(a, {&one});
  append(a, 300);
  bind(b, {&one});
  const AttendPlan plan(b, 8, 1, {});
  EXPECT_EQ(read(plan)[0].size(), 300U);
  EXPECT_EQ(a.seal_ready(nullptr), 1);
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { read(plan); });
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { append(b, 1); });
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { b.count_appended(0); });
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { b.seal_ready(nullptr); });
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { AttendPlan(b, 8, 1, {}); });
  bind(b, {&one});
  EXPECT_EQ(read(AttendPlan(b, 8, 1, {}))[0].size(), 300U);
  one = one.fork(nullptr);
  expect_error(ErrorCode::invalid_argument, {"bind it anew"}, [&] { append(b, 1); });
}

// A first page of sinks only moves, though nothing is encoded.
TEST_F(HostBatch, MovedSinksVoidPlans) {
  const PagePool sinks(parse_recipe("kivi:k=2,v=2,sink=128"), kShape, 8, 8);
  Sequence sequence(sinks);
  Batch batch(sinks, 1, 1024);
  bind(batch, {&sequence});
  append(batch, 256);
  const AttendPlan plan(batch, 8, 1, {});
  EXPECT_EQ(batch.seal_ready(nullptr), 1);
  EXPECT_EQ(sequence.sealed_pages(), 0);
  EXPECT_EQ(sinks.free_pages(), 8);
  expect_error(ErrorCode::invalid_argument, {"older"}, [&] { read(plan); });
  EXPECT_EQ(read(AttendPlan(batch, 8, 1, {}))[0].size(), 256U);
}

TEST_F(HostBatch, FailedCallsChangeNothing) {
  Batch batch(pool, 2, 4096);
  bind(batch, {&one});
  append(batch, 300);
  const std::string before = dump(one);
  const int free_pages = pool.free_pages(), free_exact_pages = pool.free_exact_pages();
  const auto fails = [&](const auto& call) {
    int failures = 0;
    for (int after = 0;; ++after) {
      state().fail_after = after;
      try {
        call();
        state().fail_after = -1;
        return failures;
      } catch (const Error&) {
        ++failures;
      }
      state().fail_after = -1;
      EXPECT_EQ(dump(one), before) << "call " << after << " failed";
      EXPECT_EQ(pool.free_pages(), free_pages);
      EXPECT_EQ(pool.free_exact_pages(), free_exact_pages);
      EXPECT_EQ(read(AttendPlan(batch, 8, 1, {}))[0].size(), 300U);
    }
  };
  EXPECT_EQ(fails([&] { bind(batch, {&two}); }), 1);
  bind(batch, {&one});
  EXPECT_EQ(fails([&] { one.fork(nullptr); }), 3);
  EXPECT_EQ(fails([&] { batch.seal_ready(nullptr); }), 2);
  EXPECT_EQ(one.sealed_pages(), 1);
  Batch other(pool, 1, 4096);
  Sequence fresh(pool);
  bind(other, {&fresh});
  const int free = pool.free_exact_pages();
  for (int after = 0; after < 3; ++after) {
    state().fail_after = after;
    EXPECT_THROW(other.reserve(256, nullptr), Error);
    EXPECT_EQ(pool.free_exact_pages(), free);
    EXPECT_TRUE(fresh.impl().tail.empty());
  }
  state().fail_after = -1;
  append(other, 10);
  EXPECT_EQ(read(AttendPlan(other, 8, 1, {}))[0].size(), 10U);
}

}  // namespace
}  // namespace kvant::cuda::host
