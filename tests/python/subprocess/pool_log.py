"""Uses a pool several times; the log says so once."""

import lowtide
import torch
from _common import install

device = install()
pool = lowtide.CPUOffloadPool("logged")
pool.offload()
pool.reload()
base = torch.ones(1 << 18, device=device)
tensors = [base, base[10:], torch.ones(1 << 18, device=device), torch.ones(1 << 18, device=device)]
pool.track(tensors)
for _ in range(3):
    pool.offload()
    pool.reload()
