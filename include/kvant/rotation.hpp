// The rotation that a model applies to its keys (RoPE, Su et al. 2021, arXiv 2104.09864), for recipes that store keys
// as they were before it (kvquant:rope=before; KVQuant, arXiv 2401.18079, section 3.2).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvant {

// Which channels of a head turn together.
enum class RotaryPairs : std::uint8_t {
  adjacent,  // 2 i and 2 i + 1: "norm" in ggml
  halves,    // i and i + the number of pairs: "neox"
};

// What a host does to a key of position p: pair i turns by p * frequencies[i] radians and is multiplied by `magnitude`;
// channels beyond the pairs stay as they are. Which positions a host counts does not matter, as long as rows and
// positions go together.
struct KeyRotation {
  RotaryPairs pairs = RotaryPairs::halves;
  std::vector<double> frequencies = {};  // 1 to key_dim / 2 of them, magnitudes up to 10^6
  double magnitude = 1;                  // 1/1024 to 1024

  bool operator==(const KeyRotation&) const = default;
};

// Rotations as hosts describe them; names and defaults of ggml's ROPE.
struct RopeParameters {
  RotaryPairs pairs = RotaryPairs::halves;
  int rotated = 0;  // channels that are rotated, even
  double base = 10000;
  double scale = 1;  // of positions: 1 / factor of the extended context
  // YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 and 3.4): with `extrapolation` above 0 fast pairs keep their
  // frequency, slow ones are scaled, those between `fast` and `slow` turns in the original context are mixed, and keys
  // grow with the factor.
  double extrapolation = 0;
  double attention = 1;
  double fast = 32;
  double slow = 1;
  int original_context = 0;
  std::vector<float> factors = {};  // divisors of the frequencies, rotated / 2 of them; empty: 1
};

// Throws Error(invalid_argument) for numbers that describe no rotation.
KeyRotation make_rotation(const RopeParameters& parameters);

// Turns dense rows [positions.size()][heads][dim] back to what they were before a host rotated them. Throws
// Error(invalid_argument) when the rotation does not fit `dim`, and Error(out_of_range) for positions beyond 2^31.
void undo_rotation(const KeyRotation& rotation, std::span<const std::int64_t> positions, int heads, int dim,
                   float* rows);

}  // namespace kvant
