"""A forked child gets clear errors and ends cleanly; the parent goes on."""

import os
import sys
import warnings

import lowtide
import torch
from _common import install

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork beside threads, which is the point here
device = install()
region, away = lowtide.OffloadRegion("resident"), lowtide.OffloadRegion("evicted")
with region:
    tensor = torch.arange(1000, device=device)
with away:
    evicted = torch.arange(1000, device=device)
away.evict()


def refused(call):
    try:
        call()
    except RuntimeError as error:
        # The last one is CUDA's own word for a child's use of its parent's context.
        refusals = ("fork", "offload region 'evicted' is evicted", "initialization error")
        return any(refusal in str(error) for refusal in refusals)
    return False


child = os.fork()
if child == 0:
    results = {
        "enter": refused(region.__enter__),
        "evict": refused(region.evict),
        "restore": refused(away.restore),
        "access": refused(evicted.sum),
        "offload": refused(lambda: lowtide.CPUOffloadPool().offload()),
    }
    bad = [name for name, ok in results.items() if not ok]
    if bad:
        print("not refused in the child:", bad, flush=True)
    # Plain CPU work goes on in a child, as DataLoader workers do it; so does the end of the child's copies of tensors.
    if torch.ones(10).sum().item() != 10:
        bad.append("cpu")
    del tensor, evicted
    sys.stdout.flush()
    os._exit(1 if bad else 0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
away.restore()
region.evict()
region.restore()
assert tensor.sum().item() == evicted.sum().item() == 499500
