#!/usr/bin/env bash
# Builds the libraries, the tests and the Python package in one CMake tree and installs the package into the tree's environment:
#   scripts/build.sh <environment> <build folder>
# Unchanged sources are not built again, and the package is reinstalled only when something in it changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="$1"
build="$2"
stamp="$build/.installed"
mkdir -p "$build"
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}"

# Shows ninja's progress on one line of a terminal; a log keeps everything.
show_progress() {
  if [[ -t 1 ]]; then
    sed -unE 's/^ *(\[[0-9]+\/[0-9]+\]) (.{0,90}).*/\r\x1b[K\1 \2/p' | tr -d '\n'
    printf '\r\033[K'
  else
    cat > /dev/null
  fi
}
run() {  # run <command…>: its output goes to the log; on failure the relevant part is shown
  if ! "$@" 2>&1 | tee "$build/build.log" | show_progress; then
    if ! grep -nE -A 40 '(FAILED:|CMake Error|error: )' "$build/build.log" | head -n 120 >&2; then
      tail -n 60 "$build/build.log" >&2
    fi
    echo "The build failed; the whole log is $build/build.log" >&2
    exit 1
  fi
}

package_changed() {
  [[ ! -f "$stamp" ]] || ! "$venv/bin/python" -I -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("lowtide"))' ||
    [[ -n "$(find CMakeLists.txt pyproject.toml README.md cmake allocator pool python "$venv/.requirements" -newer "$stamp" \
             -not -path '*/__pycache__*' -print -quit)" ]]
}

if package_changed; then
  echo "==> building in $build and installing lowtide into $venv ($CMAKE_BUILD_PARALLEL_LEVEL jobs)"
  touch "$build/.started"
  run "$venv/bin/python" -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps "--config-settings=build-dir=$build" \
    "--config-settings=cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG" \
    "--config-settings=cmake.define.LOWTIDE_BUILD_TESTS=${TESTS:-ON}" "--config-settings=cmake.define.LOWTIDE_WERROR=${WERROR:-ON}" .
  mv "$build/.started" "$stamp"
else
  echo "==> lowtide is up to date; building changed tests in $build"
  run cmake --build "$build"
fi
