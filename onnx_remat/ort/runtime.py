"""Queries to ONNX Runtime: sessions, optimised graphs, shapes, orders. `measure.processes` runs models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_remat import files, messages
from onnx_remat.errors import ModelError, OnnxRematError
from onnx_remat.ir import external_data, model_io
from onnx_remat.ir.body import unshadow
from onnx_remat.ir.light import without_weights
from onnx_remat.ort import libraries
from onnx_remat.process.child import Limit
from onnx_remat.process.worker import ask

_SECONDS, _NODES_PER_SECOND = 15.0, 1000  # CPU seconds: symbolic inference may not end on a contradictory model
_BYTES, _COPIES = 2 * 2**30, 8  # memory for any model, and per byte of it and its weights
_DEVICE_SECONDS, _DEVICE_BYTES = 60.0, 16 * 2**30  # in addition, for a device's libraries and its context

HOST = ("CPUExecutionProvider",)
"""Execution providers for queries that do not depend on the provider: about shapes, say."""

LEVELS = ("disable", "basic", "all")
"""Graph optimisation levels at which a written file must meet its budget; "all" is the default."""

MOST_WEIGHTS = 512 * 2**20
"""Bytes of initializers up to which ONNX Runtime optimises a model together with its weights.

It writes the optimised model into one file, 2 GiB at most, and keeps all weights in memory meanwhile. More weights are
given as inputs, and `executed` predicts what would be folded from them; nothing is fused into them then.
"""

MOST_NODES = 30_000
"""Nodes up to which ONNX Runtime loads any model; above, only one that a `Session` is to run.

Its memory planner compares every value with every free buffer, so the time to load some graphs grows with the square of
the number of nodes: a rewritten graph of 21,000 nodes (a DenseNet-121) takes 7 seconds per optimisation
level, one of 40,800 takes 37.
"""


def is_large(model: onnx.ModelProto) -> bool:
    """Whether the model has more than `MOST_NODES` nodes."""
    return len(model.graph.node) > MOST_NODES


def available() -> bool:
    """Whether ONNX Runtime is installed."""
    import importlib.util

    return importlib.util.find_spec("onnxruntime") is not None


def session_options(level: str = "all") -> Any:
    """Return session options that keep the memory of a rewritten model low, as measured.

    Memory patterns are switched off. With them, ONNX Runtime keeps the arena of the first step and, from the second
    step on, also one block of the whole plan's size: the process takes about twice the peak, at no gain in speed on the
    models measured.

    Parameters
    ----------
    level : str
        Graph optimisation level, one of `LEVELS`.

    Returns
    -------
    onnxruntime.SessionOptions

    Raises
    ------
    OnnxRematError
        onnxruntime is not installed.
    """
    import_runtime()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.graph_optimization_level = _level(level)
    return options


def installed() -> tuple[int, ...]:
    """Return the version of the installed ONNX Runtime; empty if there is none."""
    if not available():
        return ()
    import onnxruntime

    return tuple(int(part) for part in re.findall(r"\d+", onnxruntime.__version__)[:3])


def import_runtime() -> None:
    """Raise an error with installation advice if ONNX Runtime is missing."""
    if not available():
        raise OnnxRematError("onnxruntime is not installed: pip install 'onnx-remat[cpu]' (or [gpu])")


def _level(level: str) -> Any:
    import onnxruntime

    name = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}[level]
    return getattr(onnxruntime.GraphOptimizationLevel, name)


def optimized(
    model: onnx.ModelProto,
    folder: Path | None,
    level: str,
    providers: Sequence[str] = HOST,
    without: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return the graph that ONNX Runtime will run for `model`, its nodes in execution order.

    `providers` are names of execution providers, the preferred first; `without` names of optimisations to disable;
    `sizes` the symbolic dimensions to fix before loading.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load the model.
    """
    import_runtime()
    with files.scratch() as scratch:
        source, target = write_beside(model, folder, scratch), scratch / "optimized.onnx"
        ask(
            "ONNX Runtime", "onnx_remat.ort.runtime:load_and_optimize", limit(model, providers[0]),
            on_device=providers[0] not in HOST, source=str(source), target=str(target), level=level,
            providers=[*providers], without=[*without], sizes=dict(sizes or {}),
        )  # fmt: skip
        made = onnx.load(str(target), load_external_data=False)
    unshadow(made.graph)
    _restore_defaults(made, model)
    return made


