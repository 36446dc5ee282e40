"""Models whose groups are kernels of a CUDA device, run by threads that this process simulates; needs a C compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from onnx_remat.fuse import cuda, joins, shim
from onnx_remat.fuse.kernel import FusedNode, Kernel
from onnx_remat.fuse.nodes import Fusion, fuse
from onnx_remat.ir.shapes import Tensor
from tests.support.fake_cuda import ptx
from tests.support.fusing import Arrays, options, ordered_step

SOURCE = Path(ptx.__file__).with_name("warp.c")
STORED = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16, 11: np.float64, 12: np.uint32,
          16: np.uint16}  # fmt: skip


def why_not() -> str:
    """Why no thread of a device can be simulated here, or nothing."""
    return cuda.why_not() or ("" if shutil.which("gcc") else "threads of a device are simulated in C: install gcc")


def assembler() -> str | None:
    """NVIDIA's ``ptxas``, from the path or the package nvidia-cuda-nvcc."""
    places = [Path(each) / "nvidia" for each in sys.path]
    packaged = (str(each) for place in places if place.is_dir() for each in place.glob("*/bin/ptxas"))
    return shutil.which("ptxas") or next(packaged, None)


@cache
def _warps() -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="onnx-remat-warps-")
    made = Path(folder) / "warp.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    loaded.warp_allow.argtypes = (ctypes.c_int64, ctypes.c_int64)
    loaded.warp_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    return loaded


@cache
def _translated(text: str) -> tuple[int, bool]:
    warps = _warps()
    addresses = {name: ctypes.cast(getattr(warps, name), ctypes.c_void_p).value or 0 for name in ptx.FUNCTIONS}
    found = cuda.ptx(text)
    return ptx.compiled(found, addresses), ptx.exchanges(found)


def launch(kernel: Kernel, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Run all threads of a kernel; an access outside its inputs and outputs is an AssertionError."""
    code, exchanges = _translated(kernel.text)
    warps = _warps()
    warps.warp_allow(0, 0)
    for array in (*inputs, *outputs):
        warps.warp_allow(array.ctypes.data, array.nbytes)

    def pointers(arrays: Sequence[np.ndarray]) -> Any:
        return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))

    given, made = pointers(inputs), pointers(outputs)
    sizes = (ctypes.c_int64 * len(kernel.sizes))(*kernel.sizes)
    size = ctypes.c_int64(kernel.size)
    arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(each) for each in (given, made, sizes, size)))
    blocks = -(-kernel.size // kernel.grain)
    before = ctypes.c_int64.in_dll(warps, "warp_strays").value
    warps.warp_launch(code, arguments, blocks, kernel.threads, exchanges)
    strays = ctypes.c_int64.in_dll(warps, "warp_strays").value - before
    assert not strays, f"{strays} accesses outside the kernel's inputs and outputs"


def fused(model: onnx.ModelProto, join: bool = True) -> Fusion:
    """A model's nodes, those of groups replaced by nodes of a device's kernels, those of one text joined."""
    ordered = replace(ordered_step(model), device=True)
    found = fuse(ordered, shim.new_secret())
    return joins.joined(ordered, found) if join else found


def run(
    model: onnx.ModelProto, feeds: Arrays, over: bool = False, join: bool = True
) -> tuple[dict[str, np.ndarray], Fusion]:
    """All outputs; groups run on the simulated device, other nodes on ONNX Runtime. Of bfloat16 and float16 the bits.

    With `over`, every output of a kernel lies over an input of its size, where the kernel allows that.
    """
    ordered, made = ordered_step(model), fused(model, join)
    values: dict[str, np.ndarray] = {w.name: np.array(onnx.numpy_helper.to_array(w)) for w in model.graph.initializer}
    values |= {name: np.array(value, order="C") for name, value in feeds.items()}
    for each in made.order:
        if not isinstance(each, FusedNode):
            values |= _run_alone(model.graph.node[each], values, ordered.tensors, model)
            continue
        node = each.node
        kernel = made.kernels[next(a.i for a in node.attribute if a.name == "handle")]
        inputs = [np.array(values[name], order="C") for name in node.input]
        outputs, left = [], sorted(each.plain)
        reads, writes = (len(names) // each.segments for names in (node.input, node.output))
        for i, (dtype, shape) in enumerate(kernel.outputs):
            array = np.empty(shape, STORED[dtype])
            own = [slot for slot in left if slot // reads == i // writes]
            fits = [s for s in own if (inputs[s].nbytes, inputs[s].size) == (array.nbytes, array.size)]
            if over and fits:
                left.remove(fits[0])
                array = inputs[fits[0]].reshape(-1).view(array.dtype).reshape(shape)
            outputs.append(array)
        launch(kernel, inputs, outputs)
        values |= dict(zip(node.output, outputs, strict=True))
    return {value.name: values[value.name] for value in model.graph.output}, made


def _run_alone(
    node: onnx.NodeProto, values: Arrays, tensors: dict[str, Tensor], model: onnx.ModelProto
) -> dict[str, np.ndarray]:
    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, tensors[name].dtype, tensors[name].shape)

    reads, makes = [name for name in dict.fromkeys(node.input) if name], [name for name in node.output if name]
    graph = helper.make_graph([node], "alone", [info(n) for n in reads], [info(n) for n in makes])
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    from tests.support.fusing import run as run_session

    opened = onnxruntime.InferenceSession(alone.SerializeToString(), options(), ["CPUExecutionProvider"])
    return run_session(opened, {name: values[name].reshape(tensors[name].shape) for name in reads})
