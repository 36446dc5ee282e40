"""Products for the entries of a window as one product of columns, on a device.

Converters write the gradient of a convolution's weights as a Slice and a product for each entry of the window: then a
single copy of the images is live at a time. On a device, where each launch counts, one kernel copies what all entries
read (`fuse.columns`), and one product multiplies it. The copy takes as much memory as the slices together: where that
would raise the step's peak, the entries of each row of the window have a product, or each entry keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from onnx_remat.fuse.columns import Columns, columns_of
from onnx_remat.ir.opsets import is_op
from onnx_remat.session import biases

if TYPE_CHECKING:
    from onnx_remat.fuse.ordered import OrderedStep
    from onnx_remat.ir.shapes import Tensor
    from onnx_remat.session.lean_graph import LeanNode
    from onnx_remat.session.offsets import Program

_COLUMNS = "/columns"


def are_columns(name: str) -> bool:
    """Return whether a value of this name is columns, named after the first product that reads them."""
    return name.endswith(_COLUMNS)


@dataclass(frozen=True, slots=True)
class Gradient:
    """Products with one left operand, side by side.

    Attributes
    ----------
    place : int
        Of the Concat.
    products : tuple of int
        Places of the products, in the order of the Concat.
    columns : Columns
        The right operands.
    """

    place: int
    products: tuple[int, ...]
    columns: Columns

    def runs(self) -> Iterator[int]:
        """Yield the numbers of products that one product of columns can replace, the largest first."""
        entries = self.columns.entries
        for i in range(len(entries)):
            yield prod(extent for extent, _ in entries[i:])


def find(ordered: OrderedStep) -> list[Gradient]:
    """Return the gradients in a step, by place."""
    found = (_gradient(ordered, place) for place in range(len(ordered.steps)))
    return [each for each in found if each is not None]


def _gradient(ordered: OrderedStep, place: int) -> Gradient | None:
    from onnx_remat.ir.graph import attributes

    node, uses, tensors = ordered.steps[place].node, ordered.uses, ordered.tensors
    if not is_op(node, "Concat") or not all(uses.only_for(name, place) and uses.is_own(name) for name in node.input):
        return None
    made = node.output[0]
    if not uses.is_own(made) or uses.root(made) in uses.kept or made in ordered.renewed:
        return None
    products = [uses.made_by(name, "MatMul") for name in node.input]
    if min(products) < 0 or len(tensors[made].shape) != 2 or attributes(node).get("axis", 1) not in (1, -1):
        return None
    if any(ordered.steps[at].node.output[0] != name for at, name in zip(products, node.input, strict=True)):
        return None  # a view, in another shape perhaps
    operands = [ordered.steps[at].node.input for at in products]
    lefts, rights = {left for left, _ in operands}, [right for _, right in operands]
    read_once = all(uses.only_for(right, at) for right, at in zip(rights, products, strict=True))
    if len(lefts) != 1 or not read_once or any(len(tensors[name].shape) != 2 for name in (*lefts, *rights)):
        return None
    if any(made in step.captured for step in ordered.steps):
        return None
    columns = columns_of(ordered, rights, 1)
    return None if columns is None else Gradient(place, tuple(products), columns)


def joined(program: Program, opset: int, found: Iterable[Gradient], room: Callable[[str, str], int]) -> Program:
    """Return a program in which products are one where there is room; the same program if there is none.

    Parameters
    ----------
    program : Program
    opset : int
    found : iterable of Gradient
        Of this program.
    room : callable
        Bytes that may be live besides, where a product is computed that has a result of that name, and where a value of
        that name is live as well.
    """
    from onnx_remat.session import offsets

    def fits(gradient: Gradient, part: Sequence[int]) -> bool:
        """Return whether there is room for columns instead of the slice that the last product reads."""
        rights = [program.tensors[program.steps[at].node.input[1]].nbytes for at in part]
        last = program.steps[max(part)].node.output[0]
        return sum(rights) - rights[-1] <= room(last, gradient.columns.source)

    replaced: dict[int, list[LeanNode]] = {}
    instead: dict[str, str] = {}
    more: dict[str, Tensor] = {}
    for gradient in found:
        places, concat = gradient.products, program.steps[gradient.place]
        cuts = [[places[i : i + run] for i in range(0, len(places), run)] for run in gradient.runs()]
        parts = next((cut for cut in cuts if all(fits(gradient, part) for part in cut)), cuts[-1])
        made = {part: _product(program, part) for part in parts if fits(gradient, part)}
        if not made or any(name in program.tensors for _, new in made.values() for name in new):
            continue
        sides: list[str] = []
        for part in parts:
            if part not in made:
                sides += [program.steps[at].node.output[0] for at in part]
                continue
            nodes, new = made[part]
            replaced |= {place: [] for place in part} | {max(part): nodes}
            more |= new
            sides.append(nodes[-1].writes[0])
        if len(sides) == 1:
            replaced[gradient.place] = []
            instead[concat.node.output[0]] = sides[0]
        else:
            replaced[gradient.place] = [_reading(concat, sides)]
    if not replaced:
        return program
    steps = [node for i, step in enumerate(program.steps) for node in replaced.get(i, [step])]
    steps = [_reading(step, [instead.get(name, name) for name in step.node.input]) for step in steps]
    tensors = {**program.tensors, **more}
    made_again = offsets.program(steps, tensors, program.inputs, program.outputs, program.kernels, opset)
    return replace(made_again, on_host=program.on_host)


def _product(program: Program, part: Sequence[int]) -> tuple[list[LeanNode], dict[str, Tensor]]:
    """Return the nodes that compute some products side by side, and the values that these make."""
    from onnx import NodeProto, helper

    from onnx_remat.session.lean_graph import LeanNode

    first = program.steps[part[0]].node
    name = first.output[0]
    rights = [program.steps[at].node.input[1] for at in part]
    columns, result = name + _COLUMNS, name + biases.PRODUCT
    node = NodeProto()
    node.CopyFrom(first)
    node.input[1], node.output[0] = columns, result
    concat = helper.make_node("Concat", rights, [columns], f"{first.name}{_COLUMNS}", axis=1)
    new = {columns: _wider(program.tensors[rights[0]], len(part)), result: _wider(program.tensors[name], len(part))}
    return [LeanNode(concat), LeanNode(node)], new


def _wider(tensor: Tensor, times: int) -> Tensor:
    """Return the type of so many matrices side by side."""
    shape = (tensor.shape[0], times * tensor.shape[1])
    return replace(tensor, shape=shape, nbytes=times * tensor.nbytes, symbolic=shape)


def _reading(step: LeanNode, names: Sequence[str]) -> LeanNode:
    """Return a node that reads values of these names."""
    from onnx import NodeProto

    if list(step.node.input) == list(names):
        return step
    made = NodeProto()
    made.CopyFrom(step.node)
    made.input[:] = names
    return replace(step, node=made)
