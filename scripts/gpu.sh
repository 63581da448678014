#!/usr/bin/env bash
# For a machine with a GPU, on the Python and torch that are there; installs nothing.
#
#   scripts/gpu.sh test     builds in build-gpu and runs every suite with the GPU; ends with a table
#   scripts/gpu.sh bench    builds in build-gpu and runs the benchmarks
#   scripts/gpu.sh stress   builds in build-gpu and runs the stress test for SECONDS_OF_STRESS (300)
set -euo pipefail
cd "$(dirname "$0")/.."

what="$1"
python="$(command -v "${PYTHON:-python3}")" || { echo "${PYTHON:-python3} was not found" >&2; exit 1; }
build="${BUILD:-build-gpu}"
jobs="${JOBS:-$(nproc)}"

"$python" - "$what" <<'PYTHON'
import sys
command = {"test": "make test-gpu", "bench": "make bench", "stress": "make stress-gpu"}[sys.argv[1]]
try:
    import torch
except ImportError:
    sys.exit(f"{sys.executable} has no torch. Name the Python that has it: {command} PYTHON=/path/to/python3")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} of {sys.executable} sees no GPU. Without one, use `make test`.")
print(f"==> {torch.cuda.get_device_name(0)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
PYTHON

echo "==> building in $build ($jobs jobs)"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DLOWTIDE_PYTHON=$python" -DLOWTIDE_BUILD_TESTS=ON \
  -DLOWTIDE_BUILD_BENCH=ON -DLOWTIDE_TEST_CUDA=ON > "$build.log" 2>&1 || { tail -n 40 "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel "$jobs" > "$build.log" 2>&1 || { grep -nE -A 40 '(FAILED:|error: )' "$build.log" | head -n 120 >&2; exit 1; }
mv "$build.log" "$build/build.log"
export PYTHONPATH="$PWD/$build/python${PYTHONPATH:+:$PYTHONPATH}"
export LOWTIDE_TEST_DEVICE=cuda

# Many Python tests start processes of their own, which wait for CUDA more than they work.
workers=""
"$python" -c 'import xdist' 2> /dev/null && workers="-n 8"

case "$what" in
  test)
    mkdir -p "$build/results"
    {
      for suite in unit contract stress torch; do
        program="$build/tests/lowtide_${suite}_test"
        [[ -x "$program" ]] &&
          echo "$suite | $build/results/$suite.xml | ctest --test-dir $build -R '^$suite\$' --output-on-failure --no-tests=error"
      done
      if [[ -d tests/python ]]; then
        echo "python | $build/results/python.xml | '$python' -m pytest -q -p no:cacheprovider $workers --junitxml=$build/results/python.xml tests/python"
      fi
      if [[ -f examples/cpp/train.cpp ]]; then
        echo "C++ example | - | ctest --test-dir $build -L example --output-on-failure --no-tests=error"
      fi
      if command -v compute-sanitizer > /dev/null; then
        for suite in contract stress; do
          program="$build/tests/lowtide_${suite}_test"
          [[ -x "$program" ]] && echo "memcheck $suite | $build/results/memcheck-$suite.xml | LOWTIDE_FAULT_STRIDE=16 compute-sanitizer" \
            "--tool memcheck --report-api-errors no --error-exitcode 99 $program --gtest_brief=1 '--gtest_filter=${MEMCHECK_FILTER:-*Cuda*}'" \
            "--gtest_output=xml:$build/results/memcheck-$suite.xml"
        done
      else
        echo "==> compute-sanitizer is not on the PATH: memcheck is left out" >&2
      fi
      true
    } | "$python" scripts/run_suites.py
    ;;
  bench) "$python" bench/run.py --build "$build" ;;
  stress)
    LOWTIDE_STRESS_SECONDS="${SECONDS_OF_STRESS:-300}" "$build/tests/lowtide_stress_test" '--gtest_filter=*ManyThreads/Cuda*'
    ;;
  *) echo "gpu.sh: test, bench or stress" >&2; exit 2 ;;
esac
