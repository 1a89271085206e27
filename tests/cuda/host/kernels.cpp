// Kernels that move the numbers of tokens about: exact pages hold them where a row's first key is, sealed pages one
// behind the other.
#include "cuda/host/kernels.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "cuda/block.hpp"
#include "cuda/block_seal.hpp"
#include "cuda/host/host.hpp"
#include "cuda/prefill.hpp"
#include "cuda/reference.hpp"

namespace kvant::cuda {
namespace host {
namespace {

constexpr ExactFormat kExact{128, 128};  // of the pools in these tests

std::uint16_t number_at(const std::uint8_t* at) {
  std::uint16_t number = 0;
  std::memcpy(&number, at, sizeof number);
  return number;
}

// Places of a call's tokens, each of which must be read once.
class Reader {
 public:
  Reader(const DecodeArgs& args, int sequences) : args_(args) {
    state().read.clear();
    for (int b = 0; b < sequences; ++b) {
      state().read.emplace_back(static_cast<std::size_t>(std::max(args.lengths[b], 0)), kNone);
    }
  }
  ~Reader() {
    for (const Tokens& tokens : state().read) EXPECT_EQ(std::count(tokens.begin(), tokens.end(), kNone), 0);
  }
  // Tokens [first, first + count) of a coded page, but for the sinks.
  void coded(int sequence, int page, int first, int count, int sinks) {
    const std::int32_t number = args_.table[sequence * args_.table_stride + page];
    for (int i = first; i < first + count; ++i) {
      if (page * kPage + i < sinks) continue;
      put(sequence, page * kPage + i, args_.pages + number * args_.page_stride + 2 * i);
    }
  }
  // Tile `number` of 16 tokens of a sequence's exact ones, as exact_tile() of the kernels finds it.
  void exact(int sequence, int number, int coded_pages, int sinks) {
    const int sink_tiles = (sinks + kTile - 1) / kTile;
    const bool sink = number < sink_tiles;
    const int in_tail = number - sink_tiles;
    const int slot = sink ? 0 : 1 + in_tail / (kPage / kTile);
    for (int i = 0; i < kTile; ++i) {
      const int position = sink ? kTile * number + i : coded_pages * kPage + kTile * in_tail + i;
      if (position >= (sink ? sinks : args_.lengths[sequence])) return;
      const std::int32_t page = args_.exact_table[sequence * args_.exact_table_stride + slot];
      put(sequence, position, args_.exact + page * args_.exact_stride + kExact.key_at(position % kPage, 0));
    }
  }

 private:
  static constexpr std::uint16_t kNone = 0xFFFF;

  void put(int sequence, int position, const std::uint8_t* at) {
    Tokens& tokens = state().read[static_cast<std::size_t>(sequence)];
    ASSERT_LT(static_cast<std::size_t>(position), tokens.size());
    EXPECT_EQ(tokens[static_cast<std::size_t>(position)], kNone) << "token " << position << " is read twice";
    tokens[static_cast<std::size_t>(position)] = number_at(at);
  }

