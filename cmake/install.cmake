# Installation: headers, library with its CMake package and pkg-config file, the command and the llama.cpp plug-in.
include(CMakePackageConfigHelpers)

set(KVANT_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvant)

install(TARGETS kvant EXPORT kvant-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(KVANT_HAS_CUDA)
  install(TARGETS kvant_cuda EXPORT kvant-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY include/kvant DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
else()
  install(DIRECTORY include/kvant DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN cuda.h* EXCLUDE)
endif()
install(EXPORT kvant-targets NAMESPACE kvant:: DESTINATION ${KVANT_CMAKE_DIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# A static library leaves its own dependencies to whoever links it; a shared one does not.
get_target_property(KVANT_LIBRARY_TYPE kvant TYPE)
set(KVANT_PC_DEPENDENCIES "libhwy libxxhash")
if(KVANT_LIBRARY_TYPE STREQUAL "STATIC_LIBRARY")
  set(KVANT_NEEDS_DEPENDENCIES ON)
  set(KVANT_PC_REQUIRES ${KVANT_PC_DEPENDENCIES})
  set(KVANT_PC_LIBS ${OpenMP_CXX_FLAGS})
else()
  set(KVANT_NEEDS_DEPENDENCIES OFF)
endif()

configure_package_config_file(cmake/kvant-config.cmake.in ${PROJECT_BINARY_DIR}/kvant-config.cmake
  INSTALL_DESTINATION ${KVANT_CMAKE_DIR})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvant-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvant-config.cmake ${PROJECT_BINARY_DIR}/kvant-config-version.cmake
  DESTINATION ${KVANT_CMAKE_DIR})

# The prefix is written relative to the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH KVANT_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/kvant.pc.in ${PROJECT_BINARY_DIR}/kvant.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvant.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(KVANT_HAS_CUDA)
  configure_file(cmake/kvant-cuda.pc.in ${PROJECT_BINARY_DIR}/kvant-cuda.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/kvant-cuda.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

if(TARGET kvant_command)
  file(RELATIVE_PATH KVANT_LIB_FROM_BIN ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(kvant_command PROPERTIES INSTALL_RPATH "$ORIGIN/${KVANT_LIB_FROM_BIN}")
  install(TARGETS kvant_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(TARGET kvant_llama)
  # plugin/llama.cpp installs it beside the library.
  set_target_properties(kvant_llama PROPERTIES INSTALL_RPATH "$ORIGIN")
endif()
