"""`add_backward`: a forward model into a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Setting

from .. import names, optimizers
from ..checks import finite_differences
from ..dims import dims as dims_of
from ..passes import order
from ..tape import Tape
from . import loss as losses
from . import prepare
from .linear import into_gemm
from .prepare import Source
from .recurrent import unroll
from .registry import differentiate


def add_backward(
    forward_model: Source,
    loss: str | losses.Loss | None = None,
    wrt: Sequence[str] | None = None,
    optimizer: optimizers.Optimizer | None = None,
    *,
    training: bool = False,
    frozen: Sequence[str] = (),
    keep: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    check: bool = True,
    example_inputs: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """Append backward nodes, and an optimizer's, to a forward ONNX model.

    Inputs of the result are the parameters (initializers of the forward model, under their names) and running
    statistics, the optimizer's state, then the model's inputs and the loss' target; outputs are the loss, gradients or
    new parameters and state, then new running statistics: see `onnx_remat.converters.names`.

    Parameters
    ----------
    forward_model : path or onnx.ModelProto
        Standard ops only, any opset; older ones are converted. Recurrent ops are written out step by step.
    loss : str or CrossEntropy or MeanSquaredError, optional
        ``"cross_entropy"``, ``"mse"``, or the name of the output that is the loss; by default the output called
        ``loss``, else the only one.
    wrt : sequence of str, optional
        Parameters by name or pattern (``"*.weight"``): initializers, inputs, or values made of constants alone. By
        default every initializer that looks like a weight, see `prepare.select`, and that the loss depends on.
    optimizer : Optimizer, optional
        One of `onnx_remat.converters.optimizers`; without it gradients are put out.
    training : bool
        Put Dropout and BatchNormalization into training mode: batch statistics, running ones as inputs and outputs.
    frozen : sequence of str
        Names or patterns of initializers that are not parameters.
    keep : sequence of str
        Outputs of the forward model to put out as well, last.
    dims : mapping of str to int, optional
        Symbolic sizes to fix.
    check : bool
        Compare the gradients with differences of the loss along random directions, in float64, to 1e-6; then the
        step as ONNX Runtime runs it with float64. What was found is in the result's metadata: `finite_differences`.
    example_inputs : mapping of str to array, optional
        What to check on, for any of the result's inputs; by default the file's weights, normal data, zeros and ones
        where integers are wanted.

    Returns
    -------
    onnx.ModelProto
        In standard ops that stock ONNX Runtime runs, nodes labelled forward, backward or optimizer.

    Raises
    ------
    ConversionError
        An op without a gradient rule on the way from a parameter to the loss (named with its node), no scalar loss,
        an integer parameter, no parameter the loss depends on, or gradients that fail the check.
    """
    model = prepare.load(forward_model)
    if training:
        prepare.into_training(model.graph)
    chosen = prepare.select(model.graph, wrt, frozen)
    if not chosen:
        raise ConversionError(
            "there is nothing to differentiate by: no initializer looks like a weight; name some with {}",
            Setting("wrt"),
        )
    buffers = [v for v in prepare.running_statistics(model.graph) if v not in chosen]
    held: dict[str, np.ndarray] = {}
    parameter_names = [_as_input(model.graph, value, held) for value in chosen]
    buffer_names = [_as_input(model.graph, value, held) for value in buffers]
    model = prepare.infer_shapes(model, dims or {})
    order.FORWARD.run(model)
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    batch = [value for name, value in inputs.items() if name not in {*parameter_names, *buffer_names}]
    tape = Tape(graph)
    unroll(tape, graph)
    into_gemm(tape, graph)
    with tape.labelled("forward"):
        scalar, targets = _loss(tape, graph, loss)
    kept = {name: value for name in keep for value in graph.outputs if value.name == name}
    graph.outputs[:] = [scalar]
    after = prepare.use_batch_statistics(tape, graph)
    parameters = [inputs[name] for name in parameter_names]
    adjoints = differentiate(graph, tape, scalar, parameters)
    _demote(graph, parameters, adjoints, held, explicit=wrt is not None)
    parameters = [p for p in parameters if p in adjoints]
    with tape.labelled("backward"):
        gradients = [tape.expand(adjoints[p], dims_of(p)) for p in parameters]
    statistics = {names.new(str(b.name)): v for b, v in after.items() if b.is_graph_input()}
    graph.inputs[:] = [*parameters, *(inputs[n] for n in buffer_names), *batch, *targets]
    _put_out(
        tape, graph,
        {names.LOSS: graph.outputs[0]}
        | {names.gradient(str(p.name)): g for p, g in zip(parameters, gradients, strict=True)} | statistics | kept,
    )  # fmt: skip
    order.DIFFERENTIATED.run(model)
    plain = _finished(model)
    found = finite_differences.check(
        plain, [str(p.name) for p in parameters], held, dict(example_inputs or {})
    ) if check else None  # fmt: skip
    if optimizer is not None:
        optimizers.append(graph, {str(p.name): optimizer for p in parameters}, len(batch) + len(targets))
        plain = _finished(model)
    if found is not None:
        finite_differences.record(plain, found)
    return plain


def initial_inputs(
    forward_model: Source, step: onnx.ModelProto, optimizer: optimizers.Optimizer | None = None
) -> dict[str, np.ndarray]:
    """What the first step of a training loop starts from: parameters and statistics of the forward file, zero state.

    Parameters
    ----------
    forward_model, step, optimizer
        As given to, and made by, `add_backward`.

    Returns
    -------
    dict of str to array
        A value for every input of the step but the batch.
    """
    graph = prepare.load(forward_model).graph
    wanted = [value.name for value in step.graph.input]
    constants = dict(prepare.initial_values(graph))
    made: dict[str, np.ndarray] = {}
    for name in wanted:
        if name in constants:
            value = constants[name]
            array = value.const_value.numpy() if value.const_value is not None else prepare.filled(value)
            if array is not None:
                made[name] = array
    state = optimizers.initial_state(dict.fromkeys(made, optimizer), made) if optimizer is not None else {}
    return made | {name: value for name, value in state.items() if name in wanted}


def _as_input(graph: ir.Graph, value: ir.Value, held: dict[str, np.ndarray]) -> str:
    made, array = prepare.promote(graph, value)
    name = str(made.name)
    if array is not None:
        held[name] = array
        graph.inputs.append(made)
    return name


def _loss(tape: Tape, graph: ir.Graph, loss: str | losses.Loss | None) -> tuple[ir.Value, list[ir.Value]]:
    """The scalar to differentiate, and the inputs added for it."""
    outputs = {str(value.name): value for value in graph.outputs}
    added = losses.NAMED.get(loss) if isinstance(loss, str) and loss not in outputs else loss
    if added is not None and not isinstance(added, str):
        scalar, target = added.append(tape, graph)
        return scalar, [target]
    if isinstance(loss, str) and loss not in outputs:
        known = ", ".join([*losses.NAMED, *outputs])
        raise ConversionError(f"loss: {loss!r} is neither a known loss nor an output; there are {known}")
    name = loss or ("loss" if "loss" in outputs else next(iter(outputs)))
    if loss is None and name != "loss" and len(outputs) > 1:
        raise ConversionError(
            "no loss: name the output that is one, or add cross_entropy or mse, with {} ({})",
            Setting("loss"),
            ", ".join(outputs),
        )
    scalar = outputs[str(name)]
    shape = dims_of(scalar)
    if any(d != 1 for d in shape):
        raise ConversionError(
            "output {!r} has shape {}, and a loss is a scalar: add one with {}",
            scalar.name,
            list(shape),
            Setting("loss"),
        )
    if scalar.dtype is None or not scalar.dtype.is_floating_point():
        raise ConversionError(f"the loss {scalar.name!r} is {scalar.dtype}, not floating point")
    return scalar, []


def _demote(
    graph: ir.Graph,
    parameters: Sequence[ir.Value],
    adjoints: Mapping[ir.Value, ir.Value],
    held: dict[str, np.ndarray],
    explicit: bool,
) -> None:
    """Parameters without influence on the loss: constants again if nobody asked for them, an error otherwise."""
    idle = [p for p in parameters if p not in adjoints]
    if len(idle) == len(parameters):
        raise ConversionError(f"the loss depends on no parameter (of {len(parameters)}, {idle[0].name!r} the first)")
    if idle and explicit:
        raise ConversionError(f"the loss does not depend on {idle[0].name!r}")
    for value in idle:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(held.pop(str(value.name)), name=value.name)
        graph.register_initializer(value)


def _put_out(tape: Tape, graph: ir.Graph, wanted: Mapping[str, ir.Value]) -> None:
    """Make values the graph's outputs under these names."""
    for value in (v for node in graph for v in node.outputs):
        if value is not wanted.get(str(value.name), value):
            value.name = tape.fresh(f"forward.{value.name}")
    outputs: list[ir.Value] = []
    for name, value in wanted.items():
        # An output has a name of its own, so an input, a constant or another output needs a copy.
        if value.producer() is None or any(value is other for other in outputs):
            value = tape.op("Identity", value, shape=dims_of(value))
        value.name = name
        outputs.append(value)
    graph.outputs[:] = outputs


def _finished(model: ir.Model) -> onnx.ModelProto:
    """Serialized, shapes inferred, checked."""
    proto = ir.to_proto(model)
    proto.producer_name = "onnx-remat"
    onnx.checker.check_model(proto)
    return proto
