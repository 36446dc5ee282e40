"""A step run node by node in its slab, every byte that is dead by plan filled with NaN patterns in between.

Each node of the private copy runs in a session of its own, on the addresses that the whole step is bound to. A value
that another one overwrites too early, or that is read after its end, shows in the outputs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from onnx_remat import errors
from onnx_remat.fuse import shim
from onnx_remat.ir import graph
from onnx_remat.session import kernel_file, offsets, plan_session
from onnx_remat.session.arrays import BY_BITS, NUMPY
from onnx_remat.session.heap import reserve
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.offsets import Offsets, Program
from onnx_remat.session.plan_session import SessionRequest
from onnx_remat.session.slab_layout import SlabLayout
from tests.support.outcomes import REFUSED, RIGHT, ROUNDING, WRONG, Feeds, Outcome, difference

POISON = 0xFF
"""Every float of this byte is NaN, every signed integer -1."""

Bytes = np.ndarray
"""The memory of a value: a writable view, byte by byte."""


class UnpoisonableError(Exception):
    """Values of a step are no plain tensors, so that its nodes cannot run one by one here."""


def outcome(
    model: onnx.ModelProto | Path,
    request: SessionRequest,
    feeds: Feeds,
    expected: Mapping[str, Any],
    outliers: float = 0.0,
) -> Outcome:
    """Compare what a poisoned slab gives with what stock ONNX Runtime does, every value in the slab.

    Raises
    ------
    UnpoisonableError
    """
    with tempfile.TemporaryDirectory() as folder:
        path = model if isinstance(model, Path) else Path(folder) / "model.onnx"
        if isinstance(model, onnx.ModelProto):
            onnx.save(model, path)
        fused = request.level != "disable" and not shim.why_not()
        request = replace(request, least=1, secret=shim.new_secret() if fused else 0)
        try:
            made = outputs(path, request, {name: np.array(value) for name, value in feeds.items()})
        except errors.OnnxRematError as error:
            return Outcome(REFUSED, str(error))
    wanted = {name: value for name, value in expected.items() if name in made}
    found = difference(made, wanted, 0.0 if request.level == "disable" else ROUNDING, outliers)
    return Outcome(WRONG, found) if found else Outcome(RIGHT)


def outputs(path: Path, request: SessionRequest, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a step in a poisoned slab; every output that a node makes, by name. Donated feeds are changed.

    Raises
    ------
    UnpoisonableError
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "copy.onnx"
        made = plan_session.arrange(path, target, request)
        for linked in [file for file in Path(folder).iterdir() if file.stat().st_nlink > 1]:  # onnx reads none of these
            data = linked.read_bytes()
            linked.unlink()
            linked.write_bytes(data)
        with kernel_file.offered(kernel_file.path_of(target)) if made.kernels else nullcontext():
            return _poisoned(made, onnx.load(target), feeds)


def _poisoned(made: SlabLayout, copy: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    program, bound = made.program, made.offsets
    if odd := [n for step in program.steps for n in step.writes if not offsets.is_plain(program.tensors[n])]:
        raise UnpoisonableError(f"{odd[0]!r} is no plain tensor")
    slab = reserve(bound.height)
    memory: dict[str, Bytes] = {p.name: slab[p.offset : p.offset + p.nbytes] for p in bound.placements}
    memory |= {name: value.reshape(-1).view(np.uint8) for name, value in feeds.items()}
    memory |= {output: memory[name] for output, name in bound.donated.items()}
    constants = {tensor.name: tensor for tensor in copy.graph.initializer if tensor.name not in feeds}
    constants |= {sparse.values.name: _dense(sparse) for sparse in copy.graph.sparse_initializer}
    constants |= {node.output[0]: _constant(node) for node in copy.graph.node if graph.is_constant(node)}
    for at, step in enumerate(program.steps):
        _poison(slab, program, bound, at)
        run = False
        for name in step.writes:
            viewed = program.root.get(name)
            if viewed in memory or viewed in constants:
                memory[name] = memory[viewed] if viewed in memory else _bytes(constants[viewed])
                continue
            run = True
            memory.setdefault(name, np.empty(program.tensors[name].nbytes, np.uint8))
        if run:
            _run(copy, program, step, memory, constants)
    _poison(slab, program, bound, len(program.steps))
    made_by_nodes = {name for step in program.steps for name in step.writes}
    names = [name for name in program.outputs if name in made_by_nodes]
    return {name: memory[name].view(_dtype(program, name)).reshape(program.tensors[name].shape) for name in names}


def _poison(slab: Bytes, program: Program, bound: Offsets, at: int) -> None:
    """Fill what nobody may read from step `at` on."""
    start, end = offsets.lifetimes(program, [place.name for place in bound.placements])
    kept = np.zeros(len(slab), bool)
    for place in bound.placements:
        if start[place.name] < at and (end[place.name] >= at or place.name in program.outputs):
            kept[place.offset : place.offset + place.nbytes] = True
    slab[~kept] = POISON


def _run(
    copy: onnx.ModelProto,
    program: Program,
    step: LeanNode,
    memory: Mapping[str, Bytes],
    constants: Mapping[str, onnx.TensorProto],
) -> None:
    reads = list(dict.fromkeys(step.reads))
    given = [name for name in reads if name not in constants]
    one = onnx.ModelProto(ir_version=max(copy.ir_version, 4), opset_import=copy.opset_import)
    one.graph.name = "node"
    one.graph.node.append(step.node)
    one.graph.initializer.extend(constants[name] for name in reads if name in constants)
    for names, values in ((given, one.graph.input), (step.writes, one.graph.output)):
        values.extend(
            helper.make_tensor_value_info(n, program.tensors[n].dtype, program.tensors[n].shape) for n in names
        )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if step.plain is not None:
        shim.register(options)
    session = ort.InferenceSession(one.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bindings = session.io_binding()
    for name in given:
        tensor = program.tensors[name]
        bindings.bind_input(name, "cpu", 0, _element(tensor.dtype), tensor.shape, memory[name].ctypes.data)
    for name in step.writes:
        tensor = program.tensors[name]
        if name in program.root or not tensor.nbytes:
            bindings.bind_output(name)
        else:
            bindings.bind_output(name, "cpu", 0, _element(tensor.dtype), tensor.shape, memory[name].ctypes.data)
    session.run_with_iobinding(bindings)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto:
    value = helper.get_attribute_value(node.attribute[0])
    made = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.array(value))
    tensor = onnx.TensorProto()
    tensor.CopyFrom(made)
    tensor.name = node.output[0]
    return tensor


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    dense[tuple(places.T) if places.ndim == 2 else np.unravel_index(places, dense.shape)] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def _bytes(tensor: onnx.TensorProto) -> Bytes:
    return np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(-1).view(np.uint8)


def _element(dtype: int) -> Any:
    return np.dtype(NUMPY[dtype]).type if dtype in NUMPY else dtype


def _dtype(program: Program, name: str) -> np.dtype:
    dtype = program.tensors[name].dtype
    return np.dtype(NUMPY.get(dtype) or BY_BITS[dtype])
