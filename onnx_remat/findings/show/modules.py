"""Memory by module: the module of each value, and a flame graph of the bytes as text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_remat.ir.metadata import entries
from onnx_remat.units import format_bytes

NOWHERE = "(no module)"
"""Module name of values whose nodes do not name a module."""

_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of torch.onnx.export: modules from the outside in, then the op
_BAR = 24  # characters of the longest bar
_LEAST = 0.02  # fraction of the total: smaller branches are summed up


def module_of(node: onnx.NodeProto) -> str:
    """Return the dotted path of a node's module, "" where it is unknown.

    onnx-remat's converters write it as metadata ``module``, torch.onnx.export as scopes; other exporters use it as a
    prefix of the node's name.

    >>> module_of(onnx.helper.make_node("Conv", [], [], name="/layer1/layer1.0/conv/Conv"))
    'layer1.layer1.0.conv'
    """
    notes = entries(node)
    if "module" in notes:
        return notes["module"]
    if _SCOPES in notes:
        try:
            scopes = ast.literal_eval(notes[_SCOPES])
            return str(scopes[-2]) if len(scopes) > 1 else ""
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
            return ""
    return ".".join(part for part in node.name.split("/")[:-1] if part)


def modules(model: onnx.ModelProto) -> dict[str, str]:
    """Return the module of each value that a node of the model produces, by name."""
    return {name: module_of(node) or NOWHERE for node in model.graph.node for name in node.output if name}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the flame graph: the bytes of a module and its submodules.

    Attributes
    ----------
    name : str
        The module's path relative to its parent.
    bytes : int
    inside : tuple of Frame
        Submodules, largest first.
    """

    name: str
    bytes: int
    inside: tuple[Frame, ...]


def flame(held: Iterable[tuple[str, int]], name: str) -> Frame:
    """Build the tree of bytes by module path; merge a frame with its only child.

    Parameters
    ----------
    held : iterable of (str, int)
        Dotted paths and bytes; paths may repeat.
    name : str
        Name of the root.
    """
    return _frame(name, [(path.split("."), size) for path, size in held if size])


def _frame(name: str, held: Sequence[tuple[Sequence[str], int]]) -> Frame:
    below: dict[str, list[tuple[Sequence[str], int]]] = {}
    for path, size in held:
        if path:
            below.setdefault(path[0], []).append((path[1:], size))
    frames = [_joined(_frame(part, inside)) for part, inside in below.items()]
    return Frame(name, sum(size for _, size in held), tuple(sorted(frames, key=lambda f: (-f.bytes, f.name))))


def _joined(frame: Frame) -> Frame:
    """Merge a frame without bytes of its own with its only child, under both names."""
    if len(frame.inside) == 1 and frame.inside[0].bytes == frame.bytes:
        only = frame.inside[0]
        return Frame(f"{frame.name}.{only.name}", only.bytes, only.inside)
    return frame


def flame_text(frame: Frame) -> list[str]:
    """Return lines of bytes, share of the total, a bar, and the module, indented by depth; small frames summed up.

    >>> print("\\n".join(flame_text(flame([("a.0", 3_000_000), ("a.1", 1_000_000)], "peak"))))
       4.0 MB  100%  ########################  peak
       4.0 MB  100%  ########################    a
       3.0 MB   75%  ##################            0
       1.0 MB   25%  ######                        1
    """
    lines = _lines(frame, max(1, frame.bytes), 0)
    if any(inner.name == NOWHERE for inner in frame.inside):
        lines.append(f"{NOWHERE}: nodes that do not name their module, often those of the loss and the update")
    return lines


def _lines(frame: Frame, whole: int, depth: int) -> list[str]:
    lines = [_line(frame.name, frame.bytes, whole, depth)]
    small = [inner for inner in frame.inside if inner.bytes < _LEAST * whole]
    for inner in frame.inside:
        if inner.bytes >= _LEAST * whole:
            lines += _lines(inner, whole, depth + 1)
    if small:
        lines.append(_line(f"{len(small)} smaller", sum(inner.bytes for inner in small), whole, depth + 1))
    return lines


def _line(name: str, size: int, whole: int, depth: int) -> str:
    bar = "#" * round(_BAR * size / whole)
    return f"{format_bytes(size):>9}  {size / whole:4.0%}  {bar:<{_BAR}}  {'  ' * depth}{name}"


def memory_by_module(
    buffers: Iterable[tuple[str, int]], residents: Iterable[tuple[str, int]], of: Mapping[str, str], workspace: int
) -> Frame:
    """Return the flame graph of the memory allocated at one op.

    Parameters
    ----------
    buffers, residents : iterable of (str, int)
        Names and bytes of the values allocated there, and of inputs and weights.
    of : mapping of str to str
        `modules` of the model with these values.
    workspace : int
        Scratch memory of the op, in bytes.
    """
    held = [(of.get(name, NOWHERE), size) for name, size in buffers]
    held += [("inputs and weights", sum(size for _, size in residents)), ("workspace of the op", workspace)]
    return flame(held, "allocated at the peak")
