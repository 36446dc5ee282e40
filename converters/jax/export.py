"""Export of a JAX step: trace it, lower it, compare it with JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ort import runtime

from ..checks import agreement as comparison
from ..checks import default_level, tolerances
from ..checks.finite_differences import in_float64
from ..emit import Emitter
from ..halves import OnCPU, on_cpu
from ..passes import order
from . import bits, control, elementwise, gamma, indexing, kernels, products, randoms, reductions, structure  # noqa: F401
from .lower import Array, Lowering, Tensor
from .step import TracedStep, array, inputs_of, plain, trace

OPSETS = range(20, onnx.defs.onnx_opset_version() + 1)
"""Opsets in whose ops steps are written, up to the newest of the installed onnx."""

_PHASES = ("forward", "backward", "optimizer")


def export_training_step(
    loss_fn: Callable[..., Any],
    params: Any,
    *batch: Any,
    optimizer: Any = None,
    buffers: Any = None,
    batch_names: Sequence[str] | None = None,
    unroll: int = 64,
    opset: int = 20,
    provider: str = "cpu",
    check: bool = True,
) -> onnx.ModelProto:
    """Export a JAX training step as an ONNX graph in standard operators.

    By default the step computes the loss and the gradient of every parameter. With `optimizer` the update is part of
    the graph: the step returns new parameters and new optimizer state. For example, ``export_training_step(loss_fn,
    params, x, y, optimizer=optax.adam(1e-3))`` returns a step that trains on batches of the shapes of `x` and `y`.

    Inputs are parameters and buffers, named by their pytree paths joined by dots, optimizer state as
    ``state.<parameter>.<slot>``, then the batch as ``input.<i>``. Outputs are ``loss``, then ``grad.<parameter>``, or
    with an optimizer ``new.<parameter>`` and ``new.state.…``, then ``new.<buffer>``. Random keys are inputs of two
    words (uint32); their bits and uniform numbers equal JAX's bit for bit, and others within rounding.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(params, *batch)`` returns the scalar loss; with buffers, ``loss_fn(params, buffers, *batch)``
        returns (loss, new buffers).
    params, buffers : pytree of arrays
        First values of the trained arrays, and of other state, such as running statistics.
    *batch : pytree of arrays
        An example batch; the graph has its shapes.
    optimizer : optax.GradientTransformation, optional
        The optimizer. By default the step outputs gradients.
    batch_names : sequence of str, optional
        Names of the batch's arrays. By default they are ``input.<i>``.
    unroll : int
        Largest number of steps of a scan that is unrolled, so that onnx-remat can recompute inside it. Longer scans
        become Scan nodes.
    opset : int
        Version of ONNX's operator set, one of `OPSETS`.
    provider : {"cpu", "cuda"}
        Where the step will run. For the CPU, operators that it has no kernels for in half precision compute in float32;
        for CUDA, half precision stays wherever CUDA has a kernel, and parameters may be in bfloat16.
    check : bool
        Run the graph on the first values, and compare every output with JAX's.

    Returns
    -------
    onnx.ModelProto
        The step. Every node has its phase (forward, backward or optimizer), and every value its shape.

    Raises
    ------
    UsageError
        `opset` is none of `OPSETS`, `provider` is unknown, or `batch_names` has another number of names than the batch
        has arrays.
    ConversionError
        A primitive has no lowering, the loss is not a float scalar or depends on no parameter, a parameter is not
        float, or the graph's outputs differ from JAX's.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> def loss_fn(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)
    >>> model = export_training_step(loss_fn, {"w": jnp.ones((3, 2))}, jnp.ones((4, 3)))
    >>> [value.name for value in model.graph.output]
    ['loss', 'grad.w']
    """
    if opset not in OPSETS:
        raise UsageError(f"opset {opset} is not supported: use {OPSETS[0]} to {OPSETS[-1]}")
    if provider not in ("cpu", "cuda"):
        raise UsageError(f"provider {provider!r}: use 'cpu' or 'cuda'")
    step = trace(loss_fn, params, batch, buffers, optimizer, batch_names)
    halves = provider == "cuda"
    if not halves:
        check_types(step)
    model = convert(step, unroll, opset, halves)
    if check:
        comparison.record(model, verify(model, step, halves=halves))
    return model


def check_types(step: TracedStep) -> None:
    """Raise ConversionError if ONNX Runtime's CPU cannot take an array."""
    for name, value in step.inputs.items():
        if value.dtype == kernels.BFLOAT16:
            raise ConversionError(
                f"{name} is bfloat16, which ONNX Runtime's CPU does not take: give float32, also as an optimizer's "
                "state, and cast inside the loss; for a GPU, call export_training_step with provider='cuda'"
            )


def convert(step: TracedStep, unroll: int = 64, opset: int = 20, halves: bool = False) -> onnx.ModelProto:
    """Convert a traced step to an ONNX model; with `halves`, half precision stays: see `export_training_step`."""
    model: onnx.ModelProto = ir.to_proto(_build(step, unroll, opset, halves))
    known = {tensor.name for tensor in model.graph.initializer}  # initializers state their own shapes
    for info in [info for info in model.graph.value_info if info.name in known]:
        model.graph.value_info.remove(info)
    return model


