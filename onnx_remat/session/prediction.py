"""What training takes of the machine's memory with `session.session.Session` and `session.training.Loop`, foreseen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnx_remat.ir.graph import INITIALIZER, INPUT
from onnx_remat.memory import arena
from onnx_remat.ort.executed import Executed
from onnx_remat.ort.kernels import costs as prices
from onnx_remat.session import device_scratch
from onnx_remat.session.binding import kept_on_host, least
from onnx_remat.session.bookkeeping import books
from onnx_remat.session.fusing import UNFUSED
from onnx_remat.session.plan_session import SlabLayout, as_fused, lay_out, workspace


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
        The one allocation in which all large values lie.
    workspace : int
        The most that kernels take while they run, see `plan_session.workspace`.
    books : int
        What ONNX Runtime keeps for the graph, and small values.
    live : int
        The most bytes of the slab's values that are alive at once: no slab is smaller.
    donated : int
        Outputs that renew their input in place.
    not_donated : mapping of str to str
        Why the other ones do not.
    on_host : int
        The most bytes that the host keeps at once of what is moved there; the parts and `total` are without them.
    nodes, unfused_nodes : int
        Nodes that run, and that would run with nothing fused.
    kernels : int
        Nodes among them that are fused kernels.
    unfused : int
        What training takes in all where nothing is fused: on machines without these kernels, or with ``fuse=False``.
    not_fused : str
        Why nothing is fused here, or nothing.
    seconds : float
        What the nodes that run take together, by `Options.costs`; a fused kernel counts the bytes it reads and writes.
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
    nodes: int = 0
    unfused_nodes: int = 0
    kernels: int = 0
    unfused: int = 0
    not_fused: str = ""
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.inputs + self.weights + self.slab + self.workspace + self.books


TABLES_BYTES = 16_384
"""What kernels take on a device that no rule states: tables of pointers."""


def device_workspace(arranged: SlabLayout) -> int:
    """What a session's arena takes on a device, where all values but those of the host lie in the slab."""
    compiled = arranged.compiled
    by_maker = {name: op for op in compiled.graph.ops for name in op.writes}
    ops = [by_maker[name] for step in arranged.program.steps if (name := next(iter(step.writes), "")) in by_maker]
    return device_scratch.workspace(compiled, ops)


def rounding(arranged: SlabLayout) -> int:
    """What every request for an input, a weight and the slab is rounded up by, on a device."""
    compiled = arranged.compiled
    stored = [compiled.tensors[n].nbytes for n, v in compiled.graph.values.items() if v.kind in (INPUT, INITIALIZER)]
    return sum(-nbytes % arena.UNIT for nbytes in (arranged.binding.height, *stored))


def foresee(executed: Executed, seconds: float | None = None, fuse: bool = True, costs: str = "") -> Footprint:
    """What training takes with a step that ONNX Runtime runs as `executed`.

    Counted is what a session does that this environment opens: with fused kernels where it has them.

    Parameters
    ----------
    executed : Executed
        The step as it is optimised by default.
    seconds : float, optional
        That the search for a low slab may take at most; with more of them training may take less than this says.
    fuse : bool
        As `session.session.Session` has it.
    costs : str
        See `Options`.

    Raises
    ------
    ModelError
        A session cannot open such a step.
    """
    return footprint(as_run(executed, seconds, fuse), costs)


def as_run(executed: Executed, seconds: float | None = None, fuse: bool = True) -> SlabLayout:
    """The step that a loop runs, as `foresee` takes it."""
    outputs, smallest = [v.name for v in executed.compiled.graph.model.graph.output], least(executed.compiled.kernels)
    plain = lay_out(executed, outputs, donate=True, least=smallest, seconds=seconds)
    if not fuse:
        return replace(plain, fused=replace(plain.fused, why_not=UNFUSED))
    return as_fused(plain, smallest, seconds=seconds)


def step_seconds(arranged: SlabLayout, costs: str = "") -> float:
    """What the nodes of a step take together; `costs` as `Options` has them.

    A fused kernel takes the time of its members, times what its roofline is of theirs: of values made and read within
    it nothing is written or read, and one kernel is started.
    """
    compiled, tensors = arranged.compiled, arranged.compiled.tensors
    name = costs or compiled.kernels.costs
    device = prices.PRESETS.get(name, prices.PRESETS["cpu"])
    seconds = prices.price(compiled.graph, tensors, compiled.kernels, name)
    maker = {name: op for op in compiled.graph.ops for name in op.writes}
    total = 0.0
    for step in arranged.program.steps:
        made = step.writes[0] if step.writes else ""
        if step.plain is None:
            total += seconds[maker[made].index] if made in maker else 0.0
            continue
        members = [maker[member.writes[0]] for member in arranged.members[made]]
        apart = sum(prices.roofline(op, tensors, compiled.kernels, device) for op in members)
        together = prices.fused(members, (*step.reads, *step.writes), tensors, device)
        total += sum(seconds[op.index] for op in members) * together / apart
    return total


def footprint(arranged: SlabLayout, costs: str = "") -> Footprint:
    """What training takes with a step that is laid out."""
    compiled, bound, fused = arranged.compiled, arranged.binding, arranged.fused
    device = compiled.kernels.device != "cpu"
    found = Footprint(
        inputs=sum(compiled.tensors[name].nbytes for name, v in compiled.graph.values.items() if v.kind == INPUT),
        weights=arranged.weights,
        slab=bound.height,
        workspace=device_workspace(arranged) if device else workspace(compiled)[0],
        books=rounding(arranged) + TABLES_BYTES if device else books(len(arranged.program.steps), fused.kernels),
        live=bound.live,
        donated=len(bound.donated),
        not_donated=bound.not_donated,
        on_host=kept_on_host(arranged.program),
        nodes=len(arranged.program.steps),
        unfused_nodes=fused.nodes,
        kernels=fused.kernels,
        not_fused=fused.why_not,
        seconds=step_seconds(arranged, costs),
    )
    more = fused.slab - found.slab + (0 if device else books(fused.nodes) - found.books)
    return replace(found, unfused=found.total + more)
