// The cache on an NVIDIA GPU: pages in device memory, sequences that share them, attention of new tokens (decode) and
// of a prompt's chunks (prefill).
// Only in builds with -DKVANT_CUDA=ON (CMake target kvant::cuda). No CUDA header is needed here: streams are
// cudaStream_t passed as void*, null is the default stream; data pointers are device pointers.
//
// Every function works on the current device and throws Error(unsupported) where a CUDA call fails. Work is enqueued on
// the stream given; objects are thread-compatible, and calls that share a pool belong on one stream or must be ordered
// by the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvant/cache.hpp"

namespace kvant::cuda {

struct DeviceInfo {
  std::string name;
  int index = 0;  // its number among the process's devices
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
};

// True when the current device can run the kernels of this build.
bool is_available() noexcept;
// Throws Error(unsupported) naming the device and what is missing where is_available() is false.
DeviceInfo device_info();

// Bytes that one sealed page (128 tokens, all KV heads) takes on the device.
// Throws Error(invalid_argument) for recipes and shapes that the device does not take: it takes all that seal pages,
// with pages of 128 tokens, head dimensions 64, 96, 128, 192 and 256, f16 and bf16. kivi, kitty and waterfill have
// formats of their own where this build has kernels of the widths and shape; all others, parts of these among them, are
// the CPU's blocks, which take more time (docs/results.md).
std::size_t page_bytes(const Recipe& recipe, const CacheShape& shape);

// Device memory for a fixed number of sealed pages and of exact pages (128 unquantized tokens: sinks, open tails), one
// layer. Pages are counted references; what is dropped is free at once for the next call on the same stream.
class PagePool {
 public:
  PagePool(const Recipe& recipe, const CacheShape& shape, int pages, int exact_pages);

  const Recipe& recipe() const;
  const CacheShape& shape() const;
  int free_pages() const;
  int free_exact_pages() const;
  std::size_t bytes() const;

  // Numbers that Batch::append took so far, replays of graphs included, and Cache::append refuses: NaN, infinities,
  // bfloat16 beyond half of its range. A device cannot refuse them: zeros stand in their place, and their sequence's
  // results are wrong from then on; others are as they would be without. Waits for the work on the stream.
  std::int64_t invalid_values(void* stream) const;

  // True when the recipe stores keys before RoPE (kvquant:rope=before; KVQuant, arXiv 2401.18079, section 3.2). Such a
  // pool has to be told the rotation before its first key; rows go in rotated all the same, and a token's position is
  // its number in the sequence. Sealed pages hold keys turned back, exact pages as they came.
  bool needs_rotation() const;
  // Ignored by other recipes. Not while a graph is captured. Throws Error(invalid_argument) when the rotation does not
  // fit key_dim, or is another one than that of the pages that are in use; then nothing changed.
  void set_key_rotation(const KeyRotation& rotation);

