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
from torch.fx import GraphModule, Node

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
    _keep_digits(module)
    module.graph.eliminate_dead_code()
    return module


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
