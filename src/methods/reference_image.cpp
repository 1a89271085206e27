// Saving and loading the reference caches: magic, version, settings, the cache's own parts, checksum.
#include <xxhash.h>

#include <cstring>

#include "exact/archive.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'R', 'E', 'F'};
constexpr std::uint32_t kVersion = 1;

void transfer_config(exact::Archive& archive, KVCacheConfig& config) {
  archive.text(config.method);
  for (std::int64_t* field :
       {&config.head_dim, &config.kitty_hi_bit, &config.kitty_lo_bit, &config.kitty_group_size, &config.kvquant_bits,
        &config.kvquant_group_size, &config.kvquant_lloyd_iters, &config.kvquant_refit_interval, &config.kvquant_n_sink,
        &config.zipcache_hi_bits, &config.zipcache_lo_bits, &config.zipcache_group_size}) {
    archive.number(*field);
  }
  for (double* field : {&config.kitty_hi_fraction, &config.kvquant_outlier_fraction, &config.zipcache_hi_fraction}) {
    archive.number(*field);
  }
  auto flag = static_cast<std::uint8_t>(config.zipcache_quantize_values);
  archive.number("zipcache_quantize_values", flag, 0, 1);
  config.zipcache_quantize_values = flag != 0;
}

void transfer_header(exact::Archive& archive, KVCacheConfig& config) {
  char magic[sizeof kMagic];
  std::memcpy(magic, kMagic, sizeof magic);
  archive.bytes(magic, sizeof magic);
  archive.require(std::memcmp(magic, kMagic, sizeof magic) == 0, "does not start with KVANTREF");
  std::uint32_t version = kVersion;
  archive.number("version", version, kVersion, kVersion);
  transfer_config(archive, config);
}

std::uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH64(bytes.data(), bytes.size(), 0);
}

}  // namespace

std::vector<std::byte> ReferenceCache::save() const {
  exact::Archive archive;
  KVCacheConfig settings = config();
  transfer_header(archive, settings);
  const_cast<ReferenceCache*>(this)->transfer(archive);  // an archive that writes changes nothing
  std::vector<std::byte> image = archive.take_image();
  const std::uint64_t sum = checksum(image);
  const auto* end = reinterpret_cast<const std::byte*>(&sum);
  image.insert(image.end(), end, end + sizeof sum);
  return image;
}

std::unique_ptr<ReferenceCache> load_cache(std::span<const std::byte> image) {
  std::uint64_t sum = 0;
  if (image.size() < sizeof sum) exact::Archive::bad("ends early");
  const auto body = image.first(image.size() - sizeof sum);
  std::memcpy(&sum, body.data() + body.size(), sizeof sum);
  if (sum != checksum(body)) exact::Archive::bad("checksum does not match");
  exact::Archive archive(body);
  KVCacheConfig config;
  transfer_header(archive, config);
  auto cache = make_cache(config);
  cache->transfer(archive);
  archive.require_end();
  return cache;
}

}  // namespace kvant
