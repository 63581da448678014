"""Time of making and freeing a CUDA tensor, with Lowtide and with torch's own allocator.

    python bench/alloc_latency.py [--json FILE]

Each allocator is measured in processes of its own, the two in turn. Most of each time is torch's and Python's, the same for both;
bench/alloc_latency.cpp measures the allocator alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
import time

import torch
from common import Times, child, machine, require_cuda, table, write_json

import lowtide

SIZES = {"512 B": 512, "4 KB": 4 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
MIXED = "512 B to 8 MB, 1 000 live"
CALLS, REPEATS = 20_000, 7


def one_size(size: int, calls: int) -> float:
    """Seconds of torch.empty and its free, one tensor at a time."""
    empty, kind, device = torch.empty, torch.uint8, torch.device("cuda")
    begin = time.perf_counter()
    for _ in range(calls):
        tensor = empty(size, dtype=kind, device=device)
        del tensor
    return (time.perf_counter() - begin) / calls


def mixed_sizes(calls: int) -> float:
    """Seconds of replacing one of 1 000 live tensors by one of another size."""
    dice = random.Random(0)
    empty, kind, device = torch.empty, torch.uint8, torch.device("cuda")
    plan = [(dice.randrange(1_000), int(2 ** dice.uniform(9, 23))) for _ in range(calls)]
    live: list[torch.Tensor | None] = [empty(int(2 ** dice.uniform(9, 23)), dtype=kind, device=device) for _ in range(1_000)]
    begin = time.perf_counter()
    for slot, size in plan:
        live[slot] = None
        live[slot] = empty(size, dtype=kind, device=device)
    return (time.perf_counter() - begin) / calls


def measure(allocator: str) -> dict[str, list[float]]:
    """Nanoseconds of each case, several times, in this process."""
    if allocator == "lowtide":
        lowtide.install("cuda")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    result: dict[str, list[float]] = {}
    for name, size in SIZES.items():
        one_size(size, CALLS // 10)
        result[name] = [one_size(size, CALLS) * 1e9 for _ in range(REPEATS)]
    mixed_sizes(CALLS // 2)
    result[MIXED] = [mixed_sizes(CALLS) * 1e9 for _ in range(REPEATS)]
    torch.cuda.synchronize()
    return result


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here, as one line of JSON")
    parser.add_argument("--processes", type=int, default=3, help="processes for each allocator")
    parser.add_argument("--measure", choices=("native", "lowtide"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_cuda()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0

    print(machine(), flush=True)
    found: dict[str, dict[str, Times]] = {kind: {name: Times() for name in (*SIZES, MIXED)} for kind in ("native", "lowtide")}
    for _ in range(options.processes):
        for kind, cases in found.items():
            for name, nanoseconds in child(__file__, "--measure", kind).items():
                for value in nanoseconds:
                    cases[name].add(value)
    rows, cases = [], {}
    for name in (*SIZES, MIXED):
        native, ours = found["native"][name], found["lowtide"][name]
        rows.append([name, ours.spread(1), native.spread(1), f"{ours.median / native.median:.2f}"])
        cases[name] = {"lowtide_ns": ours.median, "native_ns": native.median, "ratio": ours.median / native.median}
    runs = f"{options.processes} processes x {REPEATS}"
    print(f"\ntorch.empty and its free, ns: median (least..most) of {runs}; ratio: ours to native\n")
    print(table(["size", "lowtide", "native", "ratio"], rows), flush=True)
    write_json(options.json, {"machine": machine(), "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
