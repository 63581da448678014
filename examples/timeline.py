"""The demo's measuring: what the device holds over a step of training, and a chart of it. Belongs to train.py."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import lowtide


@dataclass(frozen=True)
class Unit:
    """The unit in which a machine's sizes read well."""

    name: str
    bytes: float

    def of(self, size: float) -> float:
        return size / self.bytes

    def text(self, size: float) -> str:
        return f"{self.of(size):.{2 if self.name == 'GB' else 0}f}"


@dataclass(frozen=True)
class Sample:
    """What is where at one moment. Bytes."""

    seconds: float
    allocated: int  # on the device, the state included while it is there
    reserved: int  # device memory that the process holds
    free: int  # of it, pages that are ready for any use
    state: int  # AdamW's state on the device
    evicted: int  # AdamW's state on the host
    pinned: int  # host memory held for it


@dataclass(frozen=True)
class Phase:
    """A part of a recorded step."""

    name: str
    step: int
    begin: float
    end: float


@dataclass
class Recorder:
    """Notes what the device holds during the recorded steps. Does nothing in the others, so that these run at full speed.

    On a GPU the host runs ahead of the device; recorded steps wait for it after every block of the model and every phase, so that a
    figure belongs to what the device was doing then.
    """

    state: lowtide.OffloadRegion
    synchronize: Callable[[], None]
    samples: list[Sample] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    _step: int | None = None

    @contextlib.contextmanager
    def step(self, index: int, recorded: bool) -> Iterator[None]:
        """The body is step `index`; while it runs, a thread takes a sample every few milliseconds too."""
        if not recorded:
            yield
            return
        self._step, done = index, threading.Event()

        def watch() -> None:
            while not done.wait(0.003):
                self.sample()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self._step = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body is the phase `name` of the step."""
        if self._step is None:
            yield
            return
        begin = self.sample()
        yield
        self.phases.append(Phase(name, self._step, begin.seconds, self.sample(synchronize=True).seconds))

    def sample(self, synchronize: bool = False) -> Sample:
        """Notes what is where now, or once the device has done what is queued."""
        if synchronize:
            self.synchronize()
        figures = lowtide.memory_stats()
        sample = Sample(
            time.perf_counter(),
            int(figures["allocated_bytes"]),
            int(figures["reserved_bytes"]),
            int(figures["free_page_bytes"]),
            self.state.resident_bytes,
            self.state.evicted_bytes,
            int(figures["pinned_bytes"]),
        )
        self.samples.append(sample)
        return sample

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Samples after each of these parts of a model, forward and backward."""

        def after_backward(gradient: torch.Tensor) -> None:
            if self._step is not None:
                self.sample(synchronize=True)

        def after_forward(block: nn.Module, arguments: object, output: torch.Tensor) -> None:
            if self._step is not None:
                self.sample(synchronize=True)
                output.register_hook(after_backward)

        for block in blocks:
            block.register_forward_hook(after_forward)

    def within(self, phase: Phase) -> list[Sample]:
        """The samples taken in a phase, in order of time."""
        return sorted((s for s in self.samples if phase.begin <= s.seconds <= phase.end), key=lambda s: s.seconds)

    @property
    def busiest(self) -> Sample:
        """The moment of forward and backward at which most was allocated."""
        work = [phase for phase in self.phases if phase.name in ("forward", "backward")]
        return max((sample for phase in work for sample in self.within(phase)), key=lambda s: s.allocated)

    def last_step(self) -> dict[str, Phase]:
        """The phases of the last recorded step, by name."""
        return {phase.name: phase for phase in self.phases}


