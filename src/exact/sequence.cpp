#include "exact/sequence.hpp"

#include <cstring>

#include "exact/head_rows.hpp"

namespace kvant::exact {
namespace {

constexpr std::int64_t kRowsAtOnce = 128;  // rows decoded into scratch before they are narrowed

// Rounds floats to what `type` can hold.
void round_to(DType type, float* x, std::int64_t n, std::vector<std::uint16_t>& scratch) {
  if (type == DType::f32) return;
  scratch.resize(static_cast<std::size_t>(n));
  tiles::kernels().narrow(x, scratch.data(), type, n);
  tiles::kernels().widen(scratch.data(), type, x, n);
}

constexpr std::int64_t kMaxExtent = std::int64_t{1} << 20;  // of batch, heads and channels in an image
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;

}  // namespace

void SideShape::transfer(Archive& archive) {
  archive.number("batch", batch, 0, kMaxExtent);
  archive.number("heads", heads, batch == 0 ? 0 : 1, kMaxExtent);
  archive.number("channels", dim, batch == 0 ? 0 : 1, kMaxExtent);
  archive.type(type);
}

void Block::read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const {
  decode(head, first, {row_pointers<float, void*>(out, count, stride).data(), count, DType::f32});
  std::vector<std::uint16_t> scratch;
  for (std::int64_t r = 0; r < count; ++r) round_to(shape_.type, out + r * stride, shape_.dim, scratch);
}

void Block::store(std::int64_t head, std::int64_t first, std::int64_t count, const Array& out, std::int64_t at) const {
  const auto target = [&](std::int64_t r) { return row_of(out, head / shape_.heads, head % shape_.heads, at + r); };
  if (out.type == shape_.type && out.stride[3] == 1) {
    std::vector<void*> rows(static_cast<std::size_t>(count));
    for (std::int64_t r = 0; r < count; ++r) rows[static_cast<std::size_t>(r)] = target(r).start();
    decode(head, first, {rows.data(), count, out.type});
    return;
  }
  std::vector<float> rows(static_cast<std::size_t>(std::min(kRowsAtOnce, count) * shape_.dim));
  for (std::int64_t done = 0; done < count; done += kRowsAtOnce) {
    const std::int64_t n = std::min(kRowsAtOnce, count - done);
    read(head, first + done, n, rows.data(), shape_.dim);
    for (std::int64_t r = 0; r < n; ++r) target(done + r).store(rows.data() + r * shape_.dim);
  }
}

RowBlock::RowBlock(const SideShape& shape, std::int64_t capacity)
    : Block(shape, capacity),
      capacity_(capacity),
      data_bytes_(base::checked_multiply(static_cast<std::size_t>(shape.all_heads() * capacity), shape.row_bytes())),
      data_(base::allocate_aligned(data_bytes_)) {}

void RowBlock::write(std::int64_t head, std::int64_t token, const float* values) {
  tiles::kernels().narrow(values, row(head, token), shape().type, shape().dim);
}

void RowBlock::copy(std::int64_t head, std::int64_t at, const ConstArray& x, std::int64_t from, std::int64_t count) {
  const auto source = [&](std::int64_t r) { return row_of(x, head / shape().heads, head % shape().heads, from + r); };
  if (x.type != shape().type || x.stride[3] != 1) {
    std::vector<float> values(static_cast<std::size_t>(shape().dim));
    for (std::int64_t r = 0; r < count; ++r) {
      source(r).load(values.data());
      write(head, at + r, values.data());
    }
    return;
  }
  const std::int64_t together = x.stride[2] == shape().dim ? count : 1;  // rows that follow each other in x
  for (std::int64_t r = 0; r < count; r += together) {
    std::memcpy(row(head, at + r), source(r).start(), static_cast<std::size_t>(together) * shape().row_bytes());
  }
}

void RowBlock::store(std::int64_t head, std::int64_t first, std::int64_t count, const Array& out,
                     std::int64_t at) const {
  if (out.type != shape().type || out.stride[3] != 1) {
    Block::store(head, first, count, out, at);
    return;
  }
  const std::int64_t together = out.stride[2] == shape().dim ? count : 1;  // rows that follow each other in out
  for (std::int64_t r = 0; r < count; r += together) {
    void* target = row_of(out, head / shape().heads, head % shape().heads, at + r).start();
    std::memcpy(target, row(head, first + r), static_cast<std::size_t>(together) * shape().row_bytes());
  }
}

void RowBlock::transfer(Archive& archive) {
  for (std::int64_t head = 0; head < shape().all_heads(); ++head) {
    archive.bytes(row(head, 0), static_cast<std::size_t>(tokens()) * shape().row_bytes());
  }
}

void RowBlock::decode(std::int64_t head, std::int64_t first, const Rows& out) const {
  for (std::int64_t r = 0; r < out.count; ++r) {
    if (out.type == shape().type) {
      std::memcpy(out.row[r], row(head, first + r), shape().row_bytes());
    } else {  // to float: read() asks for nothing else
      tiles::kernels().widen(row(head, first + r), shape().type, static_cast<float*>(out.row[r]), shape().dim);
    }
  }
}

void Sequence::push(std::unique_ptr<Block> block) {
  // Both vectors grow before either changes: a failed allocation leaves the sequence as it was.
  if (blocks_.size() == blocks_.capacity()) blocks_.reserve(2 * blocks_.size() + 1);
  first_.push_back(tokens_);
  tokens_ += block->tokens();
  rows_ = nullptr;
  blocks_.push_back(std::move(block));
}

void Sequence::append_rows(const ConstArray& x, int threads) {
  extend_rows(x.extent[2], [&](RowBlock& block, std::int64_t at, std::int64_t first, std::int64_t rows) {
    base::parallel_for(shape_.all_heads(), threads,
                       [&](std::int64_t head, int) { block.copy(head, at, x, first, rows); });
  });
}

void Sequence::shorten(std::int64_t tokens) {
  while (!blocks_.empty() && first_.back() >= tokens) {
    blocks_.pop_back();
    first_.pop_back();
  }
  tokens_ = tokens;
  rows_ = nullptr;
  if (blocks_.empty()) return;
  blocks_.back()->set_tokens(std::min(blocks_.back()->tokens(), tokens - first_.back()));
  rows_ = dynamic_cast<RowBlock*>(blocks_.back().get());
}

template <typename Visit>
void Sequence::for_blocks(std::int64_t first, std::int64_t count, const Visit& visit) const {
  const std::int64_t last = first + count;
  auto index = static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), first) - first_.begin());
  if (index > 0) --index;
  for (; index < blocks_.size() && first_[index] < last; ++index) {
    const std::int64_t start = std::max(first, first_[index]);
    const std::int64_t end = std::min(last, first_[index] + blocks_[index]->tokens());
    if (end > start) visit(*blocks_[index], start - first_[index], end - start, start - first);
  }
}