def _restore_defaults(made: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Restore the defaults of inputs of a loaded model that have no reader any more.

    Before IR version 4 initializers had to be listed as inputs without being inputs: those are removed.
    """
    stored = {tensor.name for tensor in made.graph.initializer}
    fed = {value.name for value in made.graph.input} - stored
    lost = [tensor for tensor in model.graph.initializer if tensor.name in fed]
    if model.ir_version >= 4:
        made.graph.initializer.extend(lost)
        return
    names = {tensor.name for tensor in lost}
    kept = [value for value in made.graph.input if value.name not in names]
    del made.graph.input[:]
    made.graph.input.extend(kept)


def load_and_optimize(
    source: str,
    target: str,
    level: str,
    providers: Sequence[str],
    without: Sequence[str],
    sizes: Mapping[str, int],
) -> tuple[None, bytes]:
    """Load the model for `optimized`; runs in a separate process (`worker`)."""
    options = session_options(level)
    options.optimized_model_filepath = target
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    _load(source, options, providers, without)
    return None, b""


def _load(source: str | bytes, options: Any, providers: Sequence[str], without: Sequence[str] = ()) -> Any:
    """Return a session on a file or a serialised model."""
    import onnxruntime

    if providers[0] not in HOST:
        libraries.load_cuda()
    options.log_severity_level = 4
    try:
        leaving_out = {"disabled_optimizers": [*without]} if without else {}
        return onnxruntime.InferenceSession(source, options, providers=[*providers], **leaving_out)
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {_reason(error, source, providers)}") from error


def limit(model: onnx.ModelProto, provider: str = HOST[0]) -> Limit:
    """Return the limit of time and memory for loading a model in ONNX Runtime."""
    size = model_io.weight_bytes(model) + without_weights(model).ByteSize()
    device = Limit(_DEVICE_SECONDS, _DEVICE_BYTES) if provider not in HOST else Limit(0.0, 0)
    return Limit(
        _SECONDS + len(model.graph.node) / _NODES_PER_SECOND + device.seconds, _BYTES + _COPIES * size + device.bytes
    )


def outputs(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], level: str = "disable") -> dict[str, np.ndarray]:
    """Run a model once on the CPU and return every output by name.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load or run the model.
    """
    options = session_options(level)
    import onnxruntime

    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # for a single run it would only keep memory from others
    source = model.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(source, options, providers=[*HOST])
        made = session.run(None, dict(feeds))
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot run the model: {_reason(error, source, HOST)}") from error
    return dict(zip((value.name for value in model.graph.output), made, strict=True))


def write_beside(model: onnx.ModelProto, folder: Path | None, scratch: Path) -> Path:
    """Write a model to a new folder inside a scratch folder, together with links to its external data files."""
    home, name = scratch / "model", "model.onnx"
    home.mkdir()
    if folder is not None:
        external_data.link(model, folder, home)
    while (home / name).exists():  # a data file has that name: writing would change the user's own file
        name = "_" + name
    model_io.write(model, folder, home / name)
    return home / name


@contextlib.contextmanager
def as_step(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file whose nodes are those of the step: a temporary copy if the step is in a body (`ir.body`)."""
    source = model_io.load(path)
    if not source.in_body:
        yield files.reopened(path)
        return
    with files.scratch() as home:
        yield write_beside(source.model, source.folder, home)


def infer_shapes(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[str, list[int | str | None]]]:
    """Return element type (as in ``tensor(float)``) and shape of values, as ONNX Runtime infers them.

    Its schemas include its own contrib ops. Empty if it is not installed or cannot load the model.
    """
    if not available():
        return {}
    query = onnx.ModelProto()
    query.CopyFrom(model)
    have = {value.name for value in model.graph.output}
    query.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    try:
        made, _ = ask(
            "ONNX Runtime", "onnx_remat.ort.runtime:load_and_infer", limit(model), query.SerializeToString(),
            names=list(names),
        )  # fmt: skip
    except ModelError:
        return {}  # `optimized` reports a model that must load
    return {name: (kind, shape) for name, (kind, shape) in made.items()}


def load_and_infer(data: bytes, names: Sequence[str]) -> tuple[dict[str, Any], bytes]:
    """Load the model for `infer_shapes`; runs in a separate process (`worker`)."""
    session = _load(data, session_options("disable"), HOST)
    wanted = set(names)
    return {value.name: (value.type, value.shape) for value in session.get_outputs() if value.name in wanted}, b""


def order_by_priority(producers: Sequence[Sequence[int]], sizes: Sequence[bool]) -> list[int]:
    """Return the order in which ONNX Runtime runs a graph's nodes under ``ExecutionOrder.PRIORITY_BASED``.

    A profile of the graph's skeleton shows it, so that nothing large is computed: each node becomes a Max of scalars,
    Shape and Size become a Size, and the edges between nodes stay. The order depends on nothing else.

    Parameters
    ----------
    producers : for each node, in file order, the nodes whose outputs it reads (repeats allowed)
    sizes : for each node, whether it is a Shape or a Size

    Returns
    -------
    list of int
        Node positions in execution order, which `memory.order.priority_order` emulates.

    Raises
    ------
    ModelError
        ONNX Runtime cannot run the skeleton.
    """
    if not producers:
        return []
    import_runtime()
    nodes = []
    for i, of in enumerate(producers):
        edges = [f"v{k}" for k in dict.fromkeys(of)]
        kind = "Size" if sizes[i] and len(edges) < 2 else "Max"
        nodes.append(onnx.helper.make_node(kind, edges or ["one"], [f"v{i}"], name=f"{i}"))
    one = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [], [1])
    outputs = [onnx.helper.make_tensor_value_info(f"v{i}", onnx.TensorProto.INT64, []) for i in range(len(nodes))[-1:]]
    graph = onnx.helper.make_graph(nodes, "skeleton", [], outputs, [one])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    order, _ = ask("ONNX Runtime", "onnx_remat.ort.runtime:run_in_order", limit(model), model.SerializeToString())
    return [int(node) for node in order]


