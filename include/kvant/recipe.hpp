// A recipe: how keys and values are stored, as one plain struct with one text form, used by C++, the command line, the
// environment (KVANT_RECIPE) and files.
//
//   f16                                        the control: nothing is quantized
//   kivi:k=4,v=4,sink=0,window=128             one method for keys and values (its folder: src/methods/kivi)
//   kitty:boost=0.25,v=2,sink=32,window=128    Kitty's boosted keys with KIVI's values
//   waterfill:k=2.5,v=2,sink=4                 widths per key channel and page, rotated values (src/methods/waterfill)
//   kvquant:k=3,v=3,outliers=0.01              levels from a table, outliers kept apart (src/methods/kvquant)
//   zipcache:salient=0.6,high=4,low=2          salient tokens of a page wider than the others (src/methods/zipcache)
//   k=kitty,v=kivi:4,boost=0.125,sink=4        any keys with any values: METHOD or METHOD:BITS, then options
//   layers=0-1:kivi:k=8,*:kitty                another recipe per layer (LayerRecipes)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kvant {

// ---- keys, one struct per method; `kMethod` is its name in texts

struct F16Keys {
  static constexpr std::string_view kMethod = "f16";
  bool operator==(const F16Keys&) const = default;
};
struct KiviKeys {
  static constexpr std::string_view kMethod = "kivi";
  int bits = 4;  // per code, 1..8
  bool operator==(const KiviKeys&) const = default;
};
// What ranks the channels of a page: mean |k|, variance, max - min, or max - min times the rms of the queries so far.
enum class Selector : std::uint8_t { magnitude, variance, range, query };

struct KittyKeys {
  static constexpr std::string_view kMethod = "kitty";
  double boost = 0.25;  // share of the channels stored with 4 bits instead of 2, 0..1
  Selector selector = Selector::magnitude;
  bool operator==(const KittyKeys&) const = default;
};
// How the uniform grid of a row is found: from its smallest to its largest value, or fitted to its codes.
enum class Grid : std::uint8_t { range, least_squares };

struct WaterfillKeys {
  static constexpr std::string_view kMethod = "waterfill";
  double bits = 2.5;  // mean width of the channels of a page, low..high
  int low = 1;        // least and largest width, 1..6
  int high = 5;
  Grid grid = Grid::least_squares;
  bool feedback = false;  // each channel's rounding error is made up for by the channels rounded after it
  bool operator==(const WaterfillKeys&) const = default;
};
struct KvquantKeys {
  static constexpr std::string_view kMethod = "kvquant";
  int bits = 3;            // per code, 2..4
  double outliers = 0.01;  // share of each channel's values in a page that are kept beside the codes, 0..0.1
  bool qnorm = false;      // levels moved so that coded values keep their mean and deviation; needs Recipe::file
  // Pages hold keys as they were before RoPE, which the host must describe (PageStore::set_key_rotation).
  bool before_rope = false;
  bool operator==(const KvquantKeys&) const = default;
};

// What makes tokens of a page salient: the attention that probe queries paid to them, or the norm of their key.
enum class Saliency : std::uint8_t { attention, norm };

struct ZipcacheKeys {
  static constexpr std::string_view kMethod = "zipcache";
  double salient = 0.6;  // share of the tokens of a page with `high` bits, above 0 and below 1
  Saliency saliency = Saliency::attention;
  int high = 4;  // low + 1..4 more
  int low = 2;   // bits of the other tokens, 1..4
  bool operator==(const ZipcacheKeys&) const = default;
};
using KeyRecipe = std::variant<F16Keys, KiviKeys, KittyKeys, WaterfillKeys, KvquantKeys, ZipcacheKeys>;

// ---- values

struct F16Values {
  static constexpr std::string_view kMethod = "f16";
  bool operator==(const F16Values&) const = default;
};
struct KiviValues {
  static constexpr std::string_view kMethod = "kivi";
  int bits = 4;  // per code, 1..8
  bool operator==(const KiviValues&) const = default;
};
struct WaterfillValues {
  static constexpr std::string_view kMethod = "waterfill";
  int bits = 2;         // per code, 1..8
  bool rotate = true;   // Hadamard-rotated in blocks of the largest power of two that divides the head size
  bool shared = false;  // one grid per token over all KV heads instead of one per head
  Grid grid = Grid::least_squares;
  bool operator==(const WaterfillValues&) const = default;
};
struct KvquantValues {
  static constexpr std::string_view kMethod = "kvquant";
  int bits = 3;  // per code, 2..4
  // Share of each token's values, all KV heads together, that are kept beside the codes, 0..0.1.
  double outliers = 0.01;
  bool qnorm = false;  // as in KvquantKeys
  bool operator==(const KvquantValues&) const = default;
};

