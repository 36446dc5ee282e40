"""Keras models into training steps, against TensorFlow's own gradients (the export checks itself)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from onnx_remat.converters.autodiff.rules import RULES

from onnx_remat.converters import optimizers
from onnx_remat.errors import ConversionError, UsageError
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


ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def gradients_of(loss: Any, variables: Any) -> list[np.ndarray]:
    """TensorFlow's gradients of what a function returns."""
    with tf.GradientTape() as tape:
        value = loss()
    return [tf.convert_to_tensor(each).numpy() for each in tape.gradient(value, variables)]


def test_variables_without_a_name_are_in_the_order_in_which_the_function_reads_them() -> None:
    weights = [tf.Variable(np.full((4, 4), i + 1, np.float32)) for i in range(6)]

    def loss(x: Any) -> Any:
        for weight in weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_sum(x)

    step = export_training_step(loss, (np.ones((2, 4), np.float32),), check=False)
    names = [value.name for value in step.graph.input][:-1]
    assert names == ["Variable" + "_" * i for i in range(6)]
    assert list(dict.fromkeys(name for node in step.graph.node for name in node.input if name in names)) == names


def test_no_gradient_stays_none_at_a_pole_as_in_tensorflow() -> None:
    weight = tf.Variable(RNG.standard_normal((8, 5)), dtype=tf.float32, name="weight")

    def loss(x: Any) -> Any:
        h = x @ tf.abs(weight)
        roots = tf.where(h > 0, tf.sqrt(h) + tf.math.rsqrt(h), 0.0)
        return tf.reduce_mean(roots * [1.0, 2, 3, 4, 5] + tf.math.divide_no_nan(h, tf.reduce_sum(h, 1, keepdims=True)))

    x = np.abs(BATCHES[mlp])
    step = export_training_step(loss, (x,))
    x[2] = 0  # a row of padding, in a later batch
    (expected,) = gradients_of(lambda: loss(tf.constant(x)), [weight])
    made = runtime.outputs(step, {"weight": weight.numpy(), "input.0": x})["grad.weight"]
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-6)


def test_ties_have_the_gradients_of_tensorflow() -> None:
    gain = tf.Variable(np.ones(8, np.float32), name="gain")
    shift = tf.Variable(np.zeros(8, np.float32), name="shift")

    def loss(x: Any) -> Any:
        y = x * gain
        bounded = keras.ops.clip(y, 0, 1) + tf.nn.relu6(6 * y) + tf.minimum(y, 1 + shift)
        return tf.reduce_mean(tf.reduce_sum(bounded * tf.range(1.0, 9.0), 1))

    x = np.where(RNG.random((16, 8)) < 0.5, np.float32(1), RNG.uniform(0.1, 0.9, (16, 8)).astype(np.float32))
    export_training_step(loss, (x,))  # which compares


def test_a_stopped_gradient_stays_stopped() -> None:
    given = keras.Input((8,))
    x = keras.layers.Dense(8, activation="swish")(given)  # whose custom gradient is the derivative
    side = keras.layers.Dense(8, kernel_initializer="zeros")(keras.layers.Lambda(keras.ops.stop_gradient)(x))
    model = keras.Model(given, keras.layers.Dense(5)(x + side))
    step = export_training_step(model, (BATCHES[mlp], TARGET), ENTROPY)
    model.trainable_variables[2].assign(RNG.standard_normal((8, 8)))
    feeds = {v.path: np.asarray(v) for v in model.variables} | {"input.0": BATCHES[mlp], "input.1": TARGET}
    wanted = gradients_of(lambda: ENTROPY(TARGET, model(BATCHES[mlp])), [v.value for v in model.trainable_variables])
    made = runtime.outputs(step, feeds)
    for variable, expected in zip(model.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(made[f"grad.{variable.path}"], expected, rtol=1e-4, atol=1e-6)


def test_variables_without_a_gradient_are_left_as_they_are() -> None:
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Lambda(keras.ops.stop_gradient), keras.layers.Dense(5)]
    frozen = keras.layers.Dense(4, trainable=False)
    model = keras.Sequential([keras.Input((8,)), frozen, *layers])
    step = export_training_step(model, (BATCHES[mlp], TARGET), ENTROPY, optimizers.SGD(lr=0.1))
    trained = [f"new.{v.path}" for v in layers[-1].trainable_variables]
    assert [value.name for value in step.graph.output] == ["loss", *trained]  # no copies of frozen variables


@tf.custom_gradient
def reverse(x: Any) -> Any:
    return tf.identity(x), lambda upstream: -upstream


