"""A training step whose AdamW state leaves the GPU between steps, beside one whose state stays.

    python bench/train_step.py [--tokens 8192 16384 32768] [--json FILE]

A GPT of 1.27 billion parameters in fp32, AdamW (fused), bf16 autocast. `blocking` restores the state before the optimizer's step
and evicts it after, nothing hidden behind compute. `native` is the resident step with torch's own allocator, in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from common import Times, child, machine, require_cuda, table, timed, write_json
from torch import nn

import lowtide

SEQUENCE, VOCABULARY, HEAD = 2048, 32000, 128
ROUNDS, STEPS = 3, 4


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_forward(x))))


class Gpt(nn.Module):
    """A decoder whose embedding is also its head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.embedding.weight.t()).float().flatten(0, 1), targets.flatten())


class Training:
    """The model, its optimizer, and a step with the state staying or leaving."""

    def __init__(self, layers: int, width: int, region: lowtide.OffloadRegion | None) -> None:
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.device("cuda"):
            self.model = Gpt(layers, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.region = region
        self.batches: list[torch.Tensor] = []
        self._steps = 0

    def use(self, tokens: int) -> None:
        """Steps read this many tokens from here on."""
        generator = torch.Generator("cuda").manual_seed(1)
        shape = (max(1, tokens // SEQUENCE), min(tokens, SEQUENCE) + 1)
        self.batches = [torch.randint(0, VOCABULARY, shape, device="cuda", generator=generator) for _ in range(4)]

    def step(self, leave: bool) -> int:
        """One step. Returns the most that was allocated in its forward and backward."""
        batch = self.batches[self._steps % 4]
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        peak = torch.cuda.max_memory_allocated()
        if self.region is not None:
            self.region.restore()
        with self.region if self.region is not None and self._steps == 0 else contextlib.nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()
        if leave and self.region is not None:
            self.region.evict()
        self._steps += 1
        return peak


def measure(allocator: str, tokens: list[int], layers: int, width: int) -> dict[str, dict[str, dict[str, object]]]:
    """Seconds and peaks by tokens and kind of step, in this process."""
    region = None
    if allocator == "lowtide":
        lowtide.install("cuda")
        region = lowtide.OffloadRegion("adam")
    training = Training(layers, width, region)
    kinds = ("native",) if region is None else ("resident", "blocking")
    result: dict[str, dict[str, dict[str, object]]] = {}
    for count in tokens:
        training.use(count)
        cases = {kind: {"seconds": [], "peak": 0} for kind in kinds}
        for kind in kinds:  # warms up
            for _ in range(2):
                training.step(kind == "blocking")
        for _ in range(ROUNDS):
            for kind, case in cases.items():
                # The last step of the other kind left the state where this kind does not want it.
                peaks = [training.step(kind == "blocking")]
                case["seconds"] += [timed(lambda: peaks.append(training.step(kind == "blocking"))) for _ in range(STEPS)]
                case["peak"] = max(peaks[1:])
        if region is not None:
            region.restore()
            cases["resident"]["state"] = region.allocated_bytes
        cases[kinds[0]]["parameters"] = sum(p.numel() for p in training.model.parameters())
        result[str(count)] = cases
    return result


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens a step")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here, as one line of JSON")
    parser.add_argument("--measure", choices=("native", "lowtide"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_cuda()
    if options.measure:
        print(json.dumps(measure(options.measure, options.tokens, options.layers, options.width)))
        return 0

    print(machine(), flush=True)
    sizes = ["--layers", str(options.layers), "--width", str(options.width), "--tokens", *map(str, options.tokens)]
    native, ours = (child(__file__, "--measure", kind, *sizes) for kind in ("native", "lowtide"))
    rows, cases = [], {}
    for count in map(str, options.tokens):
        case = {**native[count], **ours[count]}
        times = {kind: Times(case[kind]["seconds"]) for kind in ("native", "resident", "blocking")}
        peaks = {kind: case[kind]["peak"] / 1e9 for kind in times}
        rows.append(
            [
                f"{int(count):,}".replace(",", " "),
                *(f"{times[kind].spread()}" for kind in times),
                f"{times['blocking'].median / times['resident'].median:.2f}",
                *(f"{peak:.1f}" for peak in peaks.values()),
            ]
        )
        cases[count] = {kind: {"ms": times[kind].median * 1e3, "peak_gb": peaks[kind]} for kind in times}
    first = ours[str(options.tokens[0])]["resident"]
    print(
        f"\nGPT of {first['parameters'] / 1e9:.2f} billion parameters, AdamW state {first['state'] / 1e9:.1f} GB; "
        "ms a step: median (least..most); GB: most allocated in forward and backward\n"
    )
    print(
        table(
            [
                "tokens a step",
                "native ms",
                "resident ms",
                "blocking ms",
                "blocking / resident",
                "native GB",
                "resident GB",
                "blocking GB",
            ],
            rows,
        ),
        flush=True,
    )
    write_json(options.json, {"machine": machine(), "state_bytes": first["state"], "tokens": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
