# torch_declarations/cublas_workspaces.h: the part of ATen/cuda/CUDAContextLight.h that Lowtide needs, cut out of the header of the
# torch that is built against. The whole header also includes those of every CUDA library, which are not all there where torch is
# installed, and the type differs between torch's minor releases.

function(lowtide_torch_declarations target)
  set(source "${TorchWheel_DIR}/include/ATen/cuda/CUDAContextLight.h")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  set(declarations "")
  if(EXISTS "${source}")
    file(READ "${source}" text)
    string(REPLACE ";" "<semicolon>" text "${text}")
    foreach(pattern IN ITEMS
        "struct WorkspaceMapWithMutex {[^}]*}<semicolon>"
        "TORCH_CUDA_CPP_API WorkspaceMapWithMutex& cublas_handle_stream_to_workspace\\(\\)<semicolon>"
        "TORCH_CUDA_CPP_API WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace\\(\\)<semicolon>")
      string(REGEX MATCH "${pattern}" declaration "${text}")
      if(NOT declaration)
        set(declarations "")
        break()
      endif()
      string(APPEND declarations "${declaration}\n")
    endforeach()
    string(REPLACE "<semicolon>" ";" declarations "${declarations}")
  endif()
  if(NOT declarations)
    message(FATAL_ERROR "torch ${TorchWheel_VERSION_FULL} declares its cuBLAS workspaces otherwise than Lowtide knows: look for "
                        "WorkspaceMapWithMutex in ${source} and adapt cmake/TorchDeclarations.cmake.")
  endif()
  set(folder "${CMAKE_BINARY_DIR}/generated")
  file(CONFIGURE OUTPUT "${folder}/torch_declarations/cublas_workspaces.h" @ONLY CONTENT "#pragma once
// Cut out of ATen/cuda/CUDAContextLight.h of torch @TorchWheel_VERSION_FULL@ by cmake/TorchDeclarations.cmake.

#include <c10/core/Allocator.h>
#include <torch/headeronly/macros/Export.h>

#include <cstddef>
#include <map>
#include <shared_mutex>
#include <tuple>
#include <utility>

namespace at::cuda {

@declarations@
}  // namespace at::cuda
")
  target_include_directories(${target} PRIVATE "${folder}")
endfunction()
