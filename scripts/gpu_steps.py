"""Training steps on a GPU, taken by one runner in a process of its own: what they take of the device, and how long.

`taken` is for `scripts.child.answered`; `scripts.gpu_truth` says what its figures are.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_remat.errors import OnnxRematError
from onnx_remat.fuse import shim
from onnx_remat.process.cache import replacing
from onnx_remat.session import kernel_file, plan_session
from onnx_remat.session import session as session_module
from onnx_remat.session.arrays import Array
from onnx_remat.session.device import smallest_limit
from onnx_remat.session.plan_session import SessionRequest
from onnx_remat.session.session import Session

WARM, STEPS = 3, 12
LIMIT, LIMITS = 1 << 25, 8
"""Bytes between two limits that are tried, and how many of them above the predicted one."""


def arrays_of(path: Path, dims: Mapping[str, int]) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """Inputs without a default, and outputs by name, whose shapes are left out, as a file states them."""
    graph = onnx.load(path, load_external_data=False).graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = []
    for value in graph.input:
        kind = value.type.tensor_type
        if missing := [dim.dim_param for dim in kind.shape.dim if dim.dim_param and dim.dim_param not in dims]:
            raise ValueError(f"input {value.name!r} has a size {missing[0]!r}, which has no number")
        if value.name not in stored:
            shape = tuple(dims[dim.dim_param] if dim.dim_param else dim.dim_value for dim in kind.shape.dim)
            inputs.append(Array(value.name, kind.elem_type, shape))
    return tuple(inputs), {each.name: Array(each.name, each.type.tensor_type.elem_type, ()) for each in graph.output}


def used() -> int:
    """Bytes in use on the device, as the driver counts them."""
    import pynvml  # type: ignore[import-not-found, unused-ignore]

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def warm_up(kind: str) -> None:
    """A product and a convolution, so that the libraries hold what they hold whatever the step."""
    if kind == "torch":
        import torch

        x = torch.ones(1, 1, 8, 8, device="cuda", requires_grad=True)
        torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3, device="cuda")).flatten(1).matmul(
            torch.ones(36, 2, device="cuda")
        ).sum().backward()
        torch.cuda.synchronize()
        return
    from onnx import TensorProto, helper, numpy_helper

    from onnx_remat.session import on_device

    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Flatten", ["c"], ["f"]),
             helper.make_node("MatMul", ["f", "m"], ["y"])]  # fmt: skip
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (1, 1, 3, 3)), ("m", (36, 2)))
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 1, 8, 8]), ("y", [1, 2])))
    model = helper.make_model(
        helper.make_graph(nodes, "warm", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    import onnxruntime

    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=on_device.providers(names, 0))
    assert session.get_providers()[0] == names[0], "onnxruntime made no session on CUDA"
    session.run(None, {"x": np.ones((1, 1, 8, 8), np.float32)})


def timed(step: Callable[[], float]) -> tuple[float, list[float]]:
    """Median of seconds, and losses, of `STEPS` steps after `WARM`."""
    losses, seconds = [], []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM:]), losses


def stock_step(path: Path, dims: Mapping[str, int]) -> Callable[[], float]:
    """A step of a file by onnxruntime's own session as it comes."""
    import onnxruntime

    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.training import Loop

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, size in dims.items():
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CUDAExecutionProvider"])
    return Loop(session, state_for(arrays_of(path, dims)[0]), device="cuda").step


def our_step(job: Mapping[str, Any], graph: bool, limit: int = 0) -> tuple[Session, Callable[[], float]]:
    """A step of a file by a `Session`."""
    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.training import Loop

    session = Session(
        job["path"], "cuda", donate=True, dims=job["dims"], cuda_graph=graph, memory_limit=limit, fuse=job["fuse"]
    )
    return session, Loop(session, state_for(session.inputs), device="cuda").step


