"""Data parallel training on torch.distributed: a rewritten step on every rank, gradients in one flat buffer.

Only `collectives` imports PyTorch, when `DataParallel` or `run` are used; the other modules use ONNX and numpy.
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
    """Import public names on first use: planning for many machines does not need PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