def draw(panels: Sequence[tuple[str, Recorder]], unit: Unit, title: str, steps: str, path: pathlib.Path) -> None:
    """Draws what the device held over the recorded steps of each run, one panel a run, all on the same axes. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rest_color, state_color, host_color, free_color, ink = "#9db8d2", "#e07b39", "#7a3e9d", "#8fc49b", "#333333"
    shades = {"forward": "#e2e2e2", "backward": "#cccccc", "step": "#aaaaaa", "restore": "#d9c8e4", "evict": "#d9c8e4"}
    dashes = (0, (4, 2))
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": "#888888", "axes.labelcolor": ink, "text.color": ink})
    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, sharey=True, figsize=(12, 0.6 + 3.4 * len(panels)), dpi=130, squeeze=False
    )

    longest = max(record.phases[-1].end - record.phases[0].begin for _, record in panels)
    scale, time_unit = (1.0, "s") if longest > 4 else (1e3, "ms")
    top = unit.of(max(sample.reserved for _, record in panels for sample in record.samples))
    for panel, (name, record) in zip(axes[:, 0], panels):
        samples = sorted(record.samples, key=lambda s: s.seconds)
        origin = record.phases[0].begin
        times = [(s.seconds - origin) * scale for s in samples]
        state = [unit.of(s.state) for s in samples]
        panel.fill_between(times, 0, state, color=state_color, linewidth=0)
        panel.fill_between(times, state, [unit.of(s.allocated) for s in samples], color=rest_color, linewidth=0)
        reserved, used = [unit.of(s.reserved) for s in samples], [unit.of(s.reserved - s.free) for s in samples]
        panel.fill_between(times, used, reserved, facecolor="none", edgecolor=free_color, hatch="////", linewidth=0)
        panel.plot(times, reserved, color=ink, linewidth=1.2)
        if any(s.evicted for s in samples):
            panel.plot(times, [unit.of(s.evicted) for s in samples], color=host_color, linewidth=1.8, linestyle=dashes)

        peak = record.busiest
        at, height = (peak.seconds - origin) * scale, unit.of(peak.allocated)
        panel.plot([at], [height], marker="o", markersize=4.5, color=ink)
        panel.annotate(
            f"{unit.text(peak.allocated)} {unit.name} ",
            (at, height),
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9.5,
            fontweight="bold",
        )

        strip = panel.get_xaxis_transform()  # x in milliseconds, y in parts of the panel's height
        for phase in record.phases:
            begin, end = (phase.begin - origin) * scale, (phase.end - origin) * scale
            if phase.name in ("restore", "evict") and not any(s.evicted for s in samples):
                continue  # nothing moves in this run
            panel.fill_between([begin, end], 1.02, 1.085, transform=strip, color=shades[phase.name], linewidth=0, clip_on=False)
            if end - begin > 0.0085 * longest * scale * len(phase.name):
                panel.text(
                    (begin + end) / 2, 1.05, phase.name, transform=strip, ha="center", va="center", fontsize=8.5, clip_on=False
                )

        panel.set_title(name, loc="left", fontsize=11.5, fontweight="bold", pad=20)
        panel.set_ylabel(f"device memory, {unit.name}")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#000000", alpha=0.08)
        panel.set_axisbelow(True)

    axes[0, 0].set_xlim(0, longest * scale)
    axes[0, 0].set_ylim(0, 1.1 * top)
    axes[-1, 0].set_xlabel(f"time, {time_unit} ({steps}, slowed a little by being recorded)")
    figure.suptitle(title, x=0.012, ha="left", fontsize=10.5)
    figure.legend(
        handles=[
            Patch(color=rest_color, label="parameters, gradients, activations"),
            Patch(color=state_color, label="AdamW state on the device"),
            Line2D([], [], color=host_color, linewidth=1.8, linestyle=dashes, label="AdamW state in pinned host memory"),
            Line2D([], [], color=ink, linewidth=1.2, label="device memory held by the process (reserved)"),
            Patch(facecolor="none", edgecolor=free_color, hatch="////", linewidth=0, label="of it free pages, ready for any use"),
            Patch(color=shades["evict"], label="restore and evict"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=9.5,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 0.99))
    figure.savefig(path)
    plt.close(figure)
