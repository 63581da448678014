# Asks Pythons where their packages are. Used by the find modules here; installed beside LowtideConfig.cmake.

include_guard(GLOBAL)

# lowtide_python_packages(<package> <out dir> <out python> <out sites> <out asked>)
# <out dir>: the folder of <package> in the first Python that has it (empty when none has); <out sites>: that Python's package folders;
# <out asked>: every Python that was asked. With an empty <package> the first Python that runs answers.
function(lowtide_python_packages package out_dir out_python out_sites out_asked)
  set(candidates "")
  foreach(python IN ITEMS "${LOWTIDE_PYTHON}" "${Python_EXECUTABLE}" "${PYTHON_EXECUTABLE}" "$ENV{VIRTUAL_ENV}/bin/python")
    if(python AND EXISTS "${python}")
      list(APPEND candidates "${python}")
    endif()
  endforeach()
  if(NOT LOWTIDE_PYTHON)
    # Not find_program: pyenv's and virtualenv's wrappers must be followed at each configure, not once.
    find_program(_lowtide_python3 NAMES python3 NO_CACHE)
    if(_lowtide_python3)
      list(APPEND candidates "${_lowtide_python3}")
    endif()
  endif()
  list(REMOVE_DUPLICATES candidates)

  set(script [=[
import importlib.util, os, sys
name = sys.argv[1]
spec = importlib.util.find_spec(name) if name else None
print(list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else '')
print(f'{sys.version_info[0]}.{sys.version_info[1]}')
for path in dict.fromkeys(os.path.abspath(p) for p in sys.path if p and os.path.isdir(p)):
    print(path)
]=])
  set(dir "")
  set(found_python "")
  set(sites "")
  foreach(python IN LISTS candidates)
    foreach(flags IN ITEMS "" "-I")
      execute_process(COMMAND "${python}" ${flags} -c "${script}" "${package}"
                      OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE result OUTPUT_STRIP_TRAILING_WHITESPACE
                      WORKING_DIRECTORY /)
      if(result EQUAL 0)
        string(REPLACE "\n" ";" answer "${answer};")
        list(GET answer 0 here)
        list(GET answer 1 version)
        # A torch of another Python cannot serve an extension module built for this one.
        if(Python_VERSION_MAJOR AND NOT LOWTIDE_PYTHON AND NOT version STREQUAL "${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}")
          continue()
        endif()
        if(here OR NOT package)
          list(REMOVE_AT answer 0 1)
          list(REMOVE_ITEM answer "")
          set(dir "${here}")
          set(found_python "${python}")
          set(sites "${answer}")
          break()
        endif()
      endif()
    endforeach()
    if(found_python)
      break()
    endif()
  endforeach()
  set(${out_dir} "${dir}" PARENT_SCOPE)
  set(${out_python} "${found_python}" PARENT_SCOPE)
  set(${out_sites} "${sites}" PARENT_SCOPE)
  set(${out_asked} "${candidates}" PARENT_SCOPE)
endfunction()
