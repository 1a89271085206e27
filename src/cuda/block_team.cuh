// Few query vectors over few block pages: the warps of a team share a page, so that it is done sooner. All scores of a
// page need the queries as bytes and the outliers, so a team meets before its products and after them; from the softmax
// on each warp has a quarter of the tokens, with a maximum and outputs of its own, which are merged as those of any
// other warp. Parts meet in the block that ends last: no second launch.
#pragma once

#include "cuda/block_decode.cuh"

namespace kvant::cuda {

// Queries into shared memory as [vector][channel], scaled to a peak of 1: a vector per warp of the first team. Beside
// them what they were scaled by, in units of log2.
template <class C>
__device__ __forceinline__ void prepare_queries(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
  const int vector = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (vector >= C::vectors) return;
  constexpr int rounds = C::key.dim / 32;
  const std::uint16_t* q = query_row(args, segment, vector);
  float x[rounds];
  float peak = 1e-30F;
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    x[i] = q != nullptr ? ptx::widen2<C::bfloat>(q[32 * i + lane]).x : 0.0F;
    peak = fmaxf(peak, fabsf(x[i]));
  }
  peak = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(peak)))));
  const float factor = 1.0F / peak;
  float* to = reinterpret_cast<float*>(shared) + vector * C::key.dim + lane;
#pragma unroll
  for (int i = 0; i < rounds; ++i) to[32 * i] = x[i] * factor;
  if (lane == 0) reinterpret_cast<float*>(shared + C::scale_offset)[vector] = peak * args.scale * kLog2e;
}

// The layout of a sequence, from the launch or from memory.
__device__ __forceinline__ void place_segment(const TeamLayout& layout, Segment& segment, int& first_page) {
  const int b = segment.sequence;
  const bool in_memory = layout.memory.first_page != nullptr;
  first_page = in_memory ? layout.memory.first_page[b] : layout.first_page[b];
  segment.coded_end = in_memory ? layout.memory.coded_pages[b] : layout.coded_pages[b];
  segment.sinks = in_memory ? layout.memory.sinks[b] : layout.sinks[b];
}

// Grid: (blocks of vectors, KV heads, sequences * parts). Which pages are whose follows from the plan alone, not from
// lengths, which the predecessor in the stream may still write: pages come before waiting for it where they may.
template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    block_team_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ TeamLayout layout, int parts,
                      const __grid_constant__ BlockFormat format) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  ptx::release_dependents();
  if (args.pages_settled == 0) ptx::wait_for_predecessor();
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int teams = warps / C::team;
  const VectorBlock early(args, C::vectors, parts);  // only of what does not depend on lengths
  Segment segment = early.segment;
  int first_page = 0;
  place_segment(layout, segment, first_page);
  const Share pages(segment.coded_end - first_page, early.part, parts);
  const std::int32_t* table = args.table + segment.sequence * args.table_stride + first_page;
  const auto page_of = [&](int i) { return i < pages.end ? args.pages + table[i] * args.page_stride : nullptr; };

  BlockWarp<C> worker(args, format, segment, shared);
  int i = pages.begin + warp / C::team;
  const std::uint8_t* page = page_of(i);
  worker.fetch_keys(page);
  worker.fetch_values(page);
  if (args.pages_settled != 0) ptx::wait_for_predecessor();

  const Lane lane;
  const VectorBlock block(args, C::vectors, parts);
  prepare_queries<C>(args, segment, shared);
  worker.clear_scores();
  __syncthreads();
  worker.take_queries(shared);
  worker.see_lengths();
  WarpState<C> state;
  state.reset();
  state.last[0] = block.row_end(args, lane.t);
  state.first[0] = args.window > 0 ? max(0, state.last[0] - args.window) : 0;
  for (int first = pages.begin; first < pages.end; first += teams, i += teams) {
    if (i >= pages.end) {
      worker.sit_out();
      break;
    }
    worker.wait_keys();
    worker.score();
    const std::uint8_t* next = page_of(i + teams);
    worker.fetch_keys(next);
    worker.wait_values();
    worker.mix(page, (first_page + i) * kPage, state);
    worker.meet();
    worker.fetch_values(next);
    page = next;
  }
  worker.finish(state);

  const int sink_tiles = (segment.sinks + kTile - 1) / kTile;
  const int tail_tiles = max(0, (block.most - segment.coded_end * kPage + kTile - 1) / kTile);
  const Share tiles(sink_tiles + tail_tiles, block.part, parts);
  for (int tile = tiles.begin + warp; tile < tiles.end; tile += warps) {
    const ExactTile exact = exact_tile<C>(args, segment, segment.coded_end + tile);
    if (exact.data != nullptr) add_exact_tile<C>(args, segment, exact, state, lane);
  }

  merge_warps_and_parts<C>(args, block, shared, state, lane);
}

}  // namespace kvant::cuda
