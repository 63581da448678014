"""``python -m lowtide info`` says what is installed and works here; ``python -m lowtide run`` runs a program under Lowtide."""

import argparse
import os
import platform
import sys

import torch

from . import __version__, _build_info, _native
from ._run import run


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _memory_of_computer() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines() -> list[tuple[str, str]]:
    lines = [
        ("lowtide", f"{__version__} ({_build_info.BUILD_TYPE}), in {os.path.dirname(os.path.abspath(__file__))}"),
        (
            "built for",
            f"torch {_build_info.TORCH_VERSION}, CUDA {_build_info.CUDA_VERSION}, Python {_build_info.PYTHON}",
        ),
        ("running", f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"),
    ]
    driver = _native.cuda_driver_version()
    lines.append(("CUDA driver", f"{driver // 1000}.{driver % 1000 // 10}" if driver else "none"))
    count = _native.cuda_device_count()
    if count == 0:
        lines.append(("CUDA devices", f"none: {_native.cuda_unavailable_reason()}"))
    _native.install("auto", 0)
    kind = _native.installed_device()
    if kind == "cuda":
        for index in range(count):
            free, total = _native.device_memory(index)
            lines.append((f"cuda:{index}", f"{_native.device_name(index)}, {_gib(total)}, {_gib(free)} free"))
    lines.append(
        ("host memory", f"{_gib(_memory_of_computer())}; evicted regions may hold {_gib(_native.host_budget())}")
    )
    lines.append(("install()", f'chooses "{kind}" here'))
    cuda = kind == "cuda"
    why_not = "" if cuda else " (needs a CUDA device)"
    for feature, works in (
        ("regions of CUDA tensors: evict, restore, guarded access", cuda),
        ("CUDA graphs over evicted and restored state", cuda),
        ("loading as a plain CUDAPluggableAllocator", cuda),
        ("regions of CPU tensors (the host device)", not cuda),
        ("CPUOffloadPool", True),
    ):
        note = "" if works else (why_not if not cuda else ' (only after install("host"))')
        lines.append(("works" if works else "not here", feature + note))
    return lines


def _split_run(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of ``lowtide run``, and those of the program, which argparse must not read."""
    if arguments[:1] != ["run"]:
        return arguments, []
    end = 1
    while end < len(arguments) and arguments[end].startswith(("--device", "-h", "--help")):
        end += 2 if arguments[end] == "--device" else 1
    return arguments[:end], arguments[end:]


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m lowtide``."""
    parser = argparse.ArgumentParser(
        prog="python -m lowtide", description="Lowtide: regions of memory that leave the device."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and what works here")
    program = commands.add_parser(
        "run",
        help="run a Python program with Lowtide as torch's allocator, subprocesses included",
        usage="python -m lowtide run [--device auto|cuda|host] (script.py | -m module | -c code | command) [arguments ...]",
    )
    program.add_argument("--device", default="auto", choices=("auto", "cuda", "host"))
    ours, others = _split_run(sys.argv[1:] if arguments is None else arguments)
    chosen = parser.parse_args(ours)
    if chosen.command == "run":
        if not others:
            program.error("name the program to run")
        try:
            run(others, chosen.device)
        except (OSError, ValueError) as error:
            program.error(str(error))
    lines = _lines()
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label:<{width}}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
