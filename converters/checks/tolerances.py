"""Every tolerance of the checks: what it bounds, and why it has this value.

Errors are relative. Rounding differs between kernels; wrong arithmetic is far above it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Outputs of a step against the framework's, and at ONNX Runtime's default optimisations against those without.

BY_DTYPE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest error of an output, over its largest magnitude, by dtype; of other dtypes outputs must be equal.

Some 840 rounding errors of float32, 20 of float16, 6 of bfloat16: kernels add up in different orders.
"""

NOISE_FACTOR = 16.0
"""Largest error of an output that rounding decides, in units of its noise, which few samples measure."""

NOISE_SAMPLES = 3
"""How often inputs are moved to measure noise: a step takes long."""

NOISE_ULPS = 8
"""How far inputs are moved, in their rounding errors: kernels that sum thousands of products are off by several."""

EXACT_ABOVE = 1e-5
"""Error in float32 above which the distances of step and framework from float64 are measured: some eighty roundings."""

VANISHING_GRADIENT = 1e-6
"""Noise of TensorFlow's gradients, over the largest of all: some are zero but for rounding (attention's key bias)."""

# Gradients against differences of the loss, in float64.

DIFFERENCE = 1e-6
"""Largest difference, over the change that parameters of these gradients' size make at random: steps are
chosen so that rounding in float64 stays below."""

PRECISION = 5e-2
"""Largest error in norm of an output on ONNX Runtime in float32: kinks and cancellation are not faults."""

NEGLIGIBLE_GRADIENT = 1e-4
"""Norm of a gradient, over the largest of all, below which float32 need not get it right."""

ROUNDING_SHARE = 1e-3
"""Largest share of rounding in a difference: with more of it, nothing is known."""

UNTESTED_SHARE = 1e-4
"""Share of a parameter in the loss's change below which an error in its gradient would not show."""

SAME_SLOPE = 0.1
"""Largest difference of two slopes that count as the same, and of rounding's share in them."""


def allowed(inside: Collection[str]) -> dict[str, float]:
    """`BY_DTYPE` for a step that computes with these dtypes: no output is more exact than the coarsest of them.

    >>> allowed({"float16"})["float32"], allowed(())["float32"]
    (0.02, 0.0001)
    """
    coarsest = max((BY_DTYPE[name] for name in inside if name in BY_DTYPE), default=0.0)
    return {name: max(least, coarsest) for name, least in BY_DTYPE.items()}


def is_single(tolerance: Mapping[str, float]) -> bool:
    """Does float32 have its own tolerance, not that of a coarser type?"""
    return tolerance["float32"] == BY_DTYPE["float32"]
