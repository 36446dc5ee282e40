"""What training takes of the machine's memory with `session.session.Session` and `session.training.Loop`, foreseen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx_remat.ir.graph import INITIALIZER, INPUT
from onnx_remat.memory import arena
from onnx_remat.ort.executed import Executed
from onnx_remat.session import device_scratch
from onnx_remat.session.binding import kept_on_host, least
from onnx_remat.session.opening import Arranged, lay_out, workspace

BOOKS_BYTES = 3_400_000
"""What a session takes whatever its graph, over a session of one node; see `books`."""

BOOKS_BYTES_PER_NODE = 5_850
"""What it takes for each node."""


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
        The most that kernels take while they run, see `opening.workspace`.
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

    @property
    def total(self) -> int:
        return self.inputs + self.weights + self.slab + self.workspace + self.books


TABLES_BYTES = 16_384
"""What kernels take on a device that no rule states: tables of pointers."""


def books(nodes: int) -> int:
    """Bytes that a session takes for a graph of so many nodes, small values included.

    A line over what fifteen graphs of 149 to 10,257 nodes were seen to take, rewritten to 60 % (``python -m
    scripts.resident``, onnxruntime 1.32.0, two threads): none took more, those of few nodes up to 3.2 MB less. On
    Python 3.13 the same file was seen to take 0.5 MB more than on 3.11.
    """
    return BOOKS_BYTES + BOOKS_BYTES_PER_NODE * nodes


def device_workspace(arranged: Arranged) -> int:
    """What a session's arena takes on a device, where all values but those of the host lie in the slab."""
    compiled = arranged.compiled
    by_maker = {name: op for op in compiled.graph.ops for name in op.writes}
    ops = [by_maker[name] for step in arranged.program.steps if (name := next(iter(step.writes), "")) in by_maker]
    return device_scratch.workspace(compiled, ops)


def rounding(arranged: Arranged) -> int:
    """What every request for an input, a weight and the slab is rounded up by, on a device."""
    compiled = arranged.compiled
    stored = [compiled.tensors[n].nbytes for n, v in compiled.graph.values.items() if v.kind in (INPUT, INITIALIZER)]
    return sum(-nbytes % arena.UNIT for nbytes in (arranged.binding.height, *stored))


def foresee(executed: Executed, seconds: float | None = None) -> Footprint:
    """What training takes with a step that ONNX Runtime runs as `executed`.

    Parameters
    ----------
    executed : Executed
        The step as it is optimised by default.
    seconds : float, optional
        That the search for a low slab may take at most; with more of them training may take less than this says.

    Raises
    ------
    ModelError
        A session cannot open such a step.
    """
    outputs = [value.name for value in executed.compiled.graph.model.graph.output]
    arranged = lay_out(executed, outputs, donate=True, least=least(executed.compiled.kernels), seconds=seconds)
    compiled, bound = arranged.compiled, arranged.binding
    device = compiled.kernels.device != "cpu"
    return Footprint(
        inputs=sum(compiled.tensors[name].nbytes for name, v in compiled.graph.values.items() if v.kind == INPUT),
        weights=arranged.weights,
        slab=bound.height,
        workspace=device_workspace(arranged) if device else workspace(compiled)[0],
        books=rounding(arranged) + TABLES_BYTES if device else books(len(arranged.program.steps)),
        live=bound.live,
        donated=len(bound.donated),
        not_donated=bound.not_donated,
        on_host=kept_on_host(arranged.program),
    )
