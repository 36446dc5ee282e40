"""What a value passes through to wait for another, or to have its shape hidden: nodes that copy nothing.

    none    = Mul(Size(input), [])                    once per file: a vector of no entries, which nobody can fold
    hidden  = Unsqueeze(trigger, none)                the trigger, its shape unseen
    token   = Shape<start=0, end=0>(hidden)           once per trigger: no entries either, and not before the trigger
    waiting = Unsqueeze(value, token)                 the value, in the same buffer, not before the trigger
    shape'  = Concat(shape, token)                    a shape that a kernel reads on the host, not before the trigger

An Unsqueeze by no axes changes nothing, and by axes that are computed it stops shape inference: this keeps `Shape` from
being folded, and Unsqueeze by `none` alone is what a private buffer needs (see `private_buffers`). Nothing here knows a
rank or a size: scalars, empty tensors and symbolic dimensions are alike.

On a CUDA device the values stay where they are and nothing is copied: the axes lie on the host, where `Shape` writes
them. Nor does the host wait for the device, as it does for every other op of which it reads a result: of `Shape` ONNX
Runtime knows that it needs no data. It waits for `Size` once, on an input, which is there when the step begins.

A vector that a kernel reads on the host, as ConstantOfShape reads its shape, would be copied to the device for an
Unsqueeze and back for the kernel. By Concat with a token, which lies on the host too, it stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from onnx_remat.ir.shapes import TAG, UNSEEN

MIN_OPSET = 13
"""The first in which Unsqueeze takes its axes as an input."""

_SHAPE_HAS_ENDS = 15  # the first in which Shape has attributes `start` and `end`


class Emit(Protocol):
    """Appends a node; `trigger` is what its control edge waits for, "" where it belongs to none."""

    def __call__(self, op_type: str, inputs: Sequence[str], output: str, trigger: str, **attributes: int) -> None: ...


class Barriers:
    """Makes what values pass through; every helper is made once.

    Parameters
    ----------
    opset : int
        Of the model, standard domain, `MIN_OPSET` or later.
    source : str
        A graph input: what is computed from it is never folded.
    emit : callable
        Appends a node.
    fresh : callable
        A name like the one wished for that is not taken.
    add_vector : callable
        Adds an int64 initializer of this name and these entries.
    """

    def __init__(
        self,
        opset: int,
        source: str,
        emit: Emit,
        fresh: Callable[[str], str],
        add_vector: Callable[[str, Sequence[int]], None],
    ) -> None:
        self._opset, self._source, self._emit, self._fresh, self._add_vector = opset, source, emit, fresh, add_vector
        self._none = ""
        self._ends: dict[int, str] = {}
        self._hidden: dict[str, str] = {}
        self._tokens: dict[tuple[str, bool], str] = {}

    def hold(self, value: str, result: str, trigger: str, hide: bool) -> None:
        """Make `result`: `value`, in its own buffer, not before `trigger` is computed ("" for none).

        Two of one trigger, of which one is to `hide` its shape, read different tokens: common subexpression elimination
        would take either for both otherwise, its shape stated or not.
        """
        self._emit("Unsqueeze", [value, self._token(trigger, hide) if trigger else self._nothing()], result, trigger)

    def hold_shape(self, shape: str, result: str, trigger: str) -> None:
        """Make `result`: `shape`, a vector of int64 that a kernel reads on the host, not before `trigger`, if any."""
        token = self._token(trigger, hide=False) if trigger else self._nothing()
        self._emit("Concat", [shape, token], result, trigger, axis=0)

    def _nothing(self) -> str:
        """A vector of no entries that nobody can fold."""
        if not self._none:
            empty, size, self._none = (self._fresh(n) for n in (f"{TAG}no_axes", f"{TAG}size", f"{UNSEEN}_axes"))
            self._add_vector(empty, ())
            self._emit("Size", [self._source], size, "")
            self._emit("Mul", [size, empty], self._none, "")
        return self._none

    def _token(self, trigger: str, hide: bool) -> str:
        """A vector of no entries that is there after `trigger`: its dimensions from 0 to 0, or else from 1 to 1."""
        if (trigger, hide) not in self._tokens:
            if trigger not in self._hidden:
                self._hidden[trigger] = self._fresh(f"{trigger}__hidden")
                self._emit("Unsqueeze", [trigger, self._nothing()], self._hidden[trigger], trigger)
            hidden, end, token = self._hidden[trigger], int(hide), self._fresh(f"{UNSEEN}_axes_after_{trigger}")
            if self._opset >= _SHAPE_HAS_ENDS:
                self._emit("Shape", [hidden], token, trigger, start=end, end=end)
            else:
                shape = self._fresh(f"{trigger}__shape")
                self._emit("Shape", [hidden], shape, trigger)
                self._emit("Slice", [shape, self._end(end), self._end(end)], token, trigger)
            self._tokens[trigger, hide] = token
        return self._tokens[trigger, hide]

    def _end(self, end: int) -> str:
        if end not in self._ends:
            self._ends[end] = self._fresh(f"{TAG}axis_{end}")
            self._add_vector(self._ends[end], (end,))
        return self._ends[end]