void Sequence::read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const {
  for_blocks(first, count, [&](const Block& block, std::int64_t from, std::int64_t n, std::int64_t at) {
    block.read(head, from, n, out + at * stride, stride);
  });
}

void Sequence::fetch(const Array& out, std::int64_t first, int threads) const {
  base::parallel_for(shape_.all_heads(), threads, [&](std::int64_t head, int) {
    for_blocks(first, out.extent[2], [&](const Block& block, std::int64_t from, std::int64_t n, std::int64_t at) {
      block.store(head, from, n, out, at);
    });
  });
}

void Sequence::transfer(Archive& archive, const MakePacked& make_packed) {
  shape_.transfer(archive);
  auto count = static_cast<std::int64_t>(blocks_.size());
  archive.number("blocks", count, 0, kMaxTokens);
  archive.require(count == 0 || shape_.batch > 0, "blocks without a shape");
  for (std::int64_t i = 0; i < count; ++i) {
    Block* block = archive.reads() ? nullptr : blocks_[static_cast<std::size_t>(i)].get();
    std::uint8_t holds_rows = dynamic_cast<RowBlock*>(block) != nullptr ? 1 : 0;
    std::int64_t saved = block == nullptr ? 0 : block->saved_tokens();
    std::int64_t used = block == nullptr ? 0 : block->tokens();
    archive.number("kind of a block", holds_rows, 0, 1);
    archive.number("tokens of a block", saved, 1, kMaxTokens);
    archive.number("tokens in use", used, 1, saved);
    // A packed value has at least one bit.
    const std::size_t rows =
        base::checked_multiply(static_cast<std::size_t>(shape_.all_heads()), static_cast<std::size_t>(saved));
    const std::size_t bits = holds_rows != 0 ? 8 * shape_.row_bytes() : static_cast<std::size_t>(shape_.dim);
    archive.need(base::checked_multiply(rows, bits) / 8);
    std::unique_ptr<Block> made;
    if (archive.reads()) {
      if (holds_rows != 0) {
        made = std::make_unique<RowBlock>(shape_, saved);
      } else {
        made = make_packed(shape_, saved);
      }
      block = made.get();
    }
    block->transfer(archive);
    if (!archive.reads()) continue;
    made->set_tokens(used);
    push(std::move(made));
  }
}

std::size_t Sequence::bytes() const {
  std::size_t total = blocks_.capacity() * sizeof(blocks_[0]) + first_.capacity() * sizeof(first_[0]);
  for (const auto& block : blocks_) total += block->bytes();
  return total;
}

}  // namespace kvant::exact