def run_in_order(data: bytes) -> tuple[list[int], bytes]:
    """Run the skeleton for `order_by_priority`; runs in a separate process (`worker`)."""
    import onnxruntime

    options = session_options("disable")
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = 1
    with files.scratch() as scratch:
        options.enable_profiling, options.profile_file_prefix = True, str(scratch / "profile")
        session = _load(data, options, HOST)
        session.run(None, {})
        events = json.loads(Path(session.end_profiling()).read_text())
    suffix = "_kernel_time"
    runs = [event["name"] for event in events if event.get("cat") == "Node" and event["name"].endswith(suffix)]
    return [int(name.removesuffix(suffix)) for name in runs], b""  # one thread records them in the order they run


def infer_shapes_symbolically(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Run ONNX Runtime's symbolic shape inference on a model; None if it is not installed or fails."""
    if not available():
        return None
    try:
        _, made = ask(
            "symbolic inference", "onnx_remat.ort.runtime:do_infer_symbolically", limit(model),
            model.SerializeToString(),
        )  # fmt: skip
    except ModelError:
        return None
    return onnx.ModelProto.FromString(made) if made else None


def do_infer_symbolically(data: bytes) -> tuple[None, bytes]:
    """Infer for `infer_shapes_symbolically`; runs in a separate process (`worker`)."""
    with files.scratch() as scratch, contextlib.chdir(scratch):  # on failure it leaves a dump in the current folder
        try:
            from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

            made = SymbolicShapeInference.infer_shapes(onnx.ModelProto.FromString(data), auto_merge=True)
        except Exception:  # sympy is not installed, or the graph has something it does not support
            made = None
    return None, made.SerializeToString() if made is not None else b""


@cache
def has_device(provider: str) -> bool:
    """Whether ONNX Runtime can create sessions on an execution provider here, with its driver and libraries."""
    if not available():
        return False
    import onnxruntime

    if provider in HOST or provider not in onnxruntime.get_available_providers():
        return provider in HOST
    nodes = [onnx.helper.make_node("Neg", ["x"], ["y"])]
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[1])
    graph = onnx.helper.make_graph(nodes, "probe", [value("x")], [value("y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    task = "onnx_remat.ort.runtime:first_provider"
    limit = Limit(_DEVICE_SECONDS, _DEVICE_BYTES)
    found, _ = ask("ONNX Runtime", task, limit, model.SerializeToString(), True, providers=[provider, *HOST])
    return bool(found == provider)


def check_device(provider: str) -> None:
    """Raise ModelError unless ONNX Runtime can create sessions on an execution provider here."""
    if not has_device(provider):
        raise ModelError(
            f"onnxruntime makes no {provider} session here: install onnxruntime-gpu and its CUDA libraries, on a "
            "machine with a device"
        )


def first_provider(data: bytes, providers: Sequence[str]) -> tuple[str, bytes]:
    """Return the provider that a session gets (`has_device`): fallback is silent. Runs in a separate process."""
    return _load(data, session_options("disable"), providers).get_providers()[0], b""


def check_provider(name: str) -> None:
    """Raise an error with installation advice if ONNX Runtime lacks an execution provider, given by its own name."""
    import_runtime()
    import onnxruntime

    if name not in onnxruntime.get_available_providers():
        raise OnnxRematError(
            f"ONNX Runtime has no {name} here: pip install 'onnx-remat[gpu]' in place of [cpu], "
            "on a machine with an NVIDIA GPU and CUDA"
        )


_SCARCE = {onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.DOUBLE: "float64"}
"""Types for which ONNX Runtime's CPU has no kernels of many ops."""


def _reason(error: Exception, source: str | bytes, providers: Sequence[str]) -> str:
    """Return ONNX Runtime's message, with the types of the model for which it may have no kernel, and a remedy."""
    reason = _first_line(error)
    if "Could not find an implementation" not in reason or tuple(providers) != tuple(HOST):
        return reason
    graph = onnx.load(io.BytesIO(source) if isinstance(source, bytes) else source, load_external_data=False).graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    scarce = " and ".join(name for kind, name in _SCARCE.items() if kind in kinds)
    remedy = f"; its CPU lacks many kernels for {scarce}: convert in float32, or plan with provider 'cuda'"
    return reason + remedy if scarce else reason


def _first_line(error: Exception) -> str:
    """Return ONNX Runtime's message without its error codes, scratch paths and C++ signatures."""
    line = messages.first_line(error)
    for clutter in _CLUTTER:
        line = re.sub(clutter, "", line)
    return line[:300]


_CLUTTER = (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", r"^Load model from \S+ failed:", r"^/\S+ .*?\(.*?\) (?=[A-Z])")
