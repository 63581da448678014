"""What the benchmarks share: the machine they ran on, times with their spread, tables, and what they do without a GPU."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

GIB = 2**30


def require_cuda() -> None:
    """Ends the program, successfully, where there is no GPU to measure."""
    if torch.cuda.is_available():
        return
    why = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no NVIDIA driver or GPU"
    print(f"skipped: no CUDA device ({why})")
    sys.exit(0)


def machine() -> str:
    """One line that says what was measured on. Asks nvidia-smi rather than torch, which would start CUDA."""
    parts = [f"torch {torch.__version__}", f"Python {platform.python_version()}", f"{os.cpu_count()} CPU cores"]
    query = [
        "nvidia-smi",
        "--id=0",
        "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver, generation, width = (field.strip() for field in answer.splitlines()[0].split(","))
        parts = [name, f"PCIe gen{generation} x{width}", f"driver {driver}", *parts]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        parts.insert(0, "GPU unknown (no nvidia-smi)")
    return "machine: " + ", ".join(parts)


class Times:
    """Seconds of the same thing measured several times."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.seconds = list(seconds)

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rate(self, size: int) -> str:
        """GB/s that moving `size` bytes in these times means: median, and in brackets the slowest and the fastest."""
        slow, fast = size / max(self.seconds) / 1e9, size / min(self.seconds) / 1e9
        return f"{size / self.median / 1e9:.1f} ({slow:.1f}..{fast:.1f})"

    def spread(self, scale: float = 1e3, digits: int = 0) -> str:
        """Median, and in brackets the least and the most, times `scale`."""
        return f"{self.median * scale:.{digits}f} ({min(self.seconds) * scale:.{digits}f}..{max(self.seconds) * scale:.{digits}f})"


def timed(body: Callable[[], Any]) -> float:
    """Seconds until the GPU has done what `body` asks for, everything before it done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    body()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths))
        ).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def write_json(path: pathlib.Path | None, result: dict[str, Any]) -> None:
    """The figures as one line of JSON."""
    if path is not None:
        path.write_text(json.dumps(result) + "\n")


def child(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script of this folder in a process of its own; the last line it prints is its result, as JSON."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join([script, *arguments])} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