class Sampling(keras.layers.Layer):  # type: ignore[misc, name-defined]
    """Draws whatever `training` is, as Keras' example of a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(keras.layers.Lambda(reverse), "custom gradient"), (Sampling(), "draws random numbers")],
    ids=["custom gradient", "draws"],
)
def test_what_would_be_lost_is_refused(layer: Any, message: str) -> None:
    model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(5, kernel_initializer="zeros")])
    with pytest.raises(ConversionError, match=message):
        export_training_step(model, (BATCHES[mlp], TARGET), ENTROPY, training=False)


def test_constraints_are_refused_with_an_optimizer() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5, kernel_constraint="non_neg")])
    with pytest.raises(ConversionError, match=r"constraint of 'sequential.*kernel'"):
        export_training_step(model, (BATCHES[mlp], TARGET), ENTROPY, optimizers.SGD(lr=0.1))


def test_functions_of_several_outputs_are_refused() -> None:
    weight = tf.Variable(np.ones((8, 5), np.float32))
    with pytest.raises(ConversionError, match="2 outputs"):
        export_training_step(lambda x: {"loss": tf.reduce_mean(x @ weight), "size": tf.norm(x)}, (BATCHES[mlp],))


def test_arguments_are_checked_first() -> None:
    old = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential", "__call__": lambda self, x: x})
    with pytest.raises(ConversionError, match="Keras 2"):
        export_training_step(old(), ())
    for optimizer in ("adam", keras.optimizers.Adam(), optimizers.Adam):
        with pytest.raises(UsageError, match=r"converters.optimizers, such as SGD\(lr=0.1\), not '(adam|Adam)'"):
            export_training_step(None, (), optimizer=optimizer)
    for opset in (14, 19):
        with pytest.raises(UsageError, match=f"opset {opset} is not supported: use 15 to 18"):
            export_training_step(None, (), opset=opset)
    with pytest.raises(UsageError, match="Keras has no loss 'nse'"):
        export_training_step(None, (), "nse")


def test_an_error_of_the_model_is_named_in_one_line() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    with pytest.raises(
        ConversionError, match=r"^TensorFlow cannot trace the forward pass: \w+Error: .*\bshape"
    ) as found:
        export_training_step(model, (BATCHES[mlp][:, :3], TARGET), ENTROPY)
    assert "\n" not in str(found.value)


def test_a_loss_function_leaves_out_what_is_masked() -> None:
    tokens, target = RNG.integers(0, 3, (4, 6)).astype(np.int32), RNG.integers(0, 5, (4, 6))
    embedding = keras.layers.Embedding(3, 4, mask_zero=True)
    model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, keras.layers.Dense(5, activation="softmax")])
    step = export_training_step(model, (tokens, target), "sparse_categorical_crossentropy")
    feeds = {v.path: np.asarray(v) for v in model.variables} | {"input.0": tokens, "input.1": target}
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert runtime.outputs(step, feeds)["loss"] == pytest.approx(model.train_on_batch(tokens, target), rel=1e-5)


class State(keras.layers.Layer):  # type: ignore[misc, name-defined]
    """One state that takes the value of another, one of a constant, and one that a branch makes."""

    def build(self, shape: Any) -> None:
        self.now, self.before, self.fixed, self.chosen = (
            self.add_weight(shape=(8,), initializer="zeros", trainable=False, name=name)
            for name in ("now", "before", "fixed", "chosen")
        )

    def call(self, x: Any) -> Any:
        self.before.assign(self.now)
        self.fixed.assign(tf.ones(8))
        now, fixed = self.now.value, self.fixed.value
        self.chosen.assign(tf.cond(tf.reduce_sum(x) > 1e9, lambda: now + 1, lambda: fixed * 2 + now))
        self.now.assign(keras.ops.mean(x, 0))
        return x - self.before


def test_state_is_copied_and_chosen() -> None:
    model = keras.Sequential([keras.Input((8,)), State(), keras.layers.Dense(5)])
    step = export_training_step(model, (BATCHES[mlp], TARGET), ENTROPY)
    feeds = {v.path: np.asarray(v) for v in model.variables} | {"input.0": BATCHES[mlp], "input.1": TARGET}
    (now,) = [name for name in feeds if name.endswith("/now")]
    feeds[now] = np.arange(8, dtype=np.float32)
    made = runtime.outputs(step, {value.name: feeds[value.name] for value in step.graph.input})
    named = {name.rpartition("/")[2]: value for name, value in made.items() if name.startswith("new.")}
    expected = {"now": BATCHES[mlp].mean(0), "before": feeds[now], "fixed": np.ones(8), "chosen": 2 + feeds[now]}
    assert named.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(named[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:tf2onnx writes bfloat16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_has_the_tolerance_of_its_type(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [keras.layers.Dense(32, activation="tanh", dtype=policy) for _ in range(2)]  # without kinks
    last = [keras.layers.Dense(5, dtype=policy), keras.layers.Activation("linear", dtype="float32")]
    keras.utils.set_random_seed(0)
    x, target = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32), np.arange(16) % 5
    model = keras.Sequential([keras.Input((8,)), *layers, *last])
    export_training_step(model, (x, target), ENTROPY)
    monkeypatch.setitem(RULES, "Tanh", RULES["Identity"])  # wrong by more than rounding
    with pytest.raises(ConversionError, match="the converted step is wrong"):
        export_training_step(model, (x, target), ENTROPY)


def test_layers_that_could_draw_compiled_ones_and_functions_near_zero() -> None:
    """An LSTM holds a seed that it does not use; Keras compiles grouped convolutions; loss and CELU have no ONNX op."""
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((3, 3, 4)), layers.Conv2D(4, 2, groups=2), layers.Reshape((2, 8)), layers.LSTM(4, unroll=True),
        layers.Dense(4, activation="celu"), layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    batch = RNG.standard_normal((4, 3, 3, 4)).astype(np.float32), np.array([[0], [1], [1], [0]], np.float32)
    export_training_step(model, batch, keras.losses.BinaryCrossentropy())


_WRITES = """
import hashlib, numpy as np, keras
from onnx_remat.converters.tensorflow import export_training_step
keras.utils.set_random_seed(0)
tokens = keras.Input((8,))
hidden = keras.layers.Embedding(20, 8)(tokens)
for _ in range(2):
    hidden = hidden + keras.layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
model = keras.Model(tokens, keras.layers.Dense(20)(keras.layers.LayerNormalization()(hidden)))
batch = np.arange(16).reshape(2, 8).astype("int32")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
made = export_training_step(model, (batch, batch), loss, check=False)
print(hashlib.sha256(made.SerializeToString(deterministic=True)).hexdigest())
"""


@pytest.mark.slow
def test_any_process_writes_the_same_bytes() -> None:
    written = set()
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _WRITES], env=environment, capture_output=True, text=True, check=True
        )
        written.add(done.stdout.split()[-1])
    assert len(written) == 1
