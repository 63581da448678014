"""Evict and restore beside a plain copy of as many bytes, and the first eviction of a process.

    python bench/offload_bandwidth.py [--json FILE]

The plain copy moves one GPU buffer to one registered host buffer, in one piece or in chunks of 64 MiB, whichever is faster here. It
runs between the evictions, so that what disturbs the machine disturbs both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import pathlib
import random
import sys
import time

import torch
from common import GIB, Times, child, machine, require_cuda, table, timed, write_json

import lowtide

CHUNK = 64 << 20
LAYERS, VOCABULARY = 33, 32000  # with the width below: about 800 tensors of state


def gpt_state_sizes(total: int) -> list[int]:
    """Bytes of each tensor of the AdamW state of a GPT, its width such that they make `total` bytes."""
    # Two tensors of 4 bytes a parameter; 12 width^2 parameters a layer and an embedding.
    a, b, c = 96 * LAYERS, 8 * VOCABULARY, -total
    width = int((-b + (b * b - 4 * a * c) ** 0.5) / (2 * a))
    norms, attention = [width] * 4, [3 * width * width, 3 * width, width * width, width]
    layer = [*norms, *attention, 4 * width * width, 4 * width, 4 * width * width, width]
    parameters = [VOCABULARY * width, *(layer * LAYERS), width, width]
    return [4 * count for count in parameters for _ in range(2)]


def workloads() -> dict[str, tuple[list[int], int]]:
    """Sizes in bytes of each workload's tensors, and how often it is measured."""
    dice = random.Random(0)
    return {
        "10 GiB in 798 tensors, a GPT's state": (gpt_state_sizes(10 * GIB), 7),
        "20 000 tensors of 16 KB": ([16 << 10] * 20_000, 15),
        "8 000 tensors of 4 to 256 KB": ([dice.randint(1 << 10, 64 << 10) * 4 for _ in range(8_000)], 15),
    }


