#include <gtest/gtest.h>
#include "kvant/kvant.hpp"
TEST(Smoke, Kernels) { for (auto& n : kvant::kernel_names()) std::printf("%s\n", n.c_str()); }
