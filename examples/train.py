"""Trains a byte-level transformer twice from one seed, with AdamW's state leaving the device between steps and without.

    python examples/train.py                   # the sources of Python's standard library, sizes that fit the machine
    python examples/train.py --text FILE --layers 24 --d-model 2048

What a program of your own needs is in `train`: the region, and three lines around `optimizer.step()`. The rest is a model to train
and the measuring: what the device holds in each phase of a step, what is evicted, what is pinned, what it costs, and whether the
results are the same to the bit. Exit status 1 if they are not.

Without a GPU it runs on Lowtide's host device. There the whole training is put into a second region, so that the device's figures
cover parameters, gradients and activations as they would on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# cuBLAS gives the same bits in every run only with a workspace of fixed size; it reads this when it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from timeline import Phase, Recorder, Unit, draw
from torch import nn

import lowtide

RECORDED_STEPS = 2  # the last ones are recorded; they are slowed by that, so the step times come from those before
HEAD = 64


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each on its normed input and added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_forward(x))))


class ByteTransformer(nn.Module):
    """Predicts each byte of a text from those before it; `forward` returns the mean loss."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        seen, following = text[:, :-1], text[:, 1:]
        x = self.bytes(seen) + self.places.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Sizes:
    """What is trained, and on how much text at a time."""

    layers: int
    width: int
    batch: int
    length: int
    steps: int


def sizes_for(kind: str) -> Sizes:
    """Sizes at which the state matters and the demo stays short."""
    if kind == "host":
        return Sizes(layers=6, width=384, batch=3, length=256, steps=16)
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        return Sizes(layers=12, width=1024, batch=8, length=1024, steps=30)
    return Sizes(layers=20, width=2048, batch=16, length=1024, steps=30)


def read_text(path: pathlib.Path | None) -> tuple[bytes, str]:
    """The text and where it is from: `path`, or the sources of this Python's standard library."""
    if path is not None:
        return path.read_bytes(), str(path)
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    others = {"encodings", "pydoc_data", "site-packages", "test"}  # character tables and such, or not the library's own
    sources = sorted(source for source in (*library.glob("*.py"), *library.glob("*/*.py")) if source.parent.name not in others)
    return b"".join(source.read_bytes() for source in sources), f"{len(sources)} sources in {library}"


@dataclass
class Run:
    """What one training run gave."""

    losses: torch.Tensor
    weights: list[torch.Tensor]
    step_seconds: list[float]
    record: Recorder
    state_bytes: int
    parameters: int

    @property
    def median_step(self) -> float:
        """Seconds of an ordinary step: not the first, which makes the state and warms up, and not the recorded ones."""
        ordinary = self.step_seconds[1:-RECORDED_STEPS] or self.step_seconds
        return statistics.median(ordinary)


