"""TensorFlow: a Keras model's training step, its forward pass by tf2onnx, its backward pass by `autodiff`.

tf2onnx turns a graph with gradients into ops no runtime has, without an error; so only the forward pass and the loss
go through it, with every variable as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnx_remat.errors import ConversionError

from . import check as comparison
from . import names, optimizers
from .autodiff import add_backward


def export_training_step(
    model: Any,
    example_inputs: Sequence[np.ndarray],
    loss: Callable[[Any, Any], Any],
    optimizer: optimizers.Optimizer | None = None,
    *,
    opset: int = 18,
    training: bool = True,
    check: bool = True,
) -> onnx.ModelProto:
    """Export a Keras model's training step.

    Parameters
    ----------
    model : keras.Model
        Keras 3 on the TensorFlow backend, built.
    example_inputs : sequence of array
        One batch: the model's inputs, then the target last. Shapes are fixed.
    loss : callable
        ``loss(target, output)``, as Keras' losses are called; its mean is taken.
    optimizer : Optimizer, optional
        One of `onnx_remat.converters.optimizers`; without it gradients are put out.
    opset : int
        Of the forward export.
    training : bool
        Run layers in training mode, with new moving statistics as outputs. Random layers (Dropout) are refused then.
    check : bool
        Compare loss, gradients and statistics with TensorFlow's own.

    Returns
    -------
    onnx.ModelProto
        Inputs and outputs as in `names`; variables under their Keras paths.

    Raises
    ------
    ConversionError
        TensorFlow or tf2onnx is missing, the model uses random layers, an op has no counterpart or no gradient rule,
        or the step's numbers differ from TensorFlow's.
    """
    tf, convert = _import()
    variables = {v.path: v for v in (*model.trainable_variables, *model.non_trainable_variables)}
    seeds = [path for path, v in variables.items() if not v.dtype.startswith(("float", "bfloat"))]
    if training and seeds:
        raise ConversionError(f"random layers are not supported in training mode ({seeds[0]}); pass training=False")
    trained = [v.path for v in model.trainable_variables]
    held = [path for path in variables if path not in trained and path not in seeds]
    values = {path: np.asarray(variables[path]) for path in (*trained, *held)}
    batch = {names.batch(i): np.asarray(array) for i, array in enumerate(example_inputs)}

    def step(*given: Any) -> tuple[Any, ...]:
        """Loss and new statistics, from variables and batch in order."""
        made = dict(zip((*values, *batch), given, strict=True))
        fixed = [made.get(v.path, v.value) for v in model.non_trainable_variables]
        *x, target = (made[name] for name in batch)
        arguments = x[0] if len(x) == 1 else x
        output, after = model.stateless_call([made[path] for path in trained], fixed, arguments, training=training)
        new = [a for a, v in zip(after, model.non_trainable_variables, strict=True) if v.path in held]
        return tf.identity(tf.reduce_mean(loss(target, output))), *(tf.identity(a) for a in new)

    arrays = (*values.values(), *batch.values())
    signature = [tf.TensorSpec(a.shape, a.dtype, name=f"arg{i}") for i, a in enumerate(arrays)]
    traced = tf.function(step, input_signature=signature)
    try:
        forward, _ = convert.from_function(traced, input_signature=signature, opset=opset)
    except Exception as error:
        raise ConversionError(f"tf2onnx cannot convert the forward pass: {error}") from error
    kept = _rename(forward, [*values, *batch], [names.LOSS, *(names.new(p) for p in held)])
    keep = [name for name in kept if name != names.LOSS] if training else []
    plain = add_backward(forward, names.LOSS, wrt=trained, keep=keep, check=False)
    if check:
        feeds = values | batch
        given = {value.name for value in plain.graph.input}
        expected = _expected(tf, step, feeds, trained, keep, held)
        # A gradient that is zero but for rounding (of the bias of attention's keys) is told by the size of the others.
        rounding = 1e-6 * max(float(np.abs(expected[names.gradient(n)]).max(initial=0)) for n in trained)
        noise = {names.gradient(n): rounding for n in trained}
        comparison.against(plain, {n: a for n, a in feeds.items() if n in given}, expected, noise=noise)
    if optimizer is None:
        return plain
    return add_backward(forward, names.LOSS, wrt=trained, keep=keep, optimizer=optimizer, check=False)


def _import() -> tuple[Any, Any]:
    try:
        import tensorflow as tf
        import tf2onnx.convert as convert
    except ImportError as error:
        raise ConversionError(f"{error.name} is not installed: pip install 'onnx-remat[tensorflow]'") from error
    return tf, convert


def _rename(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Give the graph's inputs (``arg<i>``) and outputs these names; returns the outputs'."""
    graph = model.graph
    mapping = {value.name: inputs[int(value.name.removeprefix("arg"))] for value in graph.input}
    mapping |= {value.name: name for value, name in zip(graph.output, outputs, strict=True)}
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = mapping.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [mapping.get(name, name) for name in node.input]
        node.output[:] = [mapping.get(name, name) for name in node.output]
    return list(outputs)


def _expected(
    tf: Any,
    step: Callable[..., tuple[Any, ...]],
    feeds: Mapping[str, np.ndarray],
    trained: Sequence[str],
    keep: Sequence[str],
    held: Sequence[str],
) -> dict[str, np.ndarray]:
    """The step's outputs as TensorFlow computes them."""
    given = {name: tf.constant(array) for name, array in feeds.items()}
    with tf.GradientTape() as tape:
        tape.watch([given[name] for name in trained])
        loss, *after = step(*given.values())
    gradients = tape.gradient(loss, [given[name] for name in trained])
    expected = {names.LOSS: np.asarray(loss)}
    for name, gradient in zip(trained, gradients, strict=True):
        expected[names.gradient(name)] = np.asarray(tf.convert_to_tensor(gradient))
    new = {names.new(n): np.asarray(a) for n, a in zip(held, after, strict=True)}
    return expected | {name: new[name] for name in keep}