def kept(path: Path, target: Path, request: Any) -> Any:
    """`plan_session.plan_in_child`, whose result is kept next to the file: it takes longer than all the steps here."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(json.dumps([dict(request.dims), bool(request.secret)], sort_keys=True).encode())
    model, kernels, opened = (path.with_suffix(f".{digest.hexdigest()[:16]}.{kind}") for kind in KEPT)
    if not opened.exists():
        found = plan_session.plan_in_child(path, target, request)
        for source, copy in ((target, model), (kernel_file.path_of(target), kernels)):
            if source.exists():
                with replacing(copy) as partial:
                    shutil.copyfile(source, partial)
        with replacing(opened) as partial:  # the last one: where it lies, so do the others
            partial.write_bytes(pickle.dumps(found))
    shutil.copyfile(model, target)
    if kernels.exists():
        shutil.copyfile(kernels, kernel_file.path_of(target))
    return pickle.loads(opened.read_bytes())


KEPT = ("private", "kernels", "opened")
"""What the names of the files end with that `kept` leaves: model, kernels, and plan."""


def keep_plans() -> None:
    """From now on, sessions of this process are opened by `kept`."""
    session_module.plan_in_child = kept  # type: ignore[attr-defined]


def request_of(dims: Mapping[str, int], fuse: bool) -> SessionRequest:
    """What `our_step` asks `kept` for."""
    return SessionRequest("cuda", dict(dims), True, secret=shim.new_secret() if fuse else 0)


def on_device(name: str, batch: int) -> tuple[Any, Any]:
    """A case whose model is on the device, and its batch there, of this size."""
    import torch
    from torch.utils import _pytree as pytree

    from sample_models.networks import torch_models

    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    case.model.cuda()

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(-(-batch // len(tensor)), *[1] * (tensor.dim() - 1))[:batch].cuda()

    return case, pytree.tree_map(wide, case.batch)


def torch_step(name: str, batch: int, compiled: bool) -> Callable[[], float]:
    """A step of PyTorch's on the device."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case, given = on_device(name, batch)
    model = case.model
    optimizer = case.optimizer(model.parameters())
    called = torch.compile(model) if compiled else model

    def loss_of() -> torch.Tensor:
        if case.loss is None:  # the model computes it
            made: torch.Tensor = called(**given).loss
            return made
        positional, named, target = case.arguments(given)
        loss: torch.Tensor = case.loss(called(*positional, **named), target)
        return loss

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def budgeted_step(job: Mapping[str, Any]) -> tuple[Any, Callable[[], float]]:
    """A step by `budgeted` of a module on the device, within a share of what PyTorch's own takes, or without one."""
    from onnx_remat.converters.pytorch import budgeted

    case, given = on_device(job["step"], job["batch"])
    model, options = case.model, {name: value for name, value in case.options.items() if name != "dynamic_dims"}
    if job["budget"]:
        options |= {"budget": job["budget"], "planning": {"cudnn_workspace": job["workspace"]}}
    step = budgeted(model, case.loss, case.optimizer(model.parameters()), given, check=False, progress=False, **options)
    return step, lambda: float(step(given))


def books(session: Session) -> dict[str, int]:
    """Of what the bytes of a session are, as planned."""
    inputs = sum(array.nbytes for array in session.inputs)
    return {"slab": session.slab_bytes, "inputs": inputs, "workspace": session.workspace_bytes,
            "weights": session.weight_bytes, "nodes": session.node_count}  # fmt: skip


def taken(job: Mapping[str, Any]) -> dict[str, Any]:
    """Take steps of one runner, in a process that does nothing else, and return what they took."""
    how, empty = job["how"], used()
    for kind in {"eager": ["torch"], "compile": ["torch"], "budgeted": ["torch", "ours"]}.get(how, ["ours"]):
        warm_up(kind)
    idle, start = used(), time.perf_counter()
    found: dict[str, Any] = {"idle": idle - empty}
    session = None
    if how in ("eager", "compile"):
        step = torch_step(job["step"], job["batch"], how == "compile")
    elif how == "budgeted":
        made, step = budgeted_step(job)
        if made.report is not None:
            after = made.report.loop_after
            found |= {"summary": made.summary, "limit": made.report.budget, "predicted": after and after.total}
    elif how == "onnxruntime":
        step = stock_step(Path(job["path"]), job["dims"])
    else:
        keep_plans()
        session, step = our_step(job, graph=False)
        found |= {"open": used() - idle, "books": books(session)}
    found["made"] = time.perf_counter() - start
    found["seconds"], found["losses"] = timed(step)
    found["taken"] = used() - idle
    if how in ("eager", "compile"):
        import torch

        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    if session is not None:
        session.close()
        del step
        found |= _or_why("graph", lambda: _in_graph(job, idle, found["losses"]))
        found |= _or_why("least", lambda: {"least": smallest(job)})
    return found


def _or_why(what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, or why it is not: what was measured before is not lost."""
    try:
        return measure()
    except Exception as error:
        return {f"no_{what}": f"{type(error).__name__}: {error}"[:300]}


def _in_graph(job: Mapping[str, Any], idle: int, losses: list[float]) -> dict[str, Any]:
    session, step = our_step(job, graph=True)
    with session:
        seconds, found = timed(step)
        if not np.allclose(found, losses, rtol=1e-3, equal_nan=True):
            return {"no_graph": f"a CUDA graph gives other losses: {found[:3]}, not {losses[:3]}"}
        return {"graph": seconds, "graph_taken": used() - idle}


def smallest(job: Mapping[str, Any]) -> int:
    """The least limit, in steps of `LIMIT` from the predicted one, under which three steps are taken; 0 if none is."""

    def runs_within(limit: int) -> bool:
        try:
            session, step = our_step(job, graph=False, limit=limit)
            with session:
                for _ in range(3):
                    step()
        except OnnxRematError:
            return False
        return True

    least = int(job["predicted"])
    most = least + LIMITS * LIMIT
    if runs_within(least):
        return least
    return smallest_limit(runs_within, most, least, LIMIT) if job["limits"] and runs_within(most) else 0
