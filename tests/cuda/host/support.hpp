// Sequences, batches and the plain lists that they are compared with.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>

#include "cuda/attend.hpp"
#include "cuda/host/host.hpp"
#include "support/data.hpp"

namespace kvant::cuda::host {

inline const CacheShape kShape{2, 128, 128, DType::f16};

// Keys of tokens that are told apart by their first value, [sequence][row][head][channel]; values are not looked at.
inline std::vector<std::uint16_t> rows_of(const std::vector<Tokens>& tokens) {
  std::vector<std::uint16_t> rows;
  for (const Tokens& sequence : tokens) {
    for (const std::uint16_t token : sequence) {
      rows.resize(rows.size() + 2 * 128);
      rows[rows.size() - 2 * 128] = token;
    }
  }
  return rows;
}

// Appends count numbered tokens to every sequence of a batch.
inline void append(Batch& batch, int count, std::uint16_t first = 0) {
  std::vector<Tokens> tokens(static_cast<std::size_t>(batch.size()));
  for (Tokens& sequence : tokens) {
    for (int i = 0; i < count; ++i) sequence.push_back(static_cast<std::uint16_t>(first + i));
  }
  const auto rows = rows_of(tokens);
  batch.append(rows.data(), rows.data(), count, nullptr);
}

inline void bind(Batch& batch, std::vector<Sequence*> sequences) {
  batch.bind(sequences, nullptr);
}

// What an attention call reads.
inline std::vector<Tokens> read(const AttendPlan& plan) {
  alignas(16) static char anything[16];
  plan.run(anything, anything, nullptr, nullptr);
  return state().read;
}

// Everything that the host knows of a sequence.
inline std::string dump(const Sequence& sequence) {
  const Sequence::Impl& s = sequence.impl();
  std::ostringstream out;
  out << s.length << " tokens, pages";
  for (const std::int32_t page : s.pages) out << ' ' << page;
  out << ", tail";
  for (const std::int32_t page : s.tail) out << ' ' << page;
  out << ", sinks " << s.sinks << " on " << s.sink_page << ", blind " << s.blind_seals;
  return out.str();
}

}  // namespace kvant::cuda::host
