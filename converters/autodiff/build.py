"""`add_backward`: turn a forward model into a training step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from onnx_remat.errors import ConversionError, UsageError, did_you_mean
from onnx_remat.messages import Setting

from .. import names, optimizers
from ..checks import finite_differences
from ..dims import dims as dims_of
from ..passes import order
from ..tape import Tape
from . import loss as losses
from .linear import into_gemm
from .parameters import filled, initial_values, promote, select
from .recurrent import unroll
from .registry import Convention, differentiate, is_stopped
from .shapes import infer_shapes
from .training_mode import into_training, running_statistics, use_batch_statistics
from .upgrade import Source, load


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
    convention: Convention = "torch",
) -> onnx.ModelProto:
    """Append the backward pass, and an optimizer's update, to a forward ONNX model.

    By default the step computes the loss and the gradient of every weight. With `optimizer` it computes the new weights
    and the new state of the optimizer instead. For example, ``add_backward("model.onnx", "cross_entropy",
    optimizer=SGD(lr=0.1))`` returns a step that takes a batch and class numbers, and returns the loss and the updated
    weights.

    Inputs of the step are the parameters (initializers of the forward model, under their names) and running statistics,
    the optimizer's state, then the model's inputs and the loss's target. Outputs are the loss, gradients or new
    parameters and state, then new running statistics; see `onnx_remat.converters.names`.

    Parameters
    ----------
    forward_model : path or onnx.ModelProto
        A model of standard ops. Opsets below 18 are converted. Recurrent ops are unrolled over time.
    loss : str or CrossEntropy or MeanSquaredError, optional
        ``"cross_entropy"``, ``"mse"``, a loss object, or the name of the output that is the loss. By default it is the
        output called ``loss``, or the only output.
    wrt : sequence of str, optional
        Names or patterns (``"*.weight"``) of the parameters: initializers, inputs, or values computed from constants
        alone. By default the parameters are all initializers that look like weights, see `parameters.select`, and
        influence the loss.
    optimizer : Optimizer, optional
        An optimizer of `onnx_remat.converters.optimizers`. By default the step outputs gradients.
    training : bool
        Set Dropout and BatchNormalization to training mode: the step uses the statistics of the batch, and has running
        statistics as inputs and outputs.
    frozen : sequence of str
        Names or patterns of initializers that are not parameters.
    keep : sequence of str
        Outputs of the forward model to keep, after all others.
    dims : mapping of str to int, optional
        Sizes for symbolic dimensions, by name.
    check : bool
        Compare the gradients with differences of the loss along random directions, in float64, to 1e-6. Then compare
        the step on ONNX Runtime with float64. The step's metadata record the result; see `finite_differences`.
    example_inputs : mapping of str to array, optional
        Values for the check, for any input of the step. By default the check uses the file's weights, normal data, and
        zeros and ones for integers.
    convention : "torch" or "tensorflow"
        Whose derivatives hold where mathematics has none or several. In TensorFlow, the first of equal operands of Max
        and Min has all of the gradient, Clip (Relu6) has none at its limits, and no gradient stays none at a pole of
        Sqrt, Reciprocal or a guarded Div: in PyTorch it becomes NaN.

    Returns
    -------
    onnx.ModelProto
        The step in standard ops, which stock ONNX Runtime runs. Each node has its phase: forward, backward or
        optimizer.

    Raises
    ------
    UsageError
        An argument names what the model does not have, or is an integer to differentiate by.
    ConversionError
        An op between a parameter and the loss has no gradient rule (the message names op and node), there is no scalar
        loss, the loss depends on no parameter, or the gradients fail the check.
    """
    step = differentiated(
        forward_model, loss, wrt, training=training, frozen=frozen, keep=keep, dims=dims, convention=convention
    )
    plain = step.proto()
    _check_names(example_inputs or {}, [*(value.name for value in plain.graph.input), *step.idle], optimizer)
    found = finite_differences.check(
        plain, step.parameters, step.stored, dict(example_inputs or {})
    ) if check else None  # fmt: skip
    if optimizer is not None:
        plain = step.updating(optimizer)
    if found is not None:
        finite_differences.record(plain, found)
    return plain


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A forward model with the gradients of its parameters.

    Attributes
    ----------
    model : onnx_ir.Model
        The step; inputs and outputs are those of `add_backward` without an optimizer.
    parameters, idle : list of str
        Names of the parameters that influence the loss, and of those that do not and are constants again.
    batch_inputs : int
        Number of the last inputs that are the batch.
    stored : dict of str to array
        Values of parameters and running statistics in the file, where it has them.
    """

    model: ir.Model
    parameters: list[str]
    idle: list[str]
    batch_inputs: int
    stored: dict[str, np.ndarray]

    def proto(self) -> onnx.ModelProto:
        """Return the step as a protobuf, checked by ONNX's checker."""
        proto = ir.to_proto(self.model)
        proto.producer_name = "onnx-remat"
        onnx.checker.check_model(proto)
        return proto

    def updating(self, optimizer: optimizers.Optimizer) -> onnx.ModelProto:
        """Return the step with an optimizer's update in place of gradients; `model` changes to it."""
        optimizers.append(self.model.graph, dict.fromkeys(self.parameters, optimizer), self.batch_inputs)
        return self.proto()


