"""Compare a converted step's outputs with the framework's, and record the error in the model's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx

from onnx_remat.errors import ConversionError
from onnx_remat.ir.metadata import entries, set_entries

from . import tolerances


@dataclass(frozen=True, slots=True)
class Check:
    """The error of a step's outputs against the framework's.

    Attributes
    ----------
    worst : str
        The output that differs most.
    error : float
        Relative error of that output: largest difference over largest magnitude.
    undetermined : tuple of str
        Outputs that are rounding noise (such as a gradient that is zero in exact arithmetic); they are only compared
        with the size of that noise.
    exact_error, framework_error : float, optional
        Largest relative error of the step's outputs, and of the framework's, against the same step in float64, if that
        was computed. If `exact_error` is not larger, `error` is the framework's own rounding.
    """

    worst: str
    error: float
    undetermined: tuple[str, ...] = ()
    exact_error: float | None = None
    framework_error: float | None = None


def compare(
    outputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float] = tolerances.BY_DTYPE,
    noise: Mapping[str, float] | None = None,
) -> Check:
    """Compare a step's outputs with the framework's.

    Parameters
    ----------
    outputs, expected : mapping of str to array
    tolerance : mapping of str to float
        Largest accepted relative error by dtype name; outputs of other dtypes must be equal.
    noise : mapping of str to float, optional
        Largest change of the framework's own output when its inputs change by a rounding error. An output within
        `tolerances.NOISE_FACTOR` times its noise passes, too; if its noise or error is above the tolerance, it counts
        as undetermined.

    Raises
    ------
    ConversionError
        An output differs beyond the tolerance of its dtype (the message names the worst), or all outputs are rounding
        noise.
    """
    found = agreed(outputs, expected, tolerance, noise)
    errors = found.errors
    determined = [name for name in errors if name not in found.undetermined]
    if not determined:
        raise ConversionError("every output of the step is rounding noise on this batch: give another batch")
    worst = max(determined, key=lambda n: errors[n])
    return Check(worst, errors[worst], tuple(found.undetermined))


def by(error: float) -> str:
    """Return an error in words.

    >>> by(0.25), by(float("inf"))
    ('by 0.25 relative', 'in shape, type or where it is not finite')
    """
    return f"by {error:.2g} relative" if error < float("inf") else "in shape, type or where it is not finite"


@dataclass(frozen=True, slots=True)
class Compared:
    """Relative error of every output; the outputs beyond tolerance, and those that are rounding noise."""

    errors: dict[str, float]
    wrong: list[str]
    undetermined: list[str]


def differences(
    outputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float],
    noise: Mapping[str, float],
) -> Compared:
    """Return the comparison of each output; see `compare`."""
    found = Compared({}, [], [])
    for name, value in outputs.items():
        answer = np.asarray(expected[name])
        error = found.errors[name] = relative_error(value, answer)
        allowed = tolerance.get(value.dtype.name, 0.0)
        own = relative_noise(answer, noise.get(name, 0.0))
        if allowed > 0 and max(own, error) > allowed and error <= tolerances.NOISE_FACTOR * own:
            found.undetermined.append(name)
        elif not error <= allowed:
            found.wrong.append(name)
    return found


def agreed(
    outputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float] = tolerances.BY_DTYPE,
    noise: Mapping[str, float] | None = None,
) -> Compared:
    """Compare as `compare` does, but accept outputs that are all rounding noise.

    Raises
    ------
    ConversionError
        An output differs beyond the tolerance of its dtype; the message names the worst.
    """
    if missing := sorted(set(outputs) ^ set(expected)):
        raise ConversionError(f"output {missing[0]!r} is on one side only: the step and the framework disagree")
    found = differences(outputs, expected, tolerance, noise or {})
    errors = found.errors
    if found.wrong:
        name = max(found.wrong, key=lambda n: errors[n] - tolerance.get(outputs[n].dtype.name, 0.0))
        raise ConversionError(
            f"the converted step is wrong: {name} differs from the framework's {by(errors[name])} "
            f"({len(found.wrong)} of {len(errors)} outputs differ); nothing was written"
        )
    return found


def exactly(
    found: Check,
    outputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    exact: Mapping[str, np.ndarray],
) -> Check:
    """Add the errors of the step's outputs and of the framework's against the same step in float64."""

    def largest(answers: Mapping[str, np.ndarray]) -> float:
        return max(
            relative_error(answers[name].astype(np.float64), exact[name])
            for name in outputs
            if name not in found.undetermined and is_float(answers[name])
        )

    return replace(found, exact_error=largest(outputs), framework_error=largest(expected))


def is_float(value: np.ndarray) -> bool:
    """Return whether an array is real floating point, bfloat16 included."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def relative_noise(expected: np.ndarray, noise: float) -> float:
    """Return noise over largest magnitude, as `relative_error` does; for an array of zeros, the noise itself."""
    scale = float(np.abs(np.asarray(expected, np.float64)).max(initial=0.0)) if noise else 1.0
    return noise / scale if scale else noise


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return largest difference over largest magnitude; infinity if shapes, dtypes or non-finite values differ.

    >>> relative_error(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    0.2
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    a, b = (x if x.dtype.name in _WIDE else x.astype(np.float64) for x in (actual, expected))
    finite = np.isfinite(b)
    if not finite.all():
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        a, b = a[finite], b[finite]
    difference = float(np.abs(a - b).max(initial=0.0))
    scale = float(np.abs(b).max(initial=0.0))
    return difference / scale if scale else difference


_WIDE = ("float32", "float64", "complex64", "complex128")
"""Dtypes wide enough to compute differences of their values in."""


def record(model: onnx.ModelProto, found: Check) -> None:
    """Record the result of the check in the model's metadata.

    ``check.error`` is the largest relative error, ``check.output`` the output with that error, ``check.undetermined``
    the number of outputs that are rounding noise; ``check.exact_error`` and ``check.framework_error`` are added if they
    are known.
    """
    known = {
        "check.error": f"{found.error:.2e}",
        "check.output": found.worst,
        "check.undetermined": str(len(found.undetermined)),
    }
    for name in ("exact_error", "framework_error"):
        if (error := getattr(found, name)) is not None:
            known[f"check.{name}"] = f"{error:.2e}"
    note(model, known)


def note(model: onnx.ModelProto, facts: Mapping[str, str]) -> None:
    """Add entries to the model's metadata."""
    set_entries(model, entries(model) | dict(facts))
