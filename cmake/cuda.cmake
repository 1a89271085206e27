# KVANT_CUDA: AUTO uses a CUDA compiler where there is one, ON requires it, OFF does not look. Off by default: all kernels take
# an hour to compile on two cores, and whoever installs the library or the Python package must not get that unasked.
set(KVANT_CUDA OFF CACHE STRING "Build kvant_cuda: AUTO, ON or OFF")
set_property(CACHE KVANT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KVANT_HAS_CUDA OFF)
if(NOT KVANT_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Kernels are tuned on sm_90a; sm_80 code with its PTX serves everything else that has compute capability 8.0.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "80;90a-real")
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it for every nvcc that has it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA_STANDARD_LATEST 20)
    endif()
    set(KVANT_HAS_CUDA ON)
  elseif(KVANT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVANT_CUDA is ON but no CUDA compiler was found (set CMAKE_CUDA_COMPILER or PATH)")
  endif()
endif()
