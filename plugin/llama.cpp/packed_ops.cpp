// The operations that work on packed layers directly: new rows, attention, context shift.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "config.hpp"
#include "engine.hpp"
#include "host.hpp"
#include "kvant/error.hpp"
#include "record.hpp"
#include "rotation.hpp"
#include "status.hpp"

namespace kvant::llama {
namespace {

std::vector<std::int64_t> read_indices(const abi::Tensor& t) {
  const auto count = static_cast<std::size_t>(t.ne[0]);
  if (t.type == abi::kI64) {
    const auto* data = static_cast<const std::int64_t*>(t.data);
    return {data, data + count};
  }
  const auto* data = static_cast<const std::int32_t*>(t.data);
  return {data, data + count};
}

bool is_vector(const abi::Tensor& t, std::int32_t type, std::size_t bytes) {
  return t.type == type && t.nb[0] == bytes && t.ne[1] == 1 && t.ne[2] == 1 && t.ne[3] == 1;
}

bool is_index_vector(const abi::Tensor& t) {
  return is_vector(t, abi::kI64, sizeof(std::int64_t)) || is_vector(t, abi::kI32, sizeof(std::int32_t));
}

float float_param(const abi::Tensor& node, int index) {
  float value = 0.0F;
  std::memcpy(&value, &node.op_params[index], sizeof(value));
  return value;
}

std::int64_t in_elements(std::size_t bytes, DType type) {
  return static_cast<std::int64_t>(bytes / size_of(type));
}

// True if t shows the heads of the layer for cells 0.. of consecutive streams; *first_stream says from which on.
bool shows_cells(const abi::Tensor& t, const CacheRef& ref, std::int64_t* first_stream) {
  const CacheTensor& owner = ref.layer->tensor(ref.side);
  const std::size_t stream_bytes = owner.row_bytes * static_cast<std::size_t>(owner.cells);
  const std::size_t offset = t.view_src != nullptr ? t.view_offs : 0;
  *first_stream = static_cast<std::int64_t>(offset / stream_bytes);
  const int dim = ref.layer->dim(ref.side);
  return offset % stream_bytes == 0 && t.ne[0] == dim && t.ne[2] == ref.layer->heads().kv_heads &&
         t.nb[0] == owner.codec.block_bytes() && t.nb[1] == owner.row_bytes && t.nb[2] == owner.codec.bytes(dim) &&
         t.ne[1] <= owner.cells && (t.ne[3] == 1 || t.nb[3] == stream_bytes) &&
         *first_stream + t.ne[3] <= owner.streams;
}

bool mask_fits(const abi::Tensor* mask, std::int64_t heads) {
  if (mask == nullptr) return true;
  return (mask->type == abi::kF16 || mask->type == abi::kF32) && (mask->ne[2] == 1 || mask->ne[2] == heads);
}

Mask mask_of_stream(const abi::Tensor* mask, std::int64_t stream) {
  Mask m;
  if (mask == nullptr) return m;
  m.type = mask->type == abi::kF32 ? DType::f32 : DType::f16;
  m.data = static_cast<const std::byte*>(mask->data) + static_cast<std::size_t>(stream % mask->ne[3]) * mask->nb[3];
  m.row_stride = in_elements(mask->nb[1], m.type);
  m.head_stride = mask->ne[2] > 1 ? in_elements(mask->nb[2], m.type) : 0;
  return m;
}

}  // namespace

// Positions of the keys come from the graph; those of the values are the ones of the keys just written.
std::vector<std::int64_t> Engine::positions_for(const CacheRef& target, const abi::Tensor* source,
                                                const std::vector<std::int64_t>& rows) {
  const Layer& layer = *target.layer;
  const bool turns = config().turns_keys(layer.index());
  const bool sinks = layer.store(0).recipe().sink > 0 || turns;
  if (target.side == Side::value) {
    const bool same_tokens = last_keys_.layer == &layer && last_keys_.rows == rows;
    return sinks && same_tokens ? last_keys_.positions : std::vector<std::int64_t>{};
  }
  last_keys_ = {&layer, rows, {}};
  if (!sinks) return {};
  const auto found = positions_.of_keys(source, layer.index(), static_cast<std::int64_t>(rows.size()));
  last_keys_.positions.assign(found.begin(), found.end());
  if (turns && found.empty()) {
    throw std::runtime_error("layer " + std::to_string(layer.index()) +
                             ": keys before RoPE are asked for, but their positions are not in the graph");
  }
  return last_keys_.positions;
}

// The queries of one stream belong to the keys that the graph has just written to it, in the same order, when they are
// as many and lie in that stream; otherwise (rows of several streams in one, another graph) they count for no page.
void Engine::observe_queries(Layer& layer, std::int64_t stream, const ConstView& queries, std::int64_t first,
                             const QueryScores& scores) {
  const std::int64_t count = queries.extent[0];
  const std::int64_t base = stream * layer.tensor(Side::key).cells;
  std::vector<std::int64_t> cells;
  if (last_keys_.layer == &layer) {
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::int64_t cell = last_keys_.rows[static_cast<std::size_t>(i)] - base;
      if (cell >= 0 && cell < layer.tensor(Side::key).cells) cells.push_back(cell);
    }
  }
  if (static_cast<std::int64_t>(cells.size()) != count) {
    cells.clear();
    Ledger::instance().note("some queries are not those of the keys just written: they weigh later pages only");
  }
  try {
    layer.observe(stream, cells, queries, scores);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_finite) throw;
    Ledger::instance().note("some queries were not finite: they do not weigh channels or tokens");
  }
}

