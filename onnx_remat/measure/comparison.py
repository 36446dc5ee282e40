"""Compare the outputs of two runs, bit by bit or within rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnx_remat.errors import VerificationError

_TOLERANCE = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-9}
"""Relative tolerance by dtype, for optimisations that fuse a forward chain but not its recompute."""

_FEW, _SHARE, _ROUNDINGS = 16, 0.1, 128
"""Entries of which the whole tolerance of the largest may be used, in number and as a share of all; and the roundings
of the largest entry that all may use.

One entry may be a sum that cancels. Where many small entries are wrong, a large one alongside would hide it. Outputs of
the seven sample models (file and `session.session.Session` at level "all") differ by at most 14 roundings of the
largest entry, nine entries of ten by at most 8.
"""


def compare(before: Path, after: Path, exactly: bool, plain: Path | None = None) -> str:
    """Compare two ``.npz`` of outputs; return how equal they are, or raise VerificationError.

    Keys are ``<index>:<name>``, as `processes.measure` writes them. `plain` contains the original's outputs without
    graph optimisations: where the optimisations alone change an output, such as a gradient that cancels to zero and is
    pure rounding, the tolerance grows by that change. The tolerance is relative to the largest entry of an output,
    since any entry may be a sum that cancels; for many entries of one output it is smaller.
    """
    blind = []
    with np.load(before) as a, np.load(after) as b, np.load(plain or before) as c:
        for key in a.files:
            x, y, name = a[key], b[key], key.partition(":")[2]
            if x.shape != y.shape or x.dtype != y.dtype:
                raise VerificationError(f"output {name!r} changed from {x.dtype}{x.shape} to {y.dtype}{y.shape}")
            if exactly and not same_bits(x, y):
                raise VerificationError(f"output {name!r} is not bitwise equal with graph optimisations off")
            if not exactly and not _close(x, y, c[key]):
                raise VerificationError(
                    f"output {name!r} differs by more than {_TOLERANCE.get(x.dtype.name, 0)} relative"
                )
            if x.dtype.kind == "f" and np.isnan(x).any():
                blind.append(name)
    equal = "bitwise equal" if exactly else "equal within tolerance"
    # NaN compares equal to NaN, so these outputs would hide an error
    return equal + (f" (but {len(blind)} of them, {blind[0]!r} first, hold NaN on random inputs)" if blind else "")


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Are all bits equal, except for payloads of NaN? Those depend on the alignment of a kernel's vectors."""
    if x.dtype.kind != "f":
        return x.tobytes() == y.tobytes()
    numbers = ~np.isnan(x)
    return np.array_equal(numbers, ~np.isnan(y)) and x[numbers].tobytes() == y[numbers].tobytes()


def _close(x: np.ndarray, y: np.ndarray, plain: np.ndarray) -> bool:
    tolerance = _TOLERANCE.get(x.dtype.name, 0.0)
    if not tolerance:
        return bool(np.array_equal(x, y))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities, and differences in half precision
        largest, moved = _largest(x), 2 * _largest(x - plain)
        if not np.allclose(x, y, rtol=tolerance, atol=largest * tolerance + moved, equal_nan=True):
            return False
        of_many = max(tolerance / 16, _ROUNDINGS * float(np.finfo(x.dtype).eps))
        if of_many >= tolerance:
            return True
        off = np.count_nonzero(np.abs(x - y) > tolerance * np.abs(x) + (largest * of_many + moved))
    return bool(off <= max(_FEW, x.size * _SHARE))


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
