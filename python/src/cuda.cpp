// kvant._core.cuda: the GPU library on tensors of any framework that speaks DLPack. Nothing of torch is linked: tensors
// are asked for their capsule with stream=-1 (no synchronisation), streams are integers.
#include "kvant/cuda.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "kvant/error.hpp"
#include "kvant/recipe.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

void* as_stream(std::uintptr_t stream) {
  return reinterpret_cast<void*>(stream);
}

DType dtype_of(const std::string& name) {
  if (name == "f16" || name == "float16") return DType::f16;
  if (name == "bf16" || name == "bfloat16") return DType::bf16;
  refuse("dtype is '" + name + "'; allowed: f16, bf16");
}

cuda::AttendPath path_of(const std::string& name) {
  if (name == "automatic") return cuda::AttendPath::automatic;
  if (name == "integer") return cuda::AttendPath::integer;
  if (name == "prefill") return cuda::AttendPath::prefill;
  if (name == "reference") return cuda::AttendPath::reference;
  refuse("path is '" + name + "'; allowed: automatic, integer, prefill, reference");
}

RotaryPairs pairs_of(const std::string& name) {
  if (name == "adjacent") return RotaryPairs::adjacent;
  if (name == "halves") return RotaryPairs::halves;
  refuse("pairs is '" + name + "'; allowed: adjacent, halves");
}

const char* name_of(cuda::AttendPath path) {
  switch (path) {
    case cuda::AttendPath::automatic:
      break;
    case cuda::AttendPath::integer:
      return "integer";
    case cuda::AttendPath::prefill:
      return "prefill";
    case cuda::AttendPath::reference:
      return "reference";
  }
  return "automatic";
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// A dense tensor on device `device` with this shape and type. The capsule keeps it alive as long as the object.
class Tensor {
 public:
  Tensor(const nb::handle object, const char* name, const std::vector<std::int64_t>& shape, nb::dlpack::dtype type,
         int device)
      : array_(import(object, name)) {
    std::vector<std::int64_t> got;
    bool dense = true;
    std::int64_t stride = 1;
    for (std::size_t axis = array_.ndim(); axis-- > 0;) {
      const auto extent = static_cast<std::int64_t>(array_.shape(axis));
      dense = dense && (extent == 1 || array_.stride(axis) == stride);
      stride *= extent;
      got.insert(got.begin(), extent);
    }
    if (got != shape) refuse(std::string(name) + " has the shape " + shape_text(got) + ", not " + shape_text(shape));
    if (array_.dtype() != type) {
      refuse(std::string(name) + " is a tensor of " + dtype_name(array_.dtype()) + ", not of " + dtype_name(type));
    }
    if (array_.device_type() != nb::device::cuda::value || array_.device_id() != device) {
      refuse(std::string(name) + " is not on CUDA device " + std::to_string(device) + ", where the pool is");
    }
    if (!dense && stride != 0) refuse(std::string(name) + " is not contiguous");
  }
  void* data() const { return array_.data(); }

 private:
  static nb::ndarray<> import(const nb::handle object, const char* name) {
    try {
      if (nb::hasattr(object, "__dlpack__")) {
        return nb::cast<nb::ndarray<>>(object.attr("__dlpack__")(nb::arg("stream") = -1));
      }
    } catch (const nb::cast_error&) {  // a capsule that nanobind cannot read: the same answer as to no capsule
    }
    const std::string type = nb::cast<std::string>(nb::str(object.type()));
    throw nb::type_error((std::string(name) + " is a " + type + ": not a tensor with DLPack").c_str());
  }

  nb::ndarray<> array_;
};

// The second extent of a tensor [sequence, row, head, channel], before the rest of it is checked.
std::int64_t rows_of(const nb::handle object, const char* name) {
  const nb::object shape = nb::getattr(object, "shape", nb::none());
  if (shape.is_none()) throw nb::type_error((std::string(name) + " is not a tensor").c_str());
  if (nb::len(shape) != 4) refuse(std::string(name) + " has " + std::to_string(nb::len(shape)) + " axes, not 4");
  return nb::cast<std::int64_t>(shape[nb::int_(1)]);
}

nb::dlpack::dtype tensor_type(DType type) {
  const auto code = type == DType::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), 16, 1};
}

