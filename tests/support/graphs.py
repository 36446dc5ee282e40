"""Small training graphs made on the spot, feeds for them, and runs of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
SAMPLES = sorted((Path(__file__).parents[2] / "sample_models").glob("*.onnx"))


def model_of(nodes, inputs, outputs, initializers=(), value_info=(), opset=20, ir_version=10):
    """A checked ModelProto; inputs and outputs are name -> shape (float) or name -> (dtype, shape)."""

    def typed(name, kind):
        dtype, shape = (
            kind if isinstance(kind, tuple) and len(kind) == 2 and isinstance(kind[1], list) else (FLOAT, kind)
        )
        return helper.make_tensor_value_info(name, dtype, shape)

    graph = helper.make_graph(
        nodes, "g", [typed(n, k) for n, k in inputs.items()], [typed(n, k) for n, k in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in dict(initializers).items()],
        value_info=list(value_info),
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def mlp(layers=6, batch=256, width=64, seed_dropout=None, opset=20, dims=None):
    """A tanh MLP's whole step: forward, mean-square loss, backward, SGD, in plain ops. Deterministic names."""
    nodes, inputs, outputs = [], {"x": [dims or batch, width], "t": [dims or batch, width]}, {"loss": []}
    initializers = {"lr": np.float32(0.01), "two": np.float32(2.0 / (batch * width))}
    make = helper.make_node
    h = "x"
    for i in range(layers):
        inputs[f"w{i}"] = [width, width]
        nodes.append(make("MatMul", [h, f"w{i}"], [f"z{i}"], name=f"mm{i}"))
        nodes.append(make("Tanh", [f"z{i}"], [f"a{i}"], name=f"act{i}"))
        h = f"a{i}"
        if seed_dropout is not None:
            initializers |= {"ratio": np.float32(0.5), "train": np.bool_(True)}
            seed = {} if seed_dropout == "none" else {"seed": int(seed_dropout)}
            nodes.append(make("Dropout", [h, "ratio", "train"], [f"d{i}", f"m{i}"], name=f"drop{i}", **seed))
            h = f"d{i}"
    nodes.append(make("Sub", [h, "t"], ["e"], name="err"))
    nodes.append(make("Mul", ["e", "e"], ["ee"], name="sq"))
    nodes.append(make("ReduceMean", ["ee"], ["loss"], name="mean", keepdims=0))
    nodes.append(make("Mul", ["e", "two"], ["g"], name="dloss"))
    g = "g"
    for i in reversed(range(layers)):
        if seed_dropout is not None:
            nodes.append(make("Cast", [f"m{i}"], [f"mf{i}"], name=f"mask{i}", to=FLOAT))
            nodes.append(make("Add", [f"mf{i}", f"mf{i}"], [f"ms{i}"], name=f"scale{i}"))
            nodes.append(make("Mul", [g, f"ms{i}"], [f"gd{i}"], name=f"ddrop{i}"))
            g = f"gd{i}"
        nodes.append(make("Mul", [f"a{i}", f"a{i}"], [f"aa{i}"], name=f"aa{i}"))
        nodes.append(make("Mul", [g, f"aa{i}"], [f"gaa{i}"], name=f"gaa{i}"))
        nodes.append(make("Sub", [g, f"gaa{i}"], [f"gz{i}"], name=f"dact{i}"))
        source = "x" if i == 0 else (f"d{i - 1}" if seed_dropout is not None else f"a{i - 1}")
        nodes.append(make("Transpose", [source], [f"T{i}"], name=f"t{i}", perm=[1, 0]))
        nodes.append(make("MatMul", [f"T{i}", f"gz{i}"], [f"dw{i}"], name=f"dw{i}"))
        if i:
            nodes.append(make("Transpose", [f"w{i}"], [f"wT{i}"], name=f"wt{i}", perm=[1, 0]))
            nodes.append(make("MatMul", [f"gz{i}", f"wT{i}"], [f"gx{i}"], name=f"dx{i}"))
            g = f"gx{i}"
    for i in range(layers):
        nodes.append(make("Mul", [f"dw{i}", "lr"], [f"s{i}"], name=f"step{i}"))
        nodes.append(make("Sub", [f"w{i}", f"s{i}"], [f"new.w{i}"], name=f"update{i}"))
        outputs[f"new.w{i}"] = [width, width]
    return model_of(nodes, inputs, outputs, initializers, opset=opset)


def feeds_for(model: onnx.ModelProto, seed: int = 0, **dims: int) -> dict[str, np.ndarray]:
    """Random inputs of a model."""
    generator = np.random.default_rng(seed)
    known = {t.name for t in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in known:
            continue
        kind = value.type.tensor_type
        shape = [d.dim_value or dims[d.dim_param] for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if np.issubdtype(dtype, np.floating):
            feeds[value.name] = (generator.standard_normal(shape) * 0.3).astype(dtype)
        elif dtype == np.bool_:
            feeds[value.name] = generator.integers(0, 2, shape).astype(bool)
        else:
            feeds[value.name] = generator.integers(0, 2, shape).astype(dtype)
    return feeds


def run_model(model: onnx.ModelProto, feeds, level: str = "disable", threads: int = 1):
    """Outputs of a model on stock ONNX Runtime."""
    return session_of(model, level, threads).run(None, feeds)


def session_of(model: onnx.ModelProto | Path, level: str = "disable", threads: int = 1):
    """A session of stock ONNX Runtime; of a file, where data lies next to it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = {
        "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }[level]
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def same_numbers(first, second) -> bool:
    """Are two lists of outputs equal within the rounding of one function, such as that of a fused kernel?"""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and (
            np.allclose(a, b, rtol=2e-3 if a.dtype == np.float16 else 2e-5, atol=1e-6, equal_nan=True)
            if a.dtype.kind == "f" else a.tobytes() == b.tobytes()
        )
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


def same_at(level: str):
    """The comparison that holds at a level of optimisation: nothing is fused at "disable"."""
    return same_bits if level == "disable" else same_numbers


def same_bits(first, second) -> bool:
    """Are two lists of outputs equal to the last bit?"""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )
