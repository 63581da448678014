#!/usr/bin/env bash
# Makes sure that the programs and libraries of the named groups are here, and installs what is missing where that is possible.
#
#   scripts/bootstrap.sh [build] [python] [format] [tidy] [clang]
#
# As root on a system with apt the missing packages are installed; otherwise they are named, with the command, and the exit status is 1.
# Nothing is installed that is already here in another way: what counts is whether the program or header is found.
set -euo pipefail

python="${PYTHON:-python3}"
missing=()

need() {  # need <package> <command…>: the package is missing unless the command succeeds
  local package="$1"
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
has_header() {
  local root
  for root in /usr/include /usr/local/include ${CPATH//:/ } ${CMAKE_PREFIX_PATH//:/ }; do
    [[ -e "$root/$1" || -e "$root/include/$1" ]] && return 0
  done
  return 1
}
has_python_headers() {
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
cmake_is_recent() {
  local version
  version="$(cmake --version | head -n 1)" && [[ "$version" =~ ([0-9]+)\.([0-9]+) ]] &&
    (( BASH_REMATCH[1] > 3 || (BASH_REMATCH[1] == 3 && BASH_REMATCH[2] >= 22) ))
}
CPATH="${CPATH:-}" CMAKE_PREFIX_PATH="${CMAKE_PREFIX_PATH:-}"

for group in "${@:-build}"; do
  case "$group" in
    build)
      need g++ command -v c++
      need cmake cmake_is_recent
      need ninja-build command -v ninja
      need libgtest-dev has_header gtest/gtest.h
      need libbenchmark-dev has_header benchmark/benchmark.h
      need libspdlog-dev has_header spdlog/spdlog.h
      need libfmt-dev has_header fmt/format.h
      ;;
    python)
      need python3 "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
      need python3-venv "$python" -c 'import ensurepip, venv'
      need python3-dev has_python_headers
      ;;
    format) need clang-format command -v clang-format ;;
    tidy) need clang-tidy command -v clang-tidy ;;
    clang) need clang command -v clang++ ;;
    *) echo "bootstrap.sh: unknown group '$group'" >&2; exit 2 ;;
  esac
done

if (( ${#missing[@]} == 0 )); then
  exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
  echo "==> installing with apt: ${missing[*]}"
  log="$(mktemp)"
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    cat "$log" >&2
    echo "bootstrap.sh: apt could not install ${missing[*]} (output above)" >&2
    exit 1
  fi
  rm -f "$log"
else
  {
    echo "Missing: ${missing[*]}"
    echo "On Debian or Ubuntu:"
    echo "    sudo apt-get install ${missing[*]}"
  } >&2
  exit 1
fi