def differentiated(
    forward_model: Source,
    loss: str | losses.Loss | None,
    wrt: Sequence[str] | None,
    *,
    training: bool = False,
    frozen: Sequence[str] = (),
    keep: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    convention: Convention = "torch",
) -> Differentiated:
    """Return a forward model with the gradients of its parameters; see `add_backward`."""
    wrt, frozen, keep = None if wrt is None else _names(wrt), _names(frozen), _names(keep)
    model = load(forward_model)
    if training:
        into_training(model.graph)
    chosen = select(model.graph, wrt, frozen)
    if not chosen:
        if select(model.graph, wrt, ()):
            raise UsageError("all parameters are frozen: leave one out of {}", Setting("frozen"))
        raise ConversionError(
            "no initializer looks like a weight, so there is no parameter: name some with {}",
            Setting("wrt"),
        )
    buffers = [v for v in running_statistics(model.graph) if v not in chosen]
    stored: dict[str, np.ndarray] = {}
    parameter_names = [_as_input(model.graph, value, stored) for value in chosen]
    buffer_names = [_as_input(model.graph, value, stored) for value in buffers]
    model = infer_shapes(model, dims or {})
    order.FORWARD.run(model)
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    batch = [value for name, value in inputs.items() if name not in {*parameter_names, *buffer_names}]
    tape = Tape(graph)
    unroll(tape, graph, [inputs[name] for name in parameter_names])
    into_gemm(tape, graph)
    with tape.labelled("forward"):
        scalar, targets = _loss(tape, graph, loss)
    kept = _kept(graph, scalar, keep)
    graph.outputs[:] = [scalar, *kept.values()]
    after = use_batch_statistics(tape, graph)
    kept = dict(zip(kept, graph.outputs[1:], strict=True))  # statistics are computed by other nodes now
    graph.outputs[:] = graph.outputs[:1]
    parameters = [inputs[name] for name in parameter_names]
    adjoints = differentiate(graph, tape, scalar, parameters, convention)
    for node in filter(is_stopped, graph):
        node.op_type = "Identity"
    _demote(graph, parameters, adjoints, stored, explicit=wrt is not None)
    parameters = [p for p in parameters if p in adjoints]
    with tape.labelled("backward"):
        gradients = [tape.expand(adjoints[p], dims_of(p)) for p in parameters]
    statistics = {names.new(str(b.name)): v for b, v in after.items() if b.is_graph_input()}
    graph.inputs[:] = [*parameters, *(inputs[n] for n in buffer_names), *batch, *targets]
    made = {names.LOSS: graph.outputs[0]}
    made |= {names.gradient(str(p.name)): g for p, g in zip(parameters, gradients, strict=True)}
    made |= statistics
    if clash := next((name for name in kept if name in made), None):
        raise ConversionError(f"keep: an output of the step is called {clash!r}, too: rename it in the forward model")
    _set_outputs(tape, graph, made | kept)
    order.DIFFERENTIATED.run(model)
    active = [str(p.name) for p in parameters]
    idle = [name for name in parameter_names if name not in active]
    return Differentiated(model, active, idle, len(batch) + len(targets), stored)


def _names(given: Sequence[str]) -> Sequence[str]:
    """Return the names of an argument; a text is one name, not a sequence of letters."""
    return [given] if isinstance(given, str) else given


