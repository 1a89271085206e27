// Pools whose pages hold keys as they were before RoPE.
#include "cache/store.hpp"
#include "cuda/pool.hpp"

namespace kvant::cuda {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  base::fail(ErrorCode::invalid_argument, text);
}

}  // namespace

bool PagePool::needs_rotation() const {
  return impl_->needs_rotation();
}

void PagePool::set_key_rotation(const KeyRotation& rotation) {
  Impl& impl = *impl_;
  if (!impl.needs_rotation() || impl.rotation == rotation) return;
  const TurnTables tables = make_turn_tables(rotation, impl.shape.key_dim);
  const bool in_use = impl.page_numbers.used() + impl.exact_numbers.used() > 0;
  if (impl.rotation && in_use) refuse("key rotation: is not that of the keys that the pool holds");
  DeviceBuffer<double> turns(tables.turns.size());
  DeviceBuffer<float> offsets(tables.offsets.size());
  turns.copy_from(tables.turns.data(), tables.turns.size());
  offsets.copy_from(tables.offsets.data(), tables.offsets.size());
  DeviceBuffer<float> places(tables.places.size());
  places.copy_from(tables.places.data(), tables.places.size());
  impl.rotation = rotation;
  impl.turns = std::move(turns);
  impl.turn_offsets = std::move(offsets);
  impl.turn_places = std::move(places);
  impl.block.turns = impl.block_seal.format.turns =
      tables.at(impl.turns.get(), impl.turn_offsets.get(), impl.turn_places.get());
}

void PagePool::Impl::check_rotation() const {
  if (!needs_rotation() || rotation) return;
  refuse("recipe has rope=before: keys need PagePool::set_key_rotation before the first of them comes to the GPU");
}

void PagePool::Impl::check_rotation_of(const Cache& cache) const {
  if (!needs_rotation() || cache.length() == 0) return;
  check_rotation();
  const PageStore::Impl& store = cache.store().impl();
  if (!(store.rotation->key_rotation() == *rotation)) refuse("key rotation: the cache's is not the pool's");
  for (std::int64_t token = 0; token < cache.length(); ++token) {
    const cache::Page& page = store.pages[static_cast<std::size_t>(token / kPage)];
    const std::int32_t position = page.positions[static_cast<std::size_t>(token % kPage)];
    if (position == token) continue;
    refuse("positions: token " + std::to_string(token) + " of the cache has position " + std::to_string(position) +
           "; on the GPU it is its number in the sequence");
  }
}

}  // namespace kvant::cuda
