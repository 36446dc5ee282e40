"""The tolerances of the checks, each with the quantity that it bounds and the reason for its value.

Errors are relative. Rounding differs between kernels; wrong arithmetic is far above it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Outputs of a step against the framework's, and at ONNX Runtime's default optimisations against those without.

BY_DTYPE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest error of an output, over its largest magnitude, by dtype; of other dtypes outputs must be equal.

About 840 rounding errors of float32, 20 of float16, 6 of bfloat16: kernels add up in different orders.
"""

NOISE_FACTOR = 16.0
"""Largest error of an output that is rounding noise, in units of its noise, which few samples measure."""

NOISE_SAMPLES = 3
"""Number of changed inputs on which noise is measured: few, because a step takes long."""

NOISE_ULPS = 8
"""Size of the change of inputs, in rounding errors: kernels that sum thousands of products are off by several."""

HALF_ROUNDINGS = 4.0
"""Largest error of an output of TensorFlow in half precision, in units of its change when the inputs change by one
rounding error of that type: few, because each is as large as those of the step itself."""

EXACT_ABOVE = 1e-5
"""Error in float32 above which step and framework are both compared with float64: about eighty rounding errors."""

VANISHING_GRADIENT = 1e-6
"""Noise of TensorFlow's gradients, over the largest of all: some are pure rounding (that of attention's key bias)."""

# Gradients against finite differences of the loss, in float64.

DIFFERENCE = 1e-6
"""Largest difference, over the change of the loss that a random direction with gradients of this size gives: step sizes
are chosen so that rounding in float64 stays below."""

PRECISION = 5e-2
"""Largest error, in norm, of an output on ONNX Runtime in float32: wide, because kinks and cancellation are not
faults."""

NEGLIGIBLE_GRADIENT = 1e-4
"""Norm of a gradient, over the largest of all, below which its error in float32 does not count."""

ROUNDING_SHARE = 1e-3
"""Largest share of rounding in a difference: with a larger share the difference proves nothing."""

UNTESTED_SHARE = 1e-4
"""Share of a parameter in the loss's change below which an error in its gradient would not show."""

SAME_SLOPE = 0.1
"""Largest difference of two slopes that count as equal, and largest share of rounding in them."""


def allowed(inside: Collection[str]) -> dict[str, float]:
    """Return `BY_DTYPE` for a step that computes with these dtypes: no tolerance is below that of the coarsest.

    >>> allowed({"float16"})["float32"], allowed(())["float32"]
    (0.02, 0.0001)
    """
    coarsest = max((BY_DTYPE[name] for name in inside if name in BY_DTYPE), default=0.0)
    return {name: max(least, coarsest) for name, least in BY_DTYPE.items()}


def is_single(tolerance: Mapping[str, float]) -> bool:
    """Return whether float32 has its own tolerance, not that of a coarser type."""
    return tolerance["float32"] == BY_DTYPE["float32"]
