"""Files made to harm whoever reads them: each gets its exit code and a line that says why, and leaves nothing behind.

A table. Where data lies, by what holds it; operators that no kernel runs; sizes that no machine has; functions that
grow without end; metadata that lie. The slow ones, which use up the limits, run with ``--fuzz``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.app.cli import main
from onnx_remat.process import worker
from tests.support import hostile
from tests.support.computing import computed, reader
from tests.support.graphs import mlp
from tests.support.hostile import ANSWERED, REFUSED, Change, Hostile, typed
from tests.support.pace import slowness
from tests.support.slow import few

pytest.importorskip("onnxruntime")
node, INT64, BOOL = helper.make_node, TensorProto.INT64, TensorProto.BOOL


# --- where data lies -------------------------------------------------------------------------------------------------


def stored_at(location: str, name: str = "held") -> TensorProto:
    tensor = TensorProto(name=name, data_type=1, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_initializer(m: onnx.ModelProto, tensor: TensorProto) -> None:
    m.graph.initializer.append(tensor)


def in_constant(m: onnx.ModelProto, tensor: TensorProto) -> None:
    m.graph.node.append(node("Constant", [], ["held"], value=tensor))


def in_list(m: onnx.ModelProto, tensor: TensorProto) -> None:
    kept = m.graph.node.add(op_type="Neg", input=["loss"], output=["held"])
    kept.attribute.add(name="several", type=onnx.AttributeProto.TENSORS).tensors.append(tensor)


def in_body(m: onnx.ModelProto, tensor: TensorProto) -> None:
    body = helper.make_graph([node("Constant", [], ["k"], value=tensor)], "b", [], [typed("k", [4, 4])])
    m.graph.input.append(typed("c", [], BOOL))
    m.graph.node.append(node("If", ["c"], ["held"], then_branch=body, else_branch=body))


def in_function(m: onnx.ModelProto, tensor: TensorProto) -> None:
    body = [node("Constant", [], ["k"], value=tensor), node("Identity", ["a"], ["b"])]
    m.functions.append(helper.make_function("my", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)]))


def in_function_default(m: onnx.ModelProto, tensor: TensorProto) -> None:
    in_function(m, numpy_helper.from_array(np.zeros(1, np.float32)))
    m.functions[0].attribute_proto.append(helper.make_attribute("k", tensor))


def in_sparse(m: onnx.ModelProto, tensor: TensorProto) -> None:
    sparse = m.graph.sparse_initializer.add(dims=[4, 4])
    sparse.values.CopyFrom(tensor)
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(4)))


def in_sparse_attribute(m: onnx.ModelProto, tensor: TensorProto) -> None:
    sparse = onnx.SparseTensorProto(dims=[4, 4], values=tensor)
    attribute = m.graph.node.add(op_type="Constant", output=["held"]).attribute.add(name="sparse_value", type=11)
    attribute.sparse_tensor.CopyFrom(sparse)


def in_disguise(m: onnx.ModelProto, tensor: TensorProto) -> None:
    """An attribute that states another type than that of what it holds."""
    attribute = m.graph.node.add(op_type="Neg", input=["loss"], output=["held"]).attribute.add(name="k", type=1)
    attribute.t.CopyFrom(tensor)


def in_training_info(m: onnx.ModelProto, tensor: TensorProto) -> None:
    m.training_info.add().algorithm.initializer.append(tensor)


HOLDERS = [in_initializer, in_constant, in_list, in_body, in_function, in_function_default, in_sparse,
           in_sparse_attribute, in_disguise, in_training_info]  # fmt: skip
PLACES = {
    "../secret.bin": "outside the model's folder", "sub/../../secret.bin": "outside the model's folder",
    "sub/../w.bin": "outside the model's folder", "/etc/passwd": "outside the model's folder",
    "..": "outside the model's folder", ".": "outside the model's folder", "": "outside the model's folder",
    "sub\\..\\..\\w.bin": "outside the model's folder", "C:\\w.bin": "outside the model's folder",
    "away.bin": "outside the model's folder", "away/secret.bin": "outside the model's folder",
    "zero": "outside the model's folder", "pipe": "not a regular file", "sub": "not a regular file",
    "loop": "external data", "ghost.bin": "ghost.bin", "short.bin": "too short", "a\0b": "zero byte",
}  # fmt: skip


def data_rows() -> Iterator[Hostile]:
    for holder in HOLDERS:
        for place, message in PLACES.items():

            def change(m, holder=holder, place=place):
                holder(m, stored_at(place))

            yield Hostile(f"{holder.__name__} {place!r}", change, message)


# --- operators that no kernel runs -----------------------------------------------------------------------------------


def op(kind: str, *inputs: tuple[str, list[int]], outputs: int = 1, **attributes: object) -> Change:
    """A change that adds an op on inputs of its own, as an output of the graph."""

    def change(m: onnx.ModelProto) -> None:
        names = [f"hostile.{i}.{name}" for i, (name, _) in enumerate(inputs)]
        for name, (_, shape) in zip(names, inputs, strict=True):
            m.graph.input.append(typed(name, shape))
        made = [f"hostile.out{i}" for i in range(outputs)]
        m.graph.node.append(node(kind, names, made, name="hostile", **attributes))
        m.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)

    return change


X, W = ("x", [1, 4, 8, 8]), ("w", [4, 4, 3, 3])
OPS: dict[str, Change] = {
    "Conv group 0": op("Conv", X, W, group=0),
    "Conv group -1": op("Conv", X, W, group=-1),
    "Conv group 3": op("Conv", X, W, group=3),
    "Conv strides 0": op("Conv", X, W, strides=[0, 0]),
    "Conv strides -1": op("Conv", X, W, strides=[-1, -1]),
    "Conv dilations 0": op("Conv", X, W, dilations=[0, 0]),
    "Conv pads of another length": op("Conv", X, W, pads=[1, 1]),
    "Conv pads -99": op("Conv", X, W, pads=[-99] * 4),
    "Conv kernel of another size": op("Conv", X, W, kernel_shape=[5, 5]),
    "Conv kernel 2**62": op("Conv", X, W, kernel_shape=[2**62, 2**62]),
    "Conv auto_pad nonsense": op("Conv", X, W, auto_pad="SIDEWAYS"),
    "Conv of a scalar": op("Conv", ("x", []), W),
    "ConvTranspose strides 0": op("ConvTranspose", X, W, strides=[0, 0]),
    "ConvTranspose group 0": op("ConvTranspose", X, W, group=0),
    "ConvTranspose output_padding 2**62": op("ConvTranspose", X, W, output_padding=[2**62, 2**62]),
    "MaxPool kernel 0": op("MaxPool", X, kernel_shape=[0, 0]),
    "MaxPool kernel 99": op("MaxPool", X, kernel_shape=[99, 99]),
    "MaxPool strides 0": op("MaxPool", X, kernel_shape=[2, 2], strides=[0, 0]),
    "AveragePool kernel -1": op("AveragePool", X, kernel_shape=[-1, -1]),
    "Transpose perm of another length": op("Transpose", X, perm=[0]),
    "Transpose perm twice": op("Transpose", X, perm=[0, 0, 0, 0]),
    "Transpose perm 2**62": op("Transpose", X, perm=[2**62, 0, 1, 2]),
    "Concat axis 99": op("Concat", X, X, axis=99),
    "Concat axis -2**63": op("Concat", X, X, axis=-(2**63)),
    "Gather axis 99": op("Gather", X, X, axis=99),
    "Flatten axis 99": op("Flatten", X, axis=99),
    "Softmax axis 99": op("Softmax", X, axis=99),
    "Split axis 99": op("Split", X, outputs=2, axis=99, num_outputs=2),
    "Split into 0": op("Split", X, outputs=2, num_outputs=0),
    "Split into -1": op("Split", X, outputs=2, num_outputs=-1),
    "Split with one output too many": op("Split", X, outputs=3, num_outputs=2),
    "Gemm of rank 4": op("Gemm", X, X),
    "Gemm that does not fit": op("Gemm", ("a", [2, 3]), ("b", [4, 5])),
    "MatMul that does not fit": op("MatMul", ("a", [2, 3]), ("b", [4, 5])),
    "Add that does not fit": op("Add", ("a", [2, 3]), ("b", [4, 5])),
    "Einsum without letters": op("Einsum", X, equation="1234->"),
    "Einsum of two arrows": op("Einsum", X, equation="abcd->a->b"),
    "Einsum of too few terms": op("Einsum", X, X, equation="abcd->a"),
    "Einsum of too many terms": op("Einsum", X, equation="abcd,abcd->a"),
    "Einsum with a lone comma": op("Einsum", X, equation=","),
    "Einsum of nothing": op("Einsum", X, equation=""),
    "LayerNormalization axis 99": op("LayerNormalization", X, ("s", [8]), axis=99),
    "BatchNormalization of rank 0": op("BatchNormalization", ("x", []), *[("s", [1])] * 4),
    "DepthToSpace block 0": op("DepthToSpace", X, blocksize=0),
    "SpaceToDepth block 0": op("SpaceToDepth", X, blocksize=0),
    "Cast to nothing": op("Cast", X, to=99),
    "LRN size 0": op("LRN", X, size=0),
    "TopK of a float": op("TopK", X, ("k", [1]), outputs=2),
    "ReduceSum axis of a float": op("ReduceSum", X, ("axes", [1])),
    "Pad by floats": op("Pad", X, ("pads", [8])),
    "If of a float": op("If", X),
    "Loop without a body": op("Loop", X),
    "Scan without a body": op("Scan", X, num_scan_inputs=1),
    "LSTM of hidden size 0": op("LSTM", ("x", [1, 1, 1]), ("w", [1, 4, 1]), ("r", [1, 4, 1]), hidden_size=0),
    "ai.onnx.ml op of nothing": op("ArrayFeatureExtractor", X, X),
    "GroupNormalization of 0 groups": op("GroupNormalization", X, ("s", [4]), ("b", [4]), num_groups=0),
}


LET_THROUGH = {
    "Conv group 3", "Conv kernel of another size", "ConvTranspose group 0", "Transpose perm of another length",
    "Concat axis -2**63", "BatchNormalization of rank 0", "Einsum of two arrows",
}  # fmt: skip
"""By ONNX's inference and by ONNX Runtime when it loads the file; it refuses them when they run."""


