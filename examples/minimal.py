"""The least that a training loop needs to keep AdamW's state off the device between steps. Runs with and without a GPU."""

import torch

import lowtide

lowtide.install()  # before CUDA is used; without a GPU it takes the host device
device = "cuda" if lowtide.installed() == "cuda" else "cpu"

model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
state = lowtide.OffloadRegion("adam")

for step in range(5):
    model(torch.randn(64, 1024, device=device)).square().mean().backward()
    state.restore()  # the same tensors, at the same addresses
    with state:  # the state that AdamW makes in its first step lives in the region
        optimizer.step()
    optimizer.zero_grad()
    state.evict()  # until the restore its memory serves others, and using its tensors raises
    print(f"step {step}: {state.evicted_bytes / 1e6:.1f} MB of state are {state.state}, {state.resident_bytes} bytes on the device")

try:
    optimizer.state[model[0].weight]["exp_avg"].sum()
except RuntimeError as error:
    print(f"as it should be: {str(error).splitlines()[0]}")
