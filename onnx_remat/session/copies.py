"""Copies between a CUDA device and the host beside the kernels: their nodes, and what a file says of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from onnx_remat.fuse import shim
from onnx_remat.ir.shapes import TAG

KEY = TAG + "copies"
"""Model metadata: `Stated` as JSON."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a file says of its moves to the host, as they were planned.

    Attributes
    ----------
    bandwidth : float
        Bytes per second of the link to the host, in either direction.
    costs : str
        Device by whose roofline nodes are timed.
    live : int
        Bytes of the slab that may be live at once where copies run beside the kernels; 0 where they do not.
    """

    bandwidth: float
    costs: str
    live: int = 0

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Stated | None:
        """Return what a file says; None if it says nothing that can be read."""
        text = next((each.value for each in model.metadata_props if each.key == KEY), "")
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        numbers = all(isinstance(number, int | float) for number in (found.bandwidth, found.live))
        return found if numbers and found.bandwidth > 0 and isinstance(found.costs, str) else None

    def put(self, model: onnx.ModelProto) -> None:
        """Write it into a file, in place of what that says."""
        for each in model.metadata_props:
            if each.key == KEY:
                each.value = json.dumps(asdict(self))
                return
        model.metadata_props.add(key=KEY, value=json.dumps(asdict(self)))

    def seconds(self, nbytes: int) -> float:
        """Return the time of a copy in one direction."""
        return nbytes / self.bandwidth + START_SECONDS


START_SECONDS = 10e-6
"""To start a copy."""


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
    read, made : (int, tuple of int)
        Element type and shape of what its node reads and makes.
    """

    kind: int
    offset: int
    nbytes: int
    event: int
    read: tuple[int, tuple[int, ...]]
    made: tuple[int, tuple[int, ...]]

    def numbers(self) -> list[int]:
        """Return the arguments of ``fused_add`` of ``shim.c``."""
        (read, shape), (made, axes) = self.read, self.made
        elements = max(math.prod(shape), math.prod(axes))
        return [shim.COPIES, elements, 1, 1, 1, read, math.prod(shape), made, len(axes), *axes]

    def stated(self) -> dict[str, Any]:
        """Return what a session needs besides, as JSON data."""
        return {"kind": self.kind, "offset": self.offset, "nbytes": self.nbytes, "event": self.event}


def node(kind: int, read: str, made: str, secret: int, handle: int) -> onnx.NodeProto:
    """Return the node of a copy."""
    name = {shim.OUT: f"copy out of {read}", shim.IN: f"copy in of {made}", shim.WAIT: f"wait for {read}"}[kind]
    return onnx.helper.make_node(
        shim.COPY_OP, [read], [made], name, domain=shim.DOMAIN, secret=secret, handle=handle, kind=kind
    )


def kind_of(given: onnx.NodeProto) -> int | None:
    """Return the kind of a node that copies or waits, None for any other node."""
    if (given.op_type, given.domain) != (shim.COPY_OP, shim.DOMAIN):
        return None
    return next(int(each.i) for each in given.attribute if each.name == "kind")
