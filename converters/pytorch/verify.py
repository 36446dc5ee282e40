"""Check that the exported step computes the same results as torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.session import heap

from .. import names
from ..checks import agreement as check
from ..checks import default_level, tolerances
from ..halves import HALVES, OnCPU, on_cpu
from . import reference
from .arrays import array
from .lower import watched
from .recipe import COUNT
from .step import StepParts


def step(made: ir.Model, traced: StepParts, distances: bool = True) -> check.Check:
    """Run the step once on ONNX Runtime, and compare loss, gradients and buffers, then the update, with torch's.

    The reference of the update is the optimizer's result on ONNX Runtime's gradients. Adam divides a gradient by its
    own magnitude, so a gradient that is pure rounding would move its parameter by `lr` in either direction.

    Parameters
    ----------
    made : onnx_ir.Model
    traced : StepParts
    distances : bool
        Also compute the distances of both from the step in float64, where they differ by more than rounding: that step
        takes as long as all else here.

    Raises
    ------
    ConversionError
        The results differ.
    """
    tolerance = _tolerance(made)
    known = {str(value.name) for value in made.graph.inputs}
    inputs = traced.inputs
    if traced.recipe.accumulate > 1:  # the last micro-batch, the one that updates
        inputs[COUNT] = inputs[COUNT] + traced.recipe.accumulate - 1
    feeds = {name: np.array(array(value)) for name, value in inputs.items() if name in known}
    plain, run = _run(made, feeds)
    found = run.rounded(plain.outputs)
    seen = [found.pop(name) for name in watched(list(found))]
    expected = reference.outputs(traced, seen, tolerance)
    of_forward = {name: expected.pop(names.new(name)) for name in traced.own}
    before = {name: of_forward.pop(name) for name in traced.trainable} if traced.optimizers else {}
    for name, value in of_forward.items():  # what the step only reads is not an output
        if names.new(name) in found or not np.array_equal(value, array(traced.own[name]), equal_nan=True):
            expected[names.new(name)] = value
    of_update = {name for name in found if name.startswith(names.new("")) and name not in expected}
    made_here = {n: v for n, v in found.items() if n not in of_update}
    exact = cache(lambda: reference.exact(traced, seen, tolerance))
    try:
        result = check.compare(made_here, expected, tolerance)
    except ConversionError:  # rounding may explain it
        noise = reference.rounded(expected, exact(), _eps(made))
        try:
            result = check.compare(made_here, expected, tolerance, noise)
        except ConversionError:
            noise = reference.moved(traced, seen, tolerance, expected, noise, _eps(made))
            result = check.compare(made_here, expected, tolerance, noise)
    measured = distances and tolerances.is_single(tolerance) and result.error > tolerances.EXACT_ABOVE
    if measured and (answer := exact()) is not None:
        result = check.exactly(result, made_here, expected, answer)
    if traced.optimizers:
        updated = {name: found[name] for name in found if name in of_update}
        gradients = {name: value for name, value in found.items() if name.startswith(names.gradient(""))}
        _update(traced, updated, before, gradients, feeds)
    default_level.compare(run.model, run.feeds, plain.outputs, tolerance, plain.drawn, run.narrow)
    return result


def _tolerance(model: ir.Model) -> dict[str, float]:
    """Return the tolerance by dtype: a value computed in a narrow type stays inexact in a wide output (autocast)."""
    kinds = {value.dtype.name.lower() for node in model.graph for value in node.outputs if value.dtype is not None}
    return tolerances.allowed(kinds & {"float16", "bfloat16"})


def _eps(model: ir.Model) -> float:
    """Return the rounding error of the coarsest type in half precision that a step computes in; else 0."""
    kinds = {value.dtype for node in model.graph for value in node.outputs}
    return max((float(ml_dtypes.finfo(kind.numpy()).eps) for kind in HALVES if kind in kinds), default=0.0)


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> tuple[default_level.Plain, OnCPU]:
    """Return the model's outputs without optimisations; and the step that was run, without watched outputs."""
    run = on_cpu(model, feeds)
    run = replace(run, model=default_level.seeded(run.model))
    outputs = list(run.model.graph.output)
    plain = default_level.run(run.model, run.feeds)
    heap.trim()  # the reference needs as much memory again
    watched_names = set(watched([value.name for value in outputs]))
    del run.model.graph.output[:]
    run.model.graph.output.extend(value for value in outputs if value.name not in watched_names)
    return plain, run


def _update(
    traced: StepParts,
    found: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    feeds: Mapping[str, np.ndarray],
) -> None:
    """Compare changes, not values: a parameter hardly moves in a step. `before` are those that the update reads.

    With a small learning rate every parameter may change by less than a thousandth of its value. Rounding then
    determines the last digits of all changes, and the comparison allows for it.
    """
    of = {name.removeprefix(names.gradient("")): gradient for name, gradient in gradients.items()}
    expected = reference.updated(traced, before, of)
    expected = {name: value for name, value in expected.items() if name in found or not _unchanged(name, value, feeds)}
    noise = {name: default_level.rounding(after) for name, after in expected.items()}
    check.agreed(default_level.changes(found, feeds), default_level.changes(expected, feeds), noise=noise)


def _unchanged(name: str, value: np.ndarray, feeds: Mapping[str, np.ndarray]) -> bool:
    """Return whether an output is a piece of state that the step does not change, and therefore does not output."""
    before = feeds.get(name.removeprefix(names.new("")))
    return before is None or np.array_equal(before, value)
