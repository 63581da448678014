# Finds the torch that is installed as a Python package, without find_package(Torch), which demands a CUDA toolkit.
#
# Input, each optional, first match wins:
#   TorchWheel_ROOT       the folder of the torch package itself (…/site-packages/torch)
#   LOWTIDE_PYTHON        the Python whose torch to use
#   Python_EXECUTABLE     the same, as FindPython names it
#   $VIRTUAL_ENV/bin/python, python3 on the PATH
# Torch is located, never imported: what is asked of Python is where its packages are; the rest is read from torch's files. Each
# Python is asked once as it is and once with -I, which leaves PYTHONPATH out: that is how the torch of the environment is seen from
# inside pip's isolated build environment.
#
# Result:
#   TorchWheel_FOUND, TorchWheel_VERSION (2.11.0), TorchWheel_VERSION_FULL (2.11.0+cu130), TorchWheel_MINOR (2.11)
#   TorchWheel_CUDA_VERSION, TorchWheel_CXX11_ABI, TorchWheel_DIR, TorchWheel_LIBRARY_DIR, TorchWheel_INCLUDE_DIRS
#   LOWTIDE_SITE_PACKAGES (extended)
# Targets: TorchWheel::c10, TorchWheel::torch (c10, c10_cuda, torch_cpu, torch_cuda, cudart), TorchWheel::python (and torch_python)

include(FindPackageHandleStandardArgs)
include("${CMAKE_CURRENT_LIST_DIR}/LowtidePython.cmake")

set(TorchWheel_DIR "")
set(_torch_reason "")
if(TorchWheel_ROOT)
  if(EXISTS "${TorchWheel_ROOT}/version.py")
    set(TorchWheel_DIR "${TorchWheel_ROOT}")
    get_filename_component(_site "${TorchWheel_DIR}" DIRECTORY)
    list(PREPEND LOWTIDE_SITE_PACKAGES "${_site}")
  else()
    set(_torch_reason "TorchWheel_ROOT is ${TorchWheel_ROOT}, which holds no torch package.")
  endif()
else()
  lowtide_python_packages(torch TorchWheel_DIR _torch_python _torch_sites _torch_asked)
  if(TorchWheel_DIR)
    list(APPEND LOWTIDE_SITE_PACKAGES ${_torch_sites})
  else()
    list(JOIN _torch_asked ", " _torch_asked)
    set(_torch_reason
        "None of these Pythons has torch: ${_torch_asked}. Install torch into the one that will use Lowtide, or name another by \
-DLOWTIDE_PYTHON=/path/to/python.")
  endif()
endif()

if(TorchWheel_DIR)
  get_filename_component(_site "${TorchWheel_DIR}" DIRECTORY)
  list(PREPEND LOWTIDE_SITE_PACKAGES "${_site}")
  list(REMOVE_DUPLICATES LOWTIDE_SITE_PACKAGES)

  file(STRINGS "${TorchWheel_DIR}/version.py" _lines REGEX "^(__version__|cuda)")
  foreach(_line IN LISTS _lines)
    if(_line MATCHES "^__version__ *= *'([^']+)'")
      set(TorchWheel_VERSION_FULL "${CMAKE_MATCH_1}")
    elseif(_line MATCHES "^cuda.*= *'([^']+)'")
      set(TorchWheel_CUDA_VERSION "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" TorchWheel_VERSION "${TorchWheel_VERSION_FULL}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" TorchWheel_MINOR "${TorchWheel_VERSION_FULL}")

  set(TorchWheel_LIBRARY_DIR "${TorchWheel_DIR}/lib")
  set(TorchWheel_INCLUDE_DIRS "${TorchWheel_DIR}/include" "${TorchWheel_DIR}/include/torch/csrc/api/include")
  if(EXISTS "${TorchWheel_LIBRARY_DIR}/libc10.so")
    file(STRINGS "${TorchWheel_LIBRARY_DIR}/libc10.so" _line REGEX "__cxx11" LIMIT_COUNT 1)
    if(_line)
      set(TorchWheel_CXX11_ABI 1)
    else()
      set(TorchWheel_CXX11_ABI 0)
    endif()
  endif()
  if(NOT EXISTS "${TorchWheel_LIBRARY_DIR}/libtorch_cuda.so")
    set(_torch_reason "torch ${TorchWheel_VERSION_FULL} in ${TorchWheel_DIR} was built without CUDA; Lowtide needs the CUDA build, "
                      "which is what PyPI serves for Linux (it runs without a GPU too).")
    list(JOIN _torch_reason "" _torch_reason)
    set(TorchWheel_LIBRARY_DIR "")
  endif()
