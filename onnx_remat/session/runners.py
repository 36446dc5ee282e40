"""Runners of a `training.Loop`: state updated in place, on the host or on a device; or outputs fed back as inputs."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import UsageError
from onnx_remat.ir.naming import gradient_sums, gradients, renewals
from onnx_remat.session.apart import check_apart
from onnx_remat.session.arrays import BY_BITS, Array
from onnx_remat.session.device_arrays import DeviceArray, device_array
from onnx_remat.session.heap import ALIGNMENT, keep_trimmed, reserve
from onnx_remat.session.interface import Arrays, Formal, check_loss, check_state, checked, formal, overridable
from onnx_remat.session.on_device import DeviceMemory
from onnx_remat.session.session import Session
from onnx_remat.session.state_file import Kinds, kinds_of


def _left_to_apply(outputs: Iterable[str], inputs: Container[str], renewed: Iterable[str]) -> dict[str, str]:
    """Return the parameter of each gradient that the model leaves to the caller to apply."""
    done = set(renewed)
    return {name: target for name, target in gradients(outputs).items() if target in inputs and target not in done}


def _renewed(session: Session) -> dict[str, str]:
    """Return the input of each output that is its next value: by the session's own pairs, else by their names."""
    stated = dict(session.renewals)
    named, taken = renewals((a.name for a in session.inputs), (a.name for a in session.outputs)), {*stated.values()}
    return {output: name for output, name in named.items() if name not in taken} | stated


def _check_complete(
    inputs: Iterable[str], state: Container[str], defaults: Container[str], renewed: Container[str]
) -> None:
    """Raise UsageError for an input without a value: a default is none for an input that steps renew."""
    for name in inputs:
        if name not in state and name in renewed:
            raise UsageError(f"no value for input {name!r}, which steps renew: pass it in `state`")
        if name not in state and name not in defaults:
            raise UsageError(f"no value for input {name!r}")


def _check_numbers(outputs: Iterable[Array], gradients: Container[str]) -> None:
    """Raise UsageError for a gradient to apply of which numpy has only the bits."""
    for array in outputs:
        if array.name in gradients and array.dtype in BY_BITS:
            raise UsageError(
                f"gradient {array.name!r} is of a type that numpy cannot compute with: output it in float32, or let "
                "the model apply it"
            )


class Runner(ABC):
    """What a loop does with its state, wherever that is.

    Attributes
    ----------
    on_device : bool
        Whether values may lie on a device.
    formals : dict of str to Formal
        All inputs.
    optional : frozenset of str
        Inputs that may have their defaults.
    donated, not_donated : mapping of str to str
        As of `Loop`.
    """

    on_device = False
    formals: dict[str, Formal]
    optional: frozenset[str]
    donated: Mapping[str, str]
    not_donated: Mapping[str, str]

    @abstractmethod
    def forget(self, names: Collection[str]) -> None:
        """Let inputs have their defaults again."""

    @abstractmethod
    def feed(self, batch: Mapping[str, Any]) -> None:
        """Copy values to inputs."""

    @abstractmethod
    def step(self) -> float:
        """Run one step, and return its loss."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the inputs that have a value."""

    @abstractmethod
    def kinds(self) -> Kinds:
        """Return types and shapes of these values."""

    @abstractmethod
    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the value of an input, which may change with the next step."""

    def copy(self, name: str) -> npt.NDArray[Any]:
        """Return the value of an input in memory of its own."""
        return self.array(name).copy()

    def place(self, name: str) -> npt.NDArray[Any] | None:
        """Return the array that a new value may be written over; None if others may have it."""
        return None


class SessionRunner(Runner):
    """Run steps with a `Session`, whose inputs and outputs say what is state and what is left to the loop."""

    def __init__(self, session: Session, loss: str, rate: float) -> None:
        self._session, self._loss, self._rate = session, loss, rate
        self.donated, self.not_donated = session.donated, session.not_donated
        self.formals = {a.name: a.formal for a in session.inputs}
        outputs = {a.name: a.formal for a in session.outputs}
        check_loss(outputs, loss)
        self._formal: Array = next(array for array in session.outputs if array.name == loss)
        renewed = _renewed(session)
        self._copied = {output: name for output, name in renewed.items() if session.donated.get(output) != name}
        self._gradients = _left_to_apply(outputs, self.formals, renewed.values())
        self._trained = {*renewed.values(), *self._gradients.values()}
        self.optional = frozenset(session.defaults) - self._trained
        _check_numbers(session.outputs, self._gradients)


class InPlaceRunner(SessionRunner):
    """Run steps on the CPU: one block of memory contains the state, and steps update it in place."""

    def __init__(
        self, session: Session, state: Mapping[str, npt.NDArray[Any]], loss: str, rate: float, copy: bool
    ) -> None:
        super().__init__(session, loss, rate)
        given = checked(self.formals, state)
        self._arrays = _filled(_block([a for a in session.inputs if a.name in state]), given) if copy else dict(given)
        self._own = set(self._arrays if copy else ())
        _check_complete(self.formals, state, self.optional, self._trained)
        if not copy:
            _check_trainable(self._arrays, self._trained, state)

    def forget(self, names: Collection[str]) -> None:
        for name in names:
            self._own.discard(name)
            del self._arrays[name]

    def feed(self, batch: Mapping[str, npt.NDArray[Any]]) -> None:
        check_state(self.formals, batch)
        for name, array in checked(self.formals, batch):
            if name in self._own or name in self._trained:
                np.copyto(self._arrays[name], array)
            else:  # its default was used up to now, or an array of the caller's, who may need what is in it
                self._arrays[name] = np.array(array, order="C")
                self._own.add(name)

    def step(self) -> float:
        with self._session.lock:
            self._session.execute(self._arrays)
            made = self._session.results(copy=False)
            loss = self._formal.number(made[self._loss])
            for output, name in self._copied.items():
                np.copyto(self._arrays[name], made[output])
            for output, name in self._gradients.items():
                gradient = made[output]  # in the slab: it has no other readers now
                np.multiply(gradient, self._rate, out=gradient)
                np.subtract(self._arrays[name], gradient, out=self._arrays[name])
        return loss

    def names(self) -> Collection[str]:
        return self._arrays.keys()

    def kinds(self) -> Kinds:
        return kinds_of(self._arrays)

    def array(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name].view()

    def place(self, name: str) -> npt.NDArray[Any] | None:
        """Return an array that is the loop's own or that steps renew."""
        return self._arrays[name] if name in self._own or name in self._trained else None


