"""Barriers: helper nodes, without a copy, through which a value waits for another or hides its shape.

    none    = Mul(Size(input), [])                    once per file: an empty vector that cannot be folded
    hidden  = Unsqueeze(trigger, none)                the trigger with a hidden shape
    token   = Shape<start=0, end=0>(hidden)           once per trigger: an empty vector, computed after the trigger
    waiting = Unsqueeze(value, token)                 the value, in the same buffer, after the trigger
    shape'  = Concat(shape, token)                    a shape that a kernel reads on the host, after the trigger

An input of a type without a kernel of Size, such as bfloat16, is cast first.

An Unsqueeze without axes changes nothing, and computed axes stop shape inference: this keeps `Shape` from being folded,
and Unsqueeze by `none` alone is what a private buffer needs (see `private_buffers`). No rank or size is needed: the
same nodes serve scalars, empty tensors and symbolic dimensions.

On a CUDA device the values stay in place and nothing is copied: the axes lie on the host, where `Shape` writes them.
Nor does the host wait for the device, as it does for other ops whose results it reads: ONNX Runtime knows that `Shape`
needs no data. It waits for `Size` once, on an input, which exists when the step begins.

A vector that a kernel reads on the host, as ConstantOfShape reads its shape, would be copied to the device for an
Unsqueeze and back for the kernel. Concat with a token, which also lies on the host, keeps it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from onnx import TensorProto

from onnx_remat.ir.metadata import TAG
from onnx_remat.ir.shapes import UNSEEN

MIN_OPSET = 13
"""First opset in which Unsqueeze takes its axes as an input."""

_SHAPE_HAS_ENDS = 15  # first opset in which Shape has attributes `start` and `end`


class Emit(Protocol):
    """Appends a node; its control edge waits for `trigger`, "" if it belongs to none."""

    def __call__(self, op_type: str, inputs: Sequence[str], output: str, trigger: str, **attributes: int) -> None: ...


class Barriers:
    """Factory of barriers; every helper node is made once.

    Parameters
    ----------
    opset : int
        Of the model, standard domain, `MIN_OPSET` or later.
    source : str
        A graph input: values computed from it are never folded.
    emit : callable
        Appends a node.
    fresh : callable
        Returns an unused name similar to the given one.
    add_vector : callable
        Adds an int64 initializer with the given name and entries.
    sized : bool
        Does ONNX Runtime have a kernel of Size for the type of `source`?
    """

    def __init__(
        self,
        opset: int,
        source: str,
        emit: Emit,
        fresh: Callable[[str], str],
        add_vector: Callable[[str, Sequence[int]], None],
        sized: bool = True,
    ) -> None:
        self._sized = sized
        self._opset, self._source, self._emit, self._fresh, self._add_vector = opset, source, emit, fresh, add_vector
        self._none = ""
        self._ends: dict[int, str] = {}
        self._hidden: dict[str, str] = {}
        self._tokens: dict[tuple[str, bool], str] = {}

    def delay(self, value: str, result: str, trigger: str, hide: bool) -> None:
        """Emit `result`: `value`, in its own buffer, not before `trigger` is computed ("" for none).

        With and without `hide`, barriers of one trigger read different tokens: otherwise common subexpression
        elimination would merge two of them, one with a stated shape and one with a hidden one.
        """
        self._emit("Unsqueeze", [value, self._token(trigger, hide) if trigger else self._nothing()], result, trigger)

    def delay_shape(self, shape: str, result: str, trigger: str) -> None:
        """Emit `result`: `shape`, a vector of int64 that a kernel reads on the host, not before `trigger`, if any."""
        token = self._token(trigger, hide=False) if trigger else self._nothing()
        self._emit("Concat", [shape, token], result, trigger, axis=0)

    def _nothing(self) -> str:
        """Return the name of an empty vector that cannot be folded."""
        if not self._none:
            empty, size, self._none = (self._fresh(n) for n in (f"{TAG}no_axes", f"{TAG}size", f"{UNSEEN}_axes"))
            self._add_vector(empty, ())
            source = self._source
            if not self._sized:
                source = self._fresh(f"{TAG}sized")
                self._emit("Cast", [self._source], source, "", to=TensorProto.BOOL)
            self._emit("Size", [source], size, "")
            self._emit("Mul", [size, empty], self._none, "")
        return self._none

    def _token(self, trigger: str, hide: bool) -> str:
        """Return the name of an empty vector computed after `trigger`: its dimensions 0 to 0, or 1 to 1 to `hide`."""
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
