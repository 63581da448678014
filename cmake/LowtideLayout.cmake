# Where things go, in the build tree and when installed.
#
# The build tree holds the finished Python package in ${CMAKE_BINARY_DIR}/python/lowtide, so PYTHONPATH=build/python is enough to use it.
# A wheel (scikit-build-core sets SKBUILD) puts everything into the package folder lowtide/; a plain `cmake --install` into lib/,
# include/ and lib/cmake/ of its prefix, without the Python package.

set(LOWTIDE_PACKAGE_DIR "${CMAKE_BINARY_DIR}/python/lowtide")

if(SKBUILD)
  set(LOWTIDE_INSTALL_LIBDIR "lowtide")
  set(LOWTIDE_INSTALL_INCLUDEDIR "lowtide/include")
  set(LOWTIDE_INSTALL_CMAKEDIR "lowtide/share/cmake/Lowtide")
else()
  set(LOWTIDE_INSTALL_LIBDIR "${CMAKE_INSTALL_LIBDIR}")
  set(LOWTIDE_INSTALL_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
  set(LOWTIDE_INSTALL_CMAKEDIR "${CMAKE_INSTALL_LIBDIR}/cmake/Lowtide")
endif()
