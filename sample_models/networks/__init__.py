"""Networks by name, FAMILY:NETWORK, and what builds the training step of each: for tables, tests and the zoo alike.

A builder makes the network and returns a function that exports it, which alone is timed. A family's framework is
imported when it is asked for. ``python -m sample_models.networks FOLDER NAME ...`` writes steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import onnx

Export: TypeAlias = Callable[[], onnx.ModelProto]
Builder: TypeAlias = Callable[[], Export]


def _pytorch() -> dict[str, Builder]:
    from . import torch_models

    return {name: partial(torch_models.builder, make) for name, make in torch_models.MODELS.items()}


def _any_batch() -> dict[str, Builder]:
    from . import torch_models

    opened = {name: torch_models.of_any_batch(make) for name, make in torch_models.MODELS.items()}
    return {name: partial(torch_models.builder, make) for name, make in opened.items()}


def _jax() -> dict[str, Builder]:
    from . import jax_models

    return {name: partial(jax_models.builder, make) for name, make in jax_models.MODELS.items()}


def _autodiff() -> dict[str, Builder]:
    from . import forward_models, torch_models

    found: dict[str, Builder] = {
        name: partial(forward_models.exported, torch_models.MODELS[name]) for name in forward_models.TORCH
    }
    return found | {f"light_{name}": partial(forward_models.light, name) for name in forward_models.LIGHT}


def _cuda() -> dict[str, Builder]:
    from . import cuda_models

    return {f"torch_{name}": partial(partial, cuda_models.step, name) for name in cuda_models.NAMES}


def _zoo(family: str) -> dict[str, Builder]:
    from . import zoo

    return {name: partial(zoo.builder, f"{family}:{name}") for name in zoo.NAMES[family]}


FAMILIES: Mapping[str, Callable[[], dict[str, Builder]]] = {
    "pytorch": _pytorch, "pytorch-any-batch": _any_batch, "jax": _jax, "autodiff": _autodiff, "cuda": _cuda,
    "hand": partial(_zoo, "hand"), "transformers": partial(_zoo, "transformers"),
    "torchvision": partial(_zoo, "torchvision"), "timm": partial(_zoo, "timm"),
}  # fmt: skip
"""Builders by name of a network; ``pytorch-any-batch`` leaves the size of the batch open, as ``batch``."""


def builder(key: str) -> Builder:
    """What builds a network.

    Raises
    ------
    KeyError
        There is none of this name.
    """
    family, _, name = key.partition(":")
    return FAMILIES[family]()[name]
