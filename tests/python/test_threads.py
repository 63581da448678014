"""Threads: whose allocations a region takes, and that nobody waits for the GIL."""

import asyncio
import gc
import threading
import time

import lowtide
import pytest
import torch
from lowtide_testing import Keep, assert_away, fill

MIB = 1 << 20


def region_ids(tensors):
    return {lowtide._native.storage_handle(tensor).region_id for tensor in tensors}


def run_threads(*targets, seconds=60):
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_a_region_is_open_on_its_thread_only(region, device):
    opened, done = threading.Event(), threading.Event()
    theirs = []

    def other():
        opened.wait(10)
        theirs.extend(torch.ones(10, device=device) for _ in range(1000))
        done.set()

    def holder():
        with region:
            opened.set()
            done.wait(30)
            mine = torch.ones(10, device=device)
        assert region_ids([mine]) == {region._native.id}

    run_threads(other, holder)
    assert region_ids(theirs) == {None}


def test_one_region_on_many_threads(region, device):
    made = []

    def work():
        for i in range(50):
            with region:
                made.append(torch.full((100 + i,), float(i), device=device))

    run_threads(*[work] * 4)
    assert region_ids(made) == {region._native.id}
    keeps = [Keep(tensor) for tensor in made]
    region.evict()
    assert_away(*made)
    region.restore()
    for keep in keeps:
        keep.check()


def test_evict_and_restore_on_other_threads(region, device):
    with region:
        tensor = fill(torch.empty(MIB, dtype=torch.uint8, device=device))
    keep = Keep(tensor)
    for _ in range(5):
        run_threads(region.evict)
        assert_away(tensor)
        run_threads(region.restore)
        keep.check()


def test_evict_and_restore_at_the_same_time(region, device):
    with region:
        tensor = fill(torch.empty(4 * MIB, dtype=torch.uint8, device=device))
    keep = Keep(tensor)
    run_threads(
        *[lambda: [region.evict() for _ in range(20)]] * 2, *[lambda: [region.restore() for _ in range(20)]] * 2
    )
    region.restore()
    keep.check()


def test_asyncio_tasks_share_the_scope_of_their_thread(region, device):
    """Documented: a region that is open across an await is open for the tasks that run meanwhile."""

    async def main():
        inside = asyncio.Event()
        leave = asyncio.Event()

        async def holder():
            with region:
                inside.set()
                await leave.wait()

        task = asyncio.create_task(holder())
        await inside.wait()
        tensor = torch.ones(10, device=device)
        leave.set()
        await task
        return tensor, torch.ones(10, device=device)

    during, after = asyncio.run(main())
    assert region_ids([during]) == {region._native.id}
    assert region_ids([after]) == {None}


@pytest.mark.parametrize("seconds", [4])
def test_no_deadlock_and_the_gil_is_free(region, device, seconds):
    """Eviction, allocation, plain Python and garbage collection side by side: all make progress."""
    with region:
        tensors = [fill(torch.empty(16 * MIB, dtype=torch.uint8, device=device), seed=i) for i in range(4)]
    keeps = [Keep(tensor) for tensor in tensors]
    end = time.monotonic() + seconds
    progress = {"move": 0, "allocate": 0, "count": 0, "collect": 0, "inside": 0}

    def move():
        while time.monotonic() < end:
            region.evict()
            region.restore()
            progress["move"] += 1

    def allocate():
        while time.monotonic() < end:
            torch.empty(100_000, device=device)
            progress["allocate"] += 1

    def count():
        while time.monotonic() < end:
            progress["count"] += 1

    def collect():
        while time.monotonic() < end:
            cycle = [torch.ones(1000, device=device)]
            cycle.append(cycle)
            del cycle
            gc.collect()
            progress["collect"] += 1

    other = lowtide.OffloadRegion(region.name + "-beside")

    def allocate_inside():
        while time.monotonic() < end:
            with other:
                torch.ones(50_000, device=device)
            progress["inside"] += 1

    run_threads(move, allocate, count, collect, allocate_inside)
    assert min(progress.values()) > 3, progress
    for keep in keeps:
        keep.check()


def test_no_deadlock_over_storages_that_only_python_holds(region, device):
    """To hold such a storage torch takes the GIL; a thread that has the GIL and asks about a region must not be in the way."""
    with region:
        storages = [torch.ones(100, device=device).untyped_storage() for _ in range(200)]
    end = time.monotonic() + 1

    def move():
        while time.monotonic() < end:
            region.evict()
            assert storages[0].nbytes() == 0
            region.restore()

    def ask():
        while time.monotonic() < end:
            region._native.tracked_storages()

    run_threads(move, ask, ask, seconds=20)
    assert storages[-1].nbytes() == 400


def test_the_gil_is_released_while_bytes_move(region, device):
    with region:
        tensor = torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    region.evict()  # pins the host memory; the second time only bytes move
    region.restore()
    ticks = []
    stop = threading.Event()

    def ticker():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=ticker)
    thread.start()
    try:
        moments = []
        for _ in range(3):
            begin = time.perf_counter()
            region.evict()
            region.restore()
            moments.append((begin, time.perf_counter()))
    finally:
        stop.set()
        thread.join()
    for begin, finish in moments:
        during = sum(begin < tick < finish for tick in ticks)
        assert during >= max(1, (finish - begin) / 0.05), f"{during} ticks in {finish - begin:.3f} s"
    assert int(tensor[0]) == 1


def test_scopes_of_a_thread_that_ends_inside(region, device):
    """A thread that dies inside `with` (daemon threads at exit do) harms nobody."""

    def work():
        region.__enter__()
        torch.ones(10, device=device)

    run_threads(work)
    assert region_ids([torch.ones(10, device=device)]) == {None}
