"""Nodes without a kernel on the device, and the cost of running them on the host."""

from __future__ import annotations

from onnx import TensorProto

from onnx_remat.ir.graph import INITIALIZER, Op
from onnx_remat.ir.opsets import opset_of
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.prepare import Compiled
from onnx_remat.units import format_bytes

_SMALL = 1024
"""Bytes up to which a copy between host and device is not reported: shapes and scalars."""


def nodes_on_host(compiled: Compiled) -> dict[str, int]:
    """Return the bytes copied per step for each node without a kernel on the device, by its label.

    What it reads of the device is copied to the host, once for all such nodes, and what the device reads of its results
    is copied back. Nodes with tiny copies are left out.
    """
    graph, tensors = compiled.graph, compiled.tensors
    host = {op.index for op in graph.ops if _on_host(compiled, op)}
    on_host = {name for name, value in graph.values.items() if value.kind == INITIALIZER} - graph.fed
    copied: dict[str, int] = {}
    for op in graph.ops:
        if op.index in host:
            moved = [name for name in dict.fromkeys(op.reads) if name not in on_host]
            on_host.update(op.reads, op.writes)
            moved += [n for n in op.writes if graph.values[n].is_output or not host.issuperset(graph.readers[n])]
            copied[op.label] = sum(tensors[name].nbytes for name in moved)
    return {label: size for label, size in copied.items() if size > _SMALL}


def warnings(compiled: Compiled) -> tuple[str, ...]:
    """Return one line per kind of node that the host must run, the most expensive first."""
    copied = nodes_on_host(compiled)
    kinds: dict[str, list[str]] = {}
    for op in compiled.graph.ops:
        if op.label in copied:
            kinds.setdefault(op.node.op_type, []).append(op.label)
    totals = {kind: sum(copied[label] for label in labels) for kind, labels in kinds.items()}
    lines = []
    for kind, total in sorted(totals.items(), key=lambda entry: -entry[1]):
        labels = kinds[kind]
        more = f" (and {len(labels) - 1} more of {kind})" if len(labels) > 1 else f" ({kind})"
        hint = "; pad evenly and cut the result with Slice" if kind == "ConvTranspose" else ""
        lines.append(
            f"node {labels[0]!r}{more} has no {compiled.kernels.name.upper()} kernel for its types and attributes: the "
            f"host runs it, if it can, and every step copies {format_bytes(total)} between host and device{hint}"
        )
    return tuple(lines)


def too_old(kernels: Kernels, opset: int, version: tuple[int, ...]) -> str:
    """Return why a version of ONNX Runtime is too old for files for a device, and what to install; else empty."""
    if kernels.device == "cpu" or opset < _NEW_SIZE or not version or version >= _HAS_SIZE:
        return ""
    numbers = [".".join(map(str, v)) for v in (version, _HAS_SIZE)]
    return (
        f"onnxruntime {numbers[0]} has no {kernels.name.upper()} kernel for Size at opset {opset}, so that the host "
        f"would wait at every control edge: install onnxruntime-gpu {numbers[1]} or later"
    )


_NEW_SIZE, _HAS_SIZE = 19, (1, 25, 1)  # an opset, and the first version that has its Size


def notes(compiled: Compiled) -> tuple[str, ...]:
    """Return the unmeasured assumptions of a plan for a device; nothing if the device is the host."""
    kernels = compiled.kernels
    if kernels.device == "cpu":
        return ()
    libraries = {op.node.op_type for op in compiled.graph.ops} & {"Conv", "ConvTranspose"}
    doubles = any(tensor.dtype == TensorProto.DOUBLE and tensor.nbytes > _SMALL for tensor in compiled.tensors.values())
    lines = []
    if old := too_old(kernels, opset_of(compiled.graph.model), runtime.installed()):
        lines.append(old)
    if libraries:
        lines.append(
            Message(
                "every convolution is allowed {} of cuDNN workspace ({}): a margin, not a measurement; set the "
                "provider option cudnn_conv_use_max_workspace=0, which limits it to 32 MiB",
                format_bytes(kernels.library_workspace),
                Setting("cudnn_workspace"),
            )
        )
    if norms := [op.label for op in compiled.graph.ops if op.expanded and op.node.op_type == "BatchNormalization"]:
        more = f" (and {len(norms) - 1} more)" if len(norms) > 1 else ""
        lines.append(
            f"BatchNormalization in training mode has no {kernels.name.upper()} kernel: {norms[0]!r}{more} is written "
            "as statistics and the form for inference"
        )
    if windows := [
        op.node.output[0] for op in compiled.graph.ops if op.expanded and op.node.output[0].endswith("/window_0")
    ]:
        label, name = windows[0].rpartition("/")[0], kernels.name.upper()
        lines.append(
            f"convolutions with large windows are slow on {name}: {label!r} and others are written as matrix products"
        )
    if doubles:
        lines.append("float64 runs at 1/32 to 1/64 of float32's rate on GPUs that are not made for data centres")
    lines.append(
        "peaks are of tensors and workspace: the CUDA context and what cuBLAS and cuDNN allocate for themselves come "
        "on top; memory patterns must be off (onnx_remat.session_options())"
    )
    return tuple(lines)


def _on_host(compiled: Compiled, op: Op) -> bool:
    dtype = compiled.tensors[op.inputs[0]].dtype if op.inputs and op.inputs[0] else TensorProto.FLOAT
    return compiled.kernels.on_host(op.node, dtype, opset_of(compiled.graph.model, op.node.domain))
