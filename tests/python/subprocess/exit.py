"""Ends the process in the way named, with regions in every state and tensors held in odd places. Argument: WAY."""

import os
import sys
import threading
import time

import lowtide
import torch
from _common import install

way = sys.argv[1]
device = install()
tensors = []
for state in ("resident", "evicted", "half"):
    region = lowtide.OffloadRegion(state)
    with region:
        tensors += [torch.ones(1 << 18, device=device) for _ in range(4)]
    if state != "resident":
        region.evict()
    if state == "half":
        with region:
            tensors.append(torch.ones(1 << 18, device=device))
pool = lowtide.CPUOffloadPool()
outside = torch.ones(1 << 18, device=device)
pool.track(outside)
pool.offload()
cycle = [torch.ones(10, device=device), pool]
cycle.append(cycle)
local = threading.local()
local.tensor = tensors[0][5:]

if way == "sys.exit":
    sys.exit(0)
elif way == "end":
    pass
elif way == "inside":
    region.__enter__()
    torch.ones(10, device=device)
elif way == "os._exit":
    os._exit(0)
elif way == "exception":
    raise ValueError("on purpose")
elif way == "daemon thread":

    def work():
        other = lowtide.OffloadRegion("of-a-daemon")
        with other:
            mine = torch.ones(1 << 20, device=device)
        while mine.shape:
            other.evict()
            other.restore()

    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
elif way == "thread":

    def finish():
        with region:
            torch.ones(10, device=device)

    thread = threading.Thread(target=finish)
    thread.start()
elif way == "SIGTERM":
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
else:
    raise SystemExit(f"unknown way {way}")
