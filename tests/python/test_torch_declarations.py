"""What Lowtide declares again, because torch's header for it needs more than torch installs, is what torch declares."""

import re
from pathlib import Path

import torch

REPEATED = Path(__file__).parents[2] / "pool/torch/library_workspaces.cpp"
ORIGINAL = Path(torch.__file__).parent / "include/ATen/cuda/CUDAContextLight.h"


def declarations(path):
    """The workspace type and the functions that return it, without layout."""
    found = re.findall(
        r"struct WorkspaceMapWithMutex \{.*?\};|[A-Z_]* ?WorkspaceMapWithMutex& \w+\(\);", path.read_text(), flags=re.DOTALL
    )
    return [" ".join(text.split()) for text in found]


def test_workspaces_of_cublas():
    assert len(declarations(REPEATED)) == 3
    assert declarations(REPEATED) == declarations(ORIGINAL)
