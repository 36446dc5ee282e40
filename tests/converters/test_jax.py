"""The JAX converter, primitive by primitive: values and gradients against JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from jax import lax
from jax.scipy.special import digamma, gammaln
from onnx_remat.converters.jax.export import convert, export_training_step, verify
from onnx_remat.converters.jax.step import trace

from onnx_remat.errors import ConversionError
from tests.support.slow import few

TIGHT = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}


def random(*shape, seed=0, low=-1.0, high=1.0, dtype=np.float32):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def worst_error(loss_fn, params, *batch, optimizer=None, buffers=None, **options) -> float:
    """Convert, run, compare every output with JAX within 1e-5; the largest relative error."""
    step = trace(loss_fn, params, batch, buffers, optimizer, None)
    model = convert(step, **options)
    onnx.checker.check_model(model, full_check=True)
    return verify(model, step, TIGHT).error


HALVES = {
    "float16": lambda x: jnp.tanh(x.astype(jnp.float16)) @ jnp.ones((4, 2), jnp.float16),
    "bfloat16": lambda x: (
        jnp.tanh(x.astype(jnp.bfloat16) * 2) + x.astype(jnp.bfloat16) @ jnp.ones((4, 1), jnp.bfloat16)
    ),
}


def weighted(function):
    """A scalar loss that gives every element of every result a weight of its own."""

    def loss(x, *batch):
        total = 0.0
        for made in jax.tree.leaves(function(x, *batch)):
            made = jnp.asarray(made).astype(jnp.float32)
            total = total + jnp.sum(made * jnp.linspace(0.5, 1.5, made.size).reshape(made.shape))
        return total + jnp.sum(x.astype(jnp.float32)) * 0.1

    return loss


def shaped(*shape, low=-1.0, high=1.0):
    return lambda: random(*shape, low=low, high=high)


plain, positive, unit = shaped(3, 4), shaped(3, 4, low=0.2, high=2.0), shaped(3, 4, low=-0.9, high=0.9)
IMAGE, KERNEL = shaped(2, 6, 7, 3), random(3, 3, 3, 4, seed=1)
IDS = np.array([[0, 2, 1], [2, 2, 0]], np.int32)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w=KERNEL, strides=(1, 1), padding="SAME", numbers=NHWC, **options):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def both(function):
    """Its gradient with respect to the second operand too."""
    return lambda x: function(x[..., 0], x[..., 1])


def masked_softmax(x):
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((3, 4), bool)), x, -1e9))


def window(x, how, start, sizes=(1, 2, 3, 1), strides=(1, 2, 2, 1), padding="VALID", **options):
    return lax.reduce_window(x, start, how, sizes, strides, padding, **options)


BATTERY = {
    # elementwise
    "abs": (jnp.abs, plain), "acos": (jnp.arccos, unit), "acosh": (lambda x: jnp.arccosh(x + 1.5), positive),
    "asin": (jnp.arcsin, unit), "asinh": (jnp.arcsinh, plain), "atan": (jnp.arctan, plain),
    "atanh": (jnp.arctanh, unit), "atan2": (both(jnp.arctan2), shaped(8, 2)), "cbrt": (jnp.cbrt, positive),
    "ceil": (lambda x: jnp.ceil(3 * x) * x, plain), "clamp": (lambda x: lax.clamp(-0.3, x, 0.4), plain),
    "cos": (jnp.cos, plain), "cosh": (jnp.cosh, plain), "div": (both(jnp.divide), shaped(5, 2, low=0.5, high=2)),
    "atan2 of zeros": (lambda x: x + jnp.arctan2(jnp.zeros(3), jnp.zeros(3)).sum(), plain),
    "erf": (lax.erf, plain), "erfc": (lax.erfc, plain), "erf_inv": (lax.erf_inv, shaped(64, low=-0.999, high=0.999)),
    "erfc, far": (lambda x: jnp.log(lax.erfc(x)), shaped(9, low=3, high=8)),
    "exp": (jnp.exp, plain), "exp2": (jnp.exp2, plain), "expm1": (jnp.expm1, shaped(9, low=-1e-3, high=1e-3)),
    "floor": (lambda x: jnp.floor(3 * x) * x, plain), "integer_pow": (lambda x: x**5 + x**-3, positive),
    "is_finite": (lambda x: jnp.isfinite(1 / jnp.maximum(x, 0)) * x, plain), "log": (jnp.log, positive),
    "log1p": (jnp.log1p, shaped(9, low=-1e-3, high=1e-3)), "logistic": (jax.nn.sigmoid, plain),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=0), plain), "logaddexp": (both(jnp.logaddexp), shaped(5, 2)),
    "max": (both(jnp.maximum), shaped(5, 2)), "min": (both(jnp.minimum), shaped(5, 2)),
    "mod": (lambda x: jnp.mod(x, 0.3) + jnp.fmod(x, 0.3), plain), "mul": (both(jnp.multiply), shaped(5, 2)),
    "neg": (jnp.negative, plain), "pow": (both(jnp.power), shaped(5, 2, low=0.3, high=2)),
    "round": (lambda x: jnp.round(3 * x) * x + lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), plain),
    "rsqrt": (lax.rsqrt, positive), "sign": (lambda x: jnp.sign(x) * x, plain), "sin": (jnp.sin, plain),
    "sinh": (jnp.sinh, plain), "sqrt": (jnp.sqrt, positive), "square": (jnp.square, plain), "sub": (both(jnp.subtract),
    shaped(5, 2)), "tan": (jnp.tan, plain), "tanh": (jnp.tanh, plain), "relu": (jax.nn.relu, plain),
    "elu": (jax.nn.elu, plain), "gelu": (lambda x: jax.nn.gelu(x, approximate=False), plain),
    "softplus": (jax.nn.softplus, plain), "silu": (jax.nn.silu, plain), "leaky_relu": (jax.nn.leaky_relu, plain),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), plain),
    # logic and integers
    "compare": (lambda x: [(x < 0) * x, (x <= 0.1) * x, (x > 0.2) * x, (x >= 0) * x, (x == 0) * x, (x != 0) * x],
        plain),
    "logic": (lambda x: jnp.where(((x > 0) & (x < 0.5)) | ~(x > -0.5) ^ (x < 0.9), x, 2 * x), plain),
    "select bool": (lambda x: jnp.where(x > 0, x < 0.5, x > -0.5) * x, plain),
    "select_n": (lambda x: lax.select_n(jnp.int32(3 * jnp.abs(x)) % 3, x, 2 * x, x * x), plain),
    "integers": (lambda x: [(jnp.int32(9 * x) // 2) * x, (jnp.int32(9 * x) >> 1) * x, (jnp.int32(9 * x) << 2) & 12,
                            jnp.uint32(99 * x * x) >> 2, jnp.uint8(9 * x * x) + jnp.uint8(250),
                            jnp.int16(jnp.sum(jnp.int16(9 * x)))], plain),
    "bitcast": (lambda x: lax.bitcast_convert_type(jnp.uint32(2e9 * x) + jnp.uint32(1 << 31) * (x > 1), jnp.float32),
                shaped(50, low=0.3, high=2)),
    # structure
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (3, 5, 4)) * x.sum(), plain),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x.T.reshape(3, 4), jnp.ones((3, 2))], 1), plain),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(x[0, 0] * 9), 1), (2, 2)), plain),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice(x, x[:2, 1:3] * 2, (jnp.int32(9 * x[0, 1]), 1)), plain),
    "iota": (lambda x: lax.broadcasted_iota(jnp.float32, (3, 4), 1) * x, plain),
    "pad": (lambda x: lax.pad(x, 0.5, ((1, 2, 1), (-1, 3, 2))) * 2, plain),
    "reshape": (lambda x: jnp.reshape(jnp.transpose(x), (2, 6)) ** 2, plain),
    "rev": (lambda x: x[::-1, ::-1] * x, plain),
    "roll": (lambda x: jnp.roll(x, 1, 0) * x, plain), "slice": (lambda x: x[0:3:2, 1:] ** 2, plain),
    "split": (lambda x: jnp.split(x * 2, [1, 3], axis=1), plain),
    "squeeze": (lambda x: jnp.squeeze(x[:, :1]) ** 2, plain),
    "stack": (lambda x: jnp.stack([x, 2 * x], 1) ** 2, plain), "tile": (lambda x: jnp.tile(x, (2, 3)) ** 2, plain),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)).sum(1) * x[:, 0], shaped(4, 4, 4)),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), plain),
    "vmap": (jax.vmap(lambda r: r @ r * r), plain),
    "diagonal": (lambda x: jnp.diag(x @ x.T) + jnp.diagonal(x[:, :3]) ** 2, plain),
    "platform": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tanh), plain),
    # products
    "dot": (lambda x: x @ x.T @ random(3, 5), plain), "dot vector": (lambda x: x[0] @ x.T, plain),
    "outer": (lambda x: jnp.outer(x[0], x[1]), plain),
    "dot 3d": (lambda x: jnp.tanh(x) @ random(4, 6), shaped(2, 3, 4)),
    "batched dot": (lambda x: jnp.einsum("bthk,bshk->bhts", x, 2 * x), shaped(2, 3, 2, 4)),
    "heads": (lambda x: jnp.einsum("btd,dhk->bthk", x, x.reshape(4, 2, 3)), shaped(2, 3, 4)),
    "einsum": (lambda x: jnp.einsum("bij,bjk,k->ib", x, x, x[0, 0]), shaped(2, 3, 3)),
    "integer dot": (lambda x: (jnp.int32(5 * x) @ jnp.int32(5 * x).T) * x[:, :3], plain),
    # convolutions
    "conv": (conv, IMAGE), "conv strided": (lambda x: conv(x, strides=(2, 3)), IMAGE),
    "conv valid": (lambda x: conv(x, padding="VALID"), IMAGE),
    "conv dilated": (lambda x: conv(x, rhs_dilation=(2, 1), strides=(1, 2)), IMAGE),
    "conv weights": (lambda w: conv(random(2, 6, 7, 3), w, strides=(2, 2)), lambda: KERNEL),
    "conv grouped": (lambda x: conv(x, random(3, 3, 1, 6), feature_group_count=3, strides=(2, 1)), IMAGE),
    "conv grouped weights": (lambda w: conv(random(2, 6, 7, 3), w, feature_group_count=3, strides=(2, 1)),
                             lambda: random(3, 3, 1, 6)),
    "conv nchw": (lambda x: conv(x, random(4, 3, 3, 2), numbers=("NCHW", "OIHW", "NCHW")), shaped(2, 3, 5, 6)),
    "conv odd": (lambda x: conv(x, numbers=("CHWN", "HWIO", "HNWC"), padding=((0, 2), (-1, 1))), shaped(3, 6, 7, 2)),
    "conv 1d": (lambda x: conv(x, random(3, 3, 4), (2,), "SAME", ("NHC", "HIO", "NHC")), shaped(2, 7, 3)),
    "conv 3d": (lambda x: conv(x, random(2, 2, 2, 2, 3), (1, 2, 1), "SAME", ("NDHWC", "DHWIO", "NDHWC")),
                shaped(1, 3, 4, 4, 2)),
    "conv 1x1": (lambda x: conv(x, random(1, 1, 3, 5), strides=(2, 2)), IMAGE),
    "conv to one": (lambda x: conv(x, random(1, 1, 3, 5), strides=(2, 2)), shaped(1, 2, 2, 3)),
    "a patch with a rest": (lambda x: conv(x, random(4, 4, 3, 5), (4, 4), "VALID"), shaped(1, 7, 6, 3)),
    "conv_transpose": (lambda x: lax.conv_transpose(x, KERNEL, (2, 3), "SAME"), IMAGE),
    "conv_transpose valid": (lambda w: lax.conv_transpose(random(1, 4, 4, 3), w, (3, 3), "VALID"),
                             lambda: random(2, 2, 3, 4)),
    "conv batch groups": (lambda x: conv(x, random(3, 3, 3, 4), batch_group_count=2), shaped(4, 5, 5, 3)),
    # reductions and windows
    "reduce_sum": (lambda x: x.sum(0) ** 2 + x.sum(), plain), "reduce_max": (lambda x: x.max(1), plain),
    "reduce_min": (lambda x: x.min(0), plain), "reduce_prod": (lambda x: x.prod(1), plain),
    "mean of a broadcast": (lambda x: jnp.broadcast_to(x[:, :1], (3, 7)).sum(1) ** 2, plain),
    "any all": (lambda x: jnp.any(x > 0, 1) * x[:, 0] + jnp.all(x > -2, 0)[:3] * x[:, 1], plain),
    "argmax": (lambda x: x * (jnp.argmax(x, 1, keepdims=True) + 2 * jnp.argmin(x, 0)), plain),
    "cumsum": (lambda x: jnp.cumsum(x, 1) ** 2 + lax.cumsum(x, 0, reverse=True), plain),
    "cumprod": (lambda x: jnp.cumprod(x, 1), positive), "cummax": (lambda x: lax.cummax(x, 1), plain),
    "cummin": (lambda x: lax.cummin(x, 0, reverse=True), plain),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), plain),
    "cumlogsumexp of nothing": (lambda x: lax.cumlogsumexp(jnp.where(IDS > 0, x, -jnp.inf), 1)[:, 2], shaped(2, 3)),
    "var": (lambda x: jnp.var(x, 0) + jnp.std(x), plain), "softmax": (masked_softmax, plain),
    "max_pool": (lambda x: window(x, lax.max, -jnp.inf), IMAGE),
    "max_pool overlapping": (lambda x: window(jax.nn.relu(x), lax.max, -jnp.inf, (1, 3, 3, 1), padding="SAME"), IMAGE),
    "min_pool": (lambda x: window(x, lax.min, jnp.inf, padding="SAME"), IMAGE),
    "sum_pool": (lambda x: window(x, lax.add, 0.0, padding=((0, 0), (1, 0), (2, 1), (0, 0))), IMAGE),
    "window over one axis": (lambda x: window(x, lax.add, 0.0, (1, 3), (1, 1), ((0, 0), (2, 0))) ** 2, plain),
    "dilated window": (lambda x: window(x, lax.add, 0.0, (1, 2, 2, 1), window_dilation=(1, 2, 3, 1)), IMAGE),
    # indexing
    "gather rows": (lambda x: x[IDS] ** 2, plain), "gather columns": (lambda x: x[:, IDS[0]] ** 2, plain),
    "gather points": (lambda x: x[IDS[0], IDS[1]] ** 2, plain),
    "gather negative": (lambda x: x[-IDS[0] - 1] ** 2, plain),
    "gather clip": (lambda x: jnp.take(x, IDS + 2, axis=0, mode="clip") ** 2, plain),
    "gather fill": (lambda x: jnp.take(x, IDS + 1, axis=1, mode="fill", fill_value=7.0) * x.sum(), plain),
    "gather windows": (lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 1), (2, 2)))(IDS[0]) ** 2, plain),
    "take_along_axis": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1) ** 2, plain),
    "vmapped gather": (lambda x: jax.vmap(lambda r, i: r[i])(x, IDS.reshape(3, 2)) ** 2, plain),
    "batched gather": (lambda x: jax.vmap(lambda r, i: r[:, i])(x, IDS) ** 2, shaped(2, 3, 4)),
    "scatter set": (lambda x: x.at[IDS[0], 1].set(x[0, :3] * 2), shaped(3, 4)),
    "scatter add": (lambda x: x.at[:, IDS[0]].add(x[:, :3] ** 2), plain),
    "scatter mul": (lambda x: x.at[np.array([0, 2])].multiply(x[:2] + 2, unique_indices=True), plain),
    "scatter max": (lambda x: jnp.zeros(3).at[IDS].max(lax.stop_gradient(x[0, :3])) * x[:, 0], plain),
    "sort": (lambda x: jnp.sort(x, 1) ** 2 + jnp.sort(x, 0, descending=True), plain),
    "argsort": (lambda x: x * jnp.argsort(jnp.round(2 * x), axis=1), plain),
    "sort two keys": (lambda x: lax.sort((jnp.round(2 * x), -x, x * x), num_keys=2), shaped(3, 9)),
    "top_k": (lambda x: [lax.top_k(x, 2)[0] ** 2, lax.top_k(x, 2)[1] * x[:, :2]], plain),
    # control flow
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y), lambda y: y * 2, x), plain),
    "switch": (lambda x: lax.switch(jnp.int32(jnp.abs(x[0, 0] * 4)), [jnp.sin, jnp.cos, jnp.tanh, jnp.exp], x), plain),
    "while": (lambda x: x * lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] + 1, c[1] * 1.7), (0, 1 + x[0,
        0] ** 2))[0],
              plain),
    "scan": (lambda x: lax.scan(lambda c, r: (jnp.tanh(c * r), c + r), x[0], x), plain),
    "scan reverse": (lambda x: lax.scan(lambda c, r: (jnp.tanh(c * r), c + r), x[0], x, reverse=True), plain),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * x[i], x[0]), plain),
    "map": (lambda x: lax.map(lambda r: r @ r, x), plain),
    "ones times a number": (lambda x: jnp.ones(6) * x.sum() + (jnp.zeros((2, 3)) + x.max()).ravel(), plain),
    "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x),
    positive),
}  # fmt: skip


GROUPS = [list(BATTERY)[i::10] for i in range(10)]


@pytest.mark.parametrize("names", few(GROUPS, GROUPS[::6]), ids=lambda names: names[0])
def test_primitives_and_their_gradients_agree_with_jax(names: list[str]) -> None:
    """Many cases in one step: each is a parameter with a gradient, and a buffer that holds its value."""

    def loss_fn(params, buffers):
        values = {name: weighted(BATTERY[name][0])(params[name]) for name in names}
        return sum(values.values()), {f"value of {name}": value for name, value in values.items()}

    params = {name: BATTERY[name][1]() for name in names}
    worst_error(loss_fn, params, buffers={f"value of {name}": np.float32(0) for name in names})


NUMBERS = np.array([-np.inf, -3e9, -300.5, -1.5, -0.0, 0.5, 1.5, 300.7, 3e9, np.inf, np.nan, 2**31], np.float32)
WHOLE = np.array([-(2**31), -7, -1, 0, 1, 6, 2**31 - 1], np.int32)
BY = np.array([-1, 0, 2, 0, -2, 3, -1], np.int32)
AMOUNTS = np.array([0, 1, 31, 32, 40, -1, 7], np.int32)
HOLES = np.array([[3, np.nan, 1, np.nan, 2, np.inf], [np.nan, 5, -np.inf, 4, np.nan, -0.5]], np.float32)
BYTES = np.array([-128, -7, -1, 0, 1, 90, 127], np.int32)
HALVES_OF_BITS = np.array([0, 1, 0x8001, 0x3C00, 0x3F80, 0xBC01, 0x4049, 0x2E66], np.uint16)
EDGES = {  # values that the first batch may lack: they are inputs of the run
    "int8": (lambda v: v.astype(jnp.int8), NUMBERS), "uint8": (lambda v: v.astype(jnp.uint8), NUMBERS),
    "int32": (lambda v: v.astype(jnp.int32) // 1000, NUMBERS), "uint32": (lambda v: v.astype(jnp.uint32), NUMBERS),
    "half to int": (lambda v: v.astype(jnp.float16).astype(jnp.int32) // 1000, NUMBERS),
    "divided": (lambda v: lax.div(v, BY + v * 0), WHOLE), "rest": (lambda v: lax.rem(v, BY + v * 0), WHOLE),
    "rest by constants": (lambda v: lax.rem(v, BY), WHOLE),
    "rest of bytes": (lambda v: lax.rem(v.astype(jnp.uint8), (v * 0).astype(jnp.uint8)), WHOLE),
    "left": (lambda v: lax.shift_left(jnp.full(7, 5, jnp.int32), v) // 1000, AMOUNTS),
    "logical": (lambda v: lax.shift_right_logical(jnp.full(7, -5, jnp.int32), v) // 1000, AMOUNTS),
    "arithmetic": (lambda v: lax.shift_right_arithmetic(jnp.full(7, -50, jnp.int32), v), AMOUNTS),
    "arithmetic by constants": (lambda v: lax.shift_right_arithmetic(v, AMOUNTS), WHOLE // 1000),
    **{f"shifts of {kind}": (lambda v, kind=kind: shifts(v.astype(kind), AMOUNTS.astype(kind)), BYTES)
       for kind in ("int8", "uint8", "int16", "uint16", "uint32")},
    "sums in windows": (lambda v: [window(v, lax.add, 0, (2, 3), (1, 2), [(1, 0), (2, 1)]),
                                   window(v.astype(jnp.int8), lax.add, np.int8(0), (1, 2), (1, 1),
                                          window_dilation=(1, 2))], np.arange(90, 105, dtype=np.int32).reshape(3, 5)),
    "bits of bfloat16": (lambda v: lax.bitcast_convert_type(v, jnp.bfloat16), HALVES_OF_BITS),
    "bits of float16": (lambda v: lax.bitcast_convert_type(v, jnp.float16), HALVES_OF_BITS),
    "nanmedian": (lambda v: jnp.nanmedian(v, 1), HOLES[:, :5] * [[1], [1 / np.float32(3)]]),
    "argsort": (lambda v: jnp.argsort(v, 1), HOLES),
    "maxima with NaN": (lambda v: known(v.max(1), v.min(0), v.max(), v.astype(jnp.float16).max(1), v.argmax(1),
                                        v.argmin(0), jnp.exp(v - v.max(1, keepdims=True))), HOLES),
    "windows with NaN": (lambda v: known(window(v, lax.max, -np.inf, (1, 2), (1, 2), [(0, 0), (1, 1)]),
                                         window(v, lax.min, np.inf, (1, 3), (1, 1), "SAME")), HOLES),
    "segments with NaN": (lambda v: known(jax.ops.segment_max(v.T, IDS.ravel(), 3), lax.map(jnp.max, v),
                                          jax.ops.segment_min(v, IDS[0, :2], 3)), HOLES),
    "order of bools": (lambda v: (v < 3) < (v > 1), WHOLE),
    "least of bytes": (lambda v: lax.reduce_window(v, np.uint8(255), lax.min, (2,), (1,), "VALID"),
                       np.array([0, 1, 255, 255, 3], np.uint8)),
    "least of padding": (lambda v: lax.reduce_window(v, np.uint8(255), lax.min, (2,), (1,), [(2, 0)]),
                         np.array([4, 1, 255, 3], np.uint8)),
    "angles": (lambda v: jnp.arctan2(v[:, None], v[None]), np.array([-np.inf, -1, 0, 2, np.inf], np.float32)),
    "log of sigmoid": (lambda v: jnp.log(jax.nn.sigmoid(v)), np.array([-50, -20, -17, -16, -10, 0, 20], np.float32)),
    "rounded": (lax.round, np.array([0.49999997, -0.5, 1.5, -2.4], np.float32)),
    "inner product": (lambda v: jnp.einsum("ij,ij->", v, v + 1), random(3, 3)),
    "outer product": (lambda v: jnp.tensordot(v, v, 0), random(3, 3)),
    "two sums": (lambda v: jnp.tensordot(v, random(3, 3), 2), random(2, 3, 3)),
    "sum of bytes": (lambda v: lax.reduce_sum(jnp.broadcast_to(v[0] * 0 + 1, (300,)), (0,)), np.ones(1, np.uint8)),
    "cropped beyond": (lambda v: lax.pad(v, np.float32(7), [(-3, 5, 0)]), np.array([1, 2], np.float32)),
}  # fmt: skip


BY_ROW = {
    "counts": (lambda n: lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0] // 2, s[1] + s[0] % 2), (n, 0))[1],
               np.array([[6, 7, 27], [1, 0, 300]], np.int32)),
    "matrices": (lambda v: lax.while_loop(lambda z: z.max() < v, lambda z: z @ z + 1, v * jnp.eye(2) / 9),
                 np.array([[0.5, 5.0, 50.0], [0.1, 1.0, 9.0]], np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", BY_ROW)
def test_each_row_of_a_batch_leaves_a_loop_by_itself(name: str, axes: int) -> None:
    turn, values = BY_ROW[name]
    for _ in range(axes):
        turn = jax.vmap(turn)
    worst_error(weighted(lambda x, v: turn(v)), random(2), values if axes == 2 else values[0])


def known(*values):
    """The values, with numbers in the place of NaN and infinity."""
    return [jnp.nan_to_num(value, nan=7, posinf=20, neginf=-20) for value in values]


def shifts(v, by):
    return [(v << 4) >> 4, v >> 3, lax.shift_right_logical(v, 0 * v + 2), lax.shift_left(v, by) // 16,
            lax.shift_right_arithmetic(v, by)]  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_what_xla_defines_and_c_does_not(name: str) -> None:
    function, values = EDGES[name]
    worst_error(weighted(lambda x, v: function(v)), random(2), values)


ROWS, COLUMNS = np.array([0, 3, -4, 40, 2, 2], np.int32), np.array([-9, 0, 1, 2, 3, 3], np.int32)
WINDOWS = lax.ScatterDimensionNumbers((1, 2), (), (1, 0))  # a row of indices is the column and row of a window
OUTSIDE = {  # some of the indices of each are outside the array
    "add": lambda x, r, c: x.at[r, c].add(x[0, 0] * (r + 1)),
    "subtract": lambda x, r, c: x.at[r, c].subtract(x[0, 0] * (r + 1)),
    "set": lambda x, r, c: x.at[r, c].set(x[0, 0] * jnp.where(r == 2, 3, r)),
    "set rows": lambda x, r, c: x.at[r].set(jnp.where(r[:, None] == 2, 3, c[:, None]) * x[0]),
    "set elsewhere": lambda x, r, c: jnp.zeros((3, 2, 4)).at[r, :, c].set(x[:2, 0] * 3),
    "min": lambda x, r, c: lax.stop_gradient(x).at[r, c].min(-2.0) * x,
    "max": lambda x, r, c: lax.stop_gradient(x).at[r, c].max(2.0) * x,
    "multiply": lambda x, r, c: lax.stop_gradient(x).at[r, c].multiply(2.0) * x,
    "read points": lambda x, r, c: x.at[r, c].get(mode="fill", fill_value=7.0) ** 2,
    "read rows": lambda x, r, c: jnp.take(x, r, axis=0, mode="fill", fill_value=0.0) ** 2,
    "segments": lambda x, r, c: jax.ops.segment_sum(x[0, 0] * c, r, 3) ** 2,
    "segments of a batch": lambda x, r, c: jax.vmap(lambda v: jax.ops.segment_sum(v * c, r, 3))(x[:, 0]) ** 2,
    "batch of segments": lambda x, r, c: jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, 3))(x[:, :2], r.reshape(3, 2)),
    "windows": lambda x, r, c: lax.scatter_add(x, jnp.stack([c, r], 1), x[0, 0] * jnp.ones((6, 2, 2)), WINDOWS,
                                               mode="fill"),
    "constants": lambda x, r, c: x.at[ROWS, COLUMNS].add(x[0, 0]),
    "nonzero": lambda x, r, c: x[jnp.nonzero(r, size=2)[0] % 3],
    "repeat": lambda x, r, c: x[jnp.repeat(jnp.arange(3), r[jnp.array([4, 5, 0])], total_repeat_length=4)],
    "bincount": lambda x, r, c: x * jnp.bincount(r, length=4),
}  # fmt: skip


@pytest.mark.parametrize("name", few(OUTSIDE, list(OUTSIDE)[::2]))
def test_what_jax_writes_outside_an_array_is_dropped(name: str) -> None:
    worst_error(weighted(OUTSIDE[name]), random(3, 4), ROWS, COLUMNS)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, r: x[r] ** 2,  # the gather stops the run if its gradient would write outside
        lambda x, r: x[r, r] ** 2,
        lambda x, r: jnp.take_along_axis(x, r[None], 1) ** 2,
        lambda x, r: x.at[np.array([0, 2])].add(x[0]),
        lambda x, r: x.at[jnp.arange(3), jnp.arange(3)].add(x[:, 0]),
    ],
)
def test_indices_that_are_inside_are_not_compared_with_the_ends(function) -> None:
    model = export_training_step(weighted(function), random(3, 4), np.array([0, 2, 1], np.int32))
    assert not {"GreaterOrEqual", "LessOrEqual", "Max"} & {node.op_type for node in model.graph.node}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], ["float32"]))
def test_random_floats_of_many_keys_are_jaxs(dtype: str) -> None:
    """Under vmap, counts have another shape than those of one key."""

    def loss(x, keys):
        drawn = [
            jax.vmap(lambda key: jax.random.uniform(key, (128, 64), dtype))(keys[:, 0]),
            jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (96, 48), dtype), out_axes=1))(keys),
            jax.random.uniform(keys[0, 0], (128, 64), dtype),
            jax.random.normal(keys[0, 1], (50,), dtype),
        ]
        return weighted(lambda x: [array.astype(jnp.float32) * x[0] for array in drawn])(x)

    worst_error(loss, random(2), jax.random.split(jax.random.key(0), (128, 2)))


def test_random_floats_and_shifts_in_64_bits() -> None:
    with jax.enable_x64(True):
        for kind in ("int64", "uint64"):
            worst_error(weighted(lambda x, v: shifts(v, AMOUNTS.astype(v.dtype))), random(2), BYTES.astype(kind))
        keys = jax.random.split(jax.random.key(0), 3)
        drawn = weighted(lambda x, keys: [x[0] * jax.vmap(lambda key: jax.random.uniform(key, (9,)))(keys),
                                          x[1] * jax.random.bernoulli(keys[0], 0.5, (8,))])  # fmt: skip
        worst_error(drawn, np.array([1.0, 2.0]), keys)


def test_the_gradient_of_the_logarithm_of_a_sigmoid():
    """ONNX Runtime's Sigmoid is 0 at -20: the loss was infinite, and its gradient NaN."""
    worst_error(lambda x: -jnp.log(jax.nn.sigmoid(x)).sum(), np.array([-50, -20, -17, -16, -10, 0, 20], np.float32))