def make_tensors(region: lowtide.OffloadRegion, sizes: list[int]) -> list[torch.Tensor]:
    """Tensors of these sizes in the region, filled with bytes that a mistake would change."""
    with region:
        tensors = [torch.empty(size // 4, dtype=torch.int32, device="cuda") for size in sizes]
    for index, tensor in enumerate(tensors):
        tensor.random_() if tensor.numel() > 1 << 20 else tensor.fill_(index)
    return tensors


def checksum(tensors: list[torch.Tensor]) -> list[int]:
    """One number a tensor."""
    return torch.stack([tensor.sum() for tensor in tensors]).tolist()


class PlainCopy:
    """One buffer on the GPU, one in registered host memory of exactly that size, and the copies between them."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        with contextlib.suppress(OSError):  # where the system has no huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._host = torch.frombuffer(self._map, dtype=torch.uint8).zero_()
        # torch.empty(pin_memory=True) would round the size up to a power of two.
        error = torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), size, 0)
        if int(error) != 0:
            sys.exit(f"cudaHostRegister of {size} bytes failed: {error}")
        self._device = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._pieces = {"one piece": [slice(0, size)], "64 MiB": [slice(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK)]}
        self.out = {kind: Times() for kind in self._pieces}
        self.back = {kind: Times() for kind in self._pieces}

    def measure_out(self) -> None:
        self._measure(self.out, self._host, self._device)

    def measure_back(self) -> None:
        self._measure(self.back, self._device, self._host)

    def _measure(self, times: dict[str, Times], target: torch.Tensor, source: torch.Tensor) -> None:
        for kind, pieces in self._pieces.items():
            times[kind].add(timed(lambda: [target[piece].copy_(source[piece], non_blocking=True) for piece in pieces]))

    def forget(self) -> None:
        """Drops what was measured so far."""
        for times in (*self.out.values(), *self.back.values()):
            times.seconds.clear()

    def close(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        del self._host, self._device


def fastest(times: dict[str, Times]) -> Times:
    return min(times.values(), key=lambda t: t.median)


def measure_warm(name: str, sizes: list[int], rounds: int) -> dict[str, float | str]:
    """Evict and restore of one workload once host memory is pinned, beside the plain copy."""
    lowtide.trim_host()  # what the last workload left pinned is not this one's
    region = lowtide.OffloadRegion(name)
    tensors = make_tensors(region, sizes)
    before = checksum(tensors)
    total = sum(sizes)
    plain = PlainCopy(total)
    evict, restore, pinned = Times(), Times(), 0
    for number in range(rounds + 2):
        if number == 2:  # the first two warm up
            plain.forget()
            evict, restore = Times(), Times()
        plain.measure_out()
        evict.add(timed(region.evict))
        pinned = region.pinned_bytes
        plain.measure_back()
        restore.add(timed(region.restore))
    if checksum(tensors) != before:
        sys.exit(f"{name}: the bytes that came back are not those that left")
    plain.close()
    out, back = fastest(plain.out), fastest(plain.back)
    return {
        "name": name,
        "tensors": len(sizes),
        "bytes": total,
        "pinned_bytes": pinned,
        "evict_gbps": total / evict.median / 1e9,
        "restore_gbps": total / restore.median / 1e9,
        "plain_out_gbps": total / out.median / 1e9,
        "plain_in_gbps": total / back.median / 1e9,
        "evict_ratio": out.median / evict.median,
        "restore_ratio": back.median / restore.median,
        "evict_text": evict.rate(total),
        "restore_text": restore.rate(total),
        "plain_out_text": out.rate(total),
        "plain_in_text": back.rate(total),
    }


def first_evict(size: int) -> dict[str, float]:
    """The first eviction of this process: nothing is pinned, no page was ever evicted."""
    lowtide.install("cuda")
    region = lowtide.OffloadRegion("cold")
    sizes = gpt_state_sizes(size)
    tensors = make_tensors(region, sizes)
    torch.cuda.synchronize()
    pinned = int(lowtide.memory_stats()["pinned_bytes"])
    begin = time.perf_counter()
    region.evict()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "bytes": sum(sizes),
        "tensors": len(tensors),
        "pinned_before": pinned,
        "pinned_bytes": region.pinned_bytes,
    }


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here, as one line of JSON")
    parser.add_argument("--cold-runs", type=int, default=3, help="processes whose first eviction is measured")
    parser.add_argument("--first-evict-of", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_cuda()
    if options.first_evict_of:
        print(json.dumps(first_evict(options.first_evict_of)))
        return 0

    print(machine(), flush=True)
    cold = [child(__file__, "--first-evict-of", str(11 * GIB)) for _ in range(options.cold_runs)]
    times = Times([run["seconds"] for run in cold])
    print(
        f"\nfirst evict of {cold[0]['bytes'] / GIB:.2f} GiB in {cold[0]['tensors']} tensors, each in a process of its own: "
        f"{times.spread()} ms; host memory pinned before it {max(run['pinned_before'] for run in cold) / GIB:.2f} GiB, "
        f"after it {cold[0]['pinned_bytes'] / GIB:.2f} GiB",
        flush=True,
    )

    lowtide.install("cuda")
    warm = [measure_warm(name, sizes, rounds) for name, (sizes, rounds) in workloads().items()]
    rows = [
        [
            str(w["name"]),
            w["evict_text"],
            w["plain_out_text"],
            f"{w['evict_ratio']:.3f}",
            w["restore_text"],
            w["plain_in_text"],
            f"{w['restore_ratio']:.3f}",
            f"{w['pinned_bytes'] / w['bytes']:.3f}",
        ]
        for w in warm
    ]
    print("\nGB/s: median (slowest..fastest); ratio: ours to the plain copy; pinned: host memory to bytes evicted\n")
    print(table(["warm", "evict", "plain out", "ratio", "restore", "plain in", "ratio", "pinned"], rows), flush=True)
    write_json(options.json, {"machine": machine(), "first_evict_ms": times.median * 1e3, "first_evict": cold, "warm": warm})
    return 0


if __name__ == "__main__":
    sys.exit(main())
