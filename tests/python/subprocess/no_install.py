"""Without install() a region would catch nothing: it says so instead."""

import lowtide
import torch

assert lowtide.installed() is None
region = lowtide.OffloadRegion("early")
for call in (
    region.__enter__,
    lambda: lowtide.CPUOffloadPool().track(torch.ones(1)),
    lambda: lowtide.CPUOffloadPool().offload(),
    lowtide.memory_stats,
):
    try:
        call()
    except lowtide.LowtideError as error:
        assert "lowtide.install()" in str(error), error
    else:
        raise AssertionError("no error")
assert region.evict() == 0
region.restore()
assert region.state == "resident"
assert torch.ones(3).sum().item() == 3
