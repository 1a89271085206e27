// CacheBuffer: what stands behind one buffer that the host allocated from this device.
//
// The host is told the size that it expects and gets that much address space, which costs nothing until touched. Cache
// tensors of packed layers are fenced off inside it (any stray access faults instead of reading garbage); everything
// else, such as recurrent states and the scheduler's own temporaries, is plain memory at its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "ggml_abi.hpp"
#include "layer.hpp"
#include "status.hpp"

namespace kvant::llama {

// Address space that becomes memory where it is touched.
class Reservation {
 public:
  explicit Reservation(std::size_t bytes);  // throws std::bad_alloc
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  void* data() const { return data_; }
  // Forbids or allows access to the whole pages inside [from, from + bytes).
  void fence(void* from, std::size_t bytes);
  void unfence(void* from, std::size_t bytes);
  // Everything reads as zeros again.
  void zero();

 private:
  void protect(void* from, std::size_t bytes, int mode);

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class CacheBuffer;

// A cache tensor found through one of its views.
struct CacheRef {
  CacheBuffer* buffer = nullptr;
  Layer* layer = nullptr;
  Side side = Side::key;
  explicit operator bool() const { return layer != nullptr; }
  bool packed() const { return layer != nullptr && layer->mode() == Mode::packed; }
};

class CacheBuffer final : public StatusSource {
 public:
  explicit CacheBuffer(std::size_t bytes);
  ~CacheBuffer() override;

  void* base() const { return memory_.data(); }

  // Takes note of a tensor that the host placed in this buffer.
  void add(const abi::Tensor& tensor);
  // The cache tensor that t is or views; empty for plain memory.
  CacheRef find(const abi::Tensor* t);

  // The first attention over a pending layer decides whether it is packed or passed through.
  void learn(Layer& layer, const Heads& heads);
  void pass_through(Layer& layer, const std::string& reason);
  // A pending layer must have a place for data now: the host touches it in a way that shows no heads.
  void settle(const CacheRef& ref, const char* what);

  void clear(std::uint8_t value);
  // The host could not be told that a write failed; `what` is why evaluations fail until the buffer is cleared.
  void spoil(const char* what) { spoilt_by_ = what; }
  // Throws std::runtime_error when a write failed.
  void check() const;
  // Brings the ledger up to date after a layer changed.
  void account(const Layer& layer);

  BufferReport report() const override;

 private:
  struct Plain {
    std::string name;
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  Reservation memory_;
  std::shared_ptr<PagePool> pool_;
  std::map<int, Layer> layers_;
  std::unordered_map<const void*, CacheRef> by_address_;
  std::map<const void*, Plain> plain_;  // states and the like, named cache_*
  std::unordered_map<const Layer*, Holdings> held_;
  std::int64_t idle_ = 0;
  const char* spoilt_by_ = nullptr;
};

// The buffer type of this device, and the buffers behind tensors of it.
abi::BufferType* make_buffer_type(abi::Device* device);
bool is_ours(const abi::BufferType* type);
// The cache tensor that t is or views, in whatever buffer of this device. Empty for other tensors, and for the empty
// stand-ins that a host places while it only measures.
CacheRef cache_ref(const abi::Tensor* t);
// True if t lies, or is planned to lie, in this device's buffers.
bool lives_here(const abi::Tensor* t);
// True for everything that hosts keep between graphs: "cache_" and what kind of state it is.
bool is_cache_name(const char* name);
// True if the name is one of a K or V cache tensor.
bool parse_cache_name(const char* name, int* layer, Side* side);

}  // namespace kvant::llama
