"""Refuses, while the package is imported, a torch of another minor version than the one it was built for.

torch's C++ interface changes with every minor version; the compiled part would corrupt memory rather than fail.
"""

import torch

from . import _build_info


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def require_matching_torch() -> None:
    """Raises ImportError if the running torch is of another minor version than the build's."""
    running = str(torch.__version__)
    if _minor(running) == _minor(_build_info.TORCH_VERSION):
        return
    raise ImportError(
        f"lowtide {_build_info.LOWTIDE_VERSION} was built for torch {_build_info.TORCH_VERSION}, and torch {running} "
        "is running; torch's allocator interface differs between them. Rebuild it against the running torch: "
        "`pip install --no-build-isolation --force-reinstall .` in Lowtide's source tree, "
        f"or `make build TORCH={running.split('+')[0]}` there."
    )


require_matching_torch()