bool Engine::set_rows(const abi::Tensor& node, const CacheRef& target) {
  const abi::Tensor& rows = *node.src[0];
  const abi::Tensor& indices = *node.src[1];
  const CacheTensor& owner = target.layer->tensor(target.side);
  const std::size_t offset = node.view_src != nullptr ? node.view_offs : 0;
  const bool known = rows.type == abi::kF32 && rows.nb[0] == sizeof(float) && rows.ne[0] == owner.row_values &&
                     rows.ne[2] == 1 && rows.ne[3] == 1 && is_index_vector(indices) && indices.ne[0] == rows.ne[1] &&
                     node.ne[0] == owner.row_values && offset % owner.row_bytes == 0;
  if (!known) return false;
  std::vector<std::int64_t> cells = read_indices(indices);
  for (std::int64_t& cell : cells) cell += static_cast<std::int64_t>(offset / owner.row_bytes);
  if (target.side == Side::key && config().turns_keys(target.layer->index())) {
    target.layer->notice_rotation(&rows);
    static_cast<void>(target.layer->known_rotation());
  }
  const std::vector<std::int64_t> positions = positions_for(target, &rows, cells);
  const int dim = target.layer->dim(target.side);
  const ConstView values{rows.data,
                         DType::f32,
                         {rows.ne[1], target.layer->heads().kv_heads, dim},
                         {in_elements(rows.nb[1], DType::f32), dim, 1}};
  target.layer->write(target.side, cells, values, positions);
  record(target, cells, positions, static_cast<const float*>(rows.data), values.stride[0]);
  written(target);
  return true;
}

// Rows as they came, or keys turned back.
void Engine::record(const CacheRef& target, const std::vector<std::int64_t>& cells,
                    const std::vector<std::int64_t>& positions, const float* rows, std::int64_t row_stride) {
  if (config().record.empty()) return;
  const Layer& layer = *target.layer;
  const int heads = layer.heads().kv_heads;
  const int dim = layer.dim(target.side);
  std::vector<float> plain;
  if (target.side == Side::key && config().record_before_rope) {
    const std::int64_t width = std::int64_t{heads} * dim;
    for (std::size_t i = 0; i < cells.size(); ++i, rows += row_stride) plain.insert(plain.end(), rows, rows + width);
    undo_rotation(layer.known_rotation(), positions, heads, dim, plain.data());
    rows = plain.data();
    row_stride = width;
  }
  record_rows(layer.index(), target.side, heads, dim, cells, rows, row_stride);
}

// Keys stored before RoPE: sealed pages get other positions, which is exact. `node` has to rotate as their ROPE did.
void Engine::move_keys(const abi::Tensor& node, Layer& layer, const std::vector<std::int64_t>& rows,
                       const std::vector<std::int32_t>& distances) {
  const KeyRotation shift = read_rotation(node);
  const KeyRotation& known = layer.known_rotation();
  if (shift.pairs != known.pairs || shift.frequencies != known.frequencies) {
    throw std::runtime_error("layer " + std::to_string(layer.index()) +
                             ": the context shift rotates keys by other angles than their RoPE did");
  }
  layer.shift_keys(rows, std::vector<std::int64_t>(distances.begin(), distances.end()));
}

