#include "cuda/block_reader.hpp"
#include "cuda/check.hpp"
#include "cuda/ptx.cuh"
#include "cuda/reference.hpp"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 256;

template <bool Bfloat>
__device__ double widen(const std::uint8_t* p) {
  return ptx::widen2<Bfloat>(*reinterpret_cast<const std::uint16_t*>(p)).x;
}

__device__ int field(const std::uint8_t* quad, const CodePlace& place, int bits) {
  return quad[place.lane * 16 + place.word * 4 + place.byte] >> (place.position * bits) & ((1 << bits) - 1);
}

// A code of the main planes: `row` and `depth` as CodePlace has them.
__device__ int load_code(int bits, const std::uint8_t* codes, const std::uint8_t* plane1, const CodePlace& place) {
  const int low = field(codes, place, bits == 4 ? 4 : 2);
  if (bits != 3) return low;
  CodePlace high = place;
  high.position = plane1_bit(place.group, place.position);
  return low | field(plane1, high, 1) << 2;
}

template <bool Bfloat>
struct CodedPage {
  const DeviceFormat& f;
  const std::uint8_t* keys;
  int boosted;

  __device__ int token(int place) const { return place; }
  // The channel in place i of the page.
  __device__ int channel(int i) const { return f.key.sorted() ? keys[f.key.index_offset() + i] : i; }
  __device__ double key_at(int token, int i, int /*position*/) const {
    return f.key.sorted() ? sorted_key(token, i) : uniform_key(token, i);
  }

  __device__ double uniform_key(int token, int channel) const {
    const CodePlace place = place_of(f.key.bits, token, channel);
    const int quad = (place.group * f.key.quads_per_group() + place.step) * kQuadBytes;
    int code = load_code(f.key.bits, keys + f.key.codes_offset() + quad,
                         keys + f.key.plane1_offset() + place.step * kQuadBytes, place);
    double low = widen<Bfloat>(keys + key_endpoint_offset(channel));
    double high = widen<Bfloat>(keys + key_endpoint_offset(channel) + 8);
    int levels = (1 << f.key.bits) - 1;
    for (int i = 0; i < boosted; ++i) {
      if (keys[f.key.index_offset() + i] != channel) continue;
      const CodePlace second = place_of(2, token, f.key.dim + i);
      code |= field(keys + f.key.codes_offset() + (second.group * f.key.quads_per_group() + second.step) * kQuadBytes,
                    second, 2)
              << 2;
      levels = 15;
      const double swap = low;
      low = high;
      high = swap;
    }
    return low + code * ((high - low) / levels);
  }
  __device__ double sorted_key(int token, int i) const {
    const std::uint8_t* counts = keys + f.key.counts_offset();
    const int six = counts[0], four = counts[1], five = counts[2], one = counts[3], three = counts[4], two = counts[5];
    // The planes of the CPU's page (src/cache/tile.hpp): bits, shift, first four, fours.
    const int planes[4][4] = {{4, 1, 0, six + four + five},
                              {1, 0, six + four, five + one + three},
                              {2, 1, six + four + five + one, three + two},
                              {2, 5, 0, six}};
    const std::uint8_t* plane = keys + f.key.codes_offset();
    int code = 0;
    int levels = 0;
    for (const auto& [bits, shift, first, fours] : planes) {
      const int k = i / kFour - first;
      const int most = (1 << bits) - 1;
      if (k >= 0 && k < fours) {
        const FieldPlace at = sorted_place(bits, k, i % kFour, token);
        code |= (plane[at.byte] >> at.shift & most) << shift;
        levels |= most << shift;
      }
      plane += bits * fours * kFourBytes;
    }
    const std::uint8_t* ends = keys + i / kFour * 16 + i % kFour * 2;
    const double low = widen<Bfloat>(ends);
    return low + code * ((widen<Bfloat>(ends + 8) - low) / levels);
  }
  __device__ double value(int token, int channel) const {
    const std::uint8_t* values = keys + f.key.bytes();
    const CodePlace place = place_of(f.value.bits, channel, value_slot(token));
    const std::uint8_t* half = values + token / 64 * f.value.half_bytes();
    const int code =
        load_code(f.value.bits, half + f.value.codes_offset() + (place.group * 2 + place.step % 2) * kQuadBytes,
                  half + f.value.plane1_offset() + (place.group / 2 * 2 + place.step % 2) * kQuadBytes, place);
    const std::uint8_t* ends = values + value_endpoint_offset(f.value, token);
    const double low = widen<Bfloat>(ends);
    return low + code * ((widen<Bfloat>(ends + 128) - low) / ((1 << f.value.bits) - 1));
  }
};

