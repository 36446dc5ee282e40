"""Lowerings of random keys and random bits: exact threefry2x32 in integer operators.

A key is two 32-bit words. In the graph an array of keys is an array of uint64, so that primitives that only move keys
need no lowering of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend import random as generators

from onnx_remat.errors import ConversionError

from . import kernels
from .lower import Array, Lowering, Stack, Tensor, lowering
from .structure import counting, taken

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@lowering("threefry2x32")
def threefry2x32(low: Lowering, eqn: core.JaxprEqn, *operands: Tensor) -> list[Tensor]:
    """Lower the hash of Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3; twenty rounds."""
    first, second, x, y = operands
    shape = eqn.outvars[0].aval.shape  # type: ignore[attr-defined]

    def op(op_type: str, a: Tensor, b: Tensor, **attributes: str) -> Tensor:
        return low.elementwise(op_type, a, b, shape=np.broadcast_shapes(a.shape, b.shape), **attributes)

    def rotated(a: Tensor, by: int) -> Tensor:
        left = op("BitShift", a, low.array(np.uint32(by)), direction="LEFT")
        return op("BitwiseOr", left, op("BitShift", a, low.array(np.uint32(32 - by)), direction="RIGHT"))

    keys = [first, second, op("BitwiseXor", op("BitwiseXor", first, second), low.array(np.uint32(_PARITY)))]
    # A count is added part by part, so that no constant as large as the result stays allocated.
    parts = [part.relabelled([y.axes[j] for j in part.axes], y.shape) for part in low.counts.get(y.value, ())] or [y]
    x, y = op("Add", x, keys[0]), functools.reduce(partial(op, "Add"), parts, keys[1])
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = op("Add", x, y)
            y = op("BitwiseXor", rotated(y, rotation), x)
        x = op("Add", x, keys[(group + 1) % 3])
        y = op("Add", y, op("Add", keys[(group + 2) % 3], low.array(np.uint32(group + 1))))
    return [a.relabelled(a.axes, shape) for a in (x, y)]


@lowering("iota_2x32_shape")
def iota_2x32_shape(low: Lowering, eqn: core.JaxprEqn) -> list[Tensor]:
    """Return the high and low words of 0, 1, 2, ... in this shape."""
    shape = tuple(int(n) for n in eqn.params["shape"])
    count = prod(shape)
    if count >= 2**32:
        raise ConversionError(f"{count} random numbers from one key: at most 2**32 have a lowering to ONNX")
    words = Tensor(low.reshape(counting(low, count, _U32), shape), tuple(range(len(shape))), shape, _U32)
    if count > kernels.FOLDED and len(shape) > 1:
        low.counts[words.value] = tuple(
            low.array(np.arange(n, dtype=np.uint32) * np.uint32(prod(shape[axis + 1 :]))).relabelled((axis,), shape)
            for axis, n in enumerate(shape) if n > 1
        )  # fmt: skip
    return [low.array(np.zeros(shape, _U32)), words]


@lowering("random_wrap")
def random_wrap(low: Lowering, eqn: core.JaxprEqn, words: Tensor) -> Tensor:
    _known(eqn.params["impl"])
    return keys_of(low, words)


def keys_of(low: Lowering, words: Tensor) -> Tensor:
    """Return keys as uint64 of shape words.shape[:-1]."""
    axis = len(words.shape) - 1
    high, right = (
        Tensor(low.cast(word.value, _U64), word.axes, word.shape, _U64)
        for word in (taken(low, words, axis, index) for index in (0, 1))
    )
    raised = low.elementwise("BitShift", high, low.array(np.uint64(32)), direction="LEFT")
    return low.elementwise("BitwiseOr", raised, right)


@lowering("random_unwrap")
def random_unwrap(low: Lowering, eqn: core.JaxprEqn, keys: Tensor) -> Array:
    return words_of(low, keys)


def words_of(low: Lowering, keys: Tensor) -> Array:
    """Return words as uint32 of shape (*keys.shape, 2)."""
    high = low.elementwise("BitShift", keys, low.array(np.uint64(32)), direction="RIGHT")
    right = low.elementwise("BitwiseAnd", keys, low.array(np.uint64(2**32 - 1)))
    words = [Tensor(low.cast(word.value, _U32), word.axes, word.shape, _U32) for word in (high, right)]
    stack = Stack(tuple(words))
    if not keys.shape:
        return stack
    rank = len(keys.shape)
    whole = low.tensor(stack)
    return whole.relabelled([rank if axis == 0 else axis - 1 for axis in whole.axes], (*keys.shape, 2))


def _known(generator: Any) -> None:
    if generator is not generators.threefry_prng_impl:
        raise ConversionError(f"random keys of {generator}: only threefry2x32 has a lowering to ONNX")


def _apply(low: Lowering, function: Callable[..., Any], operands: Sequence[Array], keys: Tensor) -> Tensor:
    """Lower a function of the generator for one key, applied to each key of an array."""
    for _ in keys.shape:
        function = jax.vmap(function)
    avals = [jax.ShapeDtypeStruct(x.shape, x.items[0].dtype if isinstance(x, Stack) else x.dtype) for x in operands]
    (made,) = low.run_closed(jax.make_jaxpr(function)(*avals), operands)
    return low.tensor(made)


def _generator(eqn: core.JaxprEqn) -> Any:
    """Return the generator of an equation's keys."""
    _known(getattr(eqn.invars[0].aval.dtype, "_impl", generators.threefry_prng_impl))  # type: ignore[attr-defined]
    return generators.threefry_prng_impl


@lowering("random_bits")
def random_bits(low: Lowering, eqn: core.JaxprEqn, keys: Tensor) -> Tensor:
    generator, width, shape = _generator(eqn), eqn.params["bit_width"], eqn.params["shape"]
    return _apply(low, lambda key: generator.random_bits(key, width, shape), [words_of(low, keys)], keys)


@lowering("random_split")
def random_split(low: Lowering, eqn: core.JaxprEqn, keys: Tensor) -> Tensor:
    generator, shape = _generator(eqn), eqn.params["shape"]
    return keys_of(low, _apply(low, lambda key: generator.split(key, shape), [words_of(low, keys)], keys))


@lowering("random_fold_in")
def random_fold_in(low: Lowering, eqn: core.JaxprEqn, keys: Tensor, data: Tensor) -> Tensor:
    generator = _generator(eqn)
    data = Tensor(low.cast(data.value, _U32), data.axes, data.shape, _U32)
    return keys_of(low, _apply(low, generator.fold_in, [words_of(low, keys), data], keys))


@lowering("random_seed")
def random_seed(low: Lowering, eqn: core.JaxprEqn, seeds: Tensor) -> Tensor:
    generator = eqn.params["impl"]
    _known(generator)
    return keys_of(low, _apply(low, generator.seed, [seeds], seeds))
