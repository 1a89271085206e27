// The registry entry and the one device in it.
#pragma once

#include "ggml_abi.hpp"

namespace kvant::llama {

// The registry entry with the device on the first call, and one without devices on every later call: some hosts load
// the same file twice and would list the device twice. Only to be called when host and configuration are known.
abi::Reg* make_registry();

}  // namespace kvant::llama
