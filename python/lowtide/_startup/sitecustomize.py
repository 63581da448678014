"""First on the path of programs that ``python -m lowtide run`` starts from a copy whose .pth file Python does not read."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))

# The sitecustomize that this one hides.
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [folder for folder in sys.path if os.path.abspath(folder or ".") != _here]
)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

with contextlib.suppress(ModuleNotFoundError):
    __import__("_lowtide_startup")
