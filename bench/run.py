"""Runs every benchmark and ends with a summary beside what is asked for.

    python bench/run.py [--build build-gpu] [--only offload_bandwidth …] [--json FILE]

What `make bench` runs, in about four minutes on one GPU. Exit status 1 if a benchmark failed; a figure below what is asked for is
said, and is no failure: times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from common import machine, require_cuda, table, write_json

HERE = pathlib.Path(__file__).resolve().parent
SCRIPTS = ("offload_bandwidth", "alloc_latency", "train_step")
PROGRAMS = ("alloc_latency_cpp", "native_latency")
NATIVE = {  # most time of each workload of native_latency, as a part of native's
    "one block": 0.5,
    "among 10 ": 0.5,
    "among 100 ": 0.5,
    "among 1000 ": 0.45,
    "among 10000 ": 0.4,
    "8 threads, own streams": 0.15,
    "8 threads, one stream": 0.3,
    "4 KB used on another stream": 0.5,
}
BIG, SMALL, FIRST_MS = 0.95, 0.80, 700  # least ratio to the plain copy, for 10 GiB and for small tensors; most ms for 11 GiB


def asked(figure: float, limit: float, *, at_most: bool = False) -> str:
    """Whether a figure is what is asked for."""
    return "PASS" if (figure <= limit if at_most else figure >= limit) else "below"


def summary(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of the table at the end: what, ours, beside what, ratio, asked for, verdict."""
    rows = []

    def compare(what: str, ours: float, beside: float, unit: str, of: str, *, digits: int = 0) -> None:
        rows.append([what, f"{ours:.{digits}f} {unit}", f"{beside:.{digits}f} {of}", f"{ours / beside:.2f}", "", ""])

    for index, case in enumerate(found.get("offload_bandwidth", {}).get("warm", [])):
        limit = BIG if index == 0 else SMALL
        for verb, beside in (("evict", "plain_out"), ("restore", "plain_in")):
            compare(f"{verb}, {case['name']}", case[f"{verb}_gbps"], case[f"{beside}_gbps"], "GB/s", "plain copy", digits=1)
            ratio = case[f"{verb}_ratio"]
            rows[-1][3:] = [f"{ratio:.3f}", f">= {limit:.2f}", asked(ratio, limit)]
    if "offload_bandwidth" in found:
        first = found["offload_bandwidth"]["first_evict_ms"]
        rows.append(["first evict, 11 GiB", f"{first:.0f} ms", "", "", f"<= {FIRST_MS} ms", asked(first, FIRST_MS, at_most=True)])
    for name, case in found.get("alloc_latency", {}).get("cases", {}).items():
        compare(f"torch.empty and free, {name}", case["lowtide_ns"], case["native_ns"], "ns", "native")
    for workload, case in found.get("native_latency", {}).items():
        compare(workload, case["lowtide"], case["native"], "ns", "native")
        limit = next(limit for start, limit in NATIVE.items() if workload.startswith(start))
        ratio = case["lowtide"] / case["native"]
        rows[-1][3:] = [f"{ratio:.2f}", f"<= {limit:.2f}", asked(ratio, limit, at_most=True)]
    for count, case in found.get("train_step", {}).get("tokens", {}).items():
        native, resident, blocking = case["native"], case["resident"], case["blocking"]
        compare(f"step of {count} tokens, state resident", resident["ms"], native["ms"], "ms", "native")
        compare(f"step of {count} tokens, state out and in", blocking["ms"], resident["ms"], "ms", "resident")
        compare("  its peak in forward and backward", blocking["peak_gb"], resident["peak_gb"], "GB", "resident", digits=1)
    return rows


def native_latency(program: pathlib.Path) -> dict[str, dict[str, float]]:
    """Nanoseconds of each workload with each allocator: medians of repetitions that take turns in one process."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures.json"
        turns = ["--benchmark_repetitions=7", "--benchmark_enable_random_interleaving=true", "--benchmark_min_time=0.05"]
        shown = ["--benchmark_report_aggregates_only=true", f"--benchmark_out={out}", "--benchmark_out_format=json"]
        subprocess.run([program, *turns, *shown], check=True)
        rows = json.loads(out.read_text())["benchmarks"]
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("aggregate_name") == "median":
            workload, allocator = row["run_name"].split("/")[:2]
            figures.setdefault(workload, {})[allocator] = row["real_time"]
    return figures


def main() -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--build", type=pathlib.Path, default=HERE.parent / "build-gpu", help="build folder with bench/alloc_latency"
    )
    parser.add_argument("--only", nargs="+", choices=(*SCRIPTS, *PROGRAMS), help="run these alone")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures here, as one line of JSON")
    options = parser.parse_args()
    require_cuda()
    chosen = options.only or (*SCRIPTS, *PROGRAMS)

    begin, failed = time.monotonic(), []
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (script for script in SCRIPTS if script in chosen):
            print(f"\n==> {name}.py", flush=True)
            figures = pathlib.Path(folder) / f"{name}.json"
            status = subprocess.run([sys.executable, HERE / f"{name}.py", "--json", figures]).returncode
            if status == 0 and figures.exists():
                found[name] = json.loads(figures.read_text())
            else:
                failed.append(f"{name}.py (status {status})")
        program = options.build / "bench" / "alloc_latency"
        if "alloc_latency_cpp" in chosen and program.exists():
            print("\n==> alloc_latency.cpp: the allocator alone", flush=True)
            status = subprocess.run([program, "--benchmark_counters_tabular=true"]).returncode
            if status:
                failed.append(f"alloc_latency.cpp (status {status})")
        elif "alloc_latency_cpp" in chosen:
            print(f"\n==> alloc_latency.cpp is left out: {program} is not built (LOWTIDE_BUILD_BENCH=ON)")
        program = options.build / "bench" / "native_latency"
        if "native_latency" in chosen and program.exists():
            print("\n==> native_latency.cpp: beside torch's allocator, in one process", flush=True)
            try:
                found["native_latency"] = native_latency(program)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                failed.append(f"native_latency.cpp ({error})")
        elif "native_latency" in chosen:
            print(f"\n==> native_latency.cpp is left out: {program} is not built (LOWTIDE_BUILD_BENCH=ON)")

    print(f"\n==> summary\n{machine()}\n")
    print(table(["", "Lowtide", "beside", "ratio", "asked", ""], summary(found)))
    print(f"\n{time.monotonic() - begin:.0f} s in all")
    write_json(options.json, found)
    if failed:
        print("FAILED: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