struct Pool {
  cuda::PagePool value;
  int device = cuda::device_info().index;

  Pool(const std::string& recipe, int kv_heads, int key_dim, int value_dim, const std::string& dtype, int pages,
       int exact_pages)
      : value(parse_recipe(recipe), {kv_heads, key_dim, value_dim, dtype_of(dtype)}, pages, exact_pages) {}
};

struct Sequence {
  std::shared_ptr<cuda::Sequence> value;

  explicit Sequence(const Pool& pool) : value(std::make_shared<cuda::Sequence>(pool.value)) {}
  explicit Sequence(cuda::Sequence sequence) : value(std::make_shared<cuda::Sequence>(std::move(sequence))) {}
};

// Keeps alive what it is bound to.
struct BatchState {
  cuda::Batch value;
  CacheShape shape;
  int device;
  std::vector<std::shared_ptr<cuda::Sequence>> sequences;

  BatchState(const Pool& pool, int max_sequences, std::int64_t max_tokens)
      : value(pool.value, max_sequences, max_tokens), shape(pool.value.shape()), device(pool.device) {}
};

struct Batch {
  std::shared_ptr<BatchState> state;

  Batch(const Pool& pool, int max_sequences, std::int64_t max_tokens)
      : state(std::make_shared<BatchState>(pool, max_sequences, max_tokens)) {}

  void bind(const std::vector<const Sequence*>& sequences, std::uintptr_t stream) {
    std::vector<std::shared_ptr<cuda::Sequence>> kept;
    std::vector<cuda::Sequence*> pointers;
    for (const Sequence* sequence : sequences) {
      if (sequence == nullptr) refuse("sequences[" + std::to_string(kept.size()) + "] is None");
      kept.push_back(sequence->value);
      pointers.push_back(sequence->value.get());
    }
    state->value.bind(pointers, as_stream(stream));
    state->sequences = std::move(kept);
  }

  void append(const nb::handle keys, const nb::handle values, std::uintptr_t stream) {
    const std::int64_t rows = rows_of(keys, "keys");
    const std::int64_t count = state->value.size();
    const CacheShape& shape = state->shape;
    const Tensor k(keys, "keys", {count, rows, shape.kv_heads, shape.key_dim}, tensor_type(shape.dtype), state->device);
    const Tensor v(values, "values", {count, rows, shape.kv_heads, shape.value_dim}, tensor_type(shape.dtype),
                   state->device);
    if (rows > INT_MAX) refuse("rows is " + std::to_string(rows));
    state->value.append(k.data(), v.data(), static_cast<int>(rows), as_stream(stream));
  }
};

struct Plan {
  std::shared_ptr<BatchState> batch;
  std::optional<Tensor> sinks;  // read by every run
  int query_heads;
  int rows;
  std::optional<cuda::AttendPlan> value;

  Plan(const Batch& of, int heads, int row_count, float scale, float softcap, const nb::object& sink_logits,
       int sliding_window, bool overlap, bool pages_settled, int headroom, const std::string& path)
      : batch(of.state), query_heads(heads), rows(row_count) {
    cuda::AttendOptions options;
    options.scale = scale;
    options.softcap = softcap;
    options.sliding_window = sliding_window;
    options.overlap = overlap;
    options.pages_settled = pages_settled;
    if (!sink_logits.is_none()) {
      sinks.emplace(sink_logits, "sinks", std::vector<std::int64_t>{heads}, nb::dtype<float>(), batch->device);
      options.sinks = static_cast<const float*>(sinks->data());
    }
    value.emplace(batch->value, heads, row_count, options, headroom, path_of(path));
  }

