"""Initial parameters and a random batch for a sample model."""

from __future__ import annotations

import numpy as np
import onnx

Feeds = dict[str, np.ndarray]


def make_feeds(model: onnx.ModelProto, seed: int = 0) -> Feeds:
    """A value for every input: scaled weights, unit gains, zero biases, normal data, integers in range."""
    rng = np.random.default_rng(seed)
    return {value.name: _initial(value, rng) for value in model.graph.input}


def next_feeds(feeds: Feeds, outputs: Feeds) -> Feeds:
    """The feeds of the following step: each `new.<name>` output in the place of `<name>`."""
    updated = {name.removeprefix("new."): value for name, value in outputs.items() if name.startswith("new.")}
    return {**feeds, **updated}


def _initial(value: onnx.ValueInfoProto, rng: np.random.Generator) -> np.ndarray:
    """A first value for one input, by its name and shape."""
    shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        limit = next(int(entry.value) for entry in value.metadata_props if entry.key == "below")
        return rng.integers(0, limit, shape)
    if value.name.startswith("input."):
        return rng.standard_normal(shape, np.float32)
    if value.name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if value.name.endswith("weight") and max(shape) == np.prod(shape):  # The gain of a normalisation.
        return np.ones(shape, np.float32)
    fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
    return rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / fan_in))
