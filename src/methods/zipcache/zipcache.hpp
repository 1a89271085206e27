#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// ZipCache (He et al. 2024, arXiv 2405.14256) page by page: salient tokens wide, the others narrow, values
// channel-separable. README.md has the equations and the layout.
Method zipcache();

}  // namespace kvant::catalog
