"""Keras models into training steps, against TensorFlow's own gradients (the export checks itself)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_remat.converters import optimizers
from onnx_remat.errors import ConversionError
from onnx_remat.ort import runtime

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("tf2onnx", reason="tf2onnx is not installed")
keras = pytest.importorskip("keras")
export_training_step = pytest.importorskip("onnx_remat.converters.tensorflow").export_training_step

RNG = np.random.default_rng(0)
TARGET = np.asarray([0, 1, 2, 3], np.int64)


def mlp() -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(5)])


def cnn() -> Any:
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 3)), layers.Conv2D(4, 3, padding="same", activation="relu"), layers.BatchNormalization(),
        layers.MaxPool2D(), layers.Conv2D(8, 3, strides=2, padding="same"), layers.LayerNormalization(),
        layers.DepthwiseConv2D(3, padding="same"), layers.GlobalAveragePooling2D(), layers.Dense(5),
    ])  # fmt: skip


def gelu() -> Any:
    """TensorFlow writes the exact GELU with Erfc."""
    layers = keras.layers
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="gelu"), layers.Dense(5)])


def attention() -> Any:
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(5)(layers.Flatten()(x)))


BATCHES = {
    mlp: RNG.standard_normal((4, 8)).astype(np.float32),
    gelu: RNG.standard_normal((4, 8)).astype(np.float32),
    cnn: RNG.standard_normal((4, 8, 8, 3)).astype(np.float32),
    attention: RNG.integers(0, 20, (4, 6)).astype(np.int32),
}


@pytest.mark.parametrize("make", BATCHES, ids=lambda make: make.__name__)
def test_gradients_and_statistics(make: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = make()
    step = export_training_step(model, (BATCHES[make], TARGET), loss)
    outputs = [value.name for value in step.graph.output]
    assert [f"grad.{v.path}" for v in model.trainable_variables] == outputs[1 : 1 + len(model.trainable_variables)]
    assert (make is cnn) == any(name.endswith("moving_mean") for name in outputs)
    updated = export_training_step(model, (BATCHES[make], TARGET), loss, optimizers.SGD(lr=0.1))
    assert {f"new.{v.path}" for v in model.trainable_variables} <= {value.name for value in updated.graph.output}


def test_random_layers_are_refused() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(5)])
    with pytest.raises(ConversionError, match="random layers"):
        export_training_step(model, (BATCHES[mlp], TARGET), keras.losses.SparseCategoricalCrossentropy())


class Table(tf.Module):
    """Embedding, a product inside a nested tf.function, and a variable that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.Variable(RNG.standard_normal((20, 8)), dtype=tf.float32, name="table")
        self.weight = tf.Variable(RNG.standard_normal((8, 5)), dtype=tf.float32, name="weight")
        self.scale = tf.Variable(0.5, trainable=False, name="scale")

    @tf.function
    def project(self, x: Any) -> Any:
        return tf.nn.gelu(x @ self.weight) * self.scale

    @tf.function
    def __call__(self, tokens: Any) -> Any:
        return self.project(tf.reduce_mean(tf.gather(self.table, tokens), axis=1))


def test_functions_and_modules() -> None:
    module, tokens = Table(), BATCHES[attention]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = export_training_step(module, (tokens, TARGET), loss)
    assert [value.name for value in step.graph.input] == ["table", "weight", "scale", "input.0", "input.1"]
    assert [value.name for value in step.graph.output] == ["loss", "grad.table", "grad.weight"]
    # a function that returns the loss itself; gradients against its own variables
    scalar = tf.function(lambda tokens, target: tf.reduce_mean(loss(target, module(tokens))))
    alone = export_training_step(scalar, (tokens, TARGET), optimizer=optimizers.SGD(lr=0.1))
    feeds = {"table": module.table.numpy(), "weight": module.weight.numpy(), "scale": np.asarray(module.scale)}
    feeds |= {"input.0": tokens, "input.1": TARGET}
    with tf.GradientTape() as tape:
        expected = scalar(tokens, TARGET)
    (gradient,) = tape.gradient(expected, [module.weight])
    made = runtime.outputs(alone, {value.name: feeds[value.name] for value in alone.graph.input})
    assert made["loss"] == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(made["new.weight"], module.weight.numpy() - 0.1 * gradient.numpy(), atol=1e-6)


def test_a_function_that_assigns_is_refused() -> None:
    module = Table()

    @tf.function
    def counting(x: Any) -> Any:
        module.scale.assign_add(1.0)
        return tf.reduce_sum(x @ module.weight) * module.scale

    with pytest.raises(ConversionError, match="assigns variables"):
        export_training_step(counting, (BATCHES[mlp],))


def test_added_losses_and_variables_of_one_path_count() -> None:
    class Penalised(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (keras.layers.Dense(4, name="same", use_bias=False) for _ in range(2))

        def call(self, x: Any) -> Any:
            made = self.first(x) + self.second(2 * x)
            self.add_loss(0.1 * keras.ops.mean(made**2))
            return made

    regular = keras.layers.Dense(3, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), Penalised(), regular])
    x, y = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32), np.arange(5) % 3
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = export_training_step(model, (x, y), entropy)
    given = [value.name for value in step.graph.input][:-2]
    assert len(given) == len(set(given)) == 4
    feeds = dict(zip(given, map(np.asarray, model.trainable_variables), strict=True)) | {"input.0": x, "input.1": y}
    with tf.GradientTape() as tape:
        loss = entropy(y, model(x)) + sum(model.losses)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    made = runtime.outputs(step, feeds)
    np.testing.assert_allclose(made["loss"], loss, rtol=1e-5)
    for name, gradient in zip(given, gradients, strict=True):
        np.testing.assert_allclose(made[f"grad.{name}"], gradient, rtol=1e-4, atol=1e-6)


def test_integers_that_a_model_keeps_are_state() -> None:
    class Counting(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="steps")

        def call(self, x: Any) -> Any:
            self.steps.assign(self.steps + 1)
            return x * keras.ops.cast(self.steps, x.dtype)

    scaled = keras.layers.Normalization()  # counts what it has seen
    scaled.adapt(BATCHES[mlp])
    model = keras.Sequential([keras.Input((8,)), scaled, Counting(), keras.layers.Dense(5)])
    step = export_training_step(
        model, (BATCHES[mlp], TARGET), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    outputs = {value.name for value in step.graph.output}
    (steps,) = [name for name in outputs if name.endswith("/steps")]
    feeds = {v.path: np.asarray(v) for v in model.variables} | {"input.0": BATCHES[mlp], "input.1": TARGET}
    known = {value.name for value in step.graph.input}
    feeds[steps.removeprefix("new.")] = np.array(4, np.int32)
    assert runtime.outputs(step, {name: value for name, value in feeds.items() if name in known})[steps] == 5
