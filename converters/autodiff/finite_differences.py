"""Gradients against central differences of the loss along random directions.

The step runs in the dtype it will be used in, on ONNX Runtime; halves are widened to float32 for the differences. Along
a direction every parameter contributes about the same to the loss' change, so that an error in any of them shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnx_remat import runtime
from onnx_remat.errors import ConversionError

from .. import names

DIRECTIONS = 3
TOLERANCE = 5e-2
"""Largest accepted difference, relative to the change that parameters of these gradients' size make at random."""

_CHANGES = (1e-3, 1e-2, 1e-4, 3e-2, 1e-5)  # of the loss, tried in turn: rounding wants large ones, curvature small ones
_BOLDEST = 0.1  # largest change of a parameter, of its own size
_SIZE = 2  # of symbolic dimensions in a made-up batch


def check(
    step: onnx.ModelProto,
    parameters: Sequence[str],
    values: Mapping[str, np.ndarray],
    example_inputs: Mapping[str, np.ndarray],
) -> float:
    """Compare the gradients a step puts out with differences of its loss.

    Parameters
    ----------
    step : onnx.ModelProto
        Outputs ``loss`` and ``grad.<name>``.
    parameters : sequence of str
    values, example_inputs : mapping of str to array
        Values of inputs, the second taking precedence; inputs in neither are made up.

    Returns
    -------
    float
        The largest relative difference over the directions.

    Raises
    ------
    ConversionError
        Gradients are not finite, or differ from the differences beyond `TOLERANCE`.
    """
    wide = _prepared(step)
    rng = np.random.default_rng(0)
    feeds = make_feeds(wide, {**values, **example_inputs}, rng)
    made = runtime.outputs(wide, feeds)
    loss = float(made[names.LOSS].reshape(()))
    gradients = {p: made[names.gradient(p)].astype(np.float64) for p in parameters}
    if not np.isfinite(loss):
        raise ConversionError(f"the loss is {loss} on the check's inputs: give example_inputs= or check=False")
    if bad := [p for p, g in gradients.items() if not np.isfinite(g).all()]:
        raise ConversionError(f"the gradient by {bad[0]!r} is not finite on the check's inputs; nothing was written")
    forward = _loss_only(wide)
    worst = 0.0
    for _ in range(DIRECTIONS):
        direction = {p: rng.standard_normal(g.shape) * _step(g, feeds[p]) for p, g in gradients.items()}
        predicted = sum(float((g * direction[p]).sum()) for p, g in gradients.items())
        scale = float(np.sqrt(sum(float(((g * _step(g, feeds[p])) ** 2).sum()) for p, g in gradients.items())))
        if not scale:
            raise ConversionError("every gradient is zero on the check's inputs: give example_inputs= or check=False")
        errors = []
        for change in _CHANGES:
            epsilon = min(1.0, change * max(abs(loss), 1.0) / scale)
            up, down = (
                float(runtime.outputs(forward, _moved(feeds, direction, sign * epsilon))[names.LOSS].reshape(()))
                for sign in (1, -1)
            )
            errors.append(abs((up - down) / (2 * epsilon) - predicted) / scale)
            if errors[-1] <= TOLERANCE:
                break
        worst = max(worst, min(errors))
        if not worst <= TOLERANCE:
            raise ConversionError(
                f"the gradients are wrong: along a random direction the loss changes otherwise than they say, by "
                f"{worst:.2g} relative; nothing was written (check=False skips this check)"
            )
    return worst


def _step(gradient: np.ndarray, value: np.ndarray) -> float:
    """Size of a parameter's random change that moves the loss by about 1, within reason."""
    size = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) if value.size else 0.0
    norm = float(np.linalg.norm(gradient))
    largest = _BOLDEST * max(size, 1e-2)
    return min(1.0 / norm, largest) if norm > 0 else largest


def _moved(feeds: Mapping[str, np.ndarray], direction: Mapping[str, np.ndarray], by: float) -> dict[str, np.ndarray]:
    moved = {p: (feeds[p].astype(np.float64) + by * d).astype(feeds[p].dtype) for p, d in direction.items()}
    return {**feeds, **moved}


def make_feeds(
    step: onnx.ModelProto, given: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A value for every input: those given, else normal data, zeros and ones; symbolic sizes as given, else 2."""
    sizes: dict[str, int] = {}
    for value in step.graph.input:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param and value.name in given:
                sizes[dim.dim_param] = given[value.name].shape[i]
    feeds = {}
    for value in step.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = tuple(d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, _SIZE) for d in kind.shape.dim)
        if value.name in given:
            feeds[value.name] = given[value.name].astype(dtype)
        elif np.issubdtype(dtype, np.floating):
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            feeds[value.name] = rng.integers(0, 2, shape).astype(dtype)
    return feeds


def _prepared(step: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in float32 where it is in halves, whose random ops draw the same every time."""
    model = ir.from_proto(step)
    for index, node in enumerate(model.graph):
        if node.op_type in _RANDOM and "seed" not in node.attributes:
            floating = node.op_type != "Dropout"
            node.attributes["seed"] = (
                ir.AttrFloat32("seed", float(index)) if floating else ir.AttrInt64("seed", index)
            )
    halves = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    made = [v for node in model.graph for v in node.outputs]
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
        if value.dtype in halves:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.const_value is not None and value.const_value.dtype in halves:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in model.graph:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in halves:
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))
            if name in ("to", "dtype") and attribute.value in {int(h) for h in halves}:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    return ir.to_proto(model)


_RANDOM = ("Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli")


def _loss_only(step: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(step)
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name == names.LOSS]
    passes.RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)
