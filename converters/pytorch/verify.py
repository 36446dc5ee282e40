"""Does the exported step compute what torch computes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onnx_remat.errors import ConversionError
from onnx_remat.ort import runtime

from .. import check, default_level, names
from ..widen import NARROW, wide, widened
from . import reference
from .arrays import array
from .initial import initial_feeds
from .lower import watched
from .trace import Step


def step(
    made: ir.Model,
    traced: Step,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    hidden: Mapping[str, str],
) -> check.Check:
    """Run the step once on ONNX Runtime; compare loss, gradients and buffers, then the update, with torch's.

    The update is compared with what the optimizer makes of the gradients ONNX Runtime found: Adam divides a gradient
    by its own magnitude, so one that is zero but for rounding would move its parameter by `lr` either way.

    Parameters
    ----------
    made : onnx_ir.Model
    traced : Step
    model, optimizer
    hidden : mapping of str to str
        Values that hold gradients which are not put out, by gradient name.

    Raises
    ------
    ConversionError
        They disagree.
    """
    tolerance = _tolerance(made)
    feeds = initial_feeds(ir.to_proto(made), model, optimizer)
    feeds |= {n: array(t) for n, t in zip(traced.batch.names, traced.batch.tensors, strict=True)}
    plain, run = _run(made, feeds, list(hidden.values()))
    found = {name: value.astype(NARROW.numpy()) if name in run.narrow else value for name, value in plain.items()}
    for gradient, value in hidden.items():
        found[gradient] = found.pop(value)
    seen = [found.pop(name) for name in watched(list(found))]
    expected = reference.outputs(traced, seen, tolerance)
    for buffer in traced.buffers:  # one that the step only reads is not put out
        after = names.new(buffer)
        if after not in found and np.array_equal(expected[after], array(traced.buffers[buffer])):
            del expected[after]
    of_update = {name for name in found if name.startswith(names.new("")) and name not in expected}
    made_here = {n: v for n, v in found.items() if n not in of_update}
    exact = cache(lambda: reference.exact(traced, seen, tolerance))
    try:
        result = check.compare(made_here, expected, tolerance)
    except ConversionError:  # is it rounding?
        noise = reference.noise(traced, seen, tolerance, expected, exact())
        result = check.compare(made_here, expected, tolerance, noise)
    single = tolerance["float32"] == check.TOLERANCE["float32"]
    if single and result.error > check.EXPECTED and (answer := exact()) is not None:
        result = check.exactly(result, made_here, expected, answer)
    if optimizer is not None:
        updated = {name: found[name] for name in found if name in of_update}
        gradients = {name: value for name, value in found.items() if name.startswith(names.gradient(""))}
        _update(optimizer, dict(model.named_parameters()), updated, gradients, feeds)
    default_level.compare(run.model, run.feeds, plain, tolerance)
    return result


def _tolerance(model: ir.Model) -> dict[str, float]:
    """What is computed in a narrow type is as inexact when it is put out in a wide one (autocast)."""
    kinds = {value.dtype.name.lower() for node in model.graph for value in node.outputs if value.dtype is not None}
    least = max((check.TOLERANCE[kind] for kind in ("float16", "bfloat16") if kind in kinds), default=0.0)
    return {kind: max(allowed, least) for kind, allowed in check.TOLERANCE.items()}


@dataclass(frozen=True, slots=True)
class _Run:
    """A step as ONNX Runtime's CPU runs it: bfloat16 widened, random nodes seeded, its own outputs and no others.

    Attributes
    ----------
    model : onnx.ModelProto
    feeds : dict of str to array
    narrow : frozenset of str
        Values of the step that are bfloat16.
    """

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    narrow: frozenset[str]


def _run(model: ir.Model, feeds: dict[str, np.ndarray], hidden: Sequence[str]) -> tuple[dict[str, np.ndarray], _Run]:
    """Outputs, and values that are none, of the model without optimisations."""
    narrow = frozenset(str(v.name) for node in model.graph for v in node.outputs if v.dtype == NARROW)
    if narrow:
        model, feeds = widened(model), {name: wide(feed) for name, feed in feeds.items()}
    proto = default_level.seeded(ir.to_proto(model))
    outputs = list(proto.graph.output)
    known = {info.name: info for info in proto.graph.value_info}
    proto.graph.output.extend(known[value] for value in hidden)
    plain = runtime.outputs(proto, feeds)
    beside = set(watched([value.name for value in outputs]))
    del proto.graph.output[:]
    proto.graph.output.extend(value for value in outputs if value.name not in beside)
    return plain, _Run(proto, feeds, narrow)


def _update(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    found: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    feeds: Mapping[str, np.ndarray],
) -> None:
    """Compare changes, not values: a parameter hardly moves in a step."""
    of = {name.removeprefix(names.gradient("")): gradient for name, gradient in gradients.items()}
    expected = reference.updated(optimizer, parameters, of)
    noise = {name: default_level.rounding(after) for name, after in expected.items()}
    check.compare(default_level.changes(found, feeds), default_level.changes(expected, feeds), noise=noise)