def test_what_has_no_lowering_is_refused_by_name():
    for function, message in (
        (lambda v: v.at[0].apply(jnp.sin), "x.at.*apply"),
        (lambda v: jnp.bitwise_or.reduce(v.astype(jnp.int32)), "reduce_or of integers"),
    ):
        with pytest.raises(ConversionError, match=message):
            worst_error(weighted(lambda x, v, function=function: function(v)), random(2), random(3))


def test_the_file_says_how_far_both_are_from_float64(monkeypatch):
    monkeypatch.setattr("onnx_remat.converters.checks.tolerances.EXACT_ABOVE", 0.0)
    image, kernel = random(2, 3, 8, 8), random(4, 3, 3, 3, seed=1)
    loss = weighted(lambda x, w: jnp.tanh(lax.conv(x, w, (1, 1), "SAME")).mean(0))
    step = export_training_step(lambda params, x: loss(x, params["w"]), {"w": kernel}, image)
    known = {p.key: p.value for p in step.metadata_props}
    for whose in ("exact", "framework"):
        assert 0 < float(known[f"check.{whose}_error"]) < 1e-5


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_checked_with_its_own_tolerance(name: str) -> None:
    export_training_step(weighted(HALVES[name]), random(3, 4))


def test_a_loss_in_bfloat16_is_written_in_float32() -> None:
    step = export_training_step(lambda w, x: (x @ w).astype(jnp.bfloat16).mean(), random(4, 2), random(3, 4))
    assert step.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_the_ends_of_the_inverse_error_function():
    def loss(x):
        return jnp.sum(jnp.where(lax.erf_inv(jnp.round(x)) == jnp.round(x) * jnp.inf, x, 0))

    step = trace(loss, np.array([1.0, -1.0], np.float32), (), None, None, None)
    assert verify(convert(step), step, TIGHT).error == 0


