"""`AfterLoss`: the nodes of a step that follow its loss, and a value by which they wait for it."""

from __future__ import annotations

import onnx_ir as ir

from .. import names
from ..dims import dims
from ..tape import Tape


class AfterLoss:
    """The nodes of a step that follow its loss, and may wait for it.

    A node waits by reading `never`, a scalar that is false whatever the loss is. ONNX Runtime cannot fold it away,
    because it depends on the loss.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.tape = Tape(graph)
        self._never: ir.Value | None = None
        self._loss = next((value for value in graph.outputs if value.name == names.LOSS), None)
        last = self._loss.producer() if self._loss is not None else None
        nodes = list(graph)
        self.nodes = nodes[nodes.index(last) + 1 :] if last is not None else []
        if self._loss is None or self._loss.dtype is None or self._loss.shape is None or dims(self._loss):
            self.nodes = []

    def never(self) -> ir.Value:
        """Return a scalar that is false and is computed from the loss."""
        if self._never is None:
            assert self._loss is not None
            with self.tape.ahead_of(self.nodes[0], "backward"):
                nonzero = self.tape.op("Cast", self._loss, shape=(), dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))
                self._never = self.tape.op("Xor", nonzero, nonzero, shape=())
        return self._never
