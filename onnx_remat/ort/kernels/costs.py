"""Seconds per op: a roofline of FLOPs and bytes for a named device, or figures measured by ONNX Runtime's profiler."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from onnx_remat.errors import UsageError
from onnx_remat.ir import dropout
from onnx_remat.ir.graph import Graph, Op, attributes, blames_the_node
from onnx_remat.ir.opsets import STANDARD
from onnx_remat.ir.shapes import Tensor
from onnx_remat.messages import Setting
from onnx_remat.ort.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class Device:
    """A roofline: peak float32 arithmetic (FLOP/s), memory bandwidth (bytes/s), seconds to start one op.

    `host`: bandwidth to the host's memory, or back, in bytes/s; 0 if the device is the host.
    """

    flops: float
    bandwidth: float
    overhead: float
    host: float = 0.0


PRESETS: dict[str, Device] = {
    # Dense float32 (TF32 on tensor cores for matrix products) and bandwidth from the vendors' data sheets; host
    # bandwidth is four fifths of 16 lanes of PCIe, generation 3, 4 or 5. The cpu figures are those of a pair of small
    # server cores.
    "cpu": Device(100e9, 12e9, 4e-6),
    "a100": Device(156e12, 2.0e12, 5e-6, 25e9),
    "l4": Device(60e12, 0.3e12, 5e-6, 25e9),
    "h100": Device(494e12, 3.35e12, 4e-6, 50e9),
    "h200": Device(494e12, 4.8e12, 4e-6, 50e9),
    "rtx4090": Device(82e12, 1.0e12, 4e-6, 25e9),
    "t4": Device(8.1e12, 0.32e12, 5e-6, 12e9),
}

# FLOPs per output element of transcendental functions: rough counts of a polynomial evaluation.
_TRANSCENDENTAL = 20.0
_HEAVY = {
    "Exp", "Log", "Tanh", "Erf", "Sigmoid", "Softmax", "LogSoftmax", "Gelu", "BiasGelu", "FastGelu", "QuickGelu",
    "Softplus", "Sin", "Cos", "Pow", "Mish", "Swish",
}  # fmt: skip


MATRIX_OPS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum")
"""Ops whose results are expensive to recompute: openai/gradient-checkpointing's mode ``speed`` keeps them."""


def price(graph: Graph, tensors: Mapping[str, Tensor], kernels: Kernels, costs: str = "cpu") -> list[float]:
    """Estimate the seconds of one execution of every op.

    Parameters
    ----------
    graph, tensors
        The IR and its shapes.
    kernels : Kernels
        Facts about the provider's kernels: an alias moves no data.
    costs : str
        A device of `PRESETS`, or the path of a profile that ONNX Runtime wrote (``enable_profiling``) for this or a
        similar model: its times are looked up by op, input shapes and types. Ops not in the profile get the cpu
        roofline, scaled by the median ratio on the ops in it.

    Raises
    ------
    UsageError
        `costs` is neither a preset nor a readable profile.
    """
    if costs in PRESETS:
        return _without_first_products(graph, [roofline(op, tensors, kernels, PRESETS[costs]) for op in graph.ops])
    profile = _read_profile(costs)
    estimate = [roofline(op, tensors, kernels, PRESETS["cpu"]) for op in graph.ops]
    measured = [profile.get(_key(op, tensors)) for op in graph.ops]
    ratios = [m / e for m, e in zip(measured, estimate, strict=True) if m is not None and e > 0]
    if not ratios:
        raise UsageError(f"profile {costs} has no op of this model: profile this model with the same dims")
    scale = statistics.median(ratios)
    priced = [m if m is not None else e * scale for m, e in zip(measured, estimate, strict=True)]
    return _without_first_products(graph, priced)


def _without_first_products(graph: Graph, seconds: list[float]) -> list[float]:
    """Subtract each product's seconds from its draw's, which were estimated for the whole Dropout."""
    for draw, product in dropout.pairs(graph):
        seconds[draw] = max(seconds[draw] - seconds[product], 0.0)
    return seconds


@blames_the_node
def roofline(op: Op, tensors: Mapping[str, Tensor], kernels: Kernels, device: Device) -> float:
    """Return max(FLOPs / peak, bytes / bandwidth) + overhead, in seconds (Williams, Waterman, Patterson 2009)."""
    if kernels.alias.get(op.kind):
        return device.overhead  # moves no data
    inputs = [tensors[n] for n in op.inputs if n]
    outputs = [tensors[n] for n in op.outputs if n]
    if dropout.is_product(op):  # written as three nodes with two intermediate results
        return (sum(t.nbytes for t in (*inputs, *outputs)) + 4 * outputs[0].nbytes) / device.bandwidth + (
            3 * device.overhead
        )
    if dropout.is_draw(op):
        outputs += inputs[:1]  # the Dropout also writes its result
    return max(flops(op, tensors) / device.flops, _moved(op, inputs, outputs) / device.bandwidth) + device.overhead


