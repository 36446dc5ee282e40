"""Training loop for a step model: the new state of each step is the state of the next, by I/O binding.

Names state which output is the next value of which input, see `ir.naming`; the batch is ``input.<i>`` or any input that
no output renews.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import UsageError
from onnx_remat.ir.metadata import RUN_BY_KEY
from onnx_remat.ir.naming import gradient_sums, gradients, renewals
from onnx_remat.messages import Setting, Word
from onnx_remat.session import heap, state_file
from onnx_remat.session.interface import DTYPES, Arrays, check_mapping, check_state
from onnx_remat.session.runners import DeviceRunner, FeedbackRunner, InPlaceRunner, Runner
from onnx_remat.session.session import Session

_RESET = "lazy_reset_grad"
"""The input that makes onnxruntime-training reset its accumulated gradients."""


class Loop:
    """Train one model: call `step` repeatedly.

    With a model or a `Session`, the loop updates state in place: ``new.w`` is written over ``w``, so the two never
    exist at the same time. With onnxruntime's own session, the outputs of each step become the inputs of the next, and
    only a budget of ``run_by="session"`` is kept.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto, Result, Session or onnxruntime.InferenceSession
        A training step, or a session that runs one.
    state : mapping of str to array
        A value for every input; one that no step renews may have a default instead. Each is read once, so that
        ``numpy.load("state.npz")`` has one array in memory at a time. Memory of arrays that the caller drops returns to
        the system before the next step.
    loss : str
        The output that `step` returns, a single number.
    rate : float
        Step size of plain SGD, for parameters of which the model outputs only the gradient.
    device : str
        Device that runs the step and keeps the state between steps: ``cpu``, or ``cuda``, where a step that is not a
        session runs in a CUDA graph if it can.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions, where `model` is not a session; by default those it was planned for.
    copy : bool
        Train copies of the arrays in `state`. If False, train these arrays themselves, which must be contiguous and
        writeable: this saves memory where the state is most of what training takes. Batches that `step` gets are
        copied to arrays of the loop's own; on a device, to those of the first, which another library holds there, such
        as PyTorch's tensors on CUDA.
    fuse : bool
        See `Session`; for a `model` that is not a session.

    Attributes
    ----------
    donated, not_donated : mapping of str to str
        Input by the output that is written in its place; reason by output, for those that are not written in place.

    Raises
    ------
    UsageError
        State is missing, unknown, or of another type or shape; or the loss does not exist or is not a single number.
    OnnxRematError
        The model cannot be opened, see `Session`.
    """

    def __init__(
        self,
        model: Any,
        state: Mapping[str, npt.NDArray[Any]],
        loss: str = "loss",
        rate: float = 0.01,
        device: str = "cpu",
        *,
        dims: Mapping[str, int] | None = None,
        copy: bool = True,
        fuse: bool = True,
    ) -> None:
        check_mapping(state, "the state")
        if hasattr(model, "io_binding"):
            if not copy:
                raise UsageError("copy=False needs an onnx_remat.Session: pass the model's path")
            if _is_planned_for_loop(model):
                warnings.warn(
                    "the file is planned for onnx_remat.Session: in onnxruntime's own session training takes more than "
                    "its budget; pass the model's path, or an onnx_remat.Session, to keep it",
                    stacklevel=2,
                )
            self._runner: Runner = FeedbackRunner(model, state, loss, rate, device)
        else:
            session = model
            if not isinstance(model, Session):
                graph = None if device == "cuda" and copy else False
                session = Session(model, device, dims=dims, donate=True, fuse=fuse, cuda_graph=graph)
            if device != ("cpu" if session.device is None else "cuda"):
                raise UsageError(f"device {device!r}: the session runs on another device")
            if session.device is None:
                self._runner = InPlaceRunner(session, state, loss, rate, copy)
            else:
                self._runner = DeviceRunner(session, state, loss, rate, copy)
        heap.trim_soon()
        self._failed = ""
        self.donated: Mapping[str, str] = self._runner.donated
        self.not_donated: Mapping[str, str] = self._runner.not_donated

    def step(self, batch: Mapping[str, npt.NDArray[Any]] | None = None) -> float:
        """Run one step on a batch (arrays by input name, copied), or on the last batch again, and return its loss.

        Raises
        ------
        UsageError
            The batch names an unknown input or does not fit the model; or an earlier step failed.
        ModelError
            The step failed before its end: some state is renewed and some is not. Continue with `load` or `restore`.
        """
        self._check_whole()
        if batch is not None:
            check_mapping(batch, "a batch")
        self._runner.feed({} if batch is None else batch)
        self._failed = "interrupted"
        try:
            loss = self._runner.step()
        except Exception as error:
            self._failed = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise
        self._failed = ""
        return loss

    def _check_whole(self) -> None:
        """Raise UsageError after a step that renewed some state and not the rest."""
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): load or restore the state first")

    def state(self) -> Arrays:
        """Return copies of the current values of all inputs; UsageError if an earlier step failed."""
        self._check_whole()
        heap.trim_soon()
        return {name: self._runner.copy(name) for name in self._runner.names()}

    def view(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view of an input's current value, to read between steps.

        With a model or a `Session`, later steps update the same array. UsageError if an earlier step failed.
        """
        self._check_whole()
        names = self._runner.names()
        if name not in names:
            raise UsageError(f"the model has no input {name!r}: it has {', '.join(names)}")
        view = self._runner.array(name)
        view.flags.writeable = False
        return view

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set all inputs to values that `state` returned, and continue from there.

        On a device, where a session runs the steps, values may lie there, see `Session`.
        """
        names = self._runner.names()
        check_state(self._runner.formals, state, self._runner.on_device)
        by_default = [name for name in names if name not in state and name in self._runner.optional]
        if missing := [name for name in names if name not in state and name not in by_default]:
            raise UsageError(f"no value for input {missing[0]!r}")
        self._failed = "interrupted"
        self._runner.forget(by_default)
        self._runner.feed(state)
        heap.trim_soon()
        self._failed = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the current values of all inputs to a safetensors file; resumed training is bit-identical.

        The file does not contain the state of random generators inside onnxruntime (Dropout's).

        Raises
        ------
        UsageError
            The path ends as files of another format do (``.npz``, ``.pt``, ...).
        """
        self._check_whole()
        kinds = self._runner.kinds()
        state_file.write_each(path, kinds, (self._runner.array(name) for name in kinds))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a state that `save` wrote, and continue from there.

        Raises
        ------
        UsageError
            The file is not the state of this model; the current state is unchanged.
        ModelError
            The file is missing or damaged.
        """
        stored = state_file.shapes(path)
        kinds = dict(self._runner.kinds())
        by_default = [name for name in kinds if name in self._runner.optional and name not in stored]
        for name in by_default:
            del kinds[name]
        for name in self._runner.optional - kinds.keys():
            if name in stored:
                formal = self._runner.formals[name]
                kinds[name] = formal.dtype, formal.sizes(stored[name])
        state_file.check(path, kinds)
        self._failed = "interrupted"
        self._runner.forget(by_default)
        places = {name: self._runner.place(name) for name in kinds}
        arrays = (
            (name, np.empty(shape, dtype) if (place := places[name]) is None else place)
            for name, (dtype, shape) in kinds.items()
        )
        for name, array in state_file.read_each(path, kinds, arrays):
            if places[name] is None:
                self._runner.feed({name: array})
        heap.trim_soon()
        self._failed = ""


def _is_planned_for_loop(session: Any) -> bool:
    """Return whether the file that onnxruntime's own session runs has a budget for a loop's slab."""
    return bool(session.get_modelmeta().custom_metadata_map.get(RUN_BY_KEY) == "loop")


def initial_state(session: Any, dims: Mapping[str, int], path: str | os.PathLike[str] = "") -> Arrays:
    """Return a first value for every input: from a file where it has one, else by the input's name and shape.

    Inputs that no step renews keep their defaults, where they have one.

    The file is an ``.npz``, or a checkpoint of onnxruntime-training where that is installed.

    Optimizer state, biases and running means start at zero, gains and running variances at one, weights are normal with
    variance 2 / fan-in; float data is normal, integer data is 0 or 1, valid in every vocabulary and set of classes.
    """
    generator = np.random.default_rng(0)
    given = _read_state(path) if path else {}
    defaults = session.get_overridable_initializers()
    inputs = [value.name for value in (*session.get_inputs(), *defaults)]
    outputs = [value.name for value in session.get_outputs()]
    sums = gradient_sums(inputs)
    renewed = {*renewals(inputs, outputs).values(), *gradients(outputs).values(), *sums.values()}
    state = {}
    for value in (*session.get_inputs(), *(value for value in defaults if value.name in renewed | sums.keys())):
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        dtype = np.dtype(DTYPES.get(kind, kind))
        if unknown := [d for d in value.shape if not isinstance(d, int) and d not in dims]:
            sizes = Setting("dims", dict.fromkeys(unknown, Word("SIZE")))
            raise UsageError("input {!r} has symbolic dimensions: pass {}", value.name, sizes)
        shape = tuple(d if isinstance(d, int) else dims[d] for d in value.shape)
        if value.name == _RESET:
            state[value.name] = np.ones(shape, dtype)
        elif value.name in given:
            state[value.name] = np.asarray(given[value.name], dtype, order="C")
        elif value.name in renewed:
            state[value.name] = np.asarray(_parameter(value.name, shape, generator), dtype, order="C")
        elif value.name.startswith("learning_rate"):
            state[value.name] = np.full(shape, 0.01, dtype)
        elif np.issubdtype(dtype, np.floating):
            state[value.name] = np.asarray(generator.standard_normal(shape), dtype, order="C")
        else:
            state[value.name] = np.asarray(generator.integers(0, 2, shape), dtype, order="C")
    return state


def _read_state(path: str | os.PathLike[str]) -> Mapping[str, npt.NDArray[Any]]:
    if Path(path).suffix == ".npz":
        loaded: Mapping[str, npt.NDArray[Any]] = np.load(path)
        return loaded
    from onnxruntime.training.api import CheckpointState

    return {name: value.data for name, value in CheckpointState.load_checkpoint(str(path)).parameters}


def _parameter(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.float64]:
    size = int(np.prod(shape))
    if name.startswith("state.") or name.endswith(("bias", "running_mean", "num_batches_tracked")):
        return np.zeros(shape)
    if name.endswith("running_var") or (size == max(shape, default=1) and name.endswith("weight")):
        return np.ones(shape)
    fan_in = size / shape[0] if len(shape) > 2 else max(shape[:1], default=1)
    return np.asarray(generator.standard_normal(shape) * np.sqrt(2 / max(fan_in, 1)))
