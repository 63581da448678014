"""What the scripts share. Each runs in an interpreter of its own: exits, forks and installing may end a process."""

import os

import lowtide
import torch


def install():
    lowtide.install(os.environ["LOWTIDE_TEST_DEVICE"], host_memory=1 << 30)
    return torch.device("cuda") if lowtide.installed() == "cuda" else torch.device("cpu")