def op_rows() -> Iterator[Hostile]:
    for name, change in OPS.items():
        yield Hostile(name, change, "", ANSWERED if name in LET_THROUGH else REFUSED)
    yield Hostile("Einsum that hangs", op("Einsum", X, equation="......->..."), "the limit", slow=True)


# --- sizes that no machine has ---------------------------------------------------------------------------------------


def made_of(kind: str, size: int, hidden: bool) -> Change:
    """Tile, Range, ConstantOfShape or Expand to `size` elements; `hidden`: behind a value of unknown size."""

    def change(m: onnx.ModelProto) -> None:
        g = m.graph
        g.initializer.append(numpy_helper.from_array(np.array([size]), "n"))
        g.initializer.append(numpy_helper.from_array(np.array(size), "n0"))
        g.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
        g.initializer.append(numpy_helper.from_array(np.array(0), "zero0"))
        g.initializer.append(numpy_helper.from_array(np.array(1), "one0"))
        if hidden:
            g.node.append(node("NonZero", ["x"], ["unknown"], name="hide"))
        arguments = {"Tile": ["zero", "n"], "Range": ["zero0", "n0", "one0"], "ConstantOfShape": ["n"],
                     "Expand": ["zero", "n"]}[kind]  # fmt: skip
        g.node.append(node(kind, arguments, ["huge"], name="hostile"))
        g.node.append(node("Gather", ["huge", "zero"], ["few"], axis=0))
        if hidden:
            g.node.append(node("Reshape", ["unknown", "few"], ["shaped"]))
            g.output.append(onnx.ValueInfoProto(name="shaped"))
        g.output.append(onnx.ValueInfoProto(name="few"))

    return change


