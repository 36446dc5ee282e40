"""Lowerings that read or change the bits of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from onnx_remat.errors import ConversionError

from .lower import Lowering, Tensor, lowering


def written(low: Lowering, function: Callable[..., Any], *operands: Tensor) -> Tensor:
    """Lower a function of JAX, which may compute in float64, on operands."""
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    return low.tensor(low.run_closed(jaxpr, operands)[0])


def bits_of(low: Lowering, x: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Return the bits of floats of at most 32 bits as integers, by arithmetic in float64; a NaN has those of numpy's.

    With an exponent e and a fraction of n bits, the bits of x are ``(e - least) * 2**n + x * 2**(n - e)``; likewise of
    infinity, as a power of two, and of denormal numbers, whose e is the least.
    """
    kind = jnp.finfo(x.dtype)
    least, most, n = int(kind.minexp), int(kind.maxexp), int(kind.nmant)
    inverse = np.ldexp(1.0, -np.arange(least, most + 1))
    nan = int(np.array(np.nan, x.dtype).view(f"uint{kind.bits}"))

    def scaled(x: jax.Array, place: jax.Array) -> jax.Array:
        return x * jnp.asarray(inverse).at[place].get(mode="promise_in_bounds")

    def bits(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float64)
        size = jnp.minimum(jnp.where(x == x, jnp.abs(wide), 0), 2.0**most)
        bounded = jnp.maximum(size, 2.0**least)
        place = jnp.clip(jnp.floor(jnp.log(bounded) / np.log(2)), least, most).astype(jnp.int64) - least
        share = scaled(bounded, place)  # outside 1 to 2 where the rounded logarithm is one off
        place = place + (share >= 2) - (share < 1)
        made = place * 2**n + (scaled(size, place) * 2**n).astype(jnp.int64)
        negative = (wide < 0) | (1 / wide < 0)
        top = 2 ** (kind.bits - 1) * (-1 if dtype.kind == "i" else 1)
        return (jnp.where(x == x, made, nan) + jnp.where(negative, top, 0)).astype(dtype)

    return written(low, bits, x)


@lowering("population_count")
def population_count(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    return written(low, _count, x)


@lowering("clz")
def clz(low: Lowering, eqn: core.JaxprEqn, x: Tensor) -> Tensor:
    """Count the bits that are not at or below the highest one."""

    def zeros(x: jax.Array) -> jax.Array:
        width = 8 * x.dtype.itemsize
        for by in (1, 2, 4, 8, 16, 32):
            x = x | lax.shift_right_logical(x, x.dtype.type(by)) if by < width else x
        return x.dtype.type(width) - _count(x)

    return written(low, zeros, x)


def _count(x: jax.Array) -> jax.Array:
    """Return the number of ones, added up in fields of 2, 4 and 8 bits; Warren, Hacker's Delight, section 5-1."""
    width, dtype = 8 * x.dtype.itemsize, x.dtype
    words = x.astype(f"uint{width}")
    kind = words.dtype.type

    def right(x: jax.Array, by: int) -> jax.Array:
        return lax.shift_right_logical(x, kind(by))

    pairs, fours, bytes_, ones = (kind((2**width - 1) // n) for n in (3, 5, 17, 255))
    words = words - (right(words, 1) & pairs)
    words = (words & fours) + (right(words, 2) & fours)
    words = (words + right(words, 4)) & bytes_
    return right(words * ones, width - 8).astype(dtype)


@lowering("nextafter")
def nextafter(low: Lowering, eqn: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    """Fold it for constants; else add one to the bits, or subtract it."""
    if x.constant is not None and y.constant is not None and not x.axes and not y.axes:
        made = low.array(np.nextafter(x.constant, y.constant))
        return made.relabelled((), eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
    if x.dtype == np.float64:
        raise ConversionError("nextafter of float64 has a lowering for constants alone: use float32")

    def after(x: jax.Array, y: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
        one = bits.dtype.type(1)
        near = lax.bitcast_convert_type(bits + jnp.where((x < y) == (x > 0), one, -one), x.dtype)
        least = x.dtype.type(jnp.finfo(x.dtype).smallest_subnormal)
        near = jnp.where(x == 0, jnp.where(y > 0, least, -least), near)
        return jnp.where((x != x) | (y != y), x + y, jnp.where(x == y, y, near))

    return written(low, after, x, y)
