// A recipe: the method and its parameters as one plain struct with one text form, used by C++, the command line, the
// environment (KVANT_RECIPE) and files.
//
//   f16                                        the control: nothing is quantized
//   kivi:k=4,v=4,sink=0,window=128             KIVI, keys per channel and values per token (docs: src/methods/kivi)
//   kitty:boost=0.25,v=2,sink=32,window=128    Kitty, boosted key channels (docs: src/methods/kitty)
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvant {

struct Recipe {
  std::string method = "kivi";
  int key_bits = 4;    // bits per key code (kivi); kitty's keys are always 2, or 4 where boosted
  int value_bits = 4;  // bits per value code
  double boost = 0.0;  // share of key channels stored with 4 bits (kitty), 0..1
  int sink = 0;        // first tokens of a sequence that are never quantized, 0..page
  int window = 128;    // a page is sealed once this many newer tokens exist, 0..65536
  int page = 128;      // tokens in a page: 32, 64, 128 or 256
  int x_bits = 16;     // precision of the queries and softmax weights in integer products: 8 or 16

  bool operator==(const Recipe&) const = default;

  // True when pages are ever sealed (every method but f16).
  bool quantizes() const { return method != "f16"; }
};

// Parses "method" or "method:key=value,...". Throws Error(invalid_argument) naming the bad key or value and the
// choices.
Recipe parse_recipe(std::string_view text);

// The canonical text of a recipe: every key of its method, in a fixed order. parse_recipe(to_text(r)) == r.
std::string to_text(const Recipe& recipe);

// Throws Error(invalid_argument) when a field is outside its range; called by everything that takes a Recipe.
void validate(const Recipe& recipe);

struct MethodInfo {
  std::string name;
  std::string summary;            // one line for `kvant info`
  std::string default_recipe;     // its canonical text with default parameters
  std::vector<std::string> keys;  // keys that its text form accepts
};

// Every method of this build, in the order of documentation.
const std::vector<MethodInfo>& methods();

}  // namespace kvant