def size_rows() -> Iterator[Hostile]:
    for kind in ("Tile", "Range", "ConstantOfShape", "Expand"):
        for size in (10**10, 2**40, 2**62):
            for hidden in (False, True):
                where = " behind an unknown size" if hidden else ""
                yield Hostile(
                    f"{kind} to {size}{where}",
                    made_of(kind, size, hidden),
                    "",
                    REFUSED if hidden or size > 2**50 else (3,),
                )
    for power in (50, 62):
        yield Hostile(f"input of 2**{power}", lambda m, n=2**power: m.graph.input.append(typed("big", [n])), "exceeds")
    yield Hostile("initializer of 2**62", lambda m: m.graph.initializer.add(name="w", data_type=1, dims=[2**62]), "")
    yield Hostile("initializer of -1", lambda m: m.graph.initializer.add(name="w", data_type=1, dims=[-1]), "negative")


def vector_of(size: int) -> Change:
    """An update of a flat vector of parameters, as ordinary as can be."""

    def change(m: onnx.ModelProto) -> None:
        m.graph.input.extend([typed("flat", [size]), typed("flat.gradient", [size])])
        m.graph.node.append(node("Sub", ["flat", "flat.gradient"], ["new.flat"]))
        m.graph.node.append(node("NonZero", ["x"], ["unknown"]))  # so that sizes are looked for in data
        m.graph.node.append(node("Size", ["unknown"], ["size"]))
        m.graph.output.extend([typed("new.flat", [size]), typed("size", [], INT64)])

    return change


