"""The examples run as their users run them: each in a process of its own, the C++ one built from the installed package."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

import lowtide

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
# In test-gpu the suite runs on CUDA; the examples choose CUDA by themselves where it is.
DEVICE = os.environ.get("LOWTIDE_TEST_DEVICE", "host")


def run(*command: str | os.PathLike[str], timeout: float = 240) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [os.fspath(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{done.stdout}"
    return done.stdout


def test_minimal() -> None:
    output = run(sys.executable, EXAMPLES / "minimal.py")
    # On the host device the step counters are in the region too.
    assert re.search(r"step 4: 67\.[12] MB of state are evicted, 0 bytes on the device", output)
    assert output.splitlines()[-1].startswith("as it should be: tensor of offload region 'adam' is evicted")


SMALL = ("--layers", "2", "--batch", "2", "--length", "64", "--steps", "5", "--device", DEVICE)


@dataclass(frozen=True)
class Demo:
    """One run of the demo, small: its output, the text it was given, where it drew."""

    output: str
    text: pathlib.Path
    png: pathlib.Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    text, png = folder / "text.txt", folder / "timeline.png"
    text.write_text("so much depends upon a red wheel barrow\n" * 50)
    # Wide enough that its state is seen in a table of megabytes.
    return Demo(run(sys.executable, EXAMPLES / "train.py", *SMALL, "--d-model", "512", "--text", text, "--png", png), text, png)


def test_training_is_bit_identical(demo: Demo) -> None:
    verdicts = [line.split("  ")[0] for line in demo.output.splitlines() if "bit-identical" in line]
    assert verdicts == ["losses", "final weights"], demo.output


def test_training_reads_a_text_of_ones_own(demo: Demo) -> None:
    assert str(demo.text) in demo.output


def test_training_shows_what_is_where(demo: Demo) -> None:
    rows = {line.split()[0]: line.split() for line in demo.output.splitlines() if line.startswith("  ")}
    for phase, evicted in (("forward", True), ("backward", True), ("step", False), ("evict", True)):
        # The last two columns are what is evicted and what is pinned at the phase's end.
        assert (float(rows[phase][-2]) > 0) == evicted, demo.output
        assert float(rows[phase][-1]) >= float(rows[phase][-2]), demo.output


def test_timeline_is_drawn(demo: Demo) -> None:
    pytest.importorskip("matplotlib")
    assert demo.png.read_bytes().startswith(b"\x89PNG")


def test_training_notices_one_wrong_bit(tmp_path: pathlib.Path) -> None:
    """One bit of one weight: the demo must fail."""
    program = f"""
import sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
import train
real = train.train
def with_a_wrong_bit(*arguments):
    run = real(*arguments)
    if arguments[-1]:
        run.weights[3].view(torch.int32).view(-1)[0] ^= 1
    return run
train.train = with_a_wrong_bit
sys.exit(train.main({[*SMALL, "--d-model", "64", "--png", str(tmp_path / "timeline.png")]!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 TENSORS DIFFER" in done.stdout


@pytest.mark.parametrize("arguments", [["--d-model", "100"], ["--steps", "2"], ["--text", os.devnull], ["--text", "/no/such/file"]])
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train.py", "--device", DEVICE, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "error:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(900)
def test_cpp_example_builds_from_the_installed_package(tmp_path: pathlib.Path) -> None:
    config = pathlib.Path(lowtide.cmake_prefix_path) / "Lowtide" / "LowtideConfig.cmake"
    if not config.exists():
        pytest.skip(
            "this lowtide is a build tree, which holds no CMake package; ctest builds the example from an installation of it"
        )
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(
        "cmake",
        "-S",
        EXAMPLES / "cpp",
        "-B",
        tmp_path,
        *generator,
        f"-DCMAKE_PREFIX_PATH={lowtide.cmake_prefix_path}",
        "-DCMAKE_BUILD_TYPE=Release",
    )
    run("cmake", "--build", tmp_path, timeout=600)
    assert "bit-identical" in run(tmp_path / "train")


@pytest.mark.parametrize("script", ["offload_bandwidth.py", "alloc_latency.py", "train_step.py", "run.py"])
def test_benchmarks_say_what_is_missing(script: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, EXAMPLES.parent / "bench" / script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no CUDA device")
