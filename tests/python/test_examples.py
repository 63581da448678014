"""The examples run as their users run them: each in a process of its own, the C++ one built from the installed package."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import lowtide

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
# In test-gpu the suite runs on CUDA; the examples choose CUDA by themselves where it is.
DEVICE = os.environ.get("LOWTIDE_TEST_DEVICE", "host")


def run(*command: str | os.PathLike[str], timeout: float = 240) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run([os.fspath(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{done.stdout}"
    return done.stdout


def test_minimal() -> None:
    output = run(sys.executable, EXAMPLES / "minimal.py")
    assert "step 4: 67.2 MB of state are evicted, 0 bytes on the device" in output
    assert "as it should be" in output and "adam" in output.splitlines()[-1]


def train(folder: pathlib.Path, *arguments: str) -> str:
    """Output of the demo at a size that takes a second."""
    small = ("--layers", "2", "--d-model", "64", "--batch", "2", "--length", "64", "--steps", "5")
    return run(sys.executable, EXAMPLES / "train.py", "--device", DEVICE, *small, "--png", str(folder / "timeline.png"), *arguments)


def test_training_is_bit_identical(tmp_path: pathlib.Path) -> None:
    output = train(tmp_path)
    verdicts = {line.split("  ")[0]: line for line in output.splitlines() if "bit-identical" in line}
    assert set(verdicts) == {"losses", "final weights"}, output


def test_training_shows_what_is_where(tmp_path: pathlib.Path) -> None:
    output = train(tmp_path, "--d-model", "512")  # enough state to be seen in a table of megabytes
    table = {line.split()[0]: line.split() for line in output.splitlines() if line.startswith("  ")}
    for phase, evicted in (("forward", True), ("backward", True), ("step", False), ("evict", True)):
        # The last two columns are what is evicted and what is pinned at the phase's end.
        assert (float(table[phase][-2]) > 0) == evicted, output
    assert float(table["evict"][-1]) >= float(table["evict"][-2]), output


def test_timeline_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    assert "timeline.png" in train(tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_training_on_a_text_of_ones_own(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("so much depends upon a red wheel barrow\n" * 50)
    assert str(text) in train(tmp_path, "--text", str(text))


@pytest.mark.parametrize("arguments", [["--d-model", "100"], ["--steps", "2"], ["--text", os.devnull]])
def test_sizes_that_make_no_sense_are_refused(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "train.py", "--device", DEVICE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(900)
def test_cpp_example_builds_from_the_installed_package(tmp_path: pathlib.Path) -> None:
    config = pathlib.Path(lowtide.cmake_prefix_path) / "Lowtide" / "LowtideConfig.cmake"
    if not config.exists():
        pytest.skip("this lowtide is a build tree, which holds no CMake package; ctest builds the example from an installation of it")
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", EXAMPLES / "cpp", "-B", tmp_path, *generator, f"-DCMAKE_PREFIX_PATH={lowtide.cmake_prefix_path}",
        "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", tmp_path, timeout=600)
    assert "bit-identical" in run(tmp_path / "train")


@pytest.mark.parametrize("script", ["offload_bandwidth.py", "alloc_latency.py", "train_step.py", "run.py"])
def test_benchmarks_say_what_is_missing(script: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, EXAMPLES.parent / "bench" / script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no CUDA device")
