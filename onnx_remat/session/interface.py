"""Names, types and shapes of a step model's inputs and outputs, and checks of arrays against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.session.device_arrays import DeviceArray, device_array

Arrays = dict[str, npt.NDArray[Any]]

DTYPES = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}
"""numpy's type names by onnxruntime's, where they differ."""


@dataclass(frozen=True, slots=True)
class Formal:
    """Type (numpy's name, empty if unknown) and shape (None where unknown) of an input or output.

    With `bits`, arrays have the bits of a type that numpy lacks.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    bits: bool = False

    def sizes(self, given: Sequence[int]) -> tuple[int, ...]:
        """Return the shape; unknown sizes are taken from `given`, where these fit."""
        shape = given if self.shape is None else self.shape
        filled = zip(shape, given, strict=True) if len(shape) == len(given) else ((size, 0) for size in shape)
        return tuple(other if size is None else size for size, other in filled)


def check_state(formals: Mapping[str, Formal], arrays: Mapping[str, Any], on_device: bool = False) -> None:
    """Raise UsageError unless every array is an input of the model, of its type and shape."""
    for _ in checked(formals, arrays, on_device):
        pass


def check_mapping(arrays: object, where: str) -> None:
    """Raise UsageError where there is no mapping of names to arrays, but an array, say."""
    if not isinstance(arrays, Mapping):
        raise UsageError(f"{where} is a mapping of the inputs' names to arrays, not {type(arrays).__name__}")


def checked(
    formals: Mapping[str, Formal], arrays: Mapping[str, Any], on_device: bool = False
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield name and array of one input after the other; UsageError where one does not fit the model.

    With `on_device`, an array may be a `device_arrays.DeviceArray`.

    Each array is read once, when its turn comes: a mapping that reads from a file has one array in memory at a time.
    """
    for name in arrays:
        if name not in formals:
            hint = did_you_mean(name, formals) or f": it has {', '.join(formals)}"
            raise UsageError(f"the model has no input {name!r}{hint}")
        formal, value = formals[name], arrays[name]
        given = typed(name, formal, value, on_device)
        wanted = formal.shape
        fits = wanted is None or (
            len(wanted) == given.ndim and all(a in (None, b) for a, b in zip(wanted, given.shape, strict=True))
        )
        if not fits and wanted is not None:
            dims = ", ".join("?" if size is None else str(size) for size in wanted)
            raise UsageError(f"input {name!r} is of shape [{dims}], not {list(given.shape)}")
        yield name, given.view(formal.dtype) if formal.bits and isinstance(given, np.ndarray) else given


def typed(name: str, formal: Formal, value: Any, on_device: bool = False) -> Any:
    """Return `value` as an array of numpy, or `on_device` of a device, of an input's type; UsageError for another type.

    Numbers are converted, arrays are not. Bits may be of any type of numpy's, or of another library's, of their size.
    """
    there = device_array(name, value, on_device)
    array: Any = np.asarray(value) if there is None else there
    if not formal.dtype:
        return array
    dtype = np.dtype(formal.dtype)
    numbers = there is None and not hasattr(value, "dtype") and not formal.bits
    if numbers and (np.can_cast(array.dtype, dtype, "same_kind") or {array.dtype.kind, dtype.kind} <= {"i", "u"}):
        given, array = array, array.astype(dtype)
        if dtype.kind in "iu" and (lost := given[given != array]).size:  # numpy 1 wraps, and numpy 2 raises
            raise UsageError(f"input {name!r} is of type {dtype}: {lost.flat[0]} does not fit it")
    bits = formal.bits and array.dtype.itemsize == dtype.itemsize and array.dtype.kind in "uV"
    if array.dtype != dtype and not (bits and array.dtype.isnative):
        raise UsageError(f"input {name!r} is of type {dtype}, not {array.dtype}")
    return array


def bindable(name: str, formal: Formal, value: Any, renewed: bool, on_device: bool = False) -> Any:
    """Return `value` as an array of numpy, or `on_device` of a device, that can be bound to an input without a copy.

    Raises
    ------
    UsageError
        It is of another type or shape, or the input is `renewed` in place and the array cannot be written to.
    """
    array = typed(name, formal, value, on_device)
    if array.shape != formal.shape:
        raise UsageError(f"input {name!r} is of shape {list(formal.shape or ())}, not {list(array.shape)}")
    if isinstance(array, DeviceArray):
        return array
    if renewed and not (isinstance(value, np.ndarray) and array.flags.c_contiguous and array.flags.writeable):
        raise UsageError(f"input {name!r} is renewed in place: pass a contiguous, writeable array")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


_NAMED = 6  # outputs in a message


def check_loss(outputs: Mapping[str, Formal], loss: str) -> None:
    """Raise UsageError unless `loss` names an output that is a single number."""
    if loss not in outputs:
        first, more = list(outputs)[:_NAMED], len(outputs) - _NAMED
        has = f": it has {', '.join(first)}" + (f" and {more} more" if more > 0 else "")
        hint = did_you_mean(loss, outputs) or has
        raise UsageError(f"the model has no output {loss!r} to take as the loss{hint}")
    shape = outputs[loss].shape
    if shape is not None and any(size not in (1, None) for size in shape):
        raise UsageError(f"output {loss!r} is of shape {list(shape)}: a loss is a single number")


def overridable(session: Any) -> dict[str, Formal]:
    """Return the inputs of onnxruntime's session that have a default value, by name."""
    return {value.name: formal(value) for value in session.get_overridable_initializers()}


def formal(value: Any) -> Formal:
    """Return the type and shape of an input or output of onnxruntime's session."""
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(DTYPES.get(kind, kind)).name
    except TypeError:
        dtype = ""
    return Formal(dtype, tuple(size if isinstance(size, int) else None for size in value.shape))