bool Engine::attend_packed(const abi::Tensor& node) {
  const abi::Tensor& q = *node.src[0];
  const abi::Tensor& k = *node.src[1];
  const abi::Tensor* mask = node.src[3];
  const abi::Tensor* sinks = node.src[4];
  const CacheRef key = cache_ref(&k);
  const CacheRef value = cache_ref(node.src[2]);
  if (!key.packed() || value.layer != key.layer || key.side != Side::key || value.side != Side::value) return false;
  std::int64_t stream = 0;
  std::int64_t value_stream = 0;
  const bool known = shows_cells(k, key, &stream) && shows_cells(*node.src[2], value, &value_stream) &&
                     stream == value_stream && q.type == abi::kF32 && q.ne[3] == k.ne[3] && mask_fits(mask, q.ne[2]);
  if (!known) return false;

  AttentionOptions options;
  options.scale = float_param(node, 0);
  options.max_bias = float_param(node, 1);
  options.softcap = float_param(node, 2);
  options.sinks = sinks != nullptr ? static_cast<const float*>(sinks->data) : nullptr;
  options.threads = threads_;
  // Other counts than those of the keys just written: which query is whose cannot be told.
  if (static_cast<std::int64_t>(last_keys_.rows.size()) != q.ne[1] * q.ne[3]) last_keys_ = {};
  const bool observed = key.layer->weighs_queries();
  std::vector<float> lse(observed ? static_cast<std::size_t>(q.ne[1] * q.ne[2]) : 0);
  for (std::int64_t s = 0; s < q.ne[3]; ++s) {
    const auto part = static_cast<std::size_t>(s);
    const ConstView queries{static_cast<const std::byte*>(q.data) + part * q.nb[3],
                            DType::f32,
                            {q.ne[1], q.ne[2], q.ne[0]},
                            {in_elements(q.nb[1], DType::f32), in_elements(q.nb[2], DType::f32), 1}};
    const View out{static_cast<std::byte*>(node.data) + part * node.nb[3],
                   DType::f32,
                   {q.ne[1], q.ne[2], node.ne[0]},
                   {in_elements(node.nb[2], DType::f32), in_elements(node.nb[1], DType::f32), 1}};
    options.mask = mask_of_stream(mask, s);
    float* const sums = observed ? lse.data() : nullptr;
    attend(key.layer->store(stream + s), k.ne[1], queries, out, options, *workspace_, sums);
    if (observed) {
      observe_queries(*key.layer, stream + s, queries, s * q.ne[1], {options.scale, options.softcap, sums});
    }
  }
  if (last_keys_.layer == key.layer) last_keys_ = {};  // a later graph's queries are not of these keys
  Ledger::instance().set_workspace(bytes_of(*workspace_));
  seal_and_account(*key.layer, *key.buffer);
  return true;
}

// The host moves positions by rotating cached keys in place, by a distance per cell. Only cells that really move are
// decoded, rotated in float32 by the host's own code, and written back; the others keep their exact bytes. Keys stored
// before RoPE need no decoding (move_keys).
bool Engine::shift_keys(const abi::Tensor& node, const CacheRef& target) {
  const abi::Tensor& source = *node.src[0];
  const abi::Tensor& distance = *node.src[1];
  const CacheTensor& owner = target.layer->tensor(target.side);
  const CacheRef from = cache_ref(&source);
  const std::size_t start = node.view_src != nullptr ? node.view_offs : 0;
  const std::size_t head_bytes = owner.codec.bytes(target.layer->dim(target.side));
  const bool known = from.layer == target.layer && from.side == target.side && source.view_offs == node.view_offs &&
                     is_vector(distance, abi::kI32, sizeof(std::int32_t)) && !owner.codec.quantized() &&
                     node.ne[3] == 1 && distance.ne[0] == node.ne[2] && node.nb[2] == owner.row_bytes &&
                     node.nb[1] == head_bytes && start < head_bytes && node.ne[1] == target.layer->heads().kv_heads;
  if (!known) return false;

  std::vector<std::int64_t> rows;
  std::vector<std::int32_t> moved;
  const auto* distances = static_cast<const std::int32_t*>(distance.data);
  for (std::int64_t row = 0; row < distance.ne[0]; ++row) {
    if (distances[row] == 0 || !target.layer->any_written(row)) continue;
    rows.push_back(row);
    moved.push_back(distances[row]);
  }
  if (rows.empty()) return true;
  if (target.layer->needs_rotation()) {
    move_keys(node, *target.layer, rows, moved);
    written(target);
    return true;
  }

  const std::int64_t dim = target.layer->dim(target.side);
  const std::int64_t heads = node.ne[1];
  const std::int64_t lead = owner.codec.value_at(start);  // channels of a head in front of the rotated ones
  const auto count = static_cast<std::int64_t>(rows.size());
  std::vector<float> values(static_cast<std::size_t>(count * owner.row_values));
  target.layer->read(target.side, rows, values.data());

  Scratch scratch;
  abi::Tensor* keys = scratch.tensor(abi::kF32, {node.ne[0], heads, count, 1});
  abi::Tensor* steps = scratch.tensor(abi::kI32, {count, 1, 1, 1});
  abi::Tensor* rotated = scratch.clone(node, abi::kF32, {node.ne[0], heads, count, 1});
  std::copy(moved.begin(), moved.end(), static_cast<std::int32_t*>(steps->data));
  auto* in = static_cast<float*>(keys->data);
  for (std::int64_t line = 0; line < count * heads; ++line) {
    std::copy_n(values.data() + line * dim + lead, node.ne[0], in + line * node.ne[0]);
  }
  rotated->src[0] = keys;
  rotated->src[1] = steps;
  delegate_.run(rotated);
  const auto* turned = static_cast<const float*>(rotated->data);
  for (std::int64_t line = 0; line < count * heads; ++line) {
    std::copy_n(turned + line * node.ne[0], node.ne[0], values.data() + line * dim + lead);
  }
  // A moved key is no sink, whatever the number of its cell.
  const std::vector<std::int64_t> beyond_sinks(rows.size(), target.layer->store(0).recipe().sink);
  target.layer->write(target.side, rows, values.data(), beyond_sinks);
  written(target);
  return true;
}

}  // namespace kvant::llama