  const DecodeArgs& args_;
};

constexpr int kForms = 4;  // flat, wide, cluster, half pages in clusters
int addresses[kForms];

}  // namespace

void run_decode(const void* function, const DecodeArgs& args, const InlinePlan& plan, int groups) {
  const int units_per_page = function == &addresses[3] ? 2 : 1;
  std::vector<Segment> segments;
  int sequences = 0;
  for (int g = 0; g < groups; ++g) {
    const int first = args.segments == nullptr ? g : plan.first[g];
    const int end = args.segments == nullptr ? g + 1 : plan.first[g + 1];
    for (int i = first; i < end; ++i) {
      segments.push_back(args.segments == nullptr ? plan.segments[i] : args.segments[i]);
      sequences = std::max(sequences, segments.back().sequence + 1);
    }
  }
  Reader reader(args, sequences);
  for (const Segment& s : segments) {
    if (s.kv_head != 0 || s.vector0 != 0) continue;
    for (int unit = s.begin; unit < s.end; ++unit) {
      if (unit >= s.coded_end) {
        reader.exact(s.sequence, unit - s.coded_end, s.coded_end / units_per_page, s.sinks);
        continue;
      }
      const int tokens = kPage / units_per_page;
      reader.coded(s.sequence, unit / units_per_page, unit % units_per_page * tokens, tokens, s.sinks);
    }
  }
}

void run_seal(const SealBatch& batch, unsigned pages) {
  for (unsigned i = 0; i < pages; ++i) {
    const SealJob& job = batch.jobs[i];
    for (int token = 0; token < kPage; ++token) {
      const std::uint8_t* from = batch.args.exact + job.exact_page * batch.args.exact_stride + kExact.key_at(token, 0);
      std::memcpy(batch.args.pages + job.page * batch.args.page_stride + 2 * token, from, 2);
    }
  }
}

}  // namespace host

void launch_append(const DeviceFormat&, const AppendArgs& args, int sequences, void*) {
  for (int b = 0; b < sequences; ++b) {
    for (int row = 0; row < args.rows; ++row) {
      const int at = args.lengths[b] + row - args.tail_begin[b];
      ASSERT_GE(at, 0);
      const std::int32_t page = args.exact_table[b * args.exact_table_stride + 1 + at / kPage];
      const std::uint16_t* from = args.keys + (std::int64_t{b} * args.rows + row) * args.kv_heads * 128;
      std::memcpy(args.exact + page * args.exact_stride + host::kExact.key_at(at % kPage, 0), from, 2);
    }
    args.lengths[b] += args.rows;
  }
}

void launch_reference(const DeviceFormat&, const BlockFormat&, const DecodeArgs& args, const ReferenceArgs& pages,
                      int sequences, void*) {
  host::Reader reader(args, sequences);
  for (int b = 0; b < sequences; ++b) {
    for (int page = pages.first_page[b]; page < pages.coded_pages[b]; ++page) {
      reader.coded(b, page, 0, kPage, pages.sinks[b]);
    }
    const int tail = args.lengths[b] - pages.coded_pages[b] * kPage;
    const int tiles = (pages.sinks[b] + kTile - 1) / kTile + (tail + kTile - 1) / kTile;
    for (int i = 0; i < tiles; ++i) reader.exact(b, i, pages.coded_pages[b], pages.sinks[b]);
  }
}

std::span<const DecodeKernel> host_decode() {
  static const std::vector<DecodeKernel> kernels = [] {
    std::vector<DecodeKernel> all(host::kForms);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].variant.n_tiles = i == 1 ? 2 : 1;
      all[i].variant.cluster = i >= 2;
      all[i].variant.half = i == 3;
      all[i].function = &host::addresses[i];
      all[i].warps = 8;
    }
    return all;
  }();
  return kernels;
}
SealKernel host_seal() {
  SealKernel kernel;
  kernel.function = host::addresses;
  kernel.threads = 256;
  return kernel;
}

// No block pages and no prefill here.
std::span<const BlockKernel> host_block() {
  return {};
}
void launch_block_seal(const BlockSealArgs&, bool, std::span<const BlockSealJob>, void*) {}
const PrefillKernel* find_prefill_kernel(const DeviceFormat&) {
  return nullptr;
}
bool runs_wgmma(const void*) {
  return false;
}
int prepare_prefill(const PrefillKernel&, int, int) {
  return 0;
}
int choose_parts(std::int64_t, std::int64_t, int) {
  return 1;
}
std::size_t prefill_workspace(const PrefillKernel&, const PrefillSplit&, int, int) {
  return 0;
}
void launch_prefill(const PrefillKernel&, const DecodeArgs&, const ReferenceArgs&, const BlockFormat&,
                    const PrefillSplit&, int, void*) {}

}  // namespace kvant::cuda