class Progress:
    """A line that says how far the run is: rewritten in place on a terminal, a few lines in a log."""

    def __init__(self, steps: int) -> None:
        self._steps, self._begin, self._shown = steps, time.perf_counter(), 0
        self._terminal = sys.stdout.isatty()

    def step(self, done: int, loss: Callable[[], float]) -> None:
        """`done` steps are done. The loss is asked for only when it is shown, since on a GPU that waits for the device."""
        quarter = 4 * done // self._steps
        if not self._terminal and quarter == self._shown:
            return
        self._shown = quarter
        spent = time.perf_counter() - self._begin
        bar = "#" * (24 * done // self._steps)
        left = spent / done * (self._steps - done)
        text = f"  [{bar:<24}] step {done}/{self._steps}  loss {loss():.3f}  {spent:.0f} s, {left:.0f} s left"
        end = "\n" if done == self._steps or not self._terminal else ""
        print(f"\r\x1b[K{text}" if self._terminal else text, end=end, flush=True)


def train(sizes: Sizes, text: torch.Tensor, device: str, seed: int, evict: bool) -> Run:
    """Trains a new model. With `evict` AdamW's state is on the device only while the optimizer steps."""
    torch.manual_seed(seed)
    picks = torch.Generator().manual_seed(seed)
    with torch.device(device):
        model = ByteTransformer(sizes.layers, sizes.width, sizes.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (256 / sizes.width) ** 0.5, fused=True)
    state = lowtide.OffloadRegion("adam")

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    record, progress, losses, seconds = Recorder(state, synchronize), Progress(sizes.steps), [], []
    record.watch(model.blocks)

    for step in range(sizes.steps):
        begins = torch.randint(len(text) - sizes.length - 1, (sizes.batch,), generator=picks).tolist()
        batch = torch.stack([text[at : at + sizes.length + 1] for at in begins]).to(device).long()
        synchronize()
        begin = time.perf_counter()
        with record.step(step, recorded=step >= sizes.steps - RECORDED_STEPS):
            with record.phase("forward"), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(batch)
            with record.phase("backward"):
                loss.backward()
            with record.phase("restore"):
                state.restore()  # no effect while it is here
            with record.phase("step"):
                # AdamW makes its state in its first step: that step alone runs inside the region. Gradients are made outside it.
                with state if step == 0 else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
            if evict:
                with record.phase("evict"):
                    state.evict()
        synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach())
        progress.step(step + 1, loss.item)

    state.restore()
    with lowtide.no_region():  # what is kept of this run must not count as memory of the next
        kept = torch.stack(losses).cpu(), [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    return Run(
        losses=kept[0],
        weights=kept[1],
        step_seconds=seconds,
        record=record,
        state_bytes=state.allocated_bytes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors agree in every bit: NaNs and signed zeros too."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def columns(cells: Sequence[str]) -> str:
    """Cells of a table's row."""
    return "".join(f"{cell:>11}" for cell in cells)


def print_phases(resident: Run, evicting: Run, unit: Unit) -> None:
    """A table of the last step of both runs: for each phase the most that was allocated in it, the rest at its end."""
    heads = ("allocated", "reserved", "free", "evicted", "pinned")
    print(f"\nThe last step in {unit.name}: the most allocated on the device during each phase; at the phase's end: reserved,")
    print("of that free pages (ready for any use), evicted, and pinned host memory")
    print(f"  {'':<10}{'state stays':^32}   {'state leaves after every step':^62}")
    print(f"  {'phase':<10}" + columns(heads[:3]) + "  state     " + columns(heads))
    stays, leaves = resident.record.last_step(), evicting.record.last_step()
    where = {"forward": "out", "backward": "out", "restore": "comes in", "step": "in", "evict": "goes out"}

    def figures(run: Run, phase: Phase) -> list[float]:
        samples = run.record.within(phase)
        last = samples[-1]
        return [max(s.allocated for s in samples), last.reserved, last.free, last.evicted, last.pinned]

    for name, location in where.items():
        moving = name in ("restore", "evict")
        left = ["-"] * 3 if moving else [unit.text(size) for size in figures(resident, stays[name])[:3]]
        right = [unit.text(size) for size in figures(evicting, leaves[name])]
        print(f"  {name:<10}" + columns(left) + f"  {location:<10}" + columns(right))


def print_summary(resident: Run, evicting: Run, unit: Unit) -> bool:
    """Peaks, times and whether the results agree; returns the latter."""
    high, low = resident.record.busiest.allocated, evicting.record.busiest.allocated
    print(
        f"\npeak of forward and backward   {unit.text(high)} {unit.name} with the state on the device, "
        f"{unit.text(low)} {unit.name} without it: {unit.text(high - low)} less (the state is {unit.text(resident.state_bytes)})"
    )
    phases = evicting.record.last_step()
    inward, outward = ((phases[name].end - phases[name].begin) * 1e3 for name in ("restore", "evict"))
    print(
        f"time of a step                 {resident.median_step * 1e3:.0f} ms with the state on the device, "
        f"{evicting.median_step * 1e3:.0f} ms with it brought in ({inward:.0f} ms) and taken out ({outward:.0f} ms)"
    )

    losses = same_bits(resident.losses, evicting.losses)
    different = sum(not same_bits(a, b) for a, b in zip(resident.weights, evicting.weights, strict=True))
    first, last = resident.losses[0].item(), resident.losses[-1].item()
    print(
        f"losses                         {len(resident.losses)} steps, {first:.3f} to {last:.3f}: "
        + ("bit-identical" if losses else "THEY DIFFER")
    )
    print(
        f"final weights                  {len(resident.weights)} tensors, {resident.parameters / 1e6:.1f} M values: "
        + ("bit-identical" if not different else f"{different} TENSORS DIFFER")
    )
    return losses and not different


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "host"), default="auto", help="auto: CUDA where there is a GPU")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--d-model", type=int, help=f"width of the model, a multiple of {HEAD}")
    parser.add_argument("--batch", type=int, help="pieces of text in a step")
    parser.add_argument("--length", type=int, help="bytes of text in a piece")
    parser.add_argument("--text", type=pathlib.Path, help="train on this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--png", type=pathlib.Path, default=pathlib.Path("memory_timeline.png"), help="where to draw the memory timeline"
    )
    options = parser.parse_args(arguments)

    lowtide.install(options.device)  # before anything uses CUDA
    kind = lowtide.installed()
    device, unit = ("cuda", Unit("GB", 1e9)) if kind == "cuda" else ("cpu", Unit("MB", 1e6))
    default = sizes_for(kind)
    sizes = Sizes(
        layers=options.layers or default.layers,
        width=options.d_model or default.width,
        batch=options.batch or default.batch,
        length=options.length or default.length,
        steps=options.steps or default.steps,
    )
    if sizes.width % HEAD or sizes.steps <= RECORDED_STEPS:
        parser.error(f"--d-model must be a multiple of {HEAD}, and --steps more than {RECORDED_STEPS}")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # the two runs do not read what they did not write

    try:
        data, origin = read_text(options.text)
    except OSError as error:
        parser.error(f"--text: {error}")
    if len(data) < 2 * sizes.length:
        parser.error(f"--text: {origin} is only {len(data)} bytes long; a step reads pieces of {sizes.length}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    machine = (
        torch.cuda.get_device_name(0) if kind == "cuda" else f"the host device ({torch.get_num_threads()} CPU threads, no GPU)"
    )
    print(f"Lowtide {lowtide.__version__}, torch {torch.__version__}, on {machine}")
    print(f"text   {len(data) / 1e6:.1f} MB: {origin}")
    print(f"model  {sizes.layers} layers of width {sizes.width}; each step reads {sizes.batch} x {sizes.length} bytes of text")

    # A stand-in for the device's memory where there is no device: everything made in it is counted as on a GPU.
    everything = contextlib.nullcontext() if kind == "cuda" else lowtide.OffloadRegion("everything else")
    # The run with eviction is the first: it needs less, so what it holds is its own and not left over from the other.
    runs: dict[bool, Run] = {}
    for number, (evict, words) in enumerate(
        ((True, "the state leaves after every step"), (False, "the state stays on the device")), 1
    ):
        print(f"\nrun {number} of 2: {words}", flush=True)
        with everything:
            runs[evict] = train(sizes, text, device, options.seed, evict)
        gc.collect()
        lowtide.trim_host()
        if kind == "cuda":
            torch.cuda.empty_cache()
    resident, evicting = runs[False], runs[True]
    print_phases(resident, evicting, unit)
    identical = print_summary(resident, evicting, unit)

    title = f"{resident.parameters / 1e6:.0f} M parameters, AdamW, {sizes.batch * sizes.length} bytes of text a step, on {machine}"
    steps = f"steps {sizes.steps - RECORDED_STEPS + 1} and {sizes.steps}"
    panels = (
        (f"AdamW state stays on the device: {resident.median_step * 1e3:.0f} ms a step", resident.record),
        (f"AdamW state leaves after every step: {evicting.median_step * 1e3:.0f} ms a step", evicting.record),
    )
    try:
        draw(panels, unit, title, steps, options.png)
        print(f"memory timeline                {options.png}")
    except ImportError:
        print("memory timeline                not drawn: matplotlib is missing (pip install matplotlib)")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