def test_a_softmax_reads_its_maximum_without_a_search_for_nan():
    def loss(p, buffers, x):
        return jnp.sum(jax.nn.softmax(x * p, 0) ** 2) + jnp.sum(jax.nn.logsumexp(x * p, 1)), {"top": x.max(1)}

    made = export_training_step(loss, random(6), random(4, 6), buffers={"top": jnp.zeros(4)})
    assert [node.input[0] for node in made.graph.node if node.op_type == "IsNaN"] == ["input.0"]


def test_each_row_of_a_while_loop_stops_by_its_own_condition():
    def halvings(n, by):
        state = (n, jnp.ones(2), n > 2)
        return lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] // 2, jnp.tanh(c[1] * by), ~c[2]), state)

    def loss(p, numbers, factors):
        rows = jax.vmap(jax.vmap(halvings, (0, None)), (None, 0))(numbers, factors)
        return weighted(lambda x: rows)(p) + jnp.sum(p * rows[1])

    assert worst_error(loss, random(2), np.array([1, 2, 9, 0, 700], np.int32), random(3)) < 1e-6


EXACT = np.float32(
    [0.0, -0.0, 1, -1, 2, 0.99999994, -1.9999999, 0.1, -3e-5, 3.4028235e38, 1.1754944e-38, np.inf, -np.inf]
)
BITS = {
    "float32": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "float16": lambda x: lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16),
    "bfloat16": lambda x: lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int16),
    "copysign": lambda x: jnp.copysign(x, x[::-1]),
    "frexp": lambda x: jnp.stack(jnp.frexp(x)),
    "ldexp": lambda x: jnp.ldexp(x[:9], 3),
    "ones": lambda x: jnp.stack([lax.population_count(x.astype(kind)).astype(jnp.int32) for kind in INTEGERS]),
    "zeros": lambda x: jnp.stack([lax.clz(x.astype(kind)).astype(jnp.int32) for kind in INTEGERS]),
}
INTEGERS = (jnp.int8, jnp.uint32)


