"""A process that forks while another of its threads moves a region: the child gets errors, and hangs nowhere."""

import os
import signal
import threading
import time
import warnings

import lowtide
import torch
from _common import install

warnings.simplefilter("ignore", DeprecationWarning)
torch.set_num_threads(1)
device = install()
moving, open_here = lowtide.OffloadRegion("moving"), lowtide.OffloadRegion("open here")
with moving:
    tensors = [torch.ones(1000, device=device) for _ in range(500)]
plain = torch.ones(10)
stop = threading.Event()


def move():
    while not stop.is_set():
        moving.evict()
        moving.restore()


CALLS = [
    lambda: moving.state,
    lambda: moving.allocated_bytes,
    lambda: moving.evicted_bytes,
    lambda: moving.pinned_bytes,
    moving.evict,
    moving.restore,
    lambda: repr(moving),
    lambda: moving.track(tensors[0]),
    lambda: lowtide.OffloadRegion("another"),
    lambda: lowtide.region("moving"),
    lowtide.regions,
    lowtide.memory_stats,
    lowtide.trim_host,
    lambda: lowtide.set_host_budget(1 << 30),
    lambda: torch.ones(10) + plain,  # in an open scope
    tensors.clear,
]

mover = threading.Thread(target=move)
mover.start()
try:
    with open_here:
        for number in range(8 * len(CALLS)):
            time.sleep(0.001 * (number % 7) / 7)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    CALLS[number % len(CALLS)]()
                except RuntimeError as error:
                    os._exit(0 if "fork" in str(error) or "is evicted" in str(error) else 3)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, (number % len(CALLS), status)
finally:
    stop.set()
    mover.join()
