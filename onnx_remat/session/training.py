"""Training with a step model: each step's new state is the next one's state, by I/O binding.

Which output is the next value of which input stands in their names, see `ir.naming`; the batch is ``input.<i>`` or any
input that no output renews.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import UsageError
from onnx_remat.ir.naming import gradient_sums, gradients, renewals
from onnx_remat.messages import Setting, Word
from onnx_remat.session import heap, state_file
from onnx_remat.session.interface import DTYPES, Arrays, check_state
from onnx_remat.session.runners import DeviceRunner, FeedbackRunner, InPlaceRunner
from onnx_remat.session.session import Session

Runner = FeedbackRunner | InPlaceRunner | DeviceRunner
"""How a loop runs its steps."""

_RESET = "lazy_reset_grad"
"""The input that makes onnxruntime-training begin its sums of gradients anew."""


class Loop:
    """One model's training: call `step` again and again.

    Opened from a model, or given a `Session`, the loop renews state where it lies: ``new.w`` is written over ``w``, and
    the two never exist at once. Given onnxruntime's own session, each step's outputs become the next one's inputs.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto, Result, Session or onnxruntime.InferenceSession
    state : mapping of str to array
        A value for every input, each asked for once: of ``numpy.load("state.npz")`` as it is, one array at a time is in
        memory. Memory of arrays that the caller drops goes back to the system before the next step.
    loss : str
        The output that `step` returns, a single number.
    rate : float
        Step size of plain SGD, for parameters of which the model gives the gradient only.
    device : str
        Where state lives between steps, ``cpu`` or ``cuda``, and the step runs.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions, where the model is opened here; by default those it was planned for.
    copy : bool
        Train copies of the arrays in `state`. Otherwise these arrays themselves are trained: where the state is most of
        what training takes, one cannot afford it twice. They must be contiguous and writable then.
    fuse : bool
        As a `Session` has it, where the model is opened here.

    Attributes
    ----------
    donated, not_donated : mapping of str to str
        Outputs that are written over the inputs they renew, by output; those that are not, and why.

    Raises
    ------
    UsageError
        State is missing, unknown, or of another type or shape; there is no such loss, or it is not a single number.
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
        if hasattr(model, "io_binding"):
            if not copy:
                raise UsageError("copy=False needs a session of onnx-remat's: pass the model's path")
            self._runner: FeedbackRunner | InPlaceRunner | DeviceRunner = FeedbackRunner(
                model, state, loss, rate, device
            )
        else:
            session = model if isinstance(model, Session) else Session(model, device, dims=dims, donate=True, fuse=fuse)
            if device != ("cpu" if session.device is None else "cuda"):
                raise UsageError(f"device {device!r}: the session runs on another")
            if session.device is None:
                self._runner = InPlaceRunner(session, state, loss, rate, copy)
            elif not copy:
                raise UsageError("copy=False trains the arrays of `state` where they lie: not on a device")
            else:
                self._runner = DeviceRunner(session, state, loss, rate)
        heap.trim_soon()
        self._failed = ""
        self.donated: Mapping[str, str] = self._runner.donated
        self.not_donated: Mapping[str, str] = self._runner.not_donated

    def step(self, batch: Mapping[str, npt.NDArray[Any]] | None = None) -> float:
        """Run one step, on a batch (arrays by input name, copied) or on the one before; returns its loss.

        Raises
        ------
        UsageError
            The batch names an input that the model does not have, or does not fit it; or an earlier step failed.
        ModelError
            The step failed midway: some state is renewed and some is not. `load` or `restore` sets it right.
        """
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): load or restore the state first")
        self._runner.feed(batch or {})
        self._failed = "interrupted"
        try:
            loss = self._runner.step()
        except Exception as error:
            self._failed = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise
        self._failed = ""
        return loss

    def state(self) -> Arrays:
        """Copies of all inputs as they are now."""
        heap.trim_soon()
        return {name: array.copy() for name, array in self._runner.arrays().items()}

    def view(self, name: str) -> npt.NDArray[Any]:
        """An input as it is now, which may be read at any time between steps but not written.

        Opened from a model or given a `Session`, later steps show in the same array.
        """
        arrays = self._runner.arrays()
        if name not in arrays:
            raise UsageError(f"the model has no input {name!r}: it has {', '.join(arrays)}")
        view = arrays[name].view()
        view.flags.writeable = False
        return view

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from other values of all inputs, as `state` returned them."""
        arrays = self._runner.arrays()
        check_state(self._runner.formals, state)
        if missing := [name for name in arrays if name not in state]:
            raise UsageError(f"no value for input {missing[0]!r}")
        self._failed = "interrupted"
        self._runner.feed(state)
        heap.trim_soon()
        self._failed = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all inputs as they are now to a safetensors file; training resumed from it gives the same bits.

        The state of a random generator inside onnxruntime (Dropout's) is not among them.
        """
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): this state is not worth saving")
        state_file.write(path, self._runner.arrays())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote.

        Raises
        ------
        UsageError
            The file is not the state of this model; nothing is changed.
        ModelError
            The file is missing or damaged.
        """
        arrays = self._runner.arrays()
        kinds = state_file.kinds_of(arrays)
        state_file.check(path, kinds)
        self._failed = "interrupted"
        places = ((name, a if a.flags.writeable else np.empty_like(a, order="C")) for name, a in arrays.items())
        for name, array in state_file.read_each(path, kinds, places):
            if array is not arrays[name]:
                self._runner.feed({name: array})
        heap.trim_soon()
        self._failed = ""


def initial_state(session: Any, dims: Mapping[str, int], path: str | os.PathLike[str] = "") -> Arrays:
    """A first value for every input: from a file where it has one, else what its name and shape suggest.

    The file is an ``.npz``, or a checkpoint of onnxruntime-training, where that is installed.

    Optimizer state, biases and running means start at zero, gains and running variances at one, weights normal with
    variance 2 / fan-in; float data is normal, integer data 0 or 1, which every vocabulary and set of classes has.
    """
    generator = np.random.default_rng(0)
    given = _read_state(path) if path else {}
    renewed = set(renewals((v.name for v in session.get_inputs()), (v.name for v in session.get_outputs())).values())
    renewed |= set(gradients(v.name for v in session.get_outputs()).values())
    renewed |= set(gradient_sums(v.name for v in session.get_inputs()).values())
    state = {}
    for value in session.get_inputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        dtype = np.dtype(DTYPES.get(kind, kind))
        if unknown := [d for d in value.shape if not isinstance(d, int) and d not in dims]:
            sizes = Setting("dims", dict.fromkeys(unknown, Word("N")))
            raise UsageError("input {!r} has dimensions of any size: pass {}", value.name, sizes)
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