# --- functions that grow, and many of everything ---------------------------------------------------------------------


def calls(depth: int, times: int) -> Change:
    """Functions that call each other `depth` deep, each the next `times` times."""

    def change(m: onnx.ModelProto) -> None:
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
        for i in range(depth):
            names = ["a", *(f"t{k}" for k in range(times - 1)), "b"]
            kind, domain = ("Tanh", "") if i == depth - 1 else (f"F{i + 1}", "my")
            body = [node(kind, [a], [b], domain=domain) for a, b in itertools.pairwise(names)]
            m.functions.append(helper.make_function("my", f"F{i}", ["a"], ["b"], body, imports))
        m.opset_import.append(helper.make_opsetid("my", 1))
        m.graph.node.append(node("F0", ["loss"], ["called"], domain="my"))
        m.graph.output.append(typed("called", []))

    return change


def calls_itself(m: onnx.ModelProto) -> None:
    calls(2, 1)(m)
    m.functions[1].node[0].op_type, m.functions[1].node[0].domain = "F0", "my"


def nested(depth: int) -> Change:
    """Bodies within bodies."""

    def change(m: onnx.ModelProto) -> None:
        body = helper.make_graph([node("Neg", ["loss"], ["r"])], "b", [], [typed("r", [])])
        m.graph.input.append(typed("c", [], BOOL))
        for _ in range(depth):
            inner = node("If", ["c"], ["r"], then_branch=body, else_branch=body)
            body = helper.make_graph([inner], "b", [], [typed("r", [])])
        m.graph.node.append(node("If", ["c"], ["deep"], then_branch=body, else_branch=body))
        m.graph.output.append(typed("deep", []))

    return change


def stated(key: str, value: str) -> Change:
    return lambda m: m.metadata_props.add(key=key, value=value)


SHAPES, DEEP, OBJECTS = "onnx_remat.shapes", "[" * 99_999, '{"z0":' * 99_999


def other_rows() -> Iterator[Hostile]:
    yield Hostile("31 functions that double each other", calls(31, 2), "the limit")
    yield Hostile("6 functions that call each other 100 times", calls(6, 100), "the limit")
    yield Hostile("functions 3000 deep", calls(3000, 1), "", slow=True)
    yield Hostile("functions that call each other in turn", calls_itself, "cannot be inlined")
    yield Hostile("bodies 4 deep", nested(4), "", ANSWERED)
    for value in ("null", "[]", "3", '"z0"', "{", '{"z0": null}', '{"z0": []}', '{"z0": [1, -3]}', '{"z0": [1, 2.5]}',
                  '{"z0": [999, 3]}', '{"z0": [1, 1e99]}', '{"z0": [1, [3]]}', '{"z0": "abc"}', '{"z0": [1, null]}',
                  DEEP, OBJECTS, '{"z0": [1, 999999999, 999999999]}'):  # fmt: skip
        yield Hostile(f"shapes {value[:20]}", stated(SHAPES, value), "is damaged")
    yield Hostile("shapes that are wrong", stated(SHAPES, json.dumps({"z0": [1, 3, 3]})), "by shape inference")
    yield Hostile("mark of what was read", lambda m: stored_mark(m), "refers to bytes of a file")


