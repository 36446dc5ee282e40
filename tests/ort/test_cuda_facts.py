"""The CUDA provider's facts against what ONNX Runtime decides on a fake device: placement, buffers, scratch memory.

One node is tested at a time. To see where it runs, every input comes from a node on the device and every output goes to
one: between host and device lies a Memcpy. To see its buffers, one input dies there: the books count allocations.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat.ort.kernels.base import Call, key
from onnx_remat.ort.kernels.cuda import CUDA, uneven_pads
from onnx_remat.ort.kernels.registry import kernels_of
from tests.support.fake_cuda import run

ROOT = Path(__file__).parents[2]
needs_device = pytest.mark.skipif(bool(run.why_not()), reason=run.why_not())
make = helper.make_node


@dataclass(frozen=True)
class Case:
    """A node: inputs are shapes of T, (type, shape), arrays that must have these values, or None where absent."""

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any]
    opset: int = 20

    def __str__(self) -> str:
        return f"{self.op}-{len(self.inputs)}-{dict(self.attributes)}-{self.opset}".replace(" ", "")

    def names(self, prefix: str) -> list[str]:
        """Names of its inputs, "" for one that is absent."""
        return [f"{prefix}{i}" if entry is not None else "" for i, entry in enumerate(self.inputs)]

    def node(self, inputs: Sequence[str]) -> onnx.NodeProto:
        domain, _, op = self.op.rpartition(":")
        outputs = ["out", "more"] if op in ("Dropout", "Split", "TopK") else ["out"]
        return make(op, inputs, outputs, name="tested", domain=domain, **self.attributes)


X, IMAGE, CHANNELS = (6, 10), (2, 4, 8, 8), (4,)
LONG, MASK = TensorProto.INT64, (TensorProto.BOOL, X)


def ints(*entries: int) -> np.ndarray:
    return np.array(entries, np.int64)


def scalar(value: int) -> np.ndarray:
    return np.array(value, np.int64)


_UNARY = (
    "Abs", "Acos", "Acosh", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Elu", "Erf", "Exp",
    "EyeLike", "Flatten", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "IsInf", "IsNaN",
    "LeakyRelu", "Log", "LogSoftmax", "Max", "Mean", "Min", "Neg", "RandomNormalLike", "RandomUniformLike",
    "Reciprocal", "Relu", "Round", "Selu", "Shape", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Softmax",
    "Softplus", "Softsign", "Sqrt", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Trilu", "LpNormalization",
)  # fmt: skip
_BINARY = (
    "Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Mul",
    "PRelu", "Pow", "Sub", "Sum",
)  # fmt: skip
_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSumExp",
)  # fmt: skip

CASES = [
    *(Case(op, [X], {}) for op in _UNARY),
    *(Case(op, [X, X], {}) for op in _BINARY),
    *(Case(op, [X, ints(1)], {}) for op in _REDUCTIONS),
    Case("Where", [MASK, X, X], {}),
    Case("Cast", [X], {"to": TensorProto.INT32}),
    Case("Reshape", [X, ints(10, 6)], {}),
    Case("Squeeze", [(6, 1, 10), ints(1)], {}),
    Case("Unsqueeze", [X, ints(1)], {}),
    Case("Expand", [X, ints(6, 10)], {}),
    Case("Tile", [X, ints(1, 1)], {}),
    Case("Pad", [X, ints(0, 0, 0, 0)], {}),
    Case("Transpose", [(8, 8)], {}),
    Case("Concat", [X], {"axis": 0}),
    Case("Slice", [X, ints(0), ints(6), ints(0), ints(1)], {}),
    Case("Gather", [X, ints(0, 1)], {}),
    Case("GatherElements", [X, (LONG, X)], {}),
    Case("GatherND", [X, (LONG, (2, 1))], {}),
    Case("ScatterElements", [X, (LONG, X), X], {}),
    Case("ScatterND", [X, (LONG, (1, 1)), (1, 10)], {}),
    Case("CumSum", [X, scalar(0)], {}),
    Case("Gemm", [X, (10, 10), X], {}),
    Case("MatMul", [X, (10, 10)], {}),
    Case("BatchNormalization", [IMAGE, *[CHANNELS] * 4], {}),
    Case("InstanceNormalization", [IMAGE, *[CHANNELS] * 2], {}),
    Case("LayerNormalization", [X, (10,), (10,)], {}),
    Case("MaxPool", [IMAGE], {"kernel_shape": [1, 1]}),
    Case("MaxPool", [IMAGE], {"kernel_shape": [1, 1]}, 22),
    Case("AveragePool", [IMAGE], {"kernel_shape": [2, 2]}, 22),
    Case("GlobalAveragePool", [IMAGE], {}),
    Case("Conv", [IMAGE, (4, 4, 1, 1)], {}),
    Case("ConvTranspose", [IMAGE, (4, 4, 3, 3)], {"pads": [1, 1, 1, 1]}),
    Case("ConvTranspose", [IMAGE, (4, 4, 3, 3)], {"pads": [1, 1, 0, 0]}),
    Case("Split", [X, ints(3, 3)], {"axis": 0}),
    Case("TopK", [X, ints(2)], {}),
    Case("Range", [scalar(0), scalar(5), scalar(1)], {}),
    Case("ConstantOfShape", [ints(6, 10)], {}),
    Case("ArgMax", [X], {}),
    Case("DepthToSpace", [IMAGE], {"blocksize": 2}),
    Case("LRN", [IMAGE], {"size": 3}),
    Case("Not", [MASK], {}),
    *(Case(op, [MASK, MASK], {}) for op in ("And", "Or", "Xor")),
    Case("Mod", [X, X], {"fmod": 1}),
    Case("Mod", [(LONG, X), (LONG, X)], {}),
    Case("Einsum", [X, (10, 6)], {"equation": "ij,jk->ik"}),
    Case("OneHot", [(LONG, (6,)), scalar(10), (2,)], {}),
    Case("Dropout", [X], {}),
    Case("RMSNormalization", [X, (10,)], {}, 23),
    Case("Resize", [IMAGE, None, None, ints(2, 4, 16, 16)], {"mode": "nearest"}),
    Case("NonZero", [X], {}),
    Case("com.microsoft:Gelu", [X], {}),
    Case("com.microsoft:QuickGelu", [X], {}),
    Case("com.microsoft:BiasGelu", [X, (10,)], {}),
    Case("com.microsoft:FusedMatMul", [X, (10, 10)], {}),
    Case("com.microsoft:FusedConv", [IMAGE, (4, 4, 1, 1), CHANNELS, IMAGE], {"activation": "Relu"}),
]
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
NOT_REGISTERED = ("NOT_IMPLEMENTED", "Type 'tensor(float16)' of input")


def test_every_op_that_converters_write_has_a_case() -> None:
    """Those of the samples; operators that are expanded before planning, having no kernel, need none."""
    written = {
        key(node)
        for path in (ROOT / "sample_models").rglob("*.onnx")
        for node in onnx.load(path, load_external_data=False).graph.node
    }
    tested = {("com.microsoft", case.op[14:]) if ":" in case.op else ("", case.op) for case in CASES}
    assert written - tested - CUDA.no_kernel == set()


def element(entry: Any, dtype: int) -> tuple[int, tuple[int, ...]]:
    """Element type and shape of an input."""
    if isinstance(entry, np.ndarray):
        return LONG, entry.shape
    return entry if isinstance(entry[-1], tuple) else (dtype, entry)


def placed(case: Case, dtype: int, path: Path) -> None:
    """Write a model in which everything around the node is on the device."""
    nodes, inputs = [], []
    for slot, entry in enumerate(case.inputs):
        if entry is None:
            continue
        kind, shape = element(entry, dtype)
        inputs.append(helper.make_tensor_value_info(f"x{slot}", kind, shape))
        how = {"op_type": "Concat", "axis": 0} if shape else {"op_type": "Transpose"}
        nodes.append(make(inputs=[f"x{slot}"], outputs=[f"d{slot}"], **how))
    tested = case.node(case.names("d"))
    after = [make("Transpose", [name], [f"{name}_read"]) for name in tested.output]
    save([*nodes, tested, *after], inputs, [f"{name}_read" for name in tested.output], (), case.opset, path)


def dying(case: Case, dtype: int, slot: int, keep: bool, path: Path) -> None:
    """Write a model in which one input dies at the node, or is also an output."""
    inputs, initializers = [], []
    for i, entry in enumerate(case.inputs):
        if entry is None:
            continue
        kind, shape = element(entry, dtype)
        if isinstance(entry, np.ndarray):
            initializers.append(onnx.numpy_helper.from_array(entry, f"x{i}"))
        else:
            inputs.append(helper.make_tensor_value_info(f"x{i}", kind, shape))
    tested = case.node(["dies" if i == slot else name for i, name in enumerate(case.names("x"))])
    nodes = [make("Concat", [f"x{slot}"], ["dies"], axis=0), tested, make("Shape", ["out"], ["shape"])]
    save(nodes, inputs, ["shape", "dies"] if keep else ["shape"], initializers, case.opset, path)


def save(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[str],
    initializers: Sequence[onnx.TensorProto], opset: int, path: Path,
) -> None:  # fmt: skip
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=n) for n in outputs], initializers)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)


def ask(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What became of each file on the fake device."""
    job = {"libraries": str(run.libraries()), "paths": [str(path) for path in paths]}
    done = subprocess.run(
        [run.environment() / "bin" / "python", "-m", "tests.support.fake_cuda.placing"], cwd=run.ROOT,
        input=json.dumps(job), capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"ORT_DISABLE_TELEMETRY": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def placements(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("placed")
    keys = [(case, dtype) for case in CASES for dtype in TYPES]
    paths = [folder / f"{i}.place.onnx" for i in range(len(keys))]
    for (case, dtype), path in zip(keys, paths, strict=True):
        placed(case, dtype, path)
    return {(str(case), dtype): answer for (case, dtype), answer in zip(keys, ask(paths), strict=True)}


@needs_device
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_where_nodes_and_their_inputs_lie(case: Case, dtype: int, placements: Mapping[Any, Any]) -> None:
    answer = placements[str(case), dtype]
    first = element(case.inputs[0], dtype)[0]
    if dtype != TensorProto.FLOAT and any(why in answer.get("error", "") for why in NOT_REGISTERED):
        pytest.skip(f"{case.op} is not registered for float16")
    assert "error" not in answer, answer
    makers = {name: (op, label) for op, label, _, outputs in answer["nodes"] for name in outputs}
    readers = {name: op for op, _, inputs, _ in answer["nodes"] for name in inputs}
    ((_, _, inputs, outputs),) = [node for node in answer["nodes"] if node[1] == "tested"]
    given = [name for name in inputs if name]
    widened = [makers[name][0] == "Cast" for name in given]  # float16 that the host computes in float32
    copied = tuple(i for i, name in enumerate(inputs) if name and makers[name][0] == "MemcpyToHost")
    returned = all(readers[name] == "MemcpyFromHost" for name in outputs)
    node = case.node(case.names("d"))
    on_host = any(widened) or (len(copied) == len(given) and returned)
    assert CUDA.on_host(node, first, case.opset) == on_host
    if not on_host:
        assert copied == tuple(slot for slot in CUDA.host_slots(node) if slot < len(inputs) and inputs[slot])


@pytest.fixture(scope="module")
def buffers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, bool], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("buffers")
    keys = [
        (case, slot, keep)
        for case in CASES if not CUDA.on_host(case.node(()), TensorProto.FLOAT, case.opset)
        for slot, entry in enumerate(case.inputs) if isinstance(entry, tuple)
        for keep in (False, True)
    ]  # fmt: skip
    paths = [folder / f"{i}.onnx" for i in range(len(keys))]
    for (case, slot, keep), path in zip(keys, paths, strict=True):
        dying(case, TensorProto.FLOAT, slot, keep, path)
    return {(str(c), slot, keep): answer for (c, slot, keep), answer in zip(keys, ask(paths), strict=True)}


@needs_device
@pytest.mark.parametrize("case", CASES, ids=str)
def test_which_nodes_share_a_buffer_with_an_input(case: Case, buffers: Mapping[Any, Any]) -> None:
    """Where the input dies, it and the output are allocated, or one for both; where it is an output, only the other."""
    node = case.node(case.names("x"))
    alias, inplace = CUDA.aliases(node), CUDA.may_inplace(node, TensorProto.FLOAT)
    for slot in range(len(case.inputs)):
        if (str(case), slot, False) not in buffers or case.op in ("Shape", "Size"):
            continue
        dies, kept = (buffers[str(case), slot, keep]["allocated"] for keep in (False, True))
        assert (len(kept) == 0) == ((slot, 0) in alias), f"alias of input {slot}: {kept}"
        assert (len(dies) == 1) == ((slot, 0) in (*alias, *inplace)), f"input {slot} in place: {dies}"


DEEP = (4, 8, 64, 64)
SCRATCH = [
    Case("Softmax", [DEEP], {"axis": 1}),
    Case("Softmax", [DEEP], {"axis": 3}),
    Case("Softmax", [DEEP], {"axis": 1}, 11),
    Case("LogSoftmax", [DEEP], {"axis": 1}),
    *(Case(op, [DEEP, ints(0, 2, 3)], {}) for op in _REDUCTIONS),
    *(
        Case(op, [shape, ints(-1)], {})
        for op in ("ReduceSum", "ReduceMean", "ReduceLogSum", "ReduceSumSquare")
        for shape in ((1024, 64), (64, 3000), (8, 300_000))
    ),
    *(
        Case(op, [DEEP, ints(*axes)], {"keepdims": keep})
        for op in ("ReduceSum", "ReduceMean", "ReduceMax")
        for axes in ((0,), (1,), (0, 1), (1, 2), (2, 3), (1, 3), (0, 2, 3))
        for keep in (0, 1)
    ),
    *(Case("ReduceSum", [shape, ints(axis)], {}) for shape, axis in (((1, 64, 512), 0), ((64, 512, 1), 2))),
    Case("ReduceSumSquare", [(64, 1, 512), ints(1)], {}),
    Case("Where", [(TensorProto.BOOL, DEEP), DEEP, DEEP], {}),
    Case("LayerNormalization", [DEEP, (64,), (64,)], {}),
    Case("Sum", [DEEP, DEEP, DEEP], {}),
    Case("Max", [DEEP, DEEP, DEEP], {}),
    Case("MatMul", [DEEP, DEEP], {}),
    Case("Attention", [(2, 4, 64, 32), (2, 4, 96, 32), (2, 4, 96, 32)], {}, 23),
    Case("CumSum", [DEEP, scalar(0)], {}),
    Case("Expand", [DEEP, ints(*DEEP)], {}),
    Case("Transpose", [DEEP], {}),
]
_SLACK = 2_000  # tables of pointers, which no rule states


@needs_device
def test_scratch_memory(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.onnx" for i in range(len(SCRATCH))]
    for case, path in zip(SCRATCH, paths, strict=True):
        dying(case, TensorProto.FLOAT, 0 if case.op != "Where" else 1, False, path)
    for case, answer, path in zip(SCRATCH, ask(paths), paths, strict=True):
        shapes = [element(entry, TensorProto.FLOAT)[1] for entry in case.inputs]
        value = onnx.shape_inference.infer_shapes(onnx.load(path)).graph.value_info
        (out,) = [tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in value if v.name == "out"]
        call = Call(case.attributes, shapes, [4] * len(shapes), [out], [4], 1, case.opset)
        scratch = sum(answer["allocated"]) - 4 * int(np.prod(shapes[0])) - 4 * int(np.prod(out))
        predicted = sum(CUDA.blocks(("", case.op), call))
        assert 0 <= scratch - predicted <= _SLACK, (str(case), answer, predicted)


@needs_device
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "ReduceSumSquare", "Relu"])
def test_which_workspace_an_arena_has_no_used_chunk_for(op: str, tmp_path: Path) -> None:
    """After a convolution that took 64 MiB: others work in what it gave back, kernels off the stream in new memory."""
    attributes = {} if op in ("Relu", "ReduceSumSquare") else {"axis": 1}
    nodes = [make("Conv", ["x", "w"], ["c"]), make(op, ["c"], ["out"], **attributes)]
    inputs = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", DEEP), ("w", (8, 8, 1, 1)))]
    save(nodes, inputs, ["out"], (), 20, tmp_path / "two.onnx")
    arena = {"arena_extend_strategy": "kSameAsRequested"}
    held = run.run_step(tmp_path / "two.onnx", "ORT_DISABLE_ALL", arena, workspace_forward=1 << 26).held
    size = 4 * int(np.prod(DEEP))
    more = held - (1 << 26) - 2 * size - 4 * 64  # the input, and what the convolution makes
    assert (more > size) == (("", op) in CUDA.off_stream), more


def test_what_a_library_takes_is_stated() -> None:
    call = Call({}, [IMAGE, (4, 4, 1, 1)], [4, 4], [IMAGE], [4], 1)
    assert CUDA.blocks(("", "Conv"), call) == (32 * 2**20,) == (CUDA.library_workspace,)
    assert kernels_of("cuda", 1 << 20).blocks(("", "Conv"), call) == (1 << 20,)
    assert kernels_of("cuda", 0).blocks(("", "Conv"), call) == ()


@pytest.mark.parametrize(
    ("attributes", "uneven"),
    [({}, False), ({"pads": [1, 2, 1, 2]}, False), ({"pads": [1, 2, 1, 1]}, True), ({"auto_pad": "SAME_LOWER"}, True),
     ({"auto_pad": "VALID"}, False)],
)  # fmt: skip
def test_uneven_pads(attributes: Mapping[str, Any], uneven: bool) -> None:
    assert uneven_pads(make("ConvTranspose", ["x", "w"], ["y"], **attributes)) == uneven
    assert not uneven_pads(make("Conv", ["x", "w"], ["y"], **attributes))