def test_bits_of_numbers_are_those_of_jax():
    def loss(p, buffers, x):
        return jnp.sum(p), {name: function(x) for name, function in BITS.items()}

    buffers = {
        name: jnp.zeros(made.shape, made.dtype) for name, made in jax.eval_shape(loss, EXACT, {}, EXACT)[1].items()
    }
    assert worst_error(loss, random(2), EXACT, buffers=buffers) == 0


def test_the_gamma_function_has_the_logarithm_of_jax_and_its_derivative():
    def loss(p, buffers, x):
        return jnp.sum(gammaln(p)), {"log": gammaln(x), "derivative": digamma(x)}

    x = np.array([-np.inf, -5.5, -2, -0.0, 0, 1e-30, 0.3, 0.5, 2.5, 6.9, 7, 100, 1e9, np.inf, np.nan], np.float32)
    buffers = {"log": jnp.zeros(15), "derivative": jnp.zeros(15)}
    assert worst_error(loss, random(9, low=0.1, high=9.0), x, buffers=buffers) < 1e-5


def test_the_next_number_and_truncated_draws_are_those_of_jax():
    def loss(p, buffers, x, key):
        drawn = jax.random.truncated_normal(key, -2, 2, (9,)) + jax.random.truncated_normal(key, p, 2)
        return jnp.sum(p * drawn), {"next": jnp.nextafter(x, x[::-1]), "same": jnp.nextafter(x, x)}

    x = np.array([1, -1, 2, -0.99999994, np.nan, np.inf, -3, 3.4028235e38, 5, 0.1], np.float32)
    buffers = {"next": jnp.zeros(10), "same": jnp.zeros(10)}
    assert worst_error(loss, random(9), x, jax.random.key(0), buffers=buffers) < 1e-5


