"""Memory of the host for `session.Session` on a CPU: a slab, and the caller's arrays as inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import UsageError
from onnx_remat.session import heap
from onnx_remat.session.apart import check_apart
from onnx_remat.session.interface import Arrays, bindable
from onnx_remat.session.plan_session import SessionPlan

_UNBOUND: tuple[int, Any] = (0, object())
"""In place of the address and the array of an input that is not bound."""


class HostMemory:
    """The slab of a step, and its inputs where the caller holds them, bound to the session that runs it.

    Parameters
    ----------
    binding : onnxruntime.IOBinding
        Of the session that runs the step. The outputs that ONNX Runtime allocates are bound first.
    step : SessionPlan
    slab : array of uint8, optional
        The slab of another session, which this one uses if it is large enough.

    Attributes
    ----------
    slab : array of uint8
    """

    def __init__(self, binding: Any, step: SessionPlan, slab: npt.NDArray[np.uint8] | None = None) -> None:
        self._binding, self._loose, self._donated = binding, step.loose, step.donated
        self._formals = {array.name: array for array in step.inputs}
        self._outputs = {array.name: array for array in step.outputs}
        self._renewed = {name: output for output, name in step.donated.items()}
        self._bound: dict[str, tuple[int, Any]] = {}  # address and array of each input, kept alive while bound
        self._views: Arrays = {}
        self.slab = slab if slab is not None and slab.size >= step.slab else heap.reserve(step.slab)
        base = self.slab.ctypes.data
        for place in step.places:
            kind: Any = place.element_type
            binding.bind_output(place.name, "cpu", 0, kind, place.shape, base + place.offset)
            if place.name in self._outputs:
                data = self.slab[place.offset : place.offset + place.nbytes]
                self._views[place.name] = data.view(place.dtype_name).reshape(place.shape)

    def accept(self, feeds: Mapping[str, Any]) -> None:
        """Bind the arrays of a run's inputs, each where it lies; UsageError for one that the step cannot use there."""
        if not feeds.keys() >= self._bound.keys():  # an input with a default was given before
            self._binding.clear_binding_inputs()
            self._bound = {}
        new = {  # an array's shape can be changed in place
            name: value
            for name, value in feeds.items()
            if self._bound.get(name, _UNBOUND)[1] is not value or value.shape != self._formals[name].shape
        }
        arrays = {n: bindable(n, self._formals[n].formal, value, n in self._renewed) for n, value in new.items()}
        self._check_apart(arrays)
        for name, array in arrays.items():
            formal, address = self._formals[name], array.ctypes.data
            if self._bound.get(name, _UNBOUND)[0] != address:
                self._bound[name] = _UNBOUND  # should an interrupt come now, the next run binds both
                self._binding.bind_input(name, "cpu", 0, formal.element_type, formal.shape, address)
                if (output := self._renewed.get(name)) is not None:
                    self._binding.bind_output(output, "cpu", 0, formal.element_type, formal.shape, address)
            self._bound[name] = address, array

    def _check_apart(self, new: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise UsageError if an array lies in the slab, or one that is renewed shares memory with another."""
        moved = {
            name: array
            for name, array in new.items()
            if name not in self._bound or self._bound[name][0] != array.ctypes.data
        }
        if not moved:
            return
        base, end = self.slab.ctypes.data, self.slab.ctypes.data + self.slab.size
        for name, array in moved.items():
            if array.nbytes and base < array.ctypes.data + array.nbytes and array.ctypes.data < end:
                raise UsageError(f"input {name!r} is a view of a result, which the step overwrites: pass a copy")
        held = {name: array for name, (_, array) in self._bound.items()} | dict(new)
        check_apart(((a.ctypes.data, a.nbytes, name) for name, a in held.items()), self._renewed, "pass a copy of one")

    def results(self, copy: bool) -> Arrays:
        """Return the outputs of the last run by name; a donated output is the array given for its input."""
        made = {name: view.copy() if copy else view for name, view in self._views.items()}
        if self._loose:
            values = zip(self._loose, self._binding.get_outputs(), strict=False)  # they were bound first
            made |= {name: self._outputs[name].copy_of(value, _read) for name, value in values}
        return made | {output: self._bound[name][1] for output, name in self._donated.items()}


def _read(address: int, array: npt.NDArray[Any]) -> None:
    ctypes.memmove(array.ctypes.data, address, array.nbytes)
