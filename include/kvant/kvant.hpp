// Everything in one include.
#pragma once

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "kvant/calibration.hpp"
#include "kvant/error.hpp"
#include "kvant/layout.hpp"
#include "kvant/page_store.hpp"
#include "kvant/recipe.hpp"
#include "kvant/rotation.hpp"
#include "kvant/runtime.hpp"
#include "kvant/types.hpp"
