# How each kind of target is compiled: warnings, sanitizers, visibility, run paths.

function(lowtide_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wno-psabi $<$<BOOL:${LOWTIDE_WERROR}>:-Werror>
                         $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)
  if(LOWTIDE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${LOWTIDE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${LOWTIDE_SANITIZE})
  endif()
endfunction()

# The source tree seen as "allocator/x.h", "pool/x.h" and <lowtide/lowtide.h>; installed, the same two folders below include/lowtide.
function(lowtide_include_directories target)
  target_include_directories(${target} PUBLIC
    "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>"
    "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/pool/torch/include>"
    "$<INSTALL_INTERFACE:${LOWTIDE_INSTALL_INCLUDEDIR}>"
    "$<INSTALL_INTERFACE:${LOWTIDE_INSTALL_INCLUDEDIR}/lowtide>")
endfunction()

# Ours beside one another in the package folder; torch's libraries in the neighbouring package, its CUDA runtime in nvidia's. In the
# build tree, and in a plain installation, which has no such neighbours, the folders are named absolutely as well.
function(lowtide_run_path target)
  set(relative "$ORIGIN")
  set(absolute "")
  if(NOT target STREQUAL "lowtide")
    list(APPEND relative "$ORIGIN/../torch/lib")
    list(APPEND absolute "${TorchWheel_LIBRARY_DIR}")
    if(TorchWheel_CUDART)
      get_filename_component(cudart_dir "${TorchWheel_CUDART}" DIRECTORY)
      get_filename_component(site "${TorchWheel_DIR}" DIRECTORY)
      string(FIND "${cudart_dir}" "${site}/" inside)
      if(inside EQUAL 0)
        file(RELATIVE_PATH cudart_relative "${site}" "${cudart_dir}")
        list(APPEND relative "$ORIGIN/../${cudart_relative}")
      endif()
      list(APPEND absolute "${cudart_dir}")
    endif()
  endif()
  set(build_rpath ${relative} ${absolute})
  if(SKBUILD)
    set(install_rpath ${relative})
  else()
    set(install_rpath ${build_rpath})
  endif()
  set_target_properties(${target} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${LOWTIDE_PACKAGE_DIR}"
    BUILD_RPATH "${build_rpath}"
    BUILD_RPATH_USE_ORIGIN ON
    INSTALL_RPATH "${install_rpath}"
    INSTALL_RPATH_USE_LINK_PATH OFF)
  target_link_options(${target} PRIVATE LINKER:--enable-new-dtags)
endfunction()

# lowtide_add_library(<name> SOURCES <files>): a shared library of Lowtide.
function(lowtide_add_library target)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  if(NOT ARG_SOURCES)
    message(FATAL_ERROR "No sources for ${target}: is this a complete checkout?")
  endif()
  add_library(${target} SHARED ${ARG_SOURCES})
  add_library(Lowtide::${target} ALIAS ${target})
  lowtide_include_directories(${target})
  lowtide_compile_options(${target})
  lowtide_run_path(${target})
  # Nobody replaces our functions by others of their name, so our own calls need no table, and may be inlined.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fno-semantic-interposition>)
  target_link_options(${target} PRIVATE LINKER:-Bsymbolic-functions)
  set(script "${CMAKE_SOURCE_DIR}/cmake/exports.map")
  target_link_options(${target} PRIVATE "LINKER:--version-script=${script}")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${script}")
  if(NOT LOWTIDE_SANITIZE)
    target_link_options(${target} PRIVATE LINKER:-z,defs)
  endif()
endfunction()

# lowtide_add_extension(<name> SOURCES <files>): the Python extension, on the pybind11 that torch ships.
function(lowtide_add_extension target)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  if(NOT ARG_SOURCES)
    message(FATAL_ERROR "No sources for ${target}: is this a complete checkout?")
  endif()
  python_add_library(${target} MODULE WITH_SOABI ${ARG_SOURCES})
  target_link_libraries(${target} PRIVATE lowtide_torch TorchWheel::python)
  target_compile_definitions(${target} PRIVATE
    TORCH_EXTENSION_NAME=${target}
    FMT_HEADER_ONLY=1
    LOWTIDE_VERSION="${PROJECT_VERSION}"
    LOWTIDE_TORCH_VERSION="${TorchWheel_VERSION_FULL}"
    LOWTIDE_TORCH_MINOR="${TorchWheel_MINOR}")
  # pybind11's own classes are hidden; classes of ours that hold them must be too.
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  lowtide_compile_options(${target})
  lowtide_run_path(${target})
endfunction()