  void run(const nb::handle q, const nb::handle out, const nb::object& lse, std::uintptr_t stream) const {
    const std::int64_t count = batch->value.size();
    const CacheShape& shape = batch->shape;
    const Tensor query(q, "q", {count, rows, query_heads, shape.key_dim}, tensor_type(shape.dtype), batch->device);
    const Tensor result(out, "out", {count, rows, query_heads, shape.value_dim}, tensor_type(shape.dtype),
                        batch->device);
    std::optional<Tensor> sums;
    if (!lse.is_none()) {
      sums.emplace(lse, "lse", std::vector<std::int64_t>{count, rows, query_heads}, nb::dtype<float>(), batch->device);
    }
    value->run(query.data(), result.data(), sums ? static_cast<float*>(sums->data()) : nullptr, as_stream(stream));
  }
};

void bind_memory(nb::module_& module) {
  nb::class_<Pool>(module, "PagePool",
                   "Device memory for sealed pages and for exact pages of 128 unquantized tokens, one layer, on the "
                   "current device.")
      .def(nb::init<const std::string&, int, int, int, const std::string&, int, int>(), nb::arg("recipe"),
           nb::kw_only(), nb::arg("kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("dtype"),
           nb::arg("pages"), nb::arg("exact_pages"))
      .def_prop_ro("recipe", [](const Pool& pool) { return to_text(pool.value.recipe()); })
      .def_prop_ro("free_pages", [](const Pool& pool) { return pool.value.free_pages(); })
      .def_prop_ro("free_exact_pages", [](const Pool& pool) { return pool.value.free_exact_pages(); })
      .def_prop_ro(
          "nbytes", [](const Pool& pool) { return pool.value.bytes(); }, "Bytes of device memory.")
      .def(
          "invalid_values",
          [](const Pool& pool, std::uintptr_t stream) { return pool.value.invalid_values(as_stream(stream)); },
          nb::arg("stream") = 0,
          "How many numbers of the rows appended so far a CPU cache would refuse: NaN, infinities, bfloat16 beyond\n"
          "half of its range. Zeros stand in their place, and their sequence's results are wrong from then on; those\n"
          "of others are as they would be. Waits for the work on the stream.")
      .def_prop_ro(
          "needs_rotation", [](const Pool& pool) { return pool.value.needs_rotation(); },
          "True when the recipe stores keys as they were before RoPE (rope=before).")
      .def(
          "set_key_rotation",
          [](Pool& pool, std::vector<double> frequencies, const std::string& pairs, double magnitude) {
            pool.value.set_key_rotation({pairs_of(pairs), std::move(frequencies), magnitude});
          },
          nb::arg("frequencies"), nb::kw_only(), nb::arg("pairs") = "halves", nb::arg("magnitude") = 1.0,
          "What the model does to a key of position p, its token's number in the sequence: pair i of channels turns by "
          "p * frequencies[i] radians and is multiplied by `magnitude`. pairs: 'halves' (i and i + the number of "
          "pairs, "
          "as in transformers) or 'adjacent' (2 i and 2 i + 1). Pools that need it must know it before the first "
          "append, others ignore it.");
  nb::class_<Sequence>(module, "Sequence", "The pages of one sequence: sinks, sealed pages, open tail.")
      .def(nb::init<const Pool&>(), nb::arg("pool"))
      .def(
          "fork", [](const Sequence& s, std::uintptr_t stream) { return Sequence(s.value->fork(as_stream(stream))); },
          nb::arg("stream") = 0, "A sequence that shares the sealed pages and has copies of the open ones.")
      .def_prop_ro(
          "length", [](const Sequence& s) { return s.value->length(); }, "Tokens.")
      .def_prop_ro("sealed_pages", [](const Sequence& s) { return s.value->sealed_pages(); })
      .def_prop_ro(
          "blind_seals", [](const Sequence& s) { return s.value->blind_seals(); },
          "Pages that were sealed without the queries that the recipe would look at (waterfill, zipcache with "
          "saliency=attention, kitty with selector=query): the device sees none.");
}

void bind_calls(nb::module_& module) {
  nb::class_<Batch>(module, "Batch", "The sequences of one call, with their page tables on the device.")
      .def(nb::init<const Pool&, int, std::int64_t>(), nb::arg("pool"), nb::arg("max_sequences"), nb::arg("max_tokens"))
      .def("bind", &Batch::bind, nb::arg("sequences"), nb::arg("stream") = 0,
           "From now on row b of every call is sequences[b], all of them different. One that another batch has changed "
           "since is refused by every call until it is bound anew.")
      .def(
          "reserve",
          [](Batch& b, int tokens, std::uintptr_t stream) { b.state->value.reserve(tokens, as_stream(stream)); },
          nb::arg("tokens"), nb::arg("stream") = 0,
          "Makes room for that many more tokens per sequence, so that captured appends need no new table: pages that "
          "are missing during a capture are refused.")
      .def("append", &Batch::append, nb::arg("keys"), nb::arg("values"), nb::arg("stream") = 0,
           "Appends tensors [sequence, row, kv_head, channel], contiguous, of the pool's type.")
      .def(
          "count_appended", [](Batch& b, int rows) { b.state->value.count_appended(rows); }, nb::arg("rows"),
          "Tells the host's side that a graph with an append of that many rows was launched once more. The append that "
          "was captured has counted for the first launch.")
      .def(
          "seal_ready", [](Batch& b, std::uintptr_t stream) { return b.state->value.seal_ready(as_stream(stream)); },
          nb::arg("stream") = 0,
          "Encodes every full page with at least the recipe's window of newer tokens; returns how many pages, a first "
          "one of sinks only among them. Plans made before are void unless it is 0.")
      .def("__len__", [](const Batch& b) { return b.state->value.size(); });
  nb::class_<Plan>(
      module, "AttendPlan",
      "How one attention call is split over the GPU. Valid until pages of the batch are sealed or it is bound anew; "
      "sequences may meanwhile grow by `headroom` tokens, up to the batch's max_tokens. Making a plan allocates and "
      "synchronises, running it does neither.")
      .def(
          nb::init<const Batch&, int, int, float, float, const nb::object&, int, bool, bool, int, const std::string&>(),
          nb::arg("batch"), nb::arg("query_heads"), nb::arg("rows") = 1, nb::kw_only(), nb::arg("scale") = 0.0F,
          nb::arg("softcap") = 0.0F, nb::arg("sinks") = nb::none(), nb::arg("sliding_window") = 0,
          nb::arg("overlap") = false, nb::arg("pages_settled") = false, nb::arg("headroom") = 128,
          nb::arg("path") = "automatic")
      .def("run", &Plan::run, nb::arg("q"), nb::arg("out"), nb::arg("lse") = nb::none(), nb::arg("stream") = 0,
           "Attention of q [sequence, row, query_head, key_dim], the last rows of each sequence, into out [.., "
           "value_dim]; lse: None or float32 [sequence, row, query_head]. All contiguous.")
      .def_prop_ro(
          "path", [](const Plan& plan) { return name_of(plan.value->path()); },
          "'integer', 'prefill' or 'reference': the kernel that serves the plan.")
      .def("__repr__", [](const Plan& plan) { return "AttendPlan(" + plan.value->describe() + ")"; });
}

}  // namespace

void bind_cuda(nb::module_& parent) {
  nb::module_ module = parent.def_submodule("cuda", "The cache on NVIDIA GPUs; use kvant.cuda instead.");
  module.def("is_available", &cuda::is_available, "Can the current device run the kernels of this build?");
  module.def(
      "device_name", [] { return cuda::device_info().name; }, "Name of the current device; kvant.Error without one.");
  module.def(
      "page_bytes",
      [](const std::string& recipe, int kv_heads, int key_dim, int value_dim, const std::string& dtype) {
        return cuda::page_bytes(parse_recipe(recipe), {kv_heads, key_dim, value_dim, dtype_of(dtype)});
      },
      nb::arg("recipe"), nb::kw_only(), nb::arg("kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("dtype"),
      "Bytes that one sealed page (128 tokens, all KV heads) takes on the device.");
  bind_memory(module);
  bind_calls(module);
}

}  // namespace kvant::python
