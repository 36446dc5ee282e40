"""Keras models into training steps, against TensorFlow's own gradients (the export checks itself)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_remat.converters import optimizers
from onnx_remat.converters.tensorflow import export_training_step

from onnx_remat.errors import ConversionError

pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("tf2onnx", reason="tf2onnx is not installed")
keras = pytest.importorskip("keras")

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


def attention() -> Any:
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(5)(layers.Flatten()(x)))


BATCHES = {
    mlp: RNG.standard_normal((4, 8)).astype(np.float32),
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