  struct Impl;  // src/cuda/pool.hpp
  const std::shared_ptr<Impl>& impl() const { return impl_; }
  explicit PagePool(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

// The pages of one sequence: [sinks | sealed pages | open tail], as Cache has them. Movable; fork() shares sealed
// pages.
class Sequence {
 public:
  explicit Sequence(const PagePool& pool);
  ~Sequence();
  Sequence(Sequence&&) noexcept;
  Sequence& operator=(Sequence&&) noexcept;

  // Copies a CPU cache of the pool's recipe and shape; sealed blocks keep their bits. Synchronous. A cache that was
  // given positions must have its sinks at the start, with rope=before the pool's rotation and each token's number as
  // its position: Error(invalid_argument). Throws Error(out_of_memory) when the pool has too few free pages; nothing is
  // taken then.
  static Sequence upload(const PagePool& pool, const Cache& cache);

  // The CPU's block of a sealed page (PageStore::sealed_block), bit by bit. Synchronous.
  std::vector<std::byte> download_block(std::int64_t page) const;

  // Shares the sealed pages and copies the open ones.
  Sequence fork(void* stream) const;

  std::int64_t length() const;
  std::int64_t sealed_pages() const;
  // Pages that Batch::seal_ready encoded without the queries that the recipe would look at (waterfill, zipcache with
  // saliency=attention, kitty with selector=query): the device sees none. StoreCounts::blind_seals is the CPU's.
  std::int64_t blind_seals() const;

  struct Impl;
  Impl& impl() { return *impl_; }
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// The sequences of one call with their page tables on the device (int32 page numbers, int32 lengths).
class Batch {
 public:
  // max_sequences: 1 to 65535. max_tokens: the longest sequence that will be bound or grown to.
  Batch(const PagePool& pool, int max_sequences, std::int64_t max_tokens);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // From now on row b of every call is sequences[b], all of them different. The sequences must outlive their use here.
  // One that another batch has changed since, or that was assigned to, is refused by every call until it is bound anew:
  // Error(invalid_argument).
  void bind(std::span<Sequence* const> sequences, void* stream);

  // Makes room for `tokens` more tokens per sequence, so that the appends of a graph need no table change: while a
  // stream is captured pages that are missing are refused.
  void reserve(int tokens, void* stream);
  // Appends rows tokens to every sequence: keys [sequence][row][kv_head][key_dim], rotated, values likewise, dense,
  // cache's type. Lengths grow on the device. Calls reserve() where room is missing. Throws Error(unsupported) where
  // the device cannot seal such pages: one grid per token over more channels of all KV heads than shared memory holds,
  // some 11000 for the presets of waterfill and 53000 for other recipes with 227 KB. Their pages come by upload.
  void append(const void* keys, const void* values, int rows, void* stream);
  // Tells the host's side that a graph with such an append was launched once more. The append that was captured has
  // counted for the first launch.
  void count_appended(int rows);
  // Encodes every full page that has at least recipe.window newer tokens, 256 pages a launch (128 of those that are the
  // CPU's blocks). Returns how many pages, a first one that only holds sinks and stays as it is among them: plans made
  // before are void unless it is 0. They are the CPU's where it has observed no queries (PageStore::observe):
  // waterfill's widths follow the ranges of the channels, zipcache's salient tokens are those of the largest keys, and
  // Sequence::blind_seals counts such pages.
  int seal_ready(void* stream);

  int size() const;

  struct Impl;
  Impl& impl() { return *impl_; }
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct AttendOptions {
  float scale = 0;               // multiplies q.k; 0 means 1/sqrt(key_dim)
  float softcap = 0;             // c > 0: scores become c * tanh(score / c)
  const float* sinks = nullptr;  // device pointer, learned sink logit per query head
  int sliding_window = 0;        // 0: unlimited
  // The launch may begin while its predecessor in the stream ends (programmatic dependent launch, sm_90 and later);
  // the integer path alone makes use of it, and AttendPlan::describe() says whether a plan does.
  bool overlap = false;
  // With overlap: no page in the batch's tables is written by the predecessor, so that pages may be read early.
  bool pages_settled = false;
};

// Which kernel serves a plan.
enum class AttendPath : std::uint8_t {
  automatic,  // integer up to 8 rows, prefill beyond, where this build has the shape; reference elsewhere
  integer,    // 8-bit tensor cores from the codes, 1 to 8 rows (pages that are CPU blocks: to 32 vectors per KV head).
              // With rope=before keys are 16-bit numbers, to 16 vectors, and of a rotation of halves a multiple of 32
              // channels is turned; the other rotations have prefill alone
  prefill,    // 16-bit tensor cores over tiles that are dequantized once per block of rows, any number of rows
  reference,  // plain binary64 arithmetic, slow: the cross-check
};

// How one attention call is split over the GPU: made once, valid until pages of the batch are sealed or it is bound
// anew; sequences may meanwhile grow by `headroom` tokens, up to the batch's max_tokens. Making a plan allocates and
// synchronises, running it does neither, so that it can be captured in a graph. A plan runs on one stream at a time.
class AttendPlan {
 public:
  // rows: query rows per sequence, 1 to 65535, the last tokens of it. query_heads: a multiple of kv_heads, up to 16
  // times. Throws Error(invalid_argument) naming what is outside, and where `path` cannot serve the plan.
  AttendPlan(const Batch& batch, int query_heads, int rows, const AttendOptions& options, int headroom = 128,
             AttendPath path = AttendPath::automatic);
  ~AttendPlan();
  AttendPlan(AttendPlan&&) noexcept;

  // q [sequence][row][query_head][key_dim] and out [..][value_dim], dense, cache's type, aligned to 8 and 4 bytes; lse
  // null or [sequence][row][query_head] float32. Row r sees tokens up to length - rows + r. Rows that see nothing are
  // zeros, -inf.
  void run(const void* q, void* out, float* lse, void* stream) const;

  AttendPath path() const;
  std::string describe() const;  // kernel and split, for logs

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvant::cuda
