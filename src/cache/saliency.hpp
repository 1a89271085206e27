// Which tokens of a page are salient (ZipCache, arXiv 2405.14256), decided when the page is sealed.
#pragma once

#include <span>
#include <vector>

#include "cache/store.hpp"

namespace kvant::cache {

// Indices of the page's probes among those of the store; the page is open and full.
std::vector<std::size_t> probes_of(const PageStore::Impl& store, std::int64_t page);

// Normalised attention to each token of an open page, for one KV head: the softmax probabilities that the probes'
// queries of all heads of the group give it, summed up and divided by the number of probes that can see it; 0 where
// none can. Log-sum-exps that the host did not give are computed here, over all cells as they are stored now.
std::vector<double> attention_saliency(const PageStore::Impl& store, std::int64_t page, int head,
                                       std::span<const std::size_t> probes);

// The proxy of the reference package: the Euclidean norm of each token's key.
std::vector<double> norm_saliency(const PageStore::Impl& store, std::int64_t page, int head);

// Stores the page's order of tokens in the block of a head: the salient ones with the largest scores (ties: the lower
// token), then the others, each class ascending. Tokens in `skip` count as the least salient ones.
void store_token_order(const PageLayout& layout, const std::vector<double>& scores, const CellSet& skip, int head,
                       std::byte* block);

}  // namespace kvant::cache
