"""JAX steps in half precision for CUDA: they keep it wherever CUDA has a kernel, and are compared with JAX."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from onnx_remat.converters.jax import export_training_step, initial_feeds  # noqa: E402

from onnx_remat.errors import ConversionError, UsageError  # noqa: E402
from onnx_remat.ort.kernels.cuda import CUDA  # noqa: E402
from tests.support.slow import few  # noqa: E402

DTYPES = (jnp.bfloat16, jnp.float16)
HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def text(params, tokens, targets):
    """A word's attention to those before it, a norm in float32, and a GELU."""
    x = params["words"][tokens]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ jnp.swapaxes(k, -1, -2) / 3, -1e4)
    x = x + jax.nn.softmax(scores, -1) @ v
    wide = x.astype(jnp.float32)
    x = ((wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)
    x = jnp.clip(x + jax.nn.gelu(x @ params["up"]) @ params["down"], -3, 3)
    logits = (x @ params["out"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def images(params, pixels, labels):
    """A convolution, a pool and a mean."""
    x = pixels.astype(params["conv"].dtype)
    x = jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    logits = (x.mean((1, 2)) @ params["out"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def example(loss, dtype):
    """Parameters and a batch."""
    generator = np.random.default_rng(0)
    shapes = {
        text: {"words": (11, 8), "q": (8, 8), "k": (8, 8), "v": (8, 8), "up": (8, 32), "down": (32, 8), "out": (8, 11)},
        images: {"conv": (3, 3, 3, 8), "out": (8, 5)},
    }[loss]
    params = {name: jnp.asarray(generator.normal(size=shape) / 2, dtype) for name, shape in shapes.items()}
    if loss is images:
        return params, (np.float32(generator.normal(size=(4, 8, 8, 3))), generator.integers(0, 5, 4))
    return params, (generator.integers(0, 11, (3, 6)), generator.integers(0, 11, (3, 6)))


def cast(loss, dtype):
    """The loss with its weights in float32, cast inside."""
    return lambda params, *batch: loss(jax.tree.map(lambda weight: weight.astype(dtype), params), *batch)


CASES = [(loss, dtype, how) for loss in (text, images) for dtype in DTYPES for how in ("weights", "cast")]


@pytest.mark.parametrize(
    ("loss", "dtype", "how"),
    few(CASES, [(text, jnp.bfloat16, "weights"), (images, jnp.float16, "cast")], True),
)
def test_a_step_for_cuda_keeps_half_precision_and_has_a_kernel_for_every_node(loss, dtype, how):
    params, batch = example(loss, dtype if how == "weights" else jnp.float32)
    function = loss if how == "weights" else cast(loss, dtype)
    step = export_training_step(function, params, *batch, optimizer=optax.adamw(1e-3, eps=1e-4), provider="cuda")
    onnx.checker.check_model(step, full_check=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*step.graph.input, *step.graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in step.graph.initializer}
    first = [(node, types.get(node.input[0], 0)) for node in step.graph.node if node.input]
    assert [node.name for node, kind in first if kind in HALVES and CUDA.on_host(node, kind, 20)] == []
    products = {kind for node, kind in first if node.op_type in ("MatMul", "Gemm")}
    assert products <= set(HALVES)
    if how == "weights":
        feeds = initial_feeds(params, *batch, optimizer=optax.adamw(1e-3))
        assert {feeds[name].dtype for name in params} == {np.dtype(dtype)}


def test_the_cpu_computes_in_float32_what_it_has_no_kernels_for():
    params, batch = example(text, jnp.float32)
    step = export_training_step(cast(text, jnp.bfloat16), params, *batch)
    types = {value.name: value.type.tensor_type.elem_type for value in step.graph.value_info}
    assert {types.get(node.input[0]) for node in step.graph.node if node.op_type == "MatMul"} == {
        onnx.TensorProto.FLOAT
    }


def test_parameters_in_bfloat16_are_refused_for_the_cpu_alone():
    params, batch = example(text, jnp.bfloat16)
    with pytest.raises(ConversionError, match=r"is bfloat16, which .* CPU does not take: .* with provider='cuda'"):
        export_training_step(text, params, *batch)


def test_an_unknown_provider_is_refused():
    params, batch = example(text, jnp.float32)
    with pytest.raises(UsageError, match="provider 'tpu': use 'cpu' or 'cuda'"):
        export_training_step(text, params, *batch, provider="tpu")


@pytest.mark.parametrize("within", ["if", "scan"])
def test_half_precision_inside_a_body_alone_is_kept_and_checked(within):
    def inside(x):
        return jnp.tanh(x.astype(jnp.bfloat16) * 2).astype(jnp.float32)

    def loss(params, x):
        x = x @ params["w"]
        if within == "if":
            x = jax.lax.cond(x.sum() > 0, inside, lambda x: x, x)
        else:
            x, _ = jax.lax.scan(lambda x, _: (inside(x), None), x, length=70)
        return x.mean()

    params, x = {"w": jnp.ones((3, 3)) / 3}, jnp.arange(6.0).reshape(2, 3)
    step = export_training_step(loss, params, x, provider="cuda")
    bodies = [attribute.g for node in step.graph.node for attribute in node.attribute if attribute.HasField("g")]
    assert any(value.type.tensor_type.elem_type in HALVES for body in bodies for value in body.value_info)
