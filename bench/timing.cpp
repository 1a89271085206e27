#include "bench/timing.hpp"

#include <algorithm>
#include <cmath>
#include <ctime>

namespace kvant::bench {
namespace {

double seconds_by(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

// Units of work in a sample, from the fastest of a few.
int units_for(const Work& work, double sample_seconds) {
  double fastest = work(1);
  for (int i = 0; i < 4 && fastest < sample_seconds; ++i) fastest = std::min(fastest, work(1));
  return static_cast<int>(std::clamp(std::ceil(sample_seconds / std::max(fastest, 1e-9)), 1.0, 1e6));
}

}  // namespace

double seconds_of(const std::function<void()>& body) {
  const double start = seconds_by(CLOCK_THREAD_CPUTIME_ID);
  body();
  return seconds_by(CLOCK_THREAD_CPUTIME_ID) - start;
}

double wall_seconds_of(const std::function<void()>& body) {
  const double start = seconds_by(CLOCK_MONOTONIC);
  body();
  return seconds_by(CLOCK_MONOTONIC) - start;
}

double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

double spread(const std::vector<double>& values) {
  return (quantile(values, 0.75) - quantile(values, 0.25)) / 2 / quantile(values, 0.5);
}

std::vector<double> Samples::ratios(std::size_t over, std::size_t under) const {
  std::vector<double> quotients;
  quotients.reserve(seconds[over].size());
  for (std::size_t i = 0; i < seconds[over].size(); ++i) quotients.push_back(seconds[over][i] / seconds[under][i]);
  return quotients;
}

Samples interleave(const std::vector<Work>& works, int rounds, double sample_seconds) {
  std::vector<int> units;
  units.reserve(works.size());
  for (const Work& work : works) units.push_back(units_for(work, sample_seconds));
  Samples samples;
  samples.seconds.resize(works.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i](1);
      samples.seconds[i].push_back(works[i](units[i]) / units[i]);
    }
  }
  return samples;
}

}  // namespace kvant::bench
