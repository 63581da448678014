# The Python package in the build tree: the .py, .pyi and py.typed files as links, the libraries beside them, and _build_info.py.

set(LOWTIDE_BUILD_INFO "${CMAKE_BINARY_DIR}/generated/_build_info.py")
set(_build_type "${CMAKE_BUILD_TYPE}")
if(LOWTIDE_CHECKED)
  string(APPEND _build_type ", checked")
endif()
configure_file("${CMAKE_SOURCE_DIR}/cmake/_build_info.py.in" "${LOWTIDE_BUILD_INFO}" @ONLY)

file(MAKE_DIRECTORY "${LOWTIDE_PACKAGE_DIR}")
file(CREATE_LINK "${LOWTIDE_BUILD_INFO}" "${LOWTIDE_PACKAGE_DIR}/_build_info.py" SYMBOLIC)
file(GLOB_RECURSE _files CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}/python/lowtide"
     python/lowtide/*.py python/lowtide/*.pyi python/lowtide/py.typed)
foreach(_file IN LISTS _files)
  get_filename_component(_dir "${LOWTIDE_PACKAGE_DIR}/${_file}" DIRECTORY)
  file(MAKE_DIRECTORY "${_dir}")
  file(CREATE_LINK "${CMAKE_SOURCE_DIR}/python/lowtide/${_file}" "${LOWTIDE_PACKAGE_DIR}/${_file}" SYMBOLIC)
endforeach()
# Beside the package: what an interpreter reads when it starts.
foreach(_file IN ITEMS _lowtide_startup.py lowtide_startup.pth)
  file(CREATE_LINK "${CMAKE_SOURCE_DIR}/python/startup/${_file}" "${LOWTIDE_PACKAGE_DIR}/../${_file}" SYMBOLIC)
endforeach()
# Links to files that are gone would still import as empty folders or fail obscurely.
file(GLOB_RECURSE _links RELATIVE "${LOWTIDE_PACKAGE_DIR}" "${LOWTIDE_PACKAGE_DIR}/*.py" "${LOWTIDE_PACKAGE_DIR}/*.pyi")
foreach(_link IN LISTS _links)
  if(IS_SYMLINK "${LOWTIDE_PACKAGE_DIR}/${_link}" AND NOT EXISTS "${LOWTIDE_PACKAGE_DIR}/${_link}")
    file(REMOVE "${LOWTIDE_PACKAGE_DIR}/${_link}")
  endif()
endforeach()
