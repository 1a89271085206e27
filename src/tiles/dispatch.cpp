// The table of kernel sets and the choice between them.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "base/checked.hpp"
#include "hwy/targets.h"
#include "kvant/runtime.hpp"
#include "tiles/kernels.hpp"
#include "tiles/matrix.hpp"
#include "tiles/scalar.hpp"

namespace kvant::tiles {

void fill_pack(Kernels& k);
void fill_products(Kernels& k);
void fill_rows(Kernels& k);
void fill_softmax(Kernels& k);
void fill_codec(Kernels& k);
void fill_rotate(Kernels& k);
void fill_matrix_pack(Kernels& k);
void fill_matrix_products(Kernels& k, bool emulated);

#if KVANT_AMX
bool amx_usable() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1U << 24, kInt8 = 1U << 25;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  // Linux gives tile state to processes that ask for it: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

namespace {

// Names that say what is used, instead of Highway's target names.
std::string set_name(const std::string& target) {
  static const std::map<std::string, std::string> names = {
      {"AVX3_DL", "avx512vnni"}, {"AVX3", "avx512"}, {"AVX2", "avx2"}, {"SSE4", "sse4"},      {"SSSE3", "ssse3"},
      {"NEON", "neon"},          {"SVE", "sve"},     {"SVE2", "sve2"}, {"SVE_256", "sve256"}, {"SVE2_128", "sve2_128"}};
  const auto found = names.find(target);
  return found == names.end() ? std::string() : found->second;
}

// A set with matrix products in place of its own.
Kernels matrix_set(Kernels k, bool emulated) {
  fill_matrix_pack(k);
  fill_matrix_products(k, emulated);
  k.name = emulated ? "matrix_emulated" : "avx512amx";
  return k;
}

std::vector<Kernels> make_sets() {
  std::vector<Kernels> sets;
  const std::int64_t supported = hwy::SupportedTargets();
  for (std::int64_t left = supported; left != 0; left &= left - 1) {  // lowest bit first: Highway's best first
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    Kernels k;
    fill_codec(k);
    fill_pack(k);
    fill_products(k);
    fill_rows(k);
    fill_softmax(k);
    fill_rotate(k);
    k.name = set_name(k.name);
#if KVANT_AMX
    if (k.name == "avx512vnni" && amx_usable()) {
      sets.push_back(matrix_set(k, false));
    }
#endif
    // The emulated target is left out: "scalar" below is our own reference.
    if (!k.name.empty() && (sets.empty() || sets.back().name != k.name)) sets.push_back(k);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  sets.push_back(scalar_kernels());
  return sets;
}

std::atomic<const Kernels*> active{nullptr};

std::string list_names() {
  std::string text;
  for (const Kernels& k : all_kernels()) text += (text.empty() ? "" : ", ") + k.name;
  return text;
}

const Kernels* find_set(std::string_view name) {
  for (const Kernels& k : all_kernels()) {
    if (k.name == name) return &k;
  }
  base::fail(ErrorCode::invalid_argument, "kernel set '" + std::string(name) +
                                              "' is unknown or not supported by this CPU; choices: " + list_names());
}

}  // namespace

const std::vector<Kernels>& all_kernels() {
  static const std::vector<Kernels> sets = make_sets();
  return sets;
}

Kernels emulated_matrix_kernels() {
  Kernels k = all_kernels().front();  // of the target that Highway chooses by itself
  k.begin_products = nullptr;
  k.end_products = nullptr;
  return matrix_set(k, true);
}

const Kernels& kernels() {
  const Kernels* chosen = active.load(std::memory_order_acquire);
  if (chosen == nullptr) {
    const char* wanted = std::getenv("KVANT_KERNEL");
    chosen = wanted != nullptr && *wanted != '\0' ? find_set(wanted) : &all_kernels().front();
    active.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

}  // namespace kvant::tiles

namespace kvant {

const char* version() noexcept {
  return KVANT_VERSION;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const tiles::Kernels& k : tiles::all_kernels()) names.push_back(k.name);
  return names;
}

std::string active_kernel() {
  return tiles::kernels().name;
}

void force_kernel(std::string_view name) {
  tiles::active.store(tiles::find_set(name), std::memory_order_release);
}

}  // namespace kvant
