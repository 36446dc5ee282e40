"""Whole models out of JAX and Flax: training curves, names, refusals, and what onnx-remat makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from onnx_remat.converters.jax import export_training_step, initial_feeds
from onnx_remat.converters.jax.kernels import KERNELS

from onnx_remat import rewrite_model
from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ir import phases
from onnx_remat.ort import runtime
from sample_models.networks import jax_models as zoo
from tests.support.graphs import feeds_for, run_model, same_bits
from tests.support.slow import few

OPTIMIZERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(3e-3)}
SMALL = {
    "mlp": lambda: zoo.classifier(zoo.MLP((16, 16, 5)), (8, 12), 5),
    "cnn": lambda: zoo.classifier(zoo.CNN((4, 6), 3), (4, 8, 8, 3), 3),
    "resnet": lambda: zoo.classifier(zoo.ResNet((1, 1), 4, 5), (4, 16, 16, 3), 5),
    "gpt": lambda: zoo.language_model(zoo.GPT(11, 1, 8, 2), 3, 6),
    "gpt with dropout": lambda: zoo.language_model(zoo.GPT(11, 1, 8, 2, rate=0.3), 3, 6),
    "gpt in a scan": lambda: zoo.language_model(zoo.GPT(11, 2, 8, 2, scanned=True), 3, 6),
}


def curves(case: zoo.Case, optimizer, steps: int = 20, **options) -> tuple[list[float], list[float]]:
    """Losses of consecutive steps: ONNX Runtime's and JAX's. A random key in the batch is new at every step."""
    model = case.export(optimizer, check=False, **options)
    session = runtime_session(model)
    feeds = initial_feeds(case.params, *case.batch, optimizer=optimizer, buffers=case.buffers)
    names = [value.name for value in session.get_outputs()]

    def step(params, buffers, state, batch):
        def loss_fn(params):
            made = case.loss_fn(params, *([] if buffers is None else [buffers]), *batch)
            return (made, None) if buffers is None else made

        (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), buffers, state

    step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
    params, buffers, state, batch = case.params, case.buffers, optimizer.init(case.params), case.batch
    ours, theirs = [], []
    for number in range(steps):
        if jnp.issubdtype(batch[-1].dtype, jax.dtypes.prng_key):
            batch = (*batch[:-1], jax.random.key(number))
            feeds[f"input.{len(batch) - 1}"] = np.asarray(jax.random.key_data(batch[-1]))
        made = dict(zip(names, session.run(None, feeds), strict=True))
        feeds |= {name.removeprefix("new."): value for name, value in made.items() if name.startswith("new.")}
        loss, params, buffers, state = step(params, buffers, state, batch)
        ours.append(float(made["loss"]))
        theirs.append(float(loss))
    return ours, theirs


def runtime_session(model: onnx.ModelProto):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


TRAINED = list(zip(SMALL, [*OPTIMIZERS] * 3, strict=True))


@pytest.mark.parametrize(("name", "optimizer"), few(TRAINED, TRAINED[1:2], several=True))
def test_twenty_steps_follow_jax(name: str, optimizer: str) -> None:
    ours, theirs = curves(SMALL[name](), OPTIMIZERS[optimizer])
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_long_scans_become_scan_nodes_and_agree() -> None:
    case = SMALL["gpt in a scan"]()
    model = case.export(unroll=1)
    assert [node.op_type for node in model.graph.node].count("Scan") == 2
    inside = [n for node in model.graph.node if node.op_type == "Scan" for a in node.attribute for n in a.g.node]
    assert {entry.value for node in inside for entry in node.metadata_props if entry.key == "phase"} == {
        "forward", "backward"
    }  # fmt: skip


def test_names_of_inputs_and_outputs() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 1e-3, 10)))
    params = {"layers": [{"w": jnp.ones((3, 2))}], "scale": jnp.ones(())}

    def loss_fn(params, stats, batch):
        out = batch["x"] @ params["layers"][0]["w"] * params["scale"]
        return jnp.mean((out - batch["y"]) ** 2), {"mean": stats["mean"] * 0.9 + out.mean()}

    batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros((4, 2))}
    model = export_training_step(loss_fn, params, batch, optimizer=optimizer, buffers={"mean": jnp.zeros(())})
    inputs = ["layers.0.w", "scale", "mean", "state.1.0.count", "state.layers.0.w.mu", "state.scale.mu",
              "state.layers.0.w.nu", "state.scale.nu", "state.1.1.count", "input.0", "input.1"]  # fmt: skip
    assert [value.name for value in model.graph.input] == inputs
    renewed = [*inputs[:2], *inputs[3:9], "mean"]
    assert [value.name for value in model.graph.output] == ["loss", *(f"new.{name}" for name in renewed)]


def test_every_node_is_labelled_and_every_value_typed() -> None:
    model = SMALL["resnet"]().export(check=False)
    labels = [entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "phase"]
    assert len(labels) == len(model.graph.node) and labels == sorted(labels, key=phases.NAMES.index)
    known = {value.name for value in [*model.graph.value_info, *model.graph.output]}
    assert {name for node in model.graph.node for name in node.output if name} == known
    assert {node.domain for node in model.graph.node} == {""}


def test_channels_last_convolutions_run_without_transposing_activations_between() -> None:
    """In forward, only the images and the kernels are transposed."""
    case = zoo.classifier(zoo.CNN((4, 6), 3), (4, 8, 8, 3), 3)
    model = case.export(check=False)
    forward = [n for n in model.graph.node if any(p.value == "forward" for p in n.metadata_props)]
    transposed = [node.input[0] for node in forward if node.op_type == "Transpose"]
    assert sorted(transposed) == ["Conv_0.kernel", "Conv_1.kernel", "Conv_2.kernel", "Conv_3.kernel", "input.0"]


def test_a_converted_step_is_rewritten_and_equal() -> None:
    model = zoo.classifier(zoo.MLP((32, 32, 32, 32, 4)), (256, 32), 4).export()
    result = rewrite_model(model, "75%", effort=0.3, run_by="session")
    assert result.report.after.total <= result.report.budget
    feeds = feeds_for(model)
    assert same_bits(run_model(model, feeds), run_model(result.model, feeds))


def _nothing(params, x):
    return jnp.sum(x)


REFUSED = {
    "integer parameter": (lambda p, x: jnp.sum(x) * p["n"], {"n": jnp.ones((), int)}, "parameter 'n' is int32"),
    "vector loss": (lambda p, x: x * p["w"], {"w": jnp.ones(())}, "of shape (3,)"),
    "integer loss": (lambda p, x: jnp.int32(p["w"]), {"w": jnp.ones(())}, "the loss is int32"),
    "no parameters": (_nothing, {}, "no parameters"),
    "unused parameters": (_nothing, {"w": jnp.ones(3)}, "depends on no parameter"),
    "no lowering": (lambda p, x: jnp.sum(jnp.linalg.cholesky(p["w"])), {"w": jnp.eye(3)}, "primitive 'cholesky'"),
    "names": (lambda p, x: p["a.b"] * p["a"]["b"], {"a.b": 1.0, "a": {"b": 2.0}}, "two inputs are called 'a.b'"),
    "another generator": (lambda p, x: p["w"] * jax.random.uniform(jax.random.key(0, impl="rbg")), {"w": jnp.ones(())},
                          "threefry2x32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    loss_fn, params, message = REFUSED[name]
    with pytest.raises(ConversionError) as refusal:
        export_training_step(loss_fn, params, jnp.ones(3))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_wrong_arguments_are_usage_errors() -> None:
    def loss_fn(params, x):
        return jnp.sum(x) * params["w"]

    for options, message in (
        ({"opset": 12}, "opset 12 is not supported: use 20 to"),
        ({"opset": 99}, "opset 99"),
        ({"batch_names": ["a", "b"]}, "2 names for 1 arrays"),
    ):
        with pytest.raises(UsageError, match=message):
            export_training_step(loss_fn, {"w": jnp.ones(())}, jnp.ones(3), **options)


def test_a_wrong_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_remat.converters.jax import lower

    monkeypatch.setitem(lower._RULES, "tanh", lambda low, eqn, x: low.elementwise("Sin", x))
    with pytest.raises(ConversionError, match="differs from the framework's"):
        export_training_step(lambda p, x: jnp.sum(jnp.tanh(p * x)), jnp.ones(3), jnp.ones(3))
    export_training_step(lambda p, x: jnp.sum(jnp.tanh(p * x)), jnp.ones(3), jnp.ones(3), check=False)


def test_indices_beyond_the_array_stop_the_run() -> None:
    """JAX would put NaN; a step that goes on with a wrong row would be worse than an error."""
    model = export_training_step(lambda p, i: jnp.sum(p[i] ** 2), jnp.ones((4, 2)), np.array([0, 3]))
    with pytest.raises(Exception, match="out of data bounds"):
        runtime.outputs(model, {"param": np.ones((4, 2), np.float32), "input.0": np.array([0, 4], np.int32)})


def test_the_table_of_kernels_is_onnxruntimes() -> None:
    """One node per operator and dtype: exactly the dtypes of the table load (float16 may be cast by the runtime)."""
    missing = []
    for op_type, dtypes in KERNELS.items():
        missing += [f"{op_type} {dtype}" for dtype in dtypes if not _loads(op_type, dtype)]
    assert not missing


def _loads(op_type: str, dtype: str) -> bool:
    import onnxruntime

    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype) if dtype != "bfloat16" else jnp.bfloat16.dtype)
    boolean, index = onnx.TensorProto.BOOL, onnx.TensorProto.INT64
    image, vector = [1, 1, 3, 3], [2]
    unary = ([(kind, vector)], [kind], {})
    binary = ([(kind, vector)] * 2, [kind], {})
    compared = ([(kind, vector)] * 2, [boolean], {})
    reduced = ([(kind, vector), (index, [1])], [kind], {})
    special = {
        "Where": ([(boolean, vector), (kind, vector), (kind, vector)], [kind], {}),
        "BitShift": (*binary[:2], {"direction": "LEFT"}), "Mod": (*binary[:2], {"fmod": 1}),
        "Conv": ([(kind, image)] * 2, [kind], {}), "ConvTranspose": ([(kind, image)] * 2, [kind], {}),
        "AveragePool": ([(kind, image)], [kind], {"kernel_shape": [2, 2]}),
        "MaxPool": ([(kind, image)], [kind, index], {"kernel_shape": [2, 2]}),
        "MatMul": ([(kind, [2, 2])] * 2, [kind], {}), "Gemm": ([(kind, [2, 2])] * 2, [kind], {}),
        "CumSum": ([(kind, vector), (index, [])], [kind], {}),
        "TopK": ([(kind, vector), (index, [1])], [kind, index], {}),
        "Pad": ([(kind, vector), (index, vector)], [kind], {}), "Expand": ([(kind, vector), (index, [1])], [kind], {}),
        "ScatterElements": ([(kind, vector), (index, vector), (kind, vector)], [kind], {}),
        "ScatterND": ([(kind, vector), (index, [2, 1]), (kind, vector)], [kind], {}),
        "ArgMax": ([(kind, vector)], [index], {}), "ArgMin": ([(kind, vector)], [index], {}),
        **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), compared),
        **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
                        binary),
        **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"), reduced),
    }  # fmt: skip
    inputs, outputs, attributes = special.get(op_type, unary)
    make = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        op_type, [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(len(outputs))], **attributes
    )
    graph = onnx.helper.make_graph(
        [node], "one", [make(f"x{i}", t, s) for i, (t, s) in enumerate(inputs)],
        [make(f"y{i}", t, None) for i, t in enumerate(outputs)],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


def test_scan_remat_custom_vjp_cond_dropout_top_k_in_bfloat16_at_once() -> None:
    half = jnp.bfloat16

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-2, 1e-2),))

    def sparse(h):
        largest, where = jax.lax.top_k(h, 2)
        return jnp.zeros_like(h).at[jnp.arange(len(h))[:, None], where].set(largest)

    @jax.checkpoint
    def block(weights, x, key):
        h = jax.nn.gelu(x.astype(half) @ weights["up"].astype(half))
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0).astype(half)
        h = jax.lax.cond(x[0, 0] > 0, sparse, lambda h: h * 0.5, h)
        return clipped(x + (h @ weights["down"].astype(half)).astype(x.dtype))

    def loss_fn(params, words, labels, key):
        x = params["words"].astype(half)[words].astype(jnp.float32)  # its gradient adds rows up in bfloat16
        keys = jax.random.split(key, 3)
        x, _ = jax.lax.scan(lambda x, at: (block(at[0], x, at[1]), None), x, (params["layers"], keys))
        return zoo.cross_entropy(x @ params["words"].T, labels)

    rng = np.random.default_rng(0)
    layers = {name: rng.normal(0, 0.3, shape).astype("f") for name, shape in [("up", (3, 8, 16)), ("down", (3, 16, 8))]}
    params = {"layers": layers, "words": rng.normal(0, 1, (11, 8)).astype("f")}
    words = rng.integers(0, 11, 6).astype("i")
    model = export_training_step(loss_fn, params, words, words[::-1].copy(), jax.random.key(0))
    assert [node.op_type for node in model.graph.node].count("If") >= 6  # forward and backward of three layers
    assert float(next(p.value for p in model.metadata_props if p.key == "check.error")) < 2e-2
