// Progress on standard error: one line that counts up on a terminal, a line now and then elsewhere.
#pragma once

#include <functional>
#include <string>

namespace kvant::cli {

class Progress {
 public:
  explicit Progress(int steps);
  // Starts the next step; the returned function takes the seconds it has run.
  std::function<void(double)> step(const std::string& label);
  void done(double seconds, const std::string& result);

 private:
  void show(double seconds);

  bool terminal_;
  int steps_;
  int current_ = 0;
  std::string label_;
  double shown_ = 0;
};

}  // namespace kvant::cli