// The two kinds of coded pages of one head; null: the page is exact, nothing of it is read.
template <bool Bfloat>
struct TunedPages {
  const DeviceFormat f;

  __device__ CodedPage<Bfloat> get(const DecodeArgs& args, const std::uint8_t* page, int head) const {
    const std::int64_t offset = static_cast<std::int64_t>(head) * static_cast<std::int64_t>(f.head_bytes());
    return {f, page == nullptr ? nullptr : page + offset, args.boosted};
  }
};

template <bool Bfloat>
struct WidenPair {
  __device__ double operator()(const std::uint8_t* p) const { return widen<Bfloat>(p); }
};

template <bool Bfloat>
struct BlockPages {
  const BlockFormat f;

  // A page that is not read may be any bytes, of the exact ones where there is no other: the counts of its widths are
  // still looked at.
  __device__ BlockReader<WidenPair<Bfloat>> get(const DecodeArgs& args, const std::uint8_t* page, int head) const {
    return {f, page != nullptr ? page : args.pages != nullptr ? args.pages : args.exact, head, {}};
  }
};

// One block per (query head, row, sequence), page by page: a thread per place for scores, per channel for outputs.
template <bool Bfloat, class Pages>
__global__ void __launch_bounds__(kThreads)
    reference_kernel(const DecodeArgs args, const ReferenceArgs reference, const DeviceFormat f, const Pages pages) {
  __shared__ double weight[kPage];
  __shared__ double q[256];
  __shared__ double turned[256];
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const auto sequence = static_cast<std::int64_t>(blockIdx.z);
  const int kv_head = head / args.group;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* query =
      static_cast<const std::uint16_t*>(args.q) + sequence * args.q_sequence + row * args.q_row + head * args.q_head;
  if (thread < f.key.dim) q[thread] = ptx::widen2<Bfloat>(query[thread]).x;
  const int length = args.lengths[sequence];
  const int last = length - args.rows + row + 1;
  const int first = args.window > 0 ? max(0, last - args.window) : 0;
  const int coded = reference.coded_pages[sequence];
  const int sinks = reference.sinks[sequence];
  const std::int32_t* table = args.table + sequence * args.table_stride;
  const std::int32_t* exact_table = args.exact_table + sequence * args.exact_table_stride;

  double maximum = -INFINITY;
  double sum = 0;
  double out = 0;
  double rotated = 0;  // the same sum over pages whose values are rotated
  // page -1: the sinks; pages from `coded` on: the open tail.
  for (int page = -1; page * kPage < length; ++page) {
    const bool is_sink = page < 0;
    const bool is_exact = is_sink || page >= coded;
    if (is_sink && sinks == 0) continue;
    if (!is_exact && page < reference.first_page[sequence]) continue;
    const int position = is_sink ? 0 : page * kPage;
    const std::uint8_t* exact = nullptr;
    if (is_exact) {
      exact = args.exact + exact_table[is_sink ? 0 : 1 + page - coded] * args.exact_stride +
              static_cast<std::int64_t>(kv_head) * f.exact.page_bytes();
    }
    const auto coded_page = pages.get(args, is_exact ? nullptr : args.pages + table[page] * args.page_stride, kv_head);
    __syncthreads();
    if (thread < kPage) {
      const int at = position + (is_exact ? thread : coded_page.token(thread));
      double score = 0;
      for (int d = 0; d < f.key.dim; ++d) {
        score += is_exact ? q[d] * widen<Bfloat>(exact + f.exact.key_at(thread, d))
                          : q[coded_page.channel(d)] * coded_page.key_at(thread, d, at);
      }
      score *= args.scale;
      if (args.softcap > 0) score = args.softcap * tanh(score / args.softcap);
      const bool here = is_sink ? at < sinks : is_exact || at >= sinks;
      weight[thread] = here && at >= first && at < last ? score : -INFINITY;
    }
    __syncthreads();
    double peak = maximum;
    for (int t = 0; t < kPage; ++t) peak = fmax(peak, weight[t]);
    if (peak == -INFINITY) continue;
    const double alpha = maximum == -INFINITY ? 0.0 : exp(maximum - peak);
    sum *= alpha;
    out *= alpha;
    rotated *= alpha;
    for (int t = 0; t < kPage; ++t) {
      if (weight[t] == -INFINITY) continue;
      const double p = exp(weight[t] - peak);
      sum += p;
      if (thread >= f.value.dim) continue;
      if (is_exact) {
        out += p * widen<Bfloat>(exact + f.exact.value_at(t, thread));
      } else {
        (f.rotation > 1 ? rotated : out) += p * coded_page.value(t, thread);
      }
    }
    maximum = peak;
  }
  if (f.rotation > 1) {
    turned[thread] = rotated;
    __syncthreads();
    const int first = thread / f.rotation * f.rotation;
    for (int i = 0; i < f.rotation && thread < f.value.dim; ++i) {
      out += (__popc(static_cast<unsigned>(i & thread & (f.rotation - 1))) & 1) != 0 ? -turned[first + i]
                                                                                     : turned[first + i];
    }
  }
  if (args.sinks != nullptr && args.sinks[head] != -INFINITY) {
    const double sink = args.sinks[head];
    const double peak = fmax(maximum, sink);
    const double alpha = maximum == -INFINITY ? 0.0 : exp(maximum - peak);
    sum = sum * alpha + exp(sink - peak);
    out *= alpha;
    maximum = peak;
  }
  if (thread < f.value.dim) {
    auto* to = static_cast<std::uint16_t*>(args.out) + sequence * args.out_sequence + row * args.out_row +
               head * args.out_head + thread;
    *to = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(sum > 0 ? static_cast<float>(out / sum) : 0.0F, 0));
  }
  if (args.lse != nullptr && thread == 0) {
    args.lse[(sequence * args.rows + row) * args.kv_heads * args.group + head] =
        sum > 0 ? static_cast<float>(maximum + log(sum)) : -INFINITY;
  }
}

}  // namespace

void launch_reference(const DeviceFormat& format, const BlockFormat& block, const DecodeArgs& args,
                      const ReferenceArgs& reference, int sequences, void* stream) {
  if (sequences == 0) return;
  const dim3 grid(static_cast<unsigned>(args.kv_heads * args.group), static_cast<unsigned>(args.rows),
                  static_cast<unsigned>(sequences));
  const auto launch = [&](const auto kernel, const auto& pages) {
    kernel<<<grid, kThreads, 0, as_stream(stream)>>>(args, reference, format, pages);
  };
  if (block.present() && format.bfloat) {
    launch(&reference_kernel<true, BlockPages<true>>, BlockPages<true>{block});
  } else if (block.present()) {
    launch(&reference_kernel<false, BlockPages<false>>, BlockPages<false>{block});
  } else if (format.bfloat) {
    launch(&reference_kernel<true, TunedPages<true>>, TunedPages<true>{format});
  } else {
    launch(&reference_kernel<false, TunedPages<false>>, TunedPages<false>{format});
  }
  check(cudaGetLastError(), "launch of the reference kernel");
}

}  // namespace kvant::cuda
