#!/usr/bin/env python3
"""Greps the #include lines: lower layers never include higher ones, and torch stays where it is allowed.

Runs with plain Python, without torch and without pytest: `python3 tests/layering_test.py [root]`. As a pytest module it is one test.
"""

from __future__ import annotations

import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^(Python|pybind11)\.h$")
CUDA_RUNTIME = re.compile(r"^cuda_runtime(_api)?\.h$|^driver_types\.h$")
OURS = ("allocator/", "pool/", "python/", "tests/", "bench/", "lowtide/")
FOLDERS = ("allocator", "pool", "python/src", "tests", "bench", "examples")
TORCH_FOLDERS = ("allocator/torch/", "pool/torch/", "python/src/", "tests/torch/", "bench/torch/", "examples/")


def violation(path: str, kind: str, header: str, exists: bool) -> str | None:
    """Why the file at `path` may not include `header`, or None."""
    if TORCH.search(header) and not path.startswith(TORCH_FOLDERS):
        return "torch and Python headers are for allocator/torch, pool/torch and python/src only"
    if CUDA_RUNTIME.search(header) and path.startswith(("allocator/", "pool/")) and "/torch/" not in path:
        return "the core is built on the driver API (<cuda.h>); the CUDA runtime is torch's"
    if path.startswith("allocator/") and header.startswith(("pool/", "lowtide/")):
        return "allocator/ is below pool/"
    if path.startswith(("allocator/", "pool/")) and header.startswith(("python/", "tests/", "bench/")):
        return "libraries include no tests, benchmarks or Python sources"
    if re.match(r"(allocator|pool)/torch/", header) and not path.startswith(TORCH_FOLDERS):
        return "the torch-free core does not include the torch bridge"
    if header == "lowtide/lowtide.h" and not path.startswith(TORCH_FOLDERS):
        return "the public header is torch's side"
    if kind == '"' and path.startswith(("allocator/", "pool/", "tests/", "bench/")):
        if not header.startswith(OURS):
            return 'quoted includes are rooted: "allocator/x.h", "pool/x.h"'
        if not exists:
            return "no such file"
    if kind == "<" and header.startswith(("allocator/", "pool/", "tests/")):
        return "headers of this tree are included in quotes"
    return None


def check(root: pathlib.Path) -> list[str]:
    problems = []
    files = sorted(f for folder in FOLDERS for f in (root / folder).rglob("*") if f.suffix in {".h", ".cpp", ".cu", ".cuh"})
    if not files:
        return [f"no sources below {root}"]
    for file in files:
        path = file.relative_to(root).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            kind, header = match.groups()
            exists = (root / header).exists() or (root / "pool/torch/include" / header).exists()
            why = violation(path, kind, header, exists)
            if why:
                problems.append(f"{path}:{number}: includes {header}: {why}")
    return problems


def test_layers() -> None:
    problems = check(pathlib.Path(__file__).resolve().parent.parent)
    assert not problems, "\n".join(problems)


if __name__ == "__main__":
    found = check(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent))
    print("\n".join(found) if found else "include rules hold")
    sys.exit(bool(found))
