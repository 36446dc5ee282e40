"""onnx-remat: rewrite ONNX training graphs to fit a memory budget on ONNX Runtime, with the least recompute."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnx_remat.errors import (
    BudgetInfeasibleError,
    ConversionError,
    MissingExtraError,
    ModelError,
    OnnxRematError,
    RankLostError,
    ShapeError,
    UsageError,
    VerificationError,
)
from onnx_remat.version import __version__

if TYPE_CHECKING:
    from onnx_remat.ort.runtime import session_options
    from onnx_remat.rewrite.pipeline import plan_model, rewrite_model
    from onnx_remat.session.session import Session

__all__ = [
    "BudgetInfeasibleError",
    "ConversionError",
    "MissingExtraError",
    "ModelError",
    "OnnxRematError",
    "RankLostError",
    "Session",
    "ShapeError",
    "UsageError",
    "VerificationError",
    "__version__",
    "plan_model",
    "rewrite_model",
    "session_options",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import public names and modules on first use, so that importing the package stays fast."""
    if name in ("plan_model", "rewrite_model"):
        from onnx_remat.rewrite import pipeline

        return getattr(pipeline, name)
    if name == "session_options":
        from onnx_remat.ort.runtime import session_options

        return session_options
    if name == "Session":
        from onnx_remat.session.session import Session

        return Session
    if name in ("distributed", "runtime", "show", "split", "sweep", "training"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