class DeviceRunner(SessionRunner):
    """Run steps on a device, where the session keeps the state; steps update it in place."""

    on_device = True

    def __init__(self, session: Session, state: Mapping[str, Any], loss: str, rate: float, copy: bool) -> None:
        assert session.device is not None
        super().__init__(session, loss, rate)
        self._device = session.device
        check_state(self.formals, state, self.on_device)
        _check_complete(self.formals, state, self.optional, self._trained)
        lying = {} if copy else _lying(self._device, state, self._trained)
        self._use = self._device.take(state)
        self._device.bind(lying)
        for name in state:  # one by one, as a mapping may read them from a file
            if name not in lying:
                self._device.feed(dict(checked({name: self.formals[name]}, {name: state[name]}, self.on_device)))

    def _check_use(self) -> None:
        """Raise UsageError where the session's memory contains somebody else's state now."""
        if self._device.use != self._use:
            raise UsageError(
                "the session was used since by another Loop, or by `run`, and has the state of that: open a Session "
                "for each"
            )

    def forget(self, names: Collection[str]) -> None:
        self._use = self._device.take({*self._device.fed} - {*names})

    def feed(self, batch: Mapping[str, Any]) -> None:
        self._check_use()
        self._device.feed(dict(checked(self.formals, batch, self.on_device)), where_they_lie=True)

    def step(self) -> float:
        with self._session.lock:
            self._session.execute({})
            made = self._session.fetch([self._loss, *self._copied, *self._gradients])
        self._device.feed({name: made[output] for output, name in self._copied.items()}, where_they_lie=True)
        for output, name in self._gradients.items():
            old = self._device.read(name)
            new = np.asarray(old - self._rate * made[output], old.dtype)
            self._device.feed({name: new}, where_they_lie=True)
        return self._formal.number(made[self._loss])

    def names(self) -> Collection[str]:
        self._check_use()
        return self._device.fed

    def kinds(self) -> Kinds:
        formals = {array.name: array for array in self._session.inputs}
        return {name: (formals[name].dtype_name, formals[name].shape) for name in self.names()}

    def array(self, name: str) -> npt.NDArray[Any]:
        return self._device.read(name)

    copy = array


def _lying(device: DeviceMemory, state: Mapping[str, Any], renewed: Container[str]) -> dict[str, DeviceArray]:
    """Return those arrays of a state that lie on the device; UsageError for one that is renewed and does not."""
    if device.fixed:
        raise UsageError("copy=False trains the arrays of `state` where they lie: leave out cuda_graph")
    found = {}
    for name, value in state.items():
        if name in device.on_host:
            raise UsageError(
                f"copy=False trains the arrays of `state` where they lie, but {name!r} lies in the session's own "
                "memory of the host: leave out copy=False"
            )
        array = device_array(name, value)
        if array is not None:
            found[name] = array
        elif name in renewed:
            raise UsageError(f"copy=False trains the arrays of `state` in place: {name!r} is not on the device")
    return found


def _block(inputs: Sequence[Array]) -> Arrays:
    """Return uninitialised arrays for some inputs, one after the other in one block of memory."""
    ends = list(itertools.accumulate(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in inputs))
    block = reserve(ends[-1] if ends else 0)
    places = zip(inputs, [0, *ends], strict=False)
    return {a.name: block[at : at + a.nbytes].view(a.dtype_name).reshape(a.shape) for a, at in places}


