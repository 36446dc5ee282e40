"""Train a Flax model with an optax optimizer within a budget, and return the parameters to it.

Needs onnx-remat[jax] and flax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from onnx_remat.converters.jax import budgeted

BATCH, PLACES, WIDTH, CLASSES = 64, 32, 32, 8


class Mixer(nn.Module):
    """Two residual blocks over positions and channels, then the mean."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            mixed = nn.gelu(nn.Dense(2 * PLACES)(nn.LayerNorm()(x).swapaxes(1, 2)))
            x = x + nn.Dense(PLACES)(mixed).swapaxes(1, 2)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Waves with noise; the frequency is the class."""
    target = rng.integers(0, CLASSES, BATCH)
    phase = (target[:, None] + 1) * np.linspace(0, 2 * np.pi, PLACES) + rng.uniform(0, 6, (BATCH, 1))
    wave = np.stack([np.sin(phase), np.cos(phase)], -1) + 0.2 * rng.standard_normal((BATCH, PLACES, 2))
    return wave.astype(np.float32), target.astype(np.int32)


def main() -> None:
    rng = np.random.default_rng(0)
    model = Mixer()
    example = tuple(map(jnp.asarray, batch(rng)))
    params = model.init(jax.random.key(0), example[0])

    def loss(params: object, wave: jax.Array, target: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, wave), target).mean()

    step = budgeted(
        loss, params, *example, optimizer=optax.adamw(3e-3), budget="60% of the step", planning={"effort": 3}
    )
    print(step.summary)
    for number in range(60):
        value = step(*batch(rng))
        if number % 20 == 0:
            print(f"step {number}: loss {value:.3f}")

    wave, target = batch(np.random.default_rng(1))
    right = float((model.apply(step.params, wave).argmax(-1) == target).mean())
    print(f"right on a batch that it was not trained on: {right:.0%}")


if __name__ == "__main__":
    main()
