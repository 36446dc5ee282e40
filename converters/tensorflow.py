"""Training steps of Keras models and tf.functions: the forward pass by tf2onnx, the backward pass by `autodiff`.

tf2onnx converts a graph with gradients, without an error, into ops that no runtime has. Therefore it converts only the
forward pass and the loss, with every variable as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .extras import require

require("tensorflow", "onnx_ir", "onnxruntime", "tensorflow", "tf2onnx")

import numpy as np
import onnx

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Setting
from onnx_remat.ort import runtime

from . import names, optimizers
from .autodiff import add_backward
from .checks import agreement as comparison
from .checks import default_level, tolerances

Loss = Callable[[Any, Any], Any]


def export_training_step(
    model: Any,
    example_inputs: Sequence[np.ndarray],
    loss: Loss | None = None,
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
        function are those that it reads. A function that assigns variables is refused.
    example_inputs : sequence of array
        One batch: the model's inputs, and last the target if `loss` is given. The graph has these shapes.
    loss : callable, optional
        ``loss(target, output)``, as in Keras. The step computes its mean. By default the model itself returns the loss.
    optimizer : Optimizer, optional
        An optimizer of `onnx_remat.converters.optimizers`. By default the step outputs gradients and updates nothing.
    opset : int
        Opset of the forward export.
    training : bool
        Run Keras layers in training mode, with new moving statistics as outputs. Random layers, such as Dropout, are
        then refused.
    check : bool
        Compare loss, gradients and statistics with TensorFlow's.

    Returns
    -------
    onnx.ModelProto
        The step, with inputs and outputs as in `names`: Keras variables have their paths, others their names.

    Raises
    ------
    ConversionError
        TensorFlow or tf2onnx is not installed, the model uses random layers or assigns variables, an op has no ONNX
        counterpart or no gradient rule, or the step's results differ from TensorFlow's.
    """
    tf, convert = _import()
    batch = {names.batch(i): np.asarray(array) for i, array in enumerate(example_inputs)}
    forward = (
        _of_keras(tf, model, list(batch), loss, training) if hasattr(model, "stateless_call")
        else _of_function(tf, model, batch, loss)
    )  # fmt: skip
    keep = [names.new(name) for name in forward.after]
    arrays = (*forward.values.values(), *batch.values())
    signature = [tf.TensorSpec(a.shape, a.dtype, name=f"arg{i}") for i, a in enumerate(arrays)]
    traced = tf.function(forward.step, input_signature=signature)
    try:
        made, _ = convert.from_function(traced, input_signature=signature, opset=opset)
    except Exception as error:
        raise ConversionError(f"tf2onnx cannot convert the forward pass: {error}") from error
    _write_out_erfc(made)
    _store_captured(made, traced.get_concrete_function().graph.captures)
    _rename(made, [*forward.values, *batch], [names.LOSS, *keep])
    plain = add_backward(made, names.LOSS, wrt=forward.trained, keep=keep, check=False)
    if check:
        feeds = forward.values | batch
        given = {value.name for value in plain.graph.input}
        expected = _expected(tf, traced, feeds, forward.trained, keep)
        # A gradient may be pure rounding (that of the bias of attention's keys): the others give the scale of its
        # noise.
        gradients = [names.gradient(n) for n in forward.trained]
        rounding = tolerances.VANISHING_GRADIENT * max(float(np.abs(expected[n]).max(initial=0)) for n in gradients)
        feeds = {n: a for n, a in feeds.items() if n in given}
        outputs = runtime.outputs(plain, feeds)
        found = comparison.compare(outputs, expected, noise=dict.fromkeys(gradients, rounding))
        default_level.compare(plain, feeds, outputs)
    if optimizer is not None:
        plain = add_backward(made, names.LOSS, wrt=forward.trained, keep=keep, optimizer=optimizer, check=False)
    if check:
        comparison.record(plain, found)
    return plain


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass as a function of all values that it reads.

    Attributes
    ----------
    values : dict of str to array
        Current values of the variables by name.
    trained, after : list of str
        Variables to differentiate by, and variables whose next value is an output of the step.
    step : callable
        Function of all variables, then the batch, in order; returns the loss, then the next values.
    """

    values: dict[str, np.ndarray]
    trained: list[str]
    after: list[str]
    step: Callable[..., tuple[Any, ...]]


def _of_keras(tf: Any, model: Any, batch: Sequence[str], loss: Loss | None, training: bool) -> _Forward:
    variables: dict[str, Any] = {}  # their paths need not differ
    for variable in (*model.trainable_variables, *model.non_trainable_variables):
        variables[_unused(variable.path, variables)] = variable
    called = {id(variable): name for name, variable in variables.items()}
    seeds = [name for name, v in variables.items() if v.path.endswith("seed_generator_state")]
    if training and seeds:
        raise ConversionError(
            "random layers are not supported in training mode ({}): pass {}", seeds[0], Setting("training", False)
        )
    trained = [called[id(v)] for v in model.trainable_variables]
    statistics = [name for name in variables if name not in trained and name not in seeds]
    values = {name: np.asarray(variables[name]) for name in (*trained, *statistics)}

    def step(*given: Any) -> tuple[Any, ...]:
        made = dict(zip((*values, *batch), given, strict=True))
        fixed = [made.get(called[id(v)], v.value) for v in model.non_trainable_variables]
        x, target = _split([made[name] for name in batch], loss)
        arguments = x[0] if len(x) == 1 else x
        output, after, added = model.stateless_call(
            [made[name] for name in trained], fixed, arguments, return_losses=True, training=training
        )
        new = [
            a
            for a, v in zip(after, model.non_trainable_variables, strict=True)
            if training and called[id(v)] in statistics
        ]
        total = _scalar(tf, output, target, loss)
        for penalty in added:  # regularizers', and those of add_loss, which Keras adds, too
            total += tf.cast(penalty, total.dtype)
        return total, *(tf.identity(a) for a in new)

    return _Forward(values, trained, statistics if training else [], step)


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
    # In the frozen graph, each variable is a constant with the name of its capture.
    captured = {id(handle): inside.op.name for handle, inside in concrete.graph.captures}
    frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    constants = {node.name for node in frozen.graph.as_graph_def().node if node.op == "Const"}
    variables: dict[str, tuple[Any, str]] = {}
    for variable in concrete.graph.variables:
        inside = captured[id(variable.handle)]
        name = _unused(variable.name.partition(":")[0], variables)
        if inside in constants:
            variables[name] = variable, inside
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

    return _Forward(values, trained, [], step)


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


def _write_out_erfc(model: onnx.ModelProto) -> None:
    """Replace Erfc, which tf2onnx writes but ONNX does not have, by 1 - Erf."""
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Erfc":
            nodes.append(node)
            continue
        one, erf = f"{node.output[0]}.one", f"{node.output[0]}.erf"
        nodes += [
            onnx.helper.make_node("Erf", list(node.input), [erf], f"{node.name}.erf"),
            onnx.helper.make_node("CastLike", ["onnx_remat.one", erf], [one], f"{node.name}.one"),
            onnx.helper.make_node("Sub", [one, erf], list(node.output), node.name),
        ]
        if all(tensor.name != "onnx_remat.one" for tensor in model.graph.initializer):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(1, np.float32), "onnx_remat.one"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


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
    """Rename the graph's inputs (``arg<i>``) and outputs."""
    graph = model.graph
    mapping = {value.name: inputs[int(value.name.removeprefix("arg"))] for value in graph.input}
    mapping |= {value.name: name for value, name in zip(graph.output, outputs, strict=True)}
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = mapping.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [mapping.get(name, name) for name in node.input]
        node.output[:] = [mapping.get(name, name) for name in node.output]


def _expected(
    tf: Any, step: Callable[..., Any], feeds: Mapping[str, np.ndarray], trained: Sequence[str], keep: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the step's outputs computed by TensorFlow."""
    given = {name: tf.constant(array) for name, array in feeds.items()}
    with tf.GradientTape() as tape:
        tape.watch([given[name] for name in trained])
        loss, *after = step(*given.values())
    gradients = tape.gradient(loss, [given[name] for name in trained])
    expected = {names.LOSS: np.asarray(loss)}
    for name, gradient in zip(trained, gradients, strict=True):
        expected[names.gradient(name)] = np.asarray(tf.convert_to_tensor(gradient))
    return expected | {name: np.asarray(a) for name, a in zip(keep, after, strict=True)}
