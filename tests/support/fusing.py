"""Models that are fused and run: for the tests of `onnx_remat.fuse`, which run on any ONNX Runtime alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.fuse import machine_code, shim
from onnx_remat.fuse.kernel import FusedNode
from onnx_remat.fuse.nodes import Fusion, fuse
from onnx_remat.fuse.ops import VIEWS
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.ir.shapes import Tensor
from onnx_remat.session.lean_graph import LeanNode


def why_not() -> str:
    """Why the tests of kernels cannot run here, or nothing."""
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version < shim.OLDEST_RUNTIME:
        return f"onnxruntime {ort.__version__} is older than fused kernels need"
    return machine_code.why_not() or shim.why_not()


BYTES = {1: 4, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}
Arrays = Mapping[str, np.ndarray]


def ordered_step(model: onnx.ModelProto) -> OrderedStep:
    """A model's nodes as they lie, all values of known shapes."""
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    graph = model.graph
    tensors = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        shape = tuple(d.dim_value for d in kind.shape.dim)
        nbytes = BYTES.get(kind.elem_type, 8) * int(np.prod(shape, dtype=np.int64))
        tensors[value.name] = Tensor(kind.elem_type, shape, nbytes, shape)
    for weight in graph.initializer:
        shape = tuple(weight.dims)
        tensors[weight.name] = Tensor(weight.data_type, shape, numpy_helper.to_array(weight).nbytes, shape)
    outputs = [value.name for value in graph.output]
    root: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in VIEWS and node.output[0] not in outputs:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
    steps = [LeanNode(node) for node in graph.node]
    counted = {n: tensors[n].nbytes for step in steps for n in step.writes if n not in root and n in tensors}
    constants = {
        w.name: float(numpy_helper.to_array(w).item()) for w in graph.initializer if np.prod(w.dims, dtype=int) == 1
    }
    integers = {
        w.name: tuple(numpy_helper.to_array(w).tolist())
        for w in graph.initializer
        if w.data_type == TensorProto.INT64 and len(w.dims) == 1
    }
    return OrderedStep(steps, tensors, outputs, root, counted, {}, constants, lambda *_: False, integers)


def fused(model: onnx.ModelProto, secret: int) -> tuple[onnx.ModelProto, Fusion]:
    """A copy of the model with fused nodes."""
    made = fuse(ordered_step(model), secret)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for each in made.order:
        copy.graph.node.append(each.node if isinstance(each, FusedNode) else model.graph.node[each])
    copy.opset_import.append(helper.make_opsetid(shim.DOMAIN, 1))
    return copy, made


def options(threads: int = 1) -> Any:
    """A session that runs a model as it lies."""
    made = ort.SessionOptions()
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made.intra_op_num_threads = threads
    made.log_severity_level = 4
    return made


def offered(secret: int, made: Fusion) -> Any:
    """`shim.offered` for a fusion."""
    codes = machine_code.compiled([kernel.text for kernel in made.kernels])
    offsets = np.cumsum([0, *map(len, codes)]).tolist()
    numbers = [kernel.numbers(offset) for kernel, offset in zip(made.kernels, offsets, strict=False)]
    return shim.offered(secret, b"".join(codes), numbers)


def session(model: onnx.ModelProto, threads: int = 1) -> tuple[Any, Fusion]:
    """A session of the fused model."""
    secret = shim.new_secret()
    copy, made = fused(model, secret)
    chosen = options(threads)
    shim.register(chosen)
    with offered(secret, made):
        return ort.InferenceSession(copy.SerializeToString(), chosen, ["CPUExecutionProvider"]), made


def run(session: Any, feeds: Arrays) -> dict[str, np.ndarray]:
    """All outputs; of bfloat16 and float16 their bits."""
    binding = session.io_binding()
    for value in session.get_inputs():
        array = np.asarray(feeds[value.name], order="C")
        if value.type == "tensor(bfloat16)":
            binding.bind_ortvalue_input(
                value.name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
            )
        else:
            binding.bind_cpu_input(value.name, array)
    stored = {}
    for value in session.get_outputs():
        if value.type == "tensor(bfloat16)":  # numpy has no such type
            stored[value.name] = np.zeros(value.shape, np.uint16)
            address = stored[value.name].ctypes.data
            binding.bind_output(value.name, "cpu", 0, TensorProto.BFLOAT16, value.shape, address)
        else:
            binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    made = zip(session.get_outputs(), binding.get_outputs(), strict=True)
    return {value.name: stored[value.name] if value.name in stored else found.numpy() for value, found in made}


def run_on_small_stack(session: Any, feeds: Arrays) -> dict[str, np.ndarray]:
    """As `run`, in a thread whose stack has 256 KiB, the smallest that Python has by default on some systems."""
    found: list[dict[str, np.ndarray]] = []
    before = threading.stack_size(1 << 18)
    try:
        thread = threading.Thread(target=lambda: found.append(run(session, feeds)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    return found[0]


def bits(array: np.ndarray) -> np.ndarray:
    """Bits of an array, all NaNs one: of what NaN two NaNs make, no standard speaks."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.asarray(np.nan, array.dtype), array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(model: onnx.ModelProto, feeds: Arrays, least_fused: int = 1, threads: int = 1) -> Fusion:
    """Fused, a model gives the bits that it gives as it is."""
    plain = ort.InferenceSession(model.SerializeToString(), options(threads), ["CPUExecutionProvider"])
    opened, made = session(model, threads)
    assert len(made.kernels) >= least_fused, "nothing was fused"
    wanted, got = run(plain, feeds), run(opened, feeds)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        differ = np.flatnonzero(bits(got[name]) != bits(value))
        assert not len(differ), (
            f"{name}: {len(differ)} of {value.size} differ, first {got[name].flat[differ[0]]!r} "
            f"for {value.flat[differ[0]]!r} at {differ[0]}"
        )
    return made