endif()

if(TorchWheel_DIR AND TorchWheel_LIBRARY_DIR)
  if(TorchWheel_FIND_QUIETLY)
    find_package(CudaHeaders MODULE QUIET)
  else()
    find_package(CudaHeaders MODULE)
  endif()
  if(NOT CudaHeaders_FOUND)
    set(_torch_reason "torch was found, the CUDA headers were not (see above).")
    set(TorchWheel_LIBRARY_DIR "")
  endif()
endif()

find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS TorchWheel_DIR TorchWheel_LIBRARY_DIR TorchWheel_VERSION
  VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "${_torch_reason}")

if(TorchWheel_FOUND AND NOT TARGET TorchWheel::torch)
  function(_torch_wheel_library name)
    add_library(TorchWheel::${name} SHARED IMPORTED)
    set_target_properties(TorchWheel::${name} PROPERTIES
      IMPORTED_LOCATION "${TorchWheel_LIBRARY_DIR}/lib${name}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${TorchWheel_INCLUDE_DIRS}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TorchWheel_INCLUDE_DIRS}"
      INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${TorchWheel_CXX11_ABI}")
  endfunction()
  foreach(_name IN ITEMS c10 c10_cuda torch_cpu torch_cuda torch_python)
    _torch_wheel_library(${_name})
  endforeach()
  set_property(TARGET TorchWheel::c10_cuda PROPERTY INTERFACE_LINK_LIBRARIES TorchWheel::c10 CudaHeaders::headers)
  set_property(TARGET TorchWheel::torch_cpu PROPERTY INTERFACE_LINK_LIBRARIES TorchWheel::c10)

  # Torch's headers call the CUDA runtime inline; the library is the one that libc10_cuda.so itself loads.
  set(_cudart "")
  foreach(_site IN LISTS LOWTIDE_SITE_PACKAGES)
    file(GLOB _found "${_site}/nvidia/cu[0-9]*/lib/libcudart.so.*" "${_site}/nvidia/cuda_runtime/lib/libcudart.so.*"
                     "${_site}/torch/lib/libcudart*.so*")
    list(APPEND _cudart ${_found})
  endforeach()
  foreach(_root IN ITEMS "$ENV{CUDA_HOME}" "/usr/local/cuda")
    file(GLOB _found "${_root}/lib64/libcudart.so.[0-9]*")
    list(APPEND _cudart ${_found})
  endforeach()
  set(TorchWheel_CUDART "")
  add_library(TorchWheel::cudart INTERFACE IMPORTED)
  if(_cudart)
    list(GET _cudart 0 TorchWheel_CUDART)
    set_property(TARGET TorchWheel::cudart PROPERTY INTERFACE_LINK_LIBRARIES "${TorchWheel_CUDART}")
  endif()

  # Every one of them is made a direct dependency, used or not: libtorch_cuda.so registers torch's CUDA support when it is loaded, and
  # a program whose own run path names torch's folder then finds the rest for the libraries it loads.
  set(_torch_libraries "")
  foreach(_name IN ITEMS c10 c10_cuda torch_cpu torch_cuda)
    list(APPEND _torch_libraries "${TorchWheel_LIBRARY_DIR}/lib${_name}.so")
  endforeach()
  list(APPEND _torch_libraries ${TorchWheel_CUDART})
  list(JOIN _torch_libraries "," _torch_libraries)
  add_library(TorchWheel::torch INTERFACE IMPORTED)
  set_property(TARGET TorchWheel::torch PROPERTY INTERFACE_LINK_LIBRARIES
    "-Wl,--push-state,--no-as-needed,${_torch_libraries},--pop-state"
    TorchWheel::torch_cpu TorchWheel::torch_cuda TorchWheel::c10_cuda TorchWheel::c10 TorchWheel::cudart CudaHeaders::headers)
  add_library(TorchWheel::python INTERFACE IMPORTED)
  set_property(TARGET TorchWheel::python PROPERTY INTERFACE_LINK_LIBRARIES TorchWheel::torch_python TorchWheel::torch)
endif()