def _kept(graph: ir.Graph, loss: ir.Value, keep: Sequence[str]) -> dict[str, ir.Value]:
    """Return the outputs to keep, the loss left out; raise UsageError where the model has none of a name."""
    outputs = {str(value.name): value for value in graph.outputs}
    for name in keep:
        if name not in outputs:
            raise UsageError(f"keep: the model has no output {name!r}{did_you_mean(name, outputs)}")
    return {name: outputs[name] for name in keep if outputs[name] is not loss}


def _check_names(
    examples: Mapping[str, np.ndarray], inputs: Collection[str], optimizer: optimizers.Optimizer | None
) -> None:
    """Raise UsageError for an example of no input of the step, the optimizer's state and rate included."""
    rate = optimizer.lr if optimizer is not None else None
    for name in examples:
        if name not in inputs and name != rate and not name.startswith("state."):
            raise UsageError(f"the model has no input {name!r}{did_you_mean(name, inputs)}")


def initial_inputs(
    forward_model: Source, step: onnx.ModelProto, optimizer: optimizers.Optimizer | None = None
) -> dict[str, np.ndarray]:
    """Return the inputs of the first training step: parameters and statistics of the forward file, and zero state.

    Parameters
    ----------
    forward_model, step, optimizer
        Arguments and result of `add_backward`.

    Returns
    -------
    dict of str to array
        A value for every input of the step except the batch.
    """
    graph = load(forward_model).graph
    wanted = [value.name for value in step.graph.input]
    constants = dict(initial_values(graph))
    made: dict[str, np.ndarray] = {}
    for name in wanted:
        if name in constants:
            value = constants[name]
            array = value.const_value.numpy() if value.const_value is not None else filled(value)
            if array is not None:
                made[name] = array
    state = optimizers.initial_state(dict.fromkeys(made, optimizer), made) if optimizer is not None else {}
    return made | {name: value for name, value in state.items() if name in wanted}


def _as_input(graph: ir.Graph, value: ir.Value, stored: dict[str, np.ndarray]) -> str:
    made, array = promote(graph, value)
    name = str(made.name)
    if array is not None:
        stored[name] = array
        graph.inputs.append(made)
    return name


def _loss(tape: Tape, graph: ir.Graph, loss: str | losses.Loss | None) -> tuple[ir.Value, list[ir.Value]]:
    """Return the scalar to differentiate, and the inputs added for it."""
    outputs = {str(value.name): value for value in graph.outputs}
    added = losses.NAMED.get(loss) if isinstance(loss, str) and loss not in outputs else loss
    if added is not None and not isinstance(added, str):
        scalar, target = added.append(tape, graph)
        return scalar, [target]
    if isinstance(loss, str) and loss not in outputs:
        known = ", ".join([*losses.NAMED, *outputs])
        raise UsageError(f"loss: {loss!r} is neither a known loss nor an output: use one of {known}")
    name = loss or ("loss" if "loss" in outputs else next(iter(outputs)))
    if loss is None and name != "loss" and len(outputs) > 1:
        raise ConversionError(
            "no output is called loss: name the one that is the loss, or add cross_entropy or mse, with {} ({})",
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
    stored: dict[str, np.ndarray],
    explicit: bool,
) -> None:
    """Turn parameters without influence on the loss back into constants; raise ConversionError if `explicit`."""
    idle = [p for p in parameters if p not in adjoints]
    if len(idle) == len(parameters):
        raise ConversionError(f"the loss depends on no parameter (of {len(parameters)}, {idle[0].name!r} the first)")
    if idle and explicit:
        raise ConversionError(f"the loss does not depend on {idle[0].name!r}")
    for value in idle:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(stored.pop(str(value.name)), name=value.name)
        graph.register_initializer(value)


def _set_outputs(tape: Tape, graph: ir.Graph, wanted: Mapping[str, ir.Value]) -> None:
    """Make these values the graph's outputs, under these names; ConversionError where an input has one of them."""
    taken = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    if clash := next((name for name in wanted if name in taken), None):
        raise ConversionError(f"an input or a weight is called {clash!r}, as an output of the step is: rename it")
    for value in (v for node in graph for v in node.outputs):
        if value is not wanted.get(str(value.name), value):
            value.name = tape.fresh(f"forward.{value.name}")
    outputs: list[ir.Value] = []
    for name, value in wanted.items():
        # A value has one name, so an input, a constant or another output needs a copy.
        if value.producer() is None or any(value is other for other in outputs):
            value = tape.op("Identity", value, shape=dims_of(value))
        value.name = name
        outputs.append(value)
    graph.outputs[:] = outputs
