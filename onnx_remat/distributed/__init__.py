"""Data parallel training on torch.distributed: a rewritten step on every rank, gradients in one flat buffer.

PyTorch is imported by `collectives` alone, when `DataParallel` or `run` are used; the rest is ONNX and numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_remat.distributed.collectives import run
    from onnx_remat.distributed.parallel import DataParallel
    from onnx_remat.distributed.parts import Parts, prepare

__all__ = ["DataParallel", "Parts", "prepare", "run"]

_HOMES = {"DataParallel": "parallel", "Parts": "parts", "prepare": "parts", "run": "collectives"}


def __getattr__(name: str) -> Any:
    """Load what is asked for: a plan for many machines takes no PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
