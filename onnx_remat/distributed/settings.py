"""Settings of a distributed job."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from onnx_remat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that must be the same on every rank; see `DataParallel`."""

    zero: bool = False
    clip_norm: float | None = None
    wire: str = ""
    buffers: str = "first"
    bucket: int = 25 * 2**20
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.buffers not in ("first", "mean"):
            raise UsageError(f"buffers must be 'first' or 'mean', not {self.buffers!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm must be above 0, not {self.clip_norm}")
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise UsageError(f"seed must be a whole number, not {self.seed!r}")
        if self.bucket < 1:
            raise UsageError(f"bucket must be a number of bytes above 0, not {self.bucket}")
