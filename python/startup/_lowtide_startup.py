"""Makes Lowtide torch's allocator in programs that know nothing of it.

Imported while an interpreter starts, by ``lowtide_startup.pth`` beside the package or by the ``sitecustomize`` that ``python -m
lowtide run`` puts on the path. Where the environment variable LOWTIDE_INSTALL asks for it, ``import torch`` is followed by
``lowtide.install()``. A program that never imports torch never imports Lowtide either.

LOWTIDE_INSTALL: 1 or auto, cuda, host; empty or 0: no.
"""

import importlib.abc
import importlib.util
import os
import sys

_variable = "LOWTIDE_INSTALL"


def _wanted_device():
    value = os.environ.get(_variable, "").strip()
    if value in ("", "0"):
        return None
    return "auto" if value == "1" else value


def _install():
    import lowtide

    if not hasattr(lowtide, "install"):
        return  # it is the import of lowtide that imported torch; lowtide calls lowtide_imported() at its end
    device = _wanted_device()
    if device is not None and lowtide.installed() is None:
        try:
            lowtide.install(device)
        except lowtide.LowtideError as error:
            raise ImportError(f"{_variable}={os.environ[_variable]} asks for Lowtide in this process: {error}") from error


def lowtide_imported():
    """What lowtide calls once it is imported."""
    if _wanted_device() is not None and "torch" in sys.modules:
        _install()


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else does, and has its loader install Lowtide at the end."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # once; and so that the search below is everybody else's
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_install(module):
            load(module)
            _install()

        spec.loader.exec_module = load_and_install
        return spec


if _wanted_device() is not None and "torch" not in sys.modules:
    sys.meta_path.insert(0, _AfterTorch())