def test_the_inverse_error_function_and_normal_draws_have_the_digits_of_float64():
    with jax.enable_x64(True):
        x = np.concatenate([np.linspace(-0.999, 0.999, 40), 1 - np.logspace(-9, -3, 8)])
        draw = lambda p, key: jnp.sum(p * lax.erf_inv(x) * jax.random.normal(key, x.shape, jnp.float64))  # noqa: E731
        assert worst_error(draw, np.ones(48), jax.random.key(0)) < 1e-12


def test_floats_are_found_in_their_total_order():
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    x = np.array([-inf, -1, -0.0, 0.0, 1, inf, nan], np.float32)

    def loss(p, x):
        table = jnp.arange(49.0).reshape(7, 7)
        found = [compare(x[:, None], x[None]) for compare in (lax.lt_to_p.bind, lax.le_to_p.bind)]
        places = jnp.searchsorted(x, x[1:5]) + jnp.interp(0.25, jnp.arange(3.0), jnp.arange(3.0) ** 2)
        return p * (jnp.sum(table * found[0]) + 2 * jnp.sum(table * found[1]) + jnp.sum(places * jnp.arange(4.0)))

    assert worst_error(loss, np.float32(1), x) == 0


def test_bools_are_found_in_their_order():
    def loss(p, x):
        return p * jnp.sum(jnp.searchsorted(jnp.sort(x), x) * jnp.arange(5.0))

    assert worst_error(loss, np.float32(1), np.array([True, False, True, False, False])) == 0


