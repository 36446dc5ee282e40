"""Copies between a CUDA device and the host alongside the kernels: their nodes, and what a file says of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import onnx

from onnx_remat.fuse import shim
from onnx_remat.ir.metadata import COPIES_KEY, entries, set_entry
from onnx_remat.ort.kernels.costs import PRESETS
from onnx_remat.ort.moves import START_SECONDS


@dataclass(frozen=True, slots=True)
class Stated:
    """What a file says of its moves to the host, as they were planned.

    Attributes
    ----------
    bandwidth : float
        Bytes per second of the link to the host, in either direction.
    costs : str
        Device by whose roofline nodes are timed; "" for the provider's default.
    live : int
        Bytes of the slab that may be live at once where copies run alongside the kernels; 0 where they do not.
    """

    bandwidth: float
    costs: str
    live: int = 0

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Stated | None:
        """Return what a file says; None if it says nothing that can be read. A later version may say more."""
        text = entries(model).get(COPIES_KEY, "")
        try:
            said = json.loads(text)
            found = cls(**{each.name: said[each.name] for each in fields(cls) if each.name in said})
        except (ValueError, TypeError, RecursionError):
            return None
        numbers = all(isinstance(number, int | float) for number in (found.bandwidth, found.live))
        if not (numbers and found.bandwidth > 0 and isinstance(found.costs, str)):
            return None
        return found if found.costs in PRESETS else replace(found, costs="")  # never a path: the file may be anyone's

    def put(self, model: onnx.ModelProto) -> None:
        """Write it into a file, in place of what that says."""
        set_entry(model, COPIES_KEY, json.dumps(asdict(self)))

    def seconds(self, nbytes: int) -> float:
        """Return the time of a copy in one direction."""
        return nbytes / self.bandwidth + START_SECONDS


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy, or a wait for it, as ``shim.c`` knows it.

    Attributes
    ----------
    kind : int
        `shim.OUT`, `shim.IN` or `shim.WAIT`.
    offset, nbytes : int
        Place of the value in the host's memory for copies.
    event : int
        Number of the event that says it is done.
    read : (int, tuple of int) or None
        Element type and shape of what its node reads; None if it reads nothing.
    made : (int, tuple of int)
        Likewise of what its node makes.
    state : bool
        Does the value lie in the memory of a session's state on the host, instead of that for copies?
    """

    kind: int
    offset: int
    nbytes: int
    event: int
    read: tuple[int, tuple[int, ...]] | None
    made: tuple[int, tuple[int, ...]]
    state: bool = False

    def numbers(self) -> list[int]:
        """Return the arguments of ``fused_add`` of ``shim.c``."""
        inputs = [] if self.read is None else [self.read]
        elements = max(1, *(math.prod(shape) for _, shape in (*inputs, self.made)))
        described = [number for dtype, shape in (*inputs, self.made) for number in (dtype, len(shape), *shape)]
        return [shim.COPIES, elements, 1, len(inputs), 1, *described]

    def stated(self) -> dict[str, Any]:
        """Return what a session needs besides, as JSON data."""
        names = "kind", "offset", "nbytes", "event", "state"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class StateOnHost:
    """State of a step that lies on the host: the output that renews it, and its offset in that memory."""

    output: str
    offset: int


def node(kind: int, read: str, made: str, secret: int, handle: int) -> onnx.NodeProto:
    """Return the node of a copy; `read` is empty where it reads nothing."""
    name = {shim.OUT: f"copy out of {read}", shim.IN: f"copy in of {made}", shim.WAIT: f"wait for {read}"}[kind]
    inputs = [read] if read else []
    return onnx.helper.make_node(
        shim.COPY_OP, inputs, [made], name, domain=shim.DOMAIN, secret=secret, handle=handle, kind=kind
    )


def kind_of(given: onnx.NodeProto) -> int | None:
    """Return the kind of a node that copies or waits, None for any other node."""
    if (given.op_type, given.domain) != (shim.COPY_OP, shim.DOMAIN):
        return None
    return _number(given, "kind")


def handle_of(given: onnx.NodeProto) -> int:
    """Return the handle of a node that copies or waits."""
    return _number(given, "handle")


def _number(given: onnx.NodeProto, name: str) -> int:
    return next(int(each.i) for each in given.attribute if each.name == name)
