"""What a run of onnx-remat takes on huge models: weights over 2 GiB, a file near 2 GB, 100,000 nodes, a million.

Seconds of the whole command, and the highest resident memory of its process. The folder, a temporary one unless it is
named, needs 6 GB, and keeps the files; a million nodes need
18 GB of memory and ten minutes. Budgets are of the sum of tensors, since ONNX Runtime is not asked about so many nodes
then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from scripts.child import call, command
from tests.rewrite.test_scale import deep

WIDTH = 4096


def frozen_stack(weights: int) -> onnx.ModelProto:
    """A step that trains a small head below a stack of frozen products; every weight is WIDTH x WIDTH floats."""
    make, nodes, h = helper.make_node, [], "x"
    for i in range(weights):
        nodes.append(make("MatMul", [h, f"w{i}"], [f"z{i}"], name=f"mm{i}"))
        nodes.append(make("Tanh", [f"z{i}"], [f"a{i}"], name=f"t{i}"))
        h = f"a{i}"
    nodes += [make("Mul", [h, h], ["sq"], name="sq"), make("ReduceMean", ["sq"], ["loss"], name="loss", keepdims=0)]
    g = h
    for i in reversed(range(weights)):
        nodes += [
            make("Mul", [f"a{i}", f"a{i}"], [f"s{i}"], name=f"s{i}"),
            make("Mul", [g, f"s{i}"], [f"gs{i}"], name=f"gs{i}"),
            make("Sub", [g, f"gs{i}"], [f"gz{i}"], name=f"gz{i}"),
            make("ReduceSum", [f"gz{i}", "rows"], [f"db{i}"], name=f"db{i}", keepdims=0),
            make("Transpose", [f"w{i}"], [f"wt{i}"], name=f"wt{i}", perm=[1, 0]),
            make("MatMul", [f"gz{i}", f"wt{i}"], [f"g{i}"], name=f"dx{i}"),
        ]
        g = f"g{i}"
    typed = helper.make_tensor_value_info
    outputs = [typed("loss", TensorProto.FLOAT, [])]
    outputs += [typed(f"db{i}", TensorProto.FLOAT, [WIDTH]) for i in range(weights)]
    rows = onnx.numpy_helper.from_array(np.array([0]), "rows")
    graph = helper.make_graph(nodes, "frozen", [typed("x", TensorProto.FLOAT, [2048, WIDTH])], outputs, [rows])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def external(folder: Path) -> Path:
    """2.4 GB of weights in a data file."""
    model, count = frozen_stack(36), 36
    size = WIDTH * WIDTH * 4
    generator = np.random.default_rng(0)
    with (folder / "external.bin").open("wb") as stream:
        for _ in range(count):
            stream.write((generator.standard_normal(WIDTH * WIDTH, np.float32) * 0.02).tobytes())
    for i in range(count):
        tensor = model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "external.bin"), ("offset", i * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
    (folder / "external.onnx").write_bytes(model.SerializeToString())
    return folder / "external.onnx"


def inline(folder: Path) -> Path:
    """1.95 GB of weights in the file itself."""
    model = frozen_stack(29)
    generator = np.random.default_rng(0)
    for i in range(29):
        tensor = model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        tensor.raw_data = (generator.standard_normal(WIDTH * WIDTH, np.float32) * 0.02).tobytes()
    (folder / "inline.onnx").write_bytes(model.SerializeToString())
    return folder / "inline.onnx"


def nodes(folder: Path) -> Path:
    """100,000 nodes."""
    return _deep(folder / "nodes.onnx", 100_000)


def million(folder: Path) -> Path:
    """A million nodes."""
    return _deep(folder / "million.onnx", 1_000_000)


def _deep(path: Path, count: int) -> Path:
    model = deep(count // 12 + 100)
    assert len(model.graph.node) >= count
    path.write_bytes(model.SerializeToString())
    return path


KINDS = {"external": external, "inline": inline, "nodes": nodes, "million": million}
ITEMS = tuple(KINDS)
HEADS = ("file", "nodes", "bytes", "peak", "seconds", "resident")


def rows(kind: str, *, folder: str = "", budget: str = "60%") -> Iterator[tuple[str, ...]]:
    """One run of the command."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        home = Path(folder or scratch)
        made = home / f"{kind}.onnx"
        made = made if made.exists() else KINDS[kind](home)
        ran = call(command, str(made), str(home / "out.onnx"), "--budget", budget, "--for", "session", "--force")
        size = sum(path.stat().st_size for path in (made, made.with_suffix(".bin")) if path.exists())
        count = len(onnx.load(str(made), load_external_data=False).graph.node)
    code, said = ran.answer
    if code:
        yield (kind, "", "", said, f"{ran.wall:.0f}", "")
        return
    peak = said.splitlines()[0].partition(",")[0]
    yield (kind, f"{count:,}", f"{size / 1e9:.2f} GB", peak, f"{ran.wall:.0f}", f"{ran.memory / 1e9:.1f} GB")
