// Attention straight from the packed rows: exact/attend.cpp asks for a tile of tokens at a time.
#include "exact/attend.hpp"

#include "methods/kvquant/state.hpp"

namespace kvant::kvquant {
namespace {

class PackedSource final : public exact::RowSource {
 public:
  PackedSource(const PackedSide& side, const float* live) : side_(side), live_(live) {}
  exact::SideShape shape() const override {
    const SideShape& shape = side_.shape();
    return {shape.batch, shape.heads, shape.channels, shape.type};
  }
  std::int64_t tokens() const override { return side_.tokens(); }
  void read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const override {
    side_.decode_float(head, first, count, live_, out, stride);
  }

 private:
  const PackedSide& side_;
  const float* live_;
};

}  // namespace

void KVQuantKVCache::attend(const ConstArray& queries, const Array& out,
                            const ReferenceAttentionOptions& options) const {
  exact::attend(PackedSource(state_->keys, state_->key_levels.data()), PackedSource(state_->values, nullptr), queries,
                out, options);
}

}  // namespace kvant::kvquant
