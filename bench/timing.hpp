// Samples of interleaved work.
#pragma once

#include <functional>
#include <vector>

namespace kvant::bench {

// Does `units` units of work and returns the seconds that the measured part of them took.
using Work = std::function<double(int units)>;

// Seconds that this thread computes for while body runs: on a shared machine the time given to others is no part of it.
double seconds_of(const std::function<void()>& body);

// Wall time, for work of several threads.
double wall_seconds_of(const std::function<void()>& body);

double median(std::vector<double> values);
// Half the distance between the quartiles, relative to the median: how much of a difference is noise.
double spread(const std::vector<double>& values);

struct Samples {
  std::vector<std::vector<double>> seconds;  // [work][round], per unit of work

  double median_of(std::size_t work) const { return median(seconds[work]); }
  // Median and spread of seconds[over] / seconds[under], each quotient from one round.
  double ratio(std::size_t over, std::size_t under) const { return median(ratios(over, under)); }
  double ratio_spread(std::size_t over, std::size_t under) const { return spread(ratios(over, under)); }

 private:
  std::vector<double> ratios(std::size_t over, std::size_t under) const;
};

// A B C A B C ...: `rounds` samples of each work, each at least sample_seconds long and behind one unit that does not
// count.
Samples interleave(const std::vector<Work>& works, int rounds, double sample_seconds);

}  // namespace kvant::bench