def stored_mark(m: onnx.ModelProto) -> None:
    tensor = m.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("onnx_remat.written", "0"), ("offset", "x")):
        tensor.external_data.add(key=key, value=value)


ROWS = [*data_rows(), *op_rows(), *size_rows(), *other_rows(), *hostile.rows()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with all that data can be said to lie in, below another with what nobody may touch."""
    above = tmp_path_factory.mktemp("above")
    folder = above / "home"
    (folder / "sub").mkdir(parents=True)
    (above / "secret.bin").write_bytes(b"s" * 64)
    (folder / "w.bin").write_bytes(b"w" * 64)
    (folder / "short.bin").write_bytes(b"s")
    (folder / "away.bin").symlink_to(above / "secret.bin")
    (folder / "away").symlink_to(above)
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return folder


def everything(folder: Path) -> dict[str, object]:
    return {str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else 0 for p in sorted(folder.rglob("*"))}


COMMAND = ["bad.onnx", "sub/out.onnx", "--for", "session", "--budget", "95%", "--selector", "keep_all"]
COMMAND += ["--effort", "100ms", "--dry-run", "-q"]
SECONDS, MEMORY = 10.0 if os.environ.get("NUMBA_BOUNDSCHECK", "0") == "0" else math.inf, 10**9
"""What a file may cost: seconds of computing on an idle core (any where compiled functions check their indices), and
bytes, of this process and of the one that reads."""


def memory(process: Path, field: str) -> int:
    return int((process / "status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


_held: dict[Path, int] = {}


def forget_peaks() -> None:
    """Begin to measure `grown`."""
    _held.clear()
    for process in filter(None, (Path("/proc/self"), reader())):
        (process / "clear_refs").write_text("5")
        _held[process] = memory(process, "VmRSS")


def grown() -> int:
    """The most by which either process has grown; one that has ended was held to a limit of its own."""
    return max(memory(process, "VmHWM") - held for process, held in _held.items() if process.exists())


QUICK = [row for row in ROWS[::3] if not any(large in row.name for large in ("5,000", "3,000", "30,000"))]


@pytest.mark.parametrize("row", few(ROWS, QUICK), ids=lambda row: row.name)
def test_hostile_files_are_refused(row, home, capsys, monkeypatch, pytestconfig):
    if row.slow and not pytestconfig.getoption("--fuzz"):
        pytest.skip("uses up the limits: --fuzz 1")
    monkeypatch.chdir(home)
    model = mlp(layers=1, batch=8, width=4)
    made = row.change(model)
    (home / "bad.onnx").write_bytes(made if isinstance(made, bytes) else model.SerializeToString())
    before, start = everything(home.parent), computed()
    forget_peaks()
    code = main(COMMAND)
    took, held = computed() - start, grown()
    out, err = capsys.readouterr()
    assert code in row.codes and out == "", err
    line = err.removesuffix("\n")
    assert (not code and not err) or (line.startswith("onnx-remat: error: ") and line.isprintable()), err
    assert len(line) < 800
    assert row.message in err
    assert everything(home.parent) == before
    assert held < MEMORY and (took < SECONDS or took < SECONDS * slowness())


def test_a_flat_vector_of_parameters_costs_nothing(home, monkeypatch):
    """ONNX's own data propagation would make an entry for each of its elements: 3 GB for these."""
    model = mlp(layers=1, batch=8, width=4)
    vector_of(40_000_000)(model)
    (home / "flat.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(home)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["flat.onnx", "out.onnx", "--budget", "100%", "--dry-run", "-q"]) in ANSWERED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_whoever_reads_never_took_a_gigabyte():
    """After all the others: the high-water marks of this process's reader."""
    worker.start()
    assert worker._running is not None
    status = Path(f"/proc/{worker._running[1].process.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 2**20
