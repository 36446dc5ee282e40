"""Training steps traced by PyTorch as planning problems: one op per aten call, sizes by fake tensors, nothing is run.

For comparisons with planners that count as PyTorch's allocator does: kernels' outputs, freed after their last reader,
no scratch memory; BatchNorm is one op, and ReLU may take over the buffer it reads, as it does in ``inplace`` mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from onnx_remat.memory.problem import BACKWARD, FORWARD, Problem
from onnx_remat.ort.kernels.costs import Device

_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "alias", "detach", "slice", "select", "unsqueeze",
    "squeeze", "reshape", "split", "as_strided", "lift_fresh",
}  # fmt: skip
_INPLACE = {"relu", "hardtanh"}
_RANDOM = {"native_dropout", "bernoulli", "rand", "randn", "rand_like"}


def trace_step(
    model: torch.nn.Module,
    batch: Sequence[torch.Tensor],
    loss: Callable[..., torch.Tensor],
    input_gradient: bool = False,
) -> Graph:
    """Graph of ``loss(model(batch[0]), *batch[1:])`` and the gradients of all parameters; outputs: loss, gradients.

    Placeholders: the parameters, in the order of ``named_parameters``, then the batch. `input_gradient` adds the
    gradient of ``batch[0]``, last.
    """
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[torch.Tensor], *batch: torch.Tensor) -> list[torch.Tensor]:
        given = [p.detach().requires_grad_() for p in parameters]
        data = batch[0].detach().requires_grad_() if input_gradient else batch[0]
        made = torch.func.functional_call(model, dict(zip(names, given, strict=True)), (data,))
        value = loss(made, *batch[1:])
        given += [data] * input_gradient
        return [value.detach(), *torch.autograd.grad(value, given)]

    traced = make_fx(step, tracing_mode="fake")([p.detach() for p in model.parameters()], *batch)
    traced.graph.eliminate_dead_code()
    return traced.graph


def drop_running_statistics(model: torch.nn.Module) -> None:
    """Make BatchNorm use the batch's statistics alone: updates in place of buffers are no part of a traced step."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
            module.num_batches_tracked = None


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The tensors a node makes, one for each output that is a tensor."""
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]


def problem(graph: Graph, device: Device, free: Sequence[Node] = ()) -> tuple[Problem, list[Node]]:
    """A graph as a `Problem`, and its op nodes in the problem's numbering.

    Parameters
    ----------
    graph : Graph
        Nodes carry fake tensors (``meta["val"]``).
    device : Device
        Roofline that seconds are reckoned with; FLOPs by `torch.utils.flop_counter`.
    free : sequence of Node
        Placeholders, and nodes whose results count nothing: weights and their gradients, where only activations count.
    """
    unpaid = set(free)
    numbers: dict[Node, list[int]] = {}
    sizes: list[int] = []
    classes: dict[object, int] = {}
    shape_class: list[int] = []
    resident: list[bool] = []
    maker: list[int] = []

    def define(node: Node, made_by: int) -> None:
        start = len(sizes)
        for tensor in tensors_of(node):
            kind = (tuple(tensor.shape), tensor.dtype)
            sizes.append(0 if node in unpaid else tensor.numel() * tensor.element_size())
            shape_class.append(classes.setdefault(kind, len(classes)))
            resident.append(made_by < 0)
            maker.append(made_by)
        numbers[node] = list(range(start, len(sizes)))

    ops: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            define(node, -1)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node) and isinstance(index, int)
            before = [isinstance(v, torch.Tensor) for v in source.meta["val"]][:index]
            numbers[node] = [numbers[source][sum(before)]] if tensors_of(node) else []
            if node in unpaid:
                sizes[numbers[node][0]] = 0
        elif node.op == "call_function":
            define(node, len(ops))
            ops.append(node)
    out = {v for node in _arguments(graph.output_node()) for v in numbers[node]}
    reads = [[numbers[a][0] for a in _arguments(node) if numbers[a]] for node in ops]
    writes = [numbers[node] for node in ops]
    alias = [0 if _name(node) in _VIEWS and reads[i] else -1 for i, node in enumerate(ops) for _ in numbers[node]]
    inplace = [[0] if _name(node) in _INPLACE else [] for node in ops for _ in numbers[node]]
    last_forward = maker[next(iter(numbers[_arguments(graph.output_node())[0]]))]
    n_values = len(sizes)
    return Problem(
        in_ptr=_pointers(reads), in_values=_flat(reads), out_ptr=_pointers(writes), out_values=_flat(writes),
        nbytes=np.array(sizes, np.int64), resident=np.array(resident),
        is_output=np.isin(np.arange(n_values), sorted(out)),
        shape_class=np.array(shape_class, np.int32), poolable=np.zeros(n_values, np.bool_),
        alias_slot=np.array(alias, np.int32), inplace_ptr=_pointers(inplace), inplace_slots=_flat(inplace),
        droppable=np.zeros(len(alias), np.int8), workspace=np.zeros(len(ops), np.int64),
        rerun_workspace=np.zeros(len(ops), np.int64),
        cost=np.array([seconds(node, device) for node in ops]),
        recomputable=np.array([_name(node) not in _RANDOM for node in ops]),
        phase=np.array([FORWARD if i <= last_forward else BACKWARD for i in range(len(ops))], np.int8),
        base_bytes=sum(size for size, held in zip(sizes, resident, strict=True) if held), hold_unread=False,
    ), ops  # fmt: skip


def seconds(node: Node, device: Device) -> float:
    """Roofline of one aten call: FLOPs of matrix products and convolutions, bytes read and written of all."""
    if _name(node) in _VIEWS:
        return device.overhead
    read = [t for a in _arguments(node) for t in tensors_of(a)]
    moved = sum(t.numel() * t.element_size() for t in [*read, *tensors_of(node)])
    counter = flop_registry.get(getattr(node.target, "overloadpacket", None))
    flops = 0.0
    if counter is not None:
        arguments = torch.fx.node.map_arg(node.args, lambda a: a.meta["val"])
        options = torch.fx.node.map_arg(node.kwargs, lambda a: a.meta["val"])
        flops = float(counter(*arguments, **options, out_val=node.meta["val"]))
    return max(flops / device.flops, moved / device.bandwidth) + device.overhead


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__).rstrip("_") if packet is not None else ""  # relu_ reads and makes what relu does


def _arguments(node: Node) -> list[Node]:
    """Every node a node reads, in order, repeats kept."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda a: found.append(a))
    return found


def _pointers(rows: Sequence[Sequence[int]]) -> Any:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _flat(rows: Sequence[Sequence[int]]) -> Any:
    return np.array([v for row in rows for v in row], np.int32)
