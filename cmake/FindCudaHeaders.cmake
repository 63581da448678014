# Finds the headers <cuda.h> and <cuda_runtime_api.h>, nothing else: no compiler, no libcuda.
#
# Looks, in this order, in LOWTIDE_CUDA_INCLUDE (a list the caller may set), in the nvidia/cu* wheel beside torch, in a CUDA
# toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda). The wheel comes first because it always matches torch. Torch's own
# dependencies bring cuda_runtime_api.h without the crt/ folder that it includes; that folder is taken from the nvidia-cuda-crt
# wheel (`pip install 'cuda-toolkit[crt]'`), else from a toolkit, else from the copy inside triton.
#
# Input:   LOWTIDE_SITE_PACKAGES   folders to search for wheels (FindTorchWheel or LowtidePython set it)
# Result:  CudaHeaders_FOUND, CudaHeaders_INCLUDE_DIRS, CudaHeaders_VERSION, target CudaHeaders::headers

include(FindPackageHandleStandardArgs)

set(_cuda_wheel_dirs "")
set(_crt_wheel_dirs "")
foreach(_site IN LISTS LOWTIDE_SITE_PACKAGES)
  file(GLOB _found "${_site}/nvidia/cu[0-9]*/include" "${_site}/nvidia/cuda_runtime/include")
  list(SORT _found COMPARE NATURAL ORDER DESCENDING)
  list(APPEND _cuda_wheel_dirs ${_found})
  list(APPEND _crt_wheel_dirs "${_site}/triton/backends/nvidia/include")
endforeach()

set(_cuda_toolkit_dirs "")
foreach(_root IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" "/usr/local/cuda")
  if(_root)
    list(APPEND _cuda_toolkit_dirs "${_root}/include" "${_root}/targets/x86_64-linux/include")
  endif()
endforeach()

set(CudaHeaders_INCLUDE_DIRS "")
foreach(_dir IN LISTS LOWTIDE_CUDA_INCLUDE _cuda_wheel_dirs _cuda_toolkit_dirs)
  if(EXISTS "${_dir}/cuda.h" AND EXISTS "${_dir}/cuda_runtime_api.h")
    set(CudaHeaders_INCLUDE_DIRS "${_dir}")
    break()
  endif()
endforeach()

if(CudaHeaders_INCLUDE_DIRS AND NOT EXISTS "${CudaHeaders_INCLUDE_DIRS}/crt/host_defines.h")
  foreach(_dir IN LISTS _cuda_toolkit_dirs _crt_wheel_dirs)
    if(EXISTS "${_dir}/crt/host_defines.h")
      # The crt/ headers are copied rather than put on the include path whole, so that no other header of that folder is found.
      file(COPY "${_dir}/crt" DESTINATION "${CMAKE_CURRENT_BINARY_DIR}/cuda_crt")
      list(APPEND CudaHeaders_INCLUDE_DIRS "${CMAKE_CURRENT_BINARY_DIR}/cuda_crt")
      break()
    endif()
  endforeach()
endif()

if(CudaHeaders_INCLUDE_DIRS)
  list(GET CudaHeaders_INCLUDE_DIRS 0 _dir)
  file(STRINGS "${_dir}/cuda.h" _line REGEX "^#define CUDA_VERSION [0-9]+" LIMIT_COUNT 1)
  if(_line MATCHES "([0-9]+)$")
    math(EXPR _major "${CMAKE_MATCH_1} / 1000")
    math(EXPR _minor "(${CMAKE_MATCH_1} % 1000) / 10")
    set(CudaHeaders_VERSION "${_major}.${_minor}")
  endif()
endif()

find_package_handle_standard_args(CudaHeaders
  REQUIRED_VARS CudaHeaders_INCLUDE_DIRS
  VERSION_VAR CudaHeaders_VERSION
  REASON_FAILURE_MESSAGE
    "cuda.h was found neither in the site-packages of the chosen Python nor in a CUDA toolkit. PyPI's torch brings it: \
`pip install torch`. Otherwise set CUDA_HOME, or LOWTIDE_CUDA_INCLUDE to the folder that holds cuda.h.")

if(CudaHeaders_FOUND AND NOT TARGET CudaHeaders::headers)
  add_library(CudaHeaders::headers INTERFACE IMPORTED)
  set_target_properties(CudaHeaders::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${CudaHeaders_INCLUDE_DIRS}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${CudaHeaders_INCLUDE_DIRS}")
endif()