def test_bodies_are_not_printed_to_find_equal_nodes(monkeypatch):
    """The time would grow with the square of the branches."""

    def refuse(_):
        raise AssertionError("a body was printed")

    monkeypatch.setattr(ir.Graph, "__str__", refuse)
    branches = [lambda x, by=by: jnp.sin(x * by) for by in range(3)]
    assert worst_error(lambda p, at: jnp.sum(lax.switch(at, branches, p)), random(4), np.int32(1)) < 1e-5


def test_an_optimizer_that_needs_the_loss_is_refused():
    optax = pytest.importorskip("optax")
    with pytest.raises(ConversionError, match="does not update from gradients, state and parameters alone"):
        trace(lambda w, x: jnp.sum(w * x), random(4), (random(4),), None, optax.lbfgs(), None)


def test_an_optimizer_given_as_part_of_the_batch_is_named():
    optax = pytest.importorskip("optax")
    with pytest.raises(ConversionError, match=r"'input\.1' is a function, not an array: pass the optimizer"):
        export_training_step(lambda p, x: ((p * x) ** 2).sum(), jnp.ones(3), jnp.ones(3), optax.sgd(0.1))


@pytest.mark.parametrize("jit", few([False, True], [True]))
def test_of_a_softmax_the_result_alone_is_kept(jit):
    """Also where JAX has traced the function before, with its own gradient; its flag is as it was then."""

    def loss(p, x):
        return ((jax.nn.softmax(x @ p) @ x.T) ** 2).sum()

    given, x = jnp.asarray(random(8, 8)), jnp.asarray(random(4, 8))
    function = jax.jit(loss) if jit else loss
    jax.grad(function)(given, x)
    made = export_training_step(function, given, x)
    late = [node for node in made.graph.node if any(p.value == "backward" for p in node.metadata_props)]
    exponentials = {node.output[0] for node in made.graph.node if node.op_type == "Exp"}
    assert len(exponentials) == 1 and not any(exponentials & {*node.input} for node in late)
    assert jax.config.jax_softmax_custom_jvp is False