// Beside keys of zipcache, share and saliency are the same: a page has one set of salient tokens per KV head.
struct ZipcacheValues {
  static constexpr std::string_view kMethod = "zipcache";
  double salient = 0.6;
  Saliency saliency = Saliency::attention;
  int high = 4;  // low + 1..4 more
  int low = 2;   // 1..4
  bool operator==(const ZipcacheValues&) const = default;
};
using ValueRecipe = std::variant<F16Values, KiviValues, WaterfillValues, KvquantValues, ZipcacheValues>;

struct Recipe {
  KeyRecipe key = KiviKeys();
  ValueRecipe value = KiviValues();
  int sink = 0;      // first tokens of a sequence that are never quantized, 0..page
  int window = 128;  // a page is sealed once this many newer tokens exist, 0..65536
  int page = 128;    // tokens in a page: 32, 64, 128 or 256
  int x_bits = 16;   // precision of the queries and softmax weights in integer products: 8 or 16
  // kvquant: levels and key ranges from what `kvant calibrate` wrote (kvant/calibration.hpp).
  std::string file;  // its path, up to 1024 characters without comma, semicolon and blank; empty: not calibrated
  std::uint64_t digest = 0;  // calibration_digest of its contents: parse_recipe fills it in, and nothing else is taken
  int layer = -1;            // which of its layers this is; -1: not said yet, LayerRecipes::at does

  bool operator==(const Recipe&) const = default;

  // True when pages are ever sealed (everything but f16).
  bool quantizes() const { return !std::holds_alternative<F16Keys>(key); }
};

// Parses one recipe. Throws Error(invalid_argument) naming the bad key or value and the choices.
Recipe parse_recipe(std::string_view text);

// The canonical text of a recipe, in a fixed order: every option, but selector, feedback, qnorm, vqnorm and rope only
// where they are not the default. parse_recipe(to_text(r)) == r.
std::string to_text(const Recipe& recipe);

// Throws Error(invalid_argument) when a field is outside its range or keys and values do not go together (f16 with a
// quantizing side, zipcache with two sets of salient tokens); called by everything that takes a Recipe.
void validate(const Recipe& recipe);

// What a status says about a recipe beside its text, or "": where the levels of kvquant come from, what kitty and
// waterfill's feedback do without queries.
std::string remark(const Recipe& recipe);

// A recipe per layer: the first rule whose range holds the layer counts.
struct LayerRecipes {
  struct Rule {
    int first = 0;
    int last = 0;  // inclusive; the rule "*" has 0..INT_MAX
    Recipe recipe;
    bool operator==(const Rule&) const = default;
  };
  std::vector<Rule> rules;

  bool operator==(const LayerRecipes&) const = default;
  // The layer's recipe, with Recipe::layer set where it has a calibration file and does not say. Throws
  // Error(out_of_range) when no rule holds the layer, which cannot happen after parsing.
  Recipe at(int layer) const;
};

// Parses "layers=RANGE:RECIPE,...", where RANGE is N, N-M or *, and the last one is *; any recipe alone means *.
LayerRecipes parse_layer_recipes(std::string_view text);
std::string to_text(const LayerRecipes& recipes);

struct MethodInfo {
  std::string name;
  std::string summary;            // one line for `kvant info`
  std::string default_recipe;     // its canonical text with default parameters
  std::vector<std::string> keys;  // keys that its text form accepts
  bool has_keys = false;          // may stand in k=...
  bool has_values = false;        // may stand in v=...
};

// Every method of this build, in the order of documentation.
const std::vector<MethodInfo>& methods();

// A name that stands for a recipe wherever a method's name may: "small", "small:sink=0".
struct PresetInfo {
  std::string name;
  std::string summary;
  std::string recipe;  // its canonical text
};

// From small to precise.
const std::vector<PresetInfo>& presets();

// What `kvant run` and the plug-in use when nobody says otherwise: the name of a preset.
inline constexpr std::string_view kDefaultRecipe = "balanced";

}  // namespace kvant
