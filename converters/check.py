"""Run a converted step on ONNX Runtime and compare it with the framework's own answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onnx_remat import runtime
from onnx_remat.errors import ConversionError

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest relative error accepted by dtype: rounding differs between kernels, wrong arithmetic is far above."""


@dataclass(frozen=True, slots=True)
class Check:
    """How far a step's outputs are from the framework's.

    Attributes
    ----------
    worst : str
        The output that differs most.
    error : float
        Its relative error: largest difference over largest magnitude.
    """

    worst: str
    error: float


def against(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float] = TOLERANCE,
) -> Check:
    """Run `model` on stock ONNX Runtime (CPU, optimisations off) and compare every output.

    Parameters
    ----------
    model : onnx.ModelProto
    feeds, expected : mapping of str to array
        A value for every input, and what the framework makes of it for every output.
    tolerance : mapping of str to float
        Largest accepted relative error by dtype name; dtypes not in it must be equal.

    Returns
    -------
    Check

    Raises
    ------
    ConversionError
        Names the output that differs most beyond the tolerance of its dtype.
    """
    outputs = runtime.outputs(model, feeds)
    if missing := sorted(set(outputs) ^ set(expected)):
        raise ConversionError(f"output {missing[0]!r} is on one side only: the step and the framework disagree")
    errors = {name: relative_error(outputs[name], np.asarray(expected[name])) for name in outputs}
    excess = {name: error - tolerance.get(outputs[name].dtype.name, 0.0) for name, error in errors.items()}
    if wrong := [name for name, over in excess.items() if not over <= 0]:
        name = max(wrong, key=lambda n: excess[n])
        raise ConversionError(
            f"the converted step is wrong: {name} differs from the framework's by {errors[name]:.2g} relative "
            f"({len(wrong)} of {len(errors)} outputs differ); nothing was written"
        )
    worst = max(errors, key=lambda n: errors[n])
    return Check(worst, errors[worst])


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over largest magnitude; infinite where shapes, dtypes or non-finite values differ.

    >>> relative_error(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    0.2
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    a, b = (np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (actual, expected))
    if a.size == 0:
        return 0.0
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    difference = np.abs(a[finite] - b[finite]).max(initial=0.0)
    scale = np.abs(b[finite]).max(initial=0.0)
    return float(difference / scale) if scale else float(difference)
