"""A size that the host device cannot have is refused, and nothing is chosen then."""

import lowtide
import torch

for size in (1, 1 << 20, 1 << 50):
    try:
        lowtide.install("host", host_memory=size)
    except lowtide.LowtideError as error:
        assert "of this machine" in str(error), error
    else:
        raise AssertionError(f"{size} bytes were accepted")
    assert lowtide.installed() is None
lowtide.install("host", host_memory=64 << 20)
with lowtide.OffloadRegion("small"):
    assert torch.ones(1000).sum() == 1000
