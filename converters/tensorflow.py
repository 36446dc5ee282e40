"""Training steps of Keras models and tf.functions: the forward pass by tf2onnx, the backward pass by `autodiff`.

tf2onnx converts a graph with gradients, without an error, into ops that no runtime has. Therefore it converts only the
forward pass and the loss, with every variable as an input.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .extras import require

require("tensorflow", "onnx_ir", "onnxruntime", "tensorflow", "tf2onnx")

import ml_dtypes
import numpy as np
import onnx

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ir.body import rename_values
from onnx_remat.messages import Setting, first_line
from onnx_remat.ort import runtime

from . import names, optimizers
from .autodiff.build import differentiated
from .checks import agreement as comparison
from .checks import default_level, tolerances
from .settled import settle
from .tensorflow_ops import HANDLERS, check_ops, inlined, unmerged, write_out

Loss = Callable[[Any, Any], Any]

OPSETS = range(15, 19)
"""Opsets of the forward export: from CastLike, which the exact GELU needs, to the newest of tf2onnx."""


def export_training_step(
    model: Any,
    example_inputs: Sequence[np.ndarray],
    loss: Loss | str | None = None,
    optimizer: optimizers.Optimizer | None = None,
    *,
    opset: int = 18,
    training: bool = True,
    check: bool = True,
) -> onnx.ModelProto:
    """Export the training step of a Keras model, a tf.function or a callable tf.Module as an ONNX graph.

    Parameters
    ----------
    model : keras.Model or callable
        A built model of Keras 3 on the TensorFlow backend, or a function of tensors. The trainable variables of a
        function are those that it reads, in this order. A function that assigns variables is refused, and one with
        several outputs.
    example_inputs : sequence of array
        One batch: the model's inputs, and last the target if `loss` is given. The graph has these shapes.
    loss : callable or str, optional
        ``loss(target, output)``, as in Keras, or the name of a loss of Keras. The step computes its mean, without what
        a Keras model masks. By default the model itself returns the loss.
    optimizer : Optimizer, optional
        An optimizer of `onnx_remat.converters.optimizers`. By default the step outputs gradients and updates nothing.
        Variables with a constraint are then refused.
    opset : int
        Opset of the forward export, 15 to 18.
    training : bool
        Run Keras layers in training mode, with new moving statistics as outputs. Random layers, such as Dropout, are
        then refused.
    check : bool
        Compare loss, gradients and statistics with TensorFlow's.

    Returns
    -------
    onnx.ModelProto
        The step, with inputs and outputs as in `names`: Keras variables have their paths, others their names. A
        variable that the loss does not depend on, or only behind a stopped gradient, is an input that keeps its value.

    Raises
    ------
    ConversionError
        TensorFlow or tf2onnx is not installed, the model draws random numbers, assigns variables or has a gradient of
        its own, an op has no ONNX counterpart or no gradient rule, or the step's results differ from TensorFlow's.
    UsageError
        The optimizer, the loss or the opset is not one of those above.
    """
    _check_arguments(model, optimizer, opset)
    tf, convert = _import()
    loss = _resolved(loss)
    batch = {names.batch(i): np.asarray(array) for i, array in enumerate(example_inputs)}
    forward = (
        _of_keras(tf, model, list(batch), loss, training) if hasattr(model, "stateless_call")
        else _of_function(tf, model, batch, loss)
    )  # fmt: skip
    if optimizer is not None and forward.constrained:
        raise ConversionError(
            "the update would ignore the constraint of {!r}: leave out {}, and update and constrain it yourself",
            forward.constrained[0],
            Setting("optimizer"),
        )
    arrays = (*forward.values.values(), *batch.values())
    signature = [tf.TensorSpec(a.shape, a.dtype, name=f"arg{i}") for i, a in enumerate(arrays)]
    traced = tf.function(forward.step, input_signature=signature)
    try:
        concrete = traced.get_concrete_function()
    except Exception as error:
        raise ConversionError(f"TensorFlow cannot trace the forward pass: {_reason(error)}") from error
    if forward.outputs != [1]:
        raise ConversionError(f"the model has {forward.outputs[0]} outputs: return the loss alone, or give a loss")
    check_ops(concrete.graph, training)
    try:
        with inlined(concrete.graph), unmerged():
            made, _ = convert.from_function(traced, input_signature=signature, opset=opset, custom_op_handlers=HANDLERS)
    except Exception as error:
        raise ConversionError(f"tf2onnx cannot convert the forward pass: {_reason(error)}") from error
    keep = [names.new(name) for name in forward.after]
    write_out(made)
    _store_captured(made, concrete.graph.captures)
    _rename(made, [*forward.values, *batch], [names.LOSS, *keep])
    settle(made)
    inside = _dtypes(concrete.graph)
    # Later than the conversion, because tracing gradients adds outputs to the graph of `traced`.
    gradients = _Gradients(tf, traced, [*forward.values, *batch], forward.trained, signature)
    if not (trained := gradients.connected):
        raise ConversionError(f"the loss depends on no trained variable (of {len(forward.trained)})")
    step = differentiated(made, names.LOSS, trained, keep=keep, convention="tensorflow")
    plain = step.proto()
    if check:
        feeds = forward.values | batch
        given = {value.name for value in plain.graph.input}
        expected = gradients.expected(feeds, keep)
        tolerance = tolerances.allowed(inside)
        # A gradient may be pure rounding (that of the bias of attention's keys): the others give the scale of its
        # noise.
        called = [names.gradient(n) for n in trained]
        share = tolerances.VANISHING_GRADIENT * tolerance["float32"] / tolerances.BY_DTYPE["float32"]
        rounding = share * max(float(np.abs(expected[n]).max(initial=0)) for n in called)
        feeds = {n: a for n, a in feeds.items() if n in given}
        outputs = runtime.outputs(plain, feeds)
        noise = dict.fromkeys(called, rounding)
        try:
            found = comparison.compare(outputs, expected, tolerance, noise)
        except ConversionError:
            if tolerances.is_single(tolerance):
                raise
            measured = gradients.noise(forward.values | batch, keep, expected, inside)
            noise = {name: max(noise.get(name, 0.0), change) for name, change in measured.items()}
            found = comparison.compare(outputs, expected, tolerance, noise)
        default_level.compare(plain, feeds, outputs, tolerance)
    if optimizer is not None:
        plain = step.updating(optimizer)
    if check:
        comparison.record(plain, found)
    return plain


def _check_arguments(model: Any, optimizer: Any, opset: int) -> None:
    """Raise an error for arguments that no model makes right."""
    if opset not in OPSETS:
        raise UsageError(f"opset {opset} is not supported: use {OPSETS[0]} to {OPSETS[-1]}")
    fits = all(callable(getattr(optimizer, name, None)) for name in ("slots", "update"))
    if optimizer is not None and (not fits or isinstance(optimizer, type)):
        given = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
        raise UsageError(f"optimizer: pass one of onnx_remat.converters.optimizers, such as SGD(lr=0.1), not {given!r}")
    homes = [each.__module__ for each in type(model).__mro__]
    if any(home.startswith(("tf_keras.", "tensorflow.python.keras.")) for home in homes):
        raise ConversionError(
            "models of Keras 2 (tf_keras) are not supported, as their training mode would be lost: make the model with "
            "Keras 3, or pass a tf.function that calls it with {}",
            Setting("training", False),
        )


def _resolved(loss: Loss | str | None) -> Loss | None:
    """Return a loss; of a name, that of Keras."""
    if loss is None or callable(loss):
        return loss
    import keras

    try:
        found: Loss = keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"loss: Keras has no loss {loss!r:.60}: pass a function of target and output, or a name such as 'mse'"
        ) from error
    return found


def _reason(error: Exception) -> str:
    """Return what an error states, behind the lines of a traceback that TensorFlow puts into its text."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    stated = [i for i, line in enumerate(lines) if re.match(r"\w+(Error|Exception): ", line)]
    if not stated:
        return first_line(error)
    count = 2 if "Exception encountered when calling" in lines[stated[-1]] else 1  # Keras names the layer first
    return " ".join(lines[stated[-1] : stated[-1] + count])


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass as a function of all values that it reads.

    Attributes
    ----------
    values : dict of str to array
        Current values of the variables by name.
    trained, constrained : list of str
        Variables to differentiate by, and those of them that have a constraint.
    step : callable
        Function of all variables, then the batch, in order; returns the loss, then the next values.
    after : list of str
        Variables whose next value is an output of the step; known once `step` is traced.
    outputs : list of int
        Number of outputs where the model returns the loss, else 1; known once `step` is traced.
    """

    values: dict[str, np.ndarray]
    trained: list[str]
    constrained: list[str]
    step: Callable[..., tuple[Any, ...]]
    after: list[str] = field(default_factory=list)
    outputs: list[int] = field(default_factory=lambda: [1])


def _of_keras(tf: Any, model: Any, batch: Sequence[str], loss: Loss | None, training: bool) -> _Forward:
    variables: dict[str, Any] = {}  # their paths need not differ
    for variable in (*model.trainable_variables, *model.non_trainable_variables):
        variables[_unused(variable.path, variables)] = variable
    called = {id(variable): name for name, variable in variables.items()}
    trained = [called[id(v)] for v in model.trainable_variables]
    seeds = [name for name, v in variables.items() if v.path.endswith("seed_generator_state")]
    values = {name: np.asarray(variables[name]) for name in variables if name not in seeds}
    after: list[str] = []
    outputs = [1]

    def step(*given: Any) -> tuple[Any, ...]:
        made = dict(zip((*values, *batch), given, strict=True))
        fixed = [made.get(called[id(v)], v.value) for v in model.non_trainable_variables]
        x, target = _split([made[name] for name in batch], loss)
        arguments = x[0] if len(x) == 1 else x
        with _state_by_value():
            output, state, added = model.stateless_call(
                [made[name] for name in trained], fixed, arguments, return_losses=True, training=training
            )
        new = {called[id(v)]: a for a, v in zip(state, model.non_trainable_variables, strict=True)}
        new = {name: a for name, a in new.items() if training and a is not made.get(name, a)}
        after[:] = new
        if loss is None:
            output, *others = tf.nest.flatten(output)
            outputs[:] = [1 + len(others)]
        total = _scalar(tf, output, target, None if loss is None else _masked(loss, target, output))
        for penalty in added:  # regularizers', and those of add_loss, which Keras adds, too
            total += tf.cast(penalty, total.dtype)
        return total, *(tf.identity(a) for a in new.values())

    constrained = [name for name in trained if variables[name].constraint is not None]
    return _Forward(values, trained, constrained, step, after, outputs)


@contextmanager
def _state_by_value() -> Iterator[None]:
    """Let Keras keep the current value where a variable is assigned to another one: it keeps the variable."""
    from keras import StatelessScope, Variable

    plain = StatelessScope.add_update

    def add_update(scope: Any, update: tuple[Any, Any]) -> None:
        variable, value = update
        plain(scope, (variable, value.value if isinstance(value, Variable) else value))

    StatelessScope.add_update = add_update
    try:
        yield
    finally:
        StatelessScope.add_update = plain


def _masked(loss: Loss, target: Any, output: Any) -> Loss:
    """Return the loss; of a function one that leaves out what is masked, as Keras' `compile` makes of it."""
    import keras

    if isinstance(loss, keras.losses.Loss) or not hasattr(output, "dtype"):
        return loss

    class Masked(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return loss(target, output)

    made: Loss = Masked(dtype=output.dtype.name)
    return made


def _of_function(tf: Any, function: Any, batch: Mapping[str, np.ndarray], loss: Loss | None) -> _Forward:
    """Return the function's graph with inputs in place of the variables that it reads."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    x, _ = _split(list(batch.values()), loss)
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    concrete = traced.get_concrete_function(*(tf.TensorSpec(a.shape, a.dtype) for a in x))
    definition = concrete.graph.as_graph_def()
    nodes = [*definition.node, *(node for inner in definition.library.function for node in inner.node_def)]
    if assigning := [node.name for node in nodes if node.op.startswith(("Assign", "ResourceApply", "ResourceScatter"))]:
        raise ConversionError(f"the function assigns variables ({assigning[0]}): their state would be lost")
    outputs = tf.nest.flatten(concrete.structured_outputs)
    if len(outputs) != 1:
        raise ConversionError(f"the function has {len(outputs)} outputs: return the loss, or what it is of, alone")
    check_ops(concrete.graph, training=False)
    frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    constants = {node.name for node in frozen.graph.as_graph_def().node if node.op == "Const"}
    # In the frozen graph, each variable is a constant with the name of its capture. The order of captures is that in
    # which the function reads; `graph.variables` are in the order of addresses.
    read = {id(variable.handle): variable for variable in concrete.graph.variables}
    variables: dict[str, tuple[Any, str]] = {}
    for handle, inside in concrete.graph.captures:
        variable = read.get(id(handle))
        if variable is not None and inside.op.name in constants:
            variables[_unused(variable.name.partition(":")[0], variables)] = variable, inside.op.name
    values = {name: np.asarray(variable) for name, (variable, _) in variables.items()}
    trained = [name for name, (variable, _) in variables.items() if variable.trainable]

    def step(*given: Any) -> tuple[Any, ...]:
        made = dict(zip((*values, *batch), given, strict=True))
        x, target = _split([made[name] for name in batch], loss)
        replaced = {f"{inside}:0": made[name] for name, (_, inside) in variables.items()}
        replaced |= {placeholder.name: a for placeholder, a in zip(frozen.inputs, x, strict=True)}
        (output,) = tf.import_graph_def(
            frozen.graph.as_graph_def(), input_map=replaced, return_elements=[frozen.outputs[0].name]
        )
        return (_scalar(tf, output, target, loss),)

    constrained = [name for name in trained if getattr(variables[name][0], "constraint", None) is not None]
    return _Forward(values, trained, constrained, step)


def _unused(name: str, taken: Container[str]) -> str:
    """Return the name, with underscores if it is taken."""
    while name in taken:
        name += "_"
    return name


def _split(batch: list[Any], loss: Loss | None) -> tuple[list[Any], Any]:
    """Return the model's inputs, and the target if there is a loss."""
    return (batch, None) if loss is None else (batch[:-1], batch[-1])


def _scalar(tf: Any, output: Any, target: Any, loss: Loss | None) -> Any:
    return tf.identity(output if loss is None else tf.reduce_mean(loss(target, output)))


def _dtypes(graph: Any) -> set[str]:
    """Return the dtypes that a forward pass computes with."""
    found = {value.dtype.base_dtype.name for op in graph.get_operations() for value in op.outputs}
    if "bfloat16" in found:
        warnings.warn(
            "tf2onnx writes bfloat16 as float16, which ends at 65504: choose mixed_float16 or float32 to train in the "
            "same type elsewhere",
            stacklevel=3,
        )
    return found


def _store_captured(model: onnx.ModelProto, captures: Iterable[tuple[Any, Any]]) -> None:
    """Store the tensors that a model captures, such as the mean of a Normalization, which tf2onnx makes inputs."""
    captured = {inside.name: outside for outside, inside in captures}
    stored = [value for value in model.graph.input if value.name in captured]
    for value in stored:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(captured[value.name]), value.name))
        model.graph.input.remove(value)


