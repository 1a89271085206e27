// The tokens of one side (keys or values) of a cache: blocks in order, each of them rows or packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/aligned.hpp"
#include "base/threads.hpp"
#include "exact/archive.hpp"
#include "exact/columns.hpp"
#include "exact/elements.hpp"

namespace kvant::exact {

// What all blocks of a sequence share. A head is batch index * heads + head index.
struct SideShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  DType type = DType::f16;

  std::int64_t all_heads() const { return batch * heads; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(dim) * size_of(type); }
  void transfer(Archive& archive);
};

// Consecutive tokens of every head. Only its length ever changes after it was filled.
class Block {
 public:
  Block(const SideShape& shape, std::int64_t tokens) : shape_(shape), tokens_(tokens) {}
  virtual ~Block() = default;

  std::int64_t tokens() const { return tokens_; }
  void set_tokens(std::int64_t tokens) { tokens_ = tokens; }
  const SideShape& shape() const { return shape_; }

  // Rows first..first+count-1 of a head as float, `stride` floats apart, exactly as the cache returns them.
  void read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const;
  // The same rows into axis 2 of out [batch, heads, tokens, dim], from token `at` on.
  virtual void store(std::int64_t head, std::int64_t first, std::int64_t count, const Array& out,
                     std::int64_t at) const;

  // Bytes of this object and of everything that it owns.
  virtual std::size_t bytes() const = 0;

  // Tokens that the block was made for, trimmed ones included; rows are saved without those.
  virtual std::int64_t saved_tokens() const = 0;
  // The contents, to an archive or from it; the constructor's arguments are the sequence's business.
  virtual void transfer(Archive& archive) = 0;

 protected:
  // Rows first..first+out.count-1 in out's type, rounded once.
  virtual void decode(std::int64_t head, std::int64_t first, const Rows& out) const = 0;

 private:
  SideShape shape_;
  std::int64_t tokens_ = 0;
};

// Unquantized rows [head][capacity][dim].
class RowBlock final : public Block {
 public:
  RowBlock(const SideShape& shape, std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  void write(std::int64_t head, std::int64_t token, const float* row);
  // Rows from..from+count-1 of x [batch, heads, tokens, dim] become tokens at..at+count-1 of one head.
  void copy(std::int64_t head, std::int64_t at, const ConstArray& x, std::int64_t from, std::int64_t count);

  void store(std::int64_t head, std::int64_t first, std::int64_t count, const Array& out,
             std::int64_t at) const override;
  std::size_t bytes() const override { return sizeof(RowBlock) + data_bytes_; }
  std::int64_t saved_tokens() const override { return tokens(); }
  void transfer(Archive& archive) override;

 protected:
  void decode(std::int64_t head, std::int64_t first, const Rows& out) const override;

 private:
  std::byte* row(std::int64_t head, std::int64_t token) const {
    return data_.get() + static_cast<std::size_t>(head * capacity_ + token) * shape().row_bytes();
  }

  std::int64_t capacity_ = 0;
  std::size_t data_bytes_ = 0;
  base::AlignedBytes data_;
};

class Sequence {
 public:
  Sequence() = default;
  explicit Sequence(const SideShape& shape) : shape_(shape) {}

  const SideShape& shape() const { return shape_; }
  std::int64_t tokens() const { return tokens_; }

  // Appends a filled block.
  void push(std::unique_ptr<Block> block);

  // Appends rows of x, as they are, to the last row block and to new ones.
  void append_rows(const ConstArray& x, int threads);
  // Appends `count` rows that fill(head, row, float* out) computes, row = 0..count-1.
  template <typename Fill>
  void append_rows(std::int64_t count, int threads, const Fill& fill);

  // Keeps the first `tokens` tokens.
  void shorten(std::int64_t tokens);

  // Rows first..first+count-1 of a head as float, `stride` floats apart.
  void read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const;
  // Rows first.. of every head into out [batch, heads, n, dim].
  void fetch(const Array& out, std::int64_t first, int threads) const;

  // Bytes owned, without sizeof(*this).
  std::size_t bytes() const;

  // Shape and blocks; make_packed(tokens) makes an empty packed block to read into.
  using MakePacked = std::function<std::unique_ptr<Block>(const SideShape& shape, std::int64_t tokens)>;
  void transfer(Archive& archive, const MakePacked& make_packed);

 private:
  // Tokens of one block that belong to a range: block, first token in it, count, distance from the range's start.
  template <typename Visit>
  void for_blocks(std::int64_t first, std::int64_t count, const Visit& visit) const;
  // Row blocks for `count` more tokens: calls visit(block, first token in it, first row, rows) after making them.
  template <typename Visit>
  void extend_rows(std::int64_t count, const Visit& visit);

  SideShape shape_;
  std::int64_t tokens_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::int64_t> first_;  // first token of each block
  RowBlock* rows_ = nullptr;         // the last block when it holds rows
};

template <typename Visit>
void Sequence::extend_rows(std::int64_t count, const Visit& visit) {
  constexpr std::int64_t kNewRows = 64;  // capacity of a block for rows that come one by one
  for (std::int64_t done = 0; done < count;) {
    if (rows_ == nullptr || rows_->tokens() == rows_->capacity()) {
      auto block = std::make_unique<RowBlock>(shape_, std::max(count - done, kNewRows));
      block->set_tokens(0);
      RowBlock* added = block.get();
      push(std::move(block));
      rows_ = added;
    }
    const std::int64_t at = rows_->tokens();
    const std::int64_t rows = std::min(rows_->capacity() - at, count - done);
    rows_->set_tokens(at + rows);
    tokens_ += rows;
    visit(*rows_, at, done, rows);
    done += rows;
  }
}

template <typename Fill>
void Sequence::append_rows(std::int64_t count, int threads, const Fill& fill) {
  extend_rows(count, [&](RowBlock& block, std::int64_t at, std::int64_t first, std::int64_t rows) {
    base::parallel_for(shape_.all_heads(), threads, [&](std::int64_t head, int) {
      std::vector<float> row(static_cast<std::size_t>(shape_.dim));
      for (std::int64_t r = 0; r < rows; ++r) {
        fill(head, first + r, row.data());
        block.write(head, at + r, row.data());
      }
    });
  });
}

}  // namespace kvant::exact
