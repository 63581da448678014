# Installs libraries, headers, CMake package and, in a wheel, the Python package. The two libraries are two export sets, because a
# program can use the core without torch.

include(CMakePackageConfigHelpers)

install(TARGETS lowtide EXPORT LowtideCore
        LIBRARY DESTINATION "${LOWTIDE_INSTALL_LIBDIR}" COMPONENT lowtide)
install(EXPORT LowtideCore FILE LowtideCoreTargets.cmake NAMESPACE Lowtide:: DESTINATION "${LOWTIDE_INSTALL_CMAKEDIR}" COMPONENT lowtide)
set(_config_modules "")
if(LOWTIDE_BUILD_TORCH)
  install(TARGETS lowtide_torch EXPORT LowtideTorch
          LIBRARY DESTINATION "${LOWTIDE_INSTALL_LIBDIR}" COMPONENT lowtide)
  install(EXPORT LowtideTorch FILE LowtideTorchTargets.cmake NAMESPACE Lowtide:: DESTINATION "${LOWTIDE_INSTALL_CMAKEDIR}" COMPONENT lowtide)
  list(APPEND _config_modules cmake/FindTorchWheel.cmake cmake/FindCudaHeaders.cmake cmake/LowtidePython.cmake)
endif()

foreach(_layer IN ITEMS allocator pool)
  if(LOWTIDE_BUILD_TORCH)
    set(_exclude "")
  else()
    set(_exclude REGEX "/torch(/|$)" EXCLUDE)
  endif()
  install(DIRECTORY ${_layer}/ DESTINATION "${LOWTIDE_INSTALL_INCLUDEDIR}/lowtide/${_layer}" COMPONENT lowtide
          FILES_MATCHING PATTERN "*.h" PATTERN "include" EXCLUDE ${_exclude})
endforeach()
if(LOWTIDE_BUILD_TORCH)
  install(DIRECTORY pool/torch/include/ DESTINATION "${LOWTIDE_INSTALL_INCLUDEDIR}" COMPONENT lowtide FILES_MATCHING PATTERN "*.h")
endif()

configure_package_config_file(cmake/LowtideConfig.cmake.in "${CMAKE_BINARY_DIR}/generated/LowtideConfig.cmake"
  INSTALL_DESTINATION "${LOWTIDE_INSTALL_CMAKEDIR}" NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/generated/LowtideConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/generated/LowtideConfig.cmake" "${CMAKE_BINARY_DIR}/generated/LowtideConfigVersion.cmake" ${_config_modules}
        DESTINATION "${LOWTIDE_INSTALL_CMAKEDIR}" COMPONENT lowtide)

if(SKBUILD)
  install(TARGETS _native LIBRARY DESTINATION lowtide COMPONENT lowtide)
  install(FILES "${LOWTIDE_BUILD_INFO}" DESTINATION lowtide COMPONENT lowtide)
  install(FILES python/startup/_lowtide_startup.py python/startup/lowtide_startup.pth DESTINATION . COMPONENT lowtide)
endif()