def _import() -> tuple[Any, Any]:
    try:
        import tensorflow as tf
        import tf2onnx.convert as convert
    except ImportError as error:
        raise ConversionError(f"{error.name} is not installed: pip install 'onnx-remat[tensorflow]'") from error
    return tf, convert


def _rename(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the graph's inputs (``arg<i>``) and outputs; an output that is an input, a constant or another output is
    a copy of it."""
    graph = model.graph
    mapping = {value.name: inputs[int(value.name.removeprefix("arg"))] for value in graph.input}
    taken = {*mapping, *(tensor.name for tensor in graph.initializer)}
    for value, name in zip(graph.output, outputs, strict=True):
        if value.name in taken:
            graph.node.append(onnx.helper.make_node("Identity", [value.name], [name], f"{name}.copy"))
            value.name = name
        else:
            mapping[value.name] = name
            taken.add(value.name)
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = mapping.get(value.name, value.name)
    rename_values(graph.node, mapping)


class _Gradients:
    """The step with TensorFlow's own gradients.

    Attributes
    ----------
    connected : list of str
        The trained variables that have a gradient; others are None in TensorFlow, and Keras leaves them as they are.
    """

    def __init__(
        self, tf: Any, step: Callable[..., Any], given: Sequence[str], trained: Sequence[str], signature: Sequence[Any]
    ) -> None:
        self.connected: list[str] = []
        self._tf, self._given = tf, given

        def run(*values: Any) -> tuple[Any, ...]:
            named = dict(zip(given, values, strict=True))
            with tf.GradientTape() as tape:
                tape.watch([named[name] for name in trained])
                loss, *after = step(*values)
            gradients = tape.gradient(loss, [named[name] for name in trained])
            found = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
            self.connected[:] = found
            return loss, *(tf.convert_to_tensor(g) for g in found.values()), *after

        self._run = tf.function(run, input_signature=signature, autograph=False).get_concrete_function()

    def expected(self, feeds: Mapping[str, np.ndarray], keep: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the step's outputs as TensorFlow computes them."""
        made = self._run(*(self._tf.constant(feeds[name]) for name in self._given))
        called = [names.LOSS, *map(names.gradient, self.connected), *keep]
        return {name: np.asarray(value) for name, value in zip(called, made, strict=True)}

    def noise(
        self,
        feeds: Mapping[str, np.ndarray],
        keep: Sequence[str],
        expected: Mapping[str, np.ndarray],
        inside: Collection[str],
    ) -> dict[str, float]:
        """Return the noise of each floating-point output, by changing inputs by rounding errors of the coarsest dtype
        inside."""
        epsilon = max(float(ml_dtypes.finfo(name).eps) for name in tolerances.BY_DTYPE if name in inside)  # type: ignore[no-untyped-call]
        generator = np.random.default_rng(0)
        found: dict[str, float] = {}
        for _ in range(tolerances.NOISE_SAMPLES):
            nudged = {
                name: np.asarray(array * (1 + epsilon * generator.uniform(-1, 1, array.shape)), array.dtype)
                if comparison.is_float(array) else array
                for name, array in feeds.items()
            }  # fmt: skip
            for name, value in self.expected(nudged, keep).items():
                if comparison.is_float(value):
                    change = float(np.abs(value.astype(np.float64) - expected[name].astype(np.float64)).max(initial=0))
                    found[name] = max(found.get(name, 0.0), change)
        share = tolerances.HALF_ROUNDINGS / tolerances.NOISE_FACTOR
        return {name: share * change for name, change in found.items()}