def _filled(places: Arrays, arrays: Iterable[tuple[str, npt.NDArray[Any]]]) -> Arrays:
    """Copy arrays into the places of their names; return these places in the order of the arrays."""
    filled = {}
    for name, array in arrays:
        np.copyto(places[name], array)
        filled[name] = places[name]
    return filled


def _check_trainable(arrays: Arrays, renewed: Container[str], given: Mapping[str, Any]) -> None:
    """Raise UsageError unless all arrays are writeable, and those renewed are the caller's and share no memory."""
    for name, array in arrays.items():
        converted = name in renewed and not hasattr(given[name], "dtype")
        if converted or not (array.flags.c_contiguous and array.flags.writeable):
            raise UsageError(f"{name!r} is not a contiguous, writeable array: pass copy=True")
    check_apart(((a.ctypes.data, a.nbytes, name) for name, a in arrays.items()), renewed, "pass copy=True")


class FeedbackRunner(Runner):
    """Run steps with onnxruntime's own session: the outputs of each step are the inputs of the next."""

    def __init__(
        self, session: Any, state: Mapping[str, npt.NDArray[Any]], loss: str, rate: float, device: str
    ) -> None:
        from onnxruntime import OrtValue

        self._session, self._loss, self._rate, self._device = session, loss, rate, device
        self.donated = {}
        self.formals = {value.name: formal(value) for value in session.get_inputs()}
        defaults = overridable(session)
        self.formals |= defaults
        given = checked(self.formals, state)
        # On the CPU a value has the memory of the array: the caller's must not change with it.
        self._values = {
            name: OrtValue.ortvalue_from_numpy(np.array(array, order="C"), device, 0) for name, array in given
        }
        outputs = {value.name: formal(value) for value in session.get_outputs()}
        check_loss(outputs, loss)
        self._outputs = list(outputs)
        self._renews = renewals(self.formals, self._outputs)
        reason = "a session of onnxruntime's own runs the step"
        self.not_donated = dict.fromkeys(self._renews, reason)
        self._gradients = _left_to_apply(self._outputs, self.formals, self._renews.values())
        self._sums = gradient_sums(self.formals)
        trained = {*self._renews.values(), *self._gradients.values(), *self._sums, *self._sums.values()}
        self.optional = frozenset(defaults) - trained
        _check_complete(self.formals, state, self.optional, trained)
        self._own: dict[str, npt.NDArray[Any]] = {}  # state on the CPU, bound once a step has renewed it
        self._binding = session.io_binding()
        self._bind_all()

    def forget(self, names: Collection[str]) -> None:
        for name in names:
            del self._values[name]
        self._binding.clear_binding_inputs()
        self._bind_all()

    def feed(self, batch: Mapping[str, npt.NDArray[Any]]) -> None:
        from onnxruntime import OrtValue

        check_state(self.formals, batch)
        for name, array in checked(self.formals, batch):
            self._own.pop(name, None)
            self._bind(name, OrtValue.ortvalue_from_numpy(np.array(array, order="C"), self._device, 0))

    def step(self) -> float:
        keep_trimmed()
        for name in self._outputs:
            # No buffer: ONNX Runtime allocates each output when it is computed, as it does without binding.
            self._binding.bind_output(name, "cpu" if name == self._loss else self._device)
        self._session.run_with_iobinding(self._binding)
        made = dict(zip(self._outputs, self._binding.get_outputs(), strict=True))
        loss = float(made[self._loss].numpy().item())
        for output, name in self._renews.items():
            self._renew(name, made.pop(output))
        for output, name in self._gradients.items():
            self._descend(name, made.pop(output))
        for total, name in self._sums.items():
            self._descend(name, self._values[total])
        self._binding.clear_binding_outputs()  # only now: up to 1.28 the values lie in the binding's own list
        return loss

    def names(self) -> Collection[str]:
        return self._values.keys()

    def kinds(self) -> Kinds:
        return {name: (self.formals[name].dtype, tuple(value.shape())) for name, value in self._values.items()}

    def array(self, name: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self._values[name].numpy()
        return array

    def _bind_all(self) -> None:
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)

    def _bind(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._binding.bind_ortvalue_input(name, value)

    def _renew(self, name: str, value: Any) -> None:
        """Let the next step read an output of this one: on CUDA without a copy, on the CPU from the loop's own memory.

        An output keeps its place in ONNX Runtime's arena and fragments it: training would take up to a third more. The
        caller's arrays are not modified.
        """
        from onnxruntime import OrtValue

        if self._device != "cpu":
            self._bind(name, value)
            return
        new, own = value.numpy(), self._own.get(name)
        if own is not None and own.shape == new.shape:
            np.copyto(own, new)
            return
        self._own[name] = np.array(new, order="C")
        self._bind(name, OrtValue.ortvalue_from_numpy(self._own[name], "cpu", 0))

    def _descend(self, name: str, gradient: Any) -> None:
        from onnxruntime import OrtValue

        old = self._values[name].numpy()
        moved = np.asarray(old - self._rate * gradient.numpy(), old.dtype)
        self._bind(name, OrtValue.ortvalue_from_numpy(moved, self._device, 0))