def verify(
    model: onnx.ModelProto, step: TracedStep, tolerance: Mapping[str, float] | None = None, halves: bool = False
) -> comparison.Check:
    """Compare a step's model with JAX on the first values; with `halves`, in float32 that is rounded after each node.

    If they differ by more than `tolerances.EXACT_ABOVE`, the model is also computed in float64, if possible. The
    float64 run is not XLA's, which takes minutes for convolutions in float64 because it has no kernel for them.

    Raises
    ------
    ConversionError
        An output differs by more than the tolerance of its dtype and more than rounding explains, without or with ONNX
        Runtime's default optimisations.
    """
    run = on_cpu(ir.from_proto(model), step.feeds()) if halves else OnCPU(model, step.feeds(), {})
    plain, expected = runtime.outputs(run.model, run.feeds), step.expected()
    made = run.rounded(plain)
    tolerance = step.tolerance() if tolerance is None else tolerance
    try:
        found = comparison.compare(made, expected, tolerance)
    except ConversionError:
        found = comparison.compare(made, expected, tolerance, step.noise(expected))
    default_level.compare(run.model, run.feeds, plain, tolerance, narrow=run.narrow)
    if found.error > tolerances.EXACT_ABOVE and tolerances.is_single(tolerance):
        with suppress(ConversionError):
            found = comparison.exactly(found, made, expected, in_float64(model, step.feeds()))
    return found


def initial_feeds(
    params: Any,
    *batch: Any,
    optimizer: Any = None,
    buffers: Any = None,
    batch_names: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return first values for every input of the graph that `export_training_step` makes of the same arguments.

    >>> initial_feeds({"w": np.ones(2)}, np.zeros(3))
    {'w': array([1., 1.], dtype=float32), 'input.0': array([0., 0., 0.], dtype=float32)}
    """
    groups = (params, buffers, None if optimizer is None else optimizer.init(params), tuple(batch))
    leaves = jax.tree_util.tree_leaves(groups)
    return {name: plain(array(leaf)) for name, leaf in zip(inputs_of(groups, batch_names), leaves, strict=True)}


def _build(step: TracedStep, unroll: int, opset: int, halves: bool) -> ir.Model:
    """Return the step's graph: lowered, without unused nodes, labelled, and in the order of phases."""
    arrays = [_input(name, value) for name, value in step.inputs.items()]
    graph = ir.Graph(arrays, [], nodes=[], opset_imports={"": opset}, name="training_step")
    low = Lowering(Emitter(graph, "forward"), unroll, halves)
    operands = [_operand(low, value, first) for value, first in zip(arrays, step.inputs.values(), strict=True)]
    results = low.run_closed(step.jaxpr, operands)
    for (name, phase), var, result in zip(step.outputs.items(), step.jaxpr.jaxpr.outvars, results, strict=True):
        with low.emit.labelled(phase):  # type: ignore[arg-type]
            words = randoms.words_of(low, low.tensor(result)) if kernels.is_key(var.aval) else result
            graph.outputs.append(_output(low, name, words))
    model = ir.Model(graph, ir_version=10, producer_name="onnx-remat")
    common.RemoveUnusedNodesPass()(model)
    order.JAX_LOWERED.run(model)
    _label(graph, [value for value, phase in zip(graph.outputs, step.outputs.values(), strict=True)
                   if phase == "forward"])  # fmt: skip
    graph.sort()
    nodes = sorted(graph, key=lambda node: _PHASES.index(node.metadata_props["phase"]))
    graph.remove(nodes)
    graph.extend(nodes)
    order.JAX.run(model)
    return model


def _input(name: str, value: Any) -> ir.Value:
    shape, dtype = tuple(value.shape), kernels.dtype_of_aval(value)
    if kernels.is_key(value):
        shape, dtype = (*shape, 2), np.dtype(np.uint32)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.from_numpy(dtype)))


def _operand(low: Lowering, value: ir.Value, first: Any) -> Tensor:
    assert value.shape is not None and value.dtype is not None
    shape = tuple(int(n) for n in value.shape.numpy())
    made = Tensor(value, tuple(range(len(shape))), shape, value.dtype.numpy())
    return randoms.keys_of(low, made) if kernels.is_key(first) else made


def _output(low: Lowering, name: str, result: Array) -> ir.Value:
    value = low.full(low.tensor(result))
    if value.producer() is None or value.is_graph_output():
        value = low.emit("Identity", value, like=value)
    value.name = name
    return value


def _label(graph: ir.Graph, roots: list[ir.Value]) -> None:
    """Label the ancestors of the loss and the new buffers as forward; other nodes that JAX runs early are backward."""
    forward: set[ir.Node] = set()
    pending = [node for value in roots if (node := value.producer()) is not None]
    while pending:
        node = pending.pop()
        if node not in forward:
            forward.add(node)
            values = [*node.inputs, *_captured(node)]
            pending.extend(made for value in values if value is not None and (made := value.producer()) is not None)
    for node in graph:
        label = node.metadata_props["phase"]
        phase = "forward" if node in forward else "backward" if label == "forward" else label
        for inner in [node, *_inside(node)]:
            inner.metadata_props["phase"] = phase


def _inside(node: ir.Node) -> list[ir.Node]:
    """Return all nodes in the bodies of a control-flow operator."""
    bodies = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
    return [inner for body in bodies for inner in body.all_nodes()]


def _captured(node: ir.Node) -> list[ir.Value | None]:
    """Return the values that a node's bodies read; some are defined in the bodies."""
    return [value for inner in _inside(node) for value in inner.inputs]
