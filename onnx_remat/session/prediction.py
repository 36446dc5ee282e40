"""Predict the memory that training with `session.session.Session` or `session.training.Loop` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onnx_remat.fuse.products import scratch_bytes
from onnx_remat.ir.graph import INITIALIZER, INPUT
from onnx_remat.memory import arena
from onnx_remat.ort.executed import Executed
from onnx_remat.session.bookkeeping import bookkeeping_bytes
from onnx_remat.session.fusing import UNFUSED, as_fused
from onnx_remat.session.offsets import in_use, kept_on_host, least
from onnx_remat.session.overlap import overlapped, timeline
from onnx_remat.session.slab_layout import SlabLayout, bookkeeping, kept, lay_out, makers, workspace


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that training takes, in bytes; the parts add up to `total`.

    Attributes
    ----------
    inputs : int
        State and batch.
    weights : int
        Weights and constants in the file.
    slab : int
        The one allocation that contains all large values.
    workspace : int
        Largest scratch memory of a kernel, see `slab_layout.workspace`.
    books : int
        ONNX Runtime's bookkeeping for the graph, and small values.
    live : int
        Peak of live bytes in the slab: a lower bound on the slab's size.
    donated : int
        Number of outputs written in place of the input they renew.
    not_donated : mapping of str to str
        Reason by output, for outputs that renew an input but are not written in place.
    on_host, state_on_host : int
        Peak of bytes on the host, and the part of them that is state; neither `total` nor other fields include them.
    nodes, unfused_nodes : int
        Number of nodes that run, and of those that would run without fusion.
    kernels : int
        Number of fused kernels among the nodes that run.
    unfused : int
        Total without fusion: on machines without these kernels, or with ``fuse=False``.
    not_fused : str
        Reason why no node is fused here; empty where some are.
    unserved : int
        Number of convolutions that oneDNN would compute faster, were it installed.
    seconds : float
        Time of a step, by `Options.costs`; a fused kernel counts the bytes it reads and writes.
    copies, waited : float
        Time of all copies to the host and back, in seconds, and the part of it that kernels wait for.
    in_use : mapping of str to int
        Bytes of the slab in use while the node runs that makes each value, by value; a kernel's inner values included.
    """

    inputs: int
    weights: int
    slab: int
    workspace: int
    books: int
    live: int
    donated: int
    not_donated: Mapping[str, str]
    on_host: int = 0
    state_on_host: int = 0
    nodes: int = 0
    unfused_nodes: int = 0
    kernels: int = 0
    unfused: int = 0
    not_fused: str = ""
    unserved: int = 0
    seconds: float = 0.0
    copies: float = 0.0
    waited: float = 0.0
    in_use: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        return self.inputs + self.weights + self.slab + self.workspace + self.books

    def slower_than(self, other: Footprint) -> float | None:
        """Return the predicted time of a step over another's, less 1; None where that is unknown."""
        return self.seconds / other.seconds - 1 if other.seconds else None


TABLES_BYTES = 16_384
"""Bytes that kernels take on a device beyond every workspace rule: tables of pointers."""


def stated(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a `Footprint` for JSON: without `in_use`, which has an entry for every value."""
    return None if fields is None else {name: value for name, value in fields.items() if name != "in_use"}


def rounding(arranged: SlabLayout) -> int:
    """Return the bytes that a device adds when it rounds up the requests for inputs, weights and the slab."""
    compiled = arranged.compiled
    kinds = {name: value.kind for name, value in compiled.graph.values.items() if name not in arranged.state}
    stored = [compiled.tensors[name].nbytes for name, kind in kinds.items() if kind in (INPUT, INITIALIZER)]
    return sum(-nbytes % arena.UNIT for nbytes in (arranged.offsets.height, *stored))


def predict(executed: Executed, seconds: float | None = None, fuse: bool = True, costs: str = "") -> Footprint:
    """Predict the memory that training takes with a step that ONNX Runtime runs as `executed`.

    The prediction is for a session opened in this environment: with fused kernels where they are available.

    Parameters
    ----------
    executed : Executed
        The step as ONNX Runtime optimises it by default.
    seconds : float, optional
        Limit on the search for a small slab; with a higher limit training may take less than predicted.
    fuse : bool
        See `session.session.Session`.
    costs : str
        See `Options`.

    Raises
    ------
    ModelError
        A session cannot open the step.
    """
    return footprint(laid_out(executed, seconds, fuse), costs)


def laid_out(executed: Executed, seconds: float | None = None, fuse: bool = True) -> SlabLayout:
    """Lay out the step as a loop runs it; arguments as of `predict`."""
    made = without_overlap(executed, seconds, fuse)
    return overlapped(made, least(executed.compiled.kernels), seconds=seconds) if fuse else made


def without_overlap(executed: Executed, seconds: float | None = None, fuse: bool = True) -> SlabLayout:
    """Lay out the step with all copies to the host and back on the stream of the kernels."""
    outputs, smallest = [v.name for v in executed.compiled.graph.model.graph.output], least(executed.compiled.kernels)
    plain = lay_out(executed, outputs, donate=True, least=smallest, seconds=seconds)
    if not fuse:
        return replace(plain, fused=replace(plain.fused, why_not=UNFUSED))
    return as_fused(plain, smallest, seconds=seconds)


def footprint(arranged: SlabLayout, costs: str = "") -> Footprint:
    """Return the memory that training takes with a step that is laid out."""
    compiled, bound, fused = arranged.compiled, arranged.offsets, arranged.fused
    device = compiled.kernels.device != "cpu"
    books = rounding(arranged) + TABLES_BYTES if device else bookkeeping(arranged)
    scratch, times = scratch_bytes(arranged.kernels), timeline(arranged, costs)
    state = sum(compiled.tensors[name].nbytes for name in arranged.state)
    found = Footprint(
        inputs=sum(
            compiled.tensors[name].nbytes
            for name, v in compiled.graph.values.items()
            if v.kind == INPUT and name not in arranged.state
        ),
        weights=arranged.weights,
        slab=bound.height,
        workspace=workspace(compiled, kept(makers(compiled), arranged.program.steps))[0] + scratch,
        books=books,
        live=bound.live,
        donated=len(bound.donated) + len(arranged.state),
        not_donated=bound.not_donated,
        on_host=kept_on_host(arranged.program) + arranged.pinned + state,
        state_on_host=state,
        nodes=len(arranged.program.steps),
        unfused_nodes=fused.unfused_nodes,
        kernels=fused.kernels,
        not_fused=fused.why_not,
        unserved=fused.unserved,
        seconds=times.seconds,
        copies=times.copies,
        waited=times.waited,
        in_use=_in_use(arranged),
    )
    more = state + fused.unfused_slab - found.slab + workspace(compiled, compiled.graph.ops)[0] - found.workspace
    if not device:
        more += bookkeeping_bytes(fused.unfused_values) - found.books
    return replace(found, unfused=found.total + more)


def _in_use(arranged: SlabLayout) -> dict[str, int]:
    """Return `Footprint.in_use`; of a value that several kernels make, the most."""
    found: dict[str, int] = {}
    for step, nbytes in zip(arranged.program.steps, in_use(arranged.program, arranged.offsets).tolist(), strict=True):
        members = () if step.plain is None else arranged.members[step.writes[0]]
        for name in (*step.writes, *(made for member in members for made in member.writes)):
            found[name] = max(found.get(name, 0), nbytes)
    return found