def fused(members: Sequence[Op], ends: Iterable[str], tensors: Mapping[str, Tensor], device: Device) -> float:
    """Return the roofline of ops fused into one kernel: all their FLOPs, and the bytes of the kernel's `ends`."""
    moved = sum(tensors[name].nbytes for name in ends)
    return max(sum(flops(op, tensors) for op in members) / device.flops, moved / device.bandwidth) + device.overhead


def _moved(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    written = sum(t.nbytes for t in outputs)
    if op.kind[1] in (
        "Gather",
        "Slice",
        "GatherElements",
        "GatherND",
        "Split",
        "Shape",
        "Size",
        "ConstantOfShape",
    ):
        return 2.0 * written  # reads only what it writes
    return float(written + sum(t.nbytes for t in inputs))


_ORTS_OWN = frozenset({STANDARD, "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})
"""Domains in which an operator's name means what it means in ONNX."""


def flops(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Return the floating-point operations of one execution; a multiply-add counts as two."""
    kind = op.kind[1] if op.kind[0] in _ORTS_OWN else ""
    output = tensors[op.writes[0]] if op.writes else None
    made = float(math.prod(output.shape)) if output else 0.0
    shapes = [tensors[n].shape if n else () for n in op.inputs]
    if kind in ("MatMul", "FusedMatMul", "MatMulInteger", "TransposeMatMul"):
        flipped = bool(attributes(op.node).get("transA"))
        depth = (shapes[0][-2] if flipped and len(shapes[0]) > 1 else shapes[0][-1]) if shapes[0] else 1
        return 2.0 * made * depth
    if kind in ("Gemm", "FusedGemm"):
        return 2.0 * made * shapes[0][0 if attributes(op.node).get("transA") else 1]
    if kind in ("Conv", "FusedConv", "ConvInteger", "NhwcFusedConv"):
        return 2.0 * made * math.prod(shapes[1][1:])
    if kind == "ConvTranspose":
        return 2.0 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if kind == "Einsum":
        equation = attributes(op.node)["equation"]
        return _einsum_flops(equation.decode() if isinstance(equation, bytes) else str(equation), shapes)
    read = float(sum(math.prod(s) for s in shapes))
    return (_TRANSCENDENTAL if kind in _HEAVY else 1.0) * max(made, read)


def _einsum_flops(equation: str, shapes: Sequence[tuple[int, ...]]) -> float:
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=False):
        labels = term.replace("...", "")
        sizes |= dict(zip(labels, shape[max(0, len(shape) - len(labels)) :], strict=False))
    return 2.0 * math.prod(sizes.values())


_ProfileKey = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
_ORT_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double", TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16", TensorProto.INT64: "int64", TensorProto.INT32: "int32",
    TensorProto.BOOL: "bool", TensorProto.UINT8: "uint8", TensorProto.INT8: "int8",
}  # fmt: skip


def _key(op: Op, tensors: Mapping[str, Tensor]) -> _ProfileKey:
    read = [tensors[n] for n in op.inputs if n]
    kind = "Dropout" if dropout.is_draw(op) else op.node.op_type
    return kind, tuple((_ORT_NAMES.get(t.dtype, "?"), t.shape) for t in read)


_MOST = 2**28  # bytes of a profile


def _read_profile(path: str) -> dict[_ProfileKey, float]:
    """Read a profile: median seconds by op, input types and shapes."""
    given, presets = Setting("costs", path), ", ".join(PRESETS)
    if "\0" in path:
        raise UsageError("{} has a zero byte in its name", given)
    if Path(path).exists() and not Path(path).is_file():  # a device may never end
        raise UsageError("{} is neither a preset ({}) nor a regular file", given, presets)
    try:
        with Path(path).open("rb") as stream:
            text = stream.read(_MOST + 1)
    except OSError as error:
        raise UsageError("{} is neither a preset ({}) nor a readable file", given, presets) from error
    if len(text) > _MOST:
        raise UsageError("{}: larger than {} MiB: not a profile of ONNX Runtime", given, _MOST >> 20)
    seconds: dict[_ProfileKey, list[float]] = {}
    try:
        for event in json.loads(text):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                arguments = event["args"]
                read = tuple(
                    (kind, tuple(shape)) for some in arguments["input_type_shape"] for kind, shape in some.items()
                )
                took = float(event["dur"]) * 1e-6
                if not 0 <= took < math.inf:
                    raise ValueError("no duration")
                seconds.setdefault((arguments["op_name"], read), []).append(took)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UsageError("{}: not a JSON profile of ONNX Runtime", given) from error
    return {key: statistics.median(times) for key, times in seconds.items()}
