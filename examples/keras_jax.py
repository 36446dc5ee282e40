"""Train a Keras 3 model with JAX as its backend within a budget, and return its weights to it.

Needs onnx-remat[jax] and keras.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of keras

import keras
import numpy as np
import optax
from keras import layers
from onnx_remat.converters.jax import budgeted

BATCH, SIDE, CLASSES = 64, 24, 4


def network() -> keras.Model:
    """Three convolutions with BatchNormalization and dropout."""
    keras.utils.set_random_seed(0)
    blocks = [
        layer
        for width in (16, 32, 32)
        for layer in (
            layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU(),
            layers.MaxPooling2D(), layers.Dropout(0.1),
        )
    ]  # fmt: skip
    return keras.Sequential(
        [keras.Input((SIDE, SIDE, 3)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]
    )


def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Stripes with noise; their number is the class."""
    target = rng.integers(0, CLASSES, BATCH)
    stripes = np.sin(np.linspace(0, 2 * np.pi, SIDE) * (target[:, None] + 1))[:, None, :, None]
    return (stripes + rng.standard_normal((BATCH, SIDE, SIDE, 3))).astype(np.float32), target.astype(np.int32)


def main() -> None:
    rng = np.random.default_rng(0)
    model = network()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trained: list, kept: list, images: object, labels: object) -> tuple:
        logits, kept = model.stateless_call(trained, kept, images, training=True)
        return cross_entropy(labels, logits), kept

    trained = [variable.value for variable in model.trainable_variables]
    kept = [variable.value for variable in model.non_trainable_variables]  # statistics, and seeds of dropout
    step = budgeted(
        loss, trained, *batch(rng), optimizer=optax.adamw(3e-3), buffers=kept, budget="75% of the step",
        planning={"effort": 3},
    )  # fmt: skip
    print(step.summary)
    for number in range(60):
        value = step(*batch(rng))
        if number % 20 == 0:
            print(f"step {number}: loss {value:.3f}")

    for variables, values in ((model.trainable_variables, step.params), (model.non_trainable_variables, step.buffers)):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    images, labels = batch(np.random.default_rng(1))
    right = float((model.predict(images, verbose=0).argmax(-1) == labels).mean())
    print(f"right on a batch that it was not trained on: {right:.0%}")


if __name__ == "__main__":
    main()
