"""Well-known models in JAX and Flax, at a size that trains on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import onnx
import optax


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `onnx_remat.converters.jax.export_training_step`."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    buffers: Any = None

    def export(self, optimizer: Any = None, **options: Any) -> onnx.ModelProto:
        """The case as a training step; SGD unless stated otherwise."""
        from onnx_remat.converters.jax import export_training_step

        optimizer = optax.sgd(0.01) if optimizer is None else optimizer
        return export_training_step(
            self.loss_fn, self.params, *self.batch, optimizer=optimizer, buffers=self.buffers, **options
        )


def builder(make: Callable[[], Case]) -> Callable[[], onnx.ModelProto]:
    """Build a case; the function returned exports it as a whole training step with SGD."""
    return make().export


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """Mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def initial(model: nn.Module, *inputs: Any, seed: int = 0, **rngs: Any) -> Any:
    """Variables of a Flax model by the usual rules, drawn by numpy: compiling Flax's own draws takes longer."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(seed), **rngs}, *inputs)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        kind = path[-1].key
        if kind in ("kernel", "embedding", "position"):
            fan_in = np.prod(leaf.shape[:-1]) if kind == "kernel" else 2500
            return (rng.standard_normal(leaf.shape) / np.sqrt(fan_in)).astype(leaf.dtype)
        return np.full(leaf.shape, kind in ("scale", "var"), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def classifier(model: nn.Module, images: tuple[int, ...], classes: int, *, seed: int = 0) -> Case:
    """A Flax model with cross-entropy on random images and labels; running statistics are buffers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(images).astype(np.float32)
    labels = rng.integers(0, classes, images[0]).astype(np.int32)
    variables = initial(model, x, seed=seed)
    buffers = variables.get("batch_stats")

    def plain(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, x), labels)

    def normalised(params: Any, stats: Any, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        logits, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels), new["batch_stats"]

    return Case(plain if buffers is None else normalised, variables["params"], (x, labels), buffers)


class MLP(nn.Module):
    """Linear layers with GELU between."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class CNN(nn.Module):
    """Convolutions with max and average pooling, channels last."""

    channels: tuple[int, ...]
    classes: int
    repeats: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.channels:
            for _ in range(self.repeats):
                x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm around a shortcut (He et al. 2016)."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.width, (3, 3), (self.stride, self.stride))(x)))
        y = norm()(conv(self.width, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.width, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, global pooling; ResNet-18 by default."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                x = Residual(self.width * 2**stage, 2 if stage and not index else 1)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class Block(nn.Module):
    """A pre-norm transformer block, causal; with a rate above zero also dropout."""

    heads: int
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.heads)
        x = x + self._dropped(attention(nn.LayerNorm()(x), mask=mask))
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + self._dropped(nn.Dense(x.shape[-1])(h))

    def _dropped(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(self.rate, deterministic=False)(x) if self.rate else x


class GPT(nn.Module):
    """A causal language model; `scanned` runs one block over stacked weights with `jax.lax.scan`."""

    tokens: int
    layers: int
    width: int
    heads: int
    rate: float = 0.0
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.tokens, self.width)
        x = embed(tokens) + self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        if self.scanned:
            # rematerialised in JAX, as is the custom; the converter undoes it and onnx-remat chooses again
            stack = nn.scan(
                nn.remat(_Scanned), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = stack(self.heads)(x, None)
        else:
            for _ in range(self.layers):
                x = Block(self.heads, self.rate)(x)
        return embed.attend(nn.LayerNorm()(x))


class _Scanned(nn.Module):
    """A block as `nn.scan` wants it."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.heads)(x), None


def language_model(model: GPT, batch: int, length: int) -> Case:
    """Next-token cross-entropy on random tokens; with dropout, a random key is the batch's last input."""
    tokens = np.random.default_rng(0).integers(0, model.tokens, (batch, length + 1)).astype(np.int32)
    key = jax.random.key(0)
    params = initial(model, tokens[:, :-1], dropout=key)["params"]

    def loss_fn(params: Any, tokens: jax.Array, *keys: jax.Array) -> jax.Array:
        rngs = {"dropout": keys[0]} if keys else None
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1], rngs=rngs), tokens[:, 1:])

    return Case(loss_fn, params, (tokens, key) if model.rate else (tokens,))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: classifier(MLP((*[512] * 8, 10)), (256, 512), 10),
    "cnn": lambda: classifier(CNN((32, 64, 128), 10, repeats=4), (16, 64, 64, 3), 10),
    "resnet18": lambda: classifier(ResNet(), (8, 128, 128, 3), 1000),
    "gpt2_4l": lambda: language_model(GPT(2048, 4, 256, 8), 4, 128),
    "gpt2_4l_dropout": lambda: language_model(GPT(2048, 4, 256, 8, rate=0.1), 4, 128),
    "gpt2_4l_scan": lambda: language_model(GPT(2048, 4, 256, 8, scanned=True), 4, 128),
}
