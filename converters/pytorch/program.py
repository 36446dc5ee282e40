"""A traced graph as the program that torch's exporter translates.

The exporter traces a module, decomposes the trace, and traces the result again. A step already has the required form:
flat, functional, of operators that the exporter knows. The program therefore skips these stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec
from torch.export.graph_signature import TensorArgument as Argument
from torch.fx import Graph, GraphModule, Node

from .private_torch import (
    FunctionalTensorMode,
    compiling,
    dispatch_functionalize,
    make_fx,
    pytree,
    without_translation,
)
from .reads import Lift
from .rules import decompositions

_untranslated = cache(without_translation)


def capture(function: Callable[..., Any], fakes: Sequence[torch.Tensor], opset: int, lift: Lift) -> GraphModule:
    """Trace a function on tensors without data into a functional graph of operators; `lift` handles other tensors."""

    def lifted(*values: torch.Tensor) -> Any:
        with lift, compiling():  # models ask whether they are being exported
            return function(*values)

    module = make_fx(
        dispatch_functionalize(lifted, FunctionalTensorMode()), tracing_mode="fake",
        decomposition_table=_untranslated(opset) | decompositions(), _allow_non_fake_inputs=True,
    )(*fakes)  # fmt: skip
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.replace_all_uses_with(node.args[0])  # of constants in rules
        module.graph.erase_node(node)
    _type_factories(module.graph)
    _keep_digits(module)
    _widen_updates(module.graph)
    module.graph.eliminate_dead_code()
    return module


def _type_factories(graph: Graph) -> None:
    """State the type of tensors made in torch's default type, because torch's exporter makes them in float32."""
    for node in graph.nodes:
        schema, dtype = getattr(node.target, "_schema", None), getattr(node.meta.get("val"), "dtype", torch.float32)
        if schema is None or not dtype.is_floating_point or dtype == torch.float32:
            continue
        takes = {argument.name: str(argument.type) for argument in schema.arguments}
        if "dtype" in takes and "Tensor" not in takes.values():
            node.kwargs = node.kwargs | {"dtype": dtype}


_BY_NUMBER = {
    getattr(torch.ops.aten, name).Scalar: getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")
} | {torch.ops.aten.pow.Scalar: torch.ops.aten.pow.Tensor_Tensor}


def _keep_digits(module: GraphModule) -> None:
    """Turn numbers in float64 arithmetic into tensors, because torch's exporter rounds numbers to float32."""
    graph = module.graph
    for node in [node for node in graph.nodes if node.target in {*_BY_NUMBER, *_BY_NUMBER.values()}]:
        numbers = [slot for slot, value in enumerate(node.args) if isinstance(value, float)]
        if node.meta["val"].dtype == torch.float64 and len(node.args) == 2 and len(numbers) == 1:
            name = f"_number_{node.name}"
            setattr(module, name, torch.tensor(node.args[numbers[0]], dtype=torch.float64))
            with graph.inserting_before(node):
                made = graph.get_attr(name)
            made.meta = dict(node.meta) | {"val": node.meta["val"].new_empty(())}
            node.target = _BY_NUMBER.get(node.target, node.target)
            node.args = tuple(made if slot in numbers else value for slot, value in enumerate(node.args))


_HALVES = (torch.float16, torch.bfloat16)

_WITH_NUMBERS = {
    *(getattr(getattr(torch.ops.aten, name), kind)
      for name in ("add", "sub", "mul", "div", "rsub") for kind in ("Tensor", "Scalar")),
    torch.ops.aten.addcmul.default, torch.ops.aten.addcdiv.default,
    torch.ops.aten.lerp.Scalar, torch.ops.aten.lerp.Tensor,
}  # fmt: skip
"""Operators in which torch on a GPU computes by a number in float32, whatever the type of the tensors; on the CPU it
rounds a number that is added, or that multiplies what is added."""


def _widen_updates(graph: Graph) -> None:
    """Compute by numbers that half precision does not hold in float32, as torch does, where state is renewed.

    The exporter rounds numbers, and tensors without dimensions, such as a learning rate, to the type of the others: a
    second moment that decays by 0.99 would decay by 0.988 in bfloat16. Elsewhere the rounded number serves both a value
    and its gradient, and needs no copies in float32.
    """
    for node in list(graph.nodes):
        dtype = getattr(node.meta.get("val"), "dtype", None)
        numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, int | float)]
        in_update = (node.meta.get("custom") or {}).get("phase") == "optimizer"
        if node.target not in _WITH_NUMBERS or dtype not in _HALVES or not in_update:
            continue
        made = {source: source.meta["val"] for source in node.all_input_nodes}
        exact = all(torch.tensor(number, dtype=dtype).item() == number for number in numbers)
        if exact and all(value.dtype == dtype or not value.dtype.is_floating_point for value in made.values()):
            continue
        for source in [source for source, value in made.items() if value.dtype != torch.float32]:
            with graph.inserting_before(node):
                node.replace_input_with(source, _cast(graph, source, torch.float32, node))
        node.meta = node.meta | {"val": node.meta["val"].to(torch.float32)}
        with graph.inserting_after(node):
            rounded = _cast(graph, node, dtype, node)
        node.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)


def _cast(graph: Graph, source: Node, dtype: torch.dtype, place: Node) -> Node:
    """Return a new node that casts a result, with the labels of another node."""
    made = graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
    made.meta = dict(place.meta) | {"val": source.meta["val"].to(dtype)}
    return made


def make_inputs(module: GraphModule, constants: Mapping[str, torch.Tensor], place: int) -> None:
    """Turn these constants of a captured graph into inputs, at this position among the inputs."""
    graph = module.graph
    following = [node for node in graph.nodes if node.op == "placeholder"][place:]
    first = following[0] if following else next(node for node in graph.nodes if node.op != "placeholder")
    reads = [(node, getattr(module, str(node.target))) for node in graph.find_nodes(op="get_attr")]
    for index, tensor in enumerate(constants.values()):
        with graph.inserting_before(first):
            made = graph.placeholder(f"outside_{index}")
        made.meta = {"val": tensor}
        for node, value in reads:
            if value is tensor:
                node.replace_all_uses_with(made)
                graph.erase_node(node)


class _Final(ExportedProgram):
    """A program that needs no decomposition."""

    def run_decompositions(self, *_: Any, **__: Any) -> _Final:
        return self


def program(module: GraphModule) -> ExportedProgram:
    """Return the program of a captured graph; its tensors become constants of the program."""
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    ((results,),) = (node.args for node in graph.nodes if node.op == "output")
    takes = [InputSpec(InputKind.USER_INPUT, Argument(node.name), None) for node in inputs]
    gives = [OutputSpec(OutputKind.USER_OUTPUT, Argument(node.name), None) for node in results]
    constants: dict[str, Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in constants:
            with graph.inserting_after(inputs[-1]):
                inputs.append(graph.placeholder(name))
            constants[name] = inputs[-1]
            constants[name].meta = {"val": getattr(module, name)} | node.meta
            takes.append(InputSpec(InputKind.CONSTANT_TENSOR, Argument(constants[name].name), name))
        node.replace_all_uses_with(constants[name])
        graph.erase_node(node)
    _, flat = pytree.tree_flatten(((), {}))
    whole = ModuleCallEntry("", ModuleCallSignature([], [], flat, flat))
    values = {name: getattr(module, name) for name in constants}
    return _Final(module, graph, ExportGraphSignature(takes, gives), {}, {}, [whole], constants=values)
