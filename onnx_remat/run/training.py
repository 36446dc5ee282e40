"""Training with a step model: each step's new state feeds the next, by I/O binding.

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
from onnx_remat.ir.naming import NEW, gradient_sums, gradients, renewals

Arrays = dict[str, npt.NDArray[Any]]

_RESET = "lazy_reset_grad"
"""The input that makes onnxruntime-training begin these sums anew."""

_DTYPES = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}


class Loop:
    """One model's training: call `step` again and again.

    Parameters
    ----------
    session : onnxruntime.InferenceSession
    state : mapping of str to array
        A value for every input.
    loss : str
        The output that `step` returns.
    rate : float
        Step size of plain SGD, for parameters of which the model gives the gradient only.
    device : str
        Where state lives between steps, ``cpu`` or ``cuda``.
    """

    def __init__(
        self, session: Any, state: Mapping[str, npt.NDArray[Any]], loss: str, rate: float = 0.01, device: str = "cpu"
    ) -> None:
        from onnxruntime import OrtValue

        self._session, self._loss, self._rate, self._device = session, loss, rate, device
        self._outputs = [value.name for value in session.get_outputs()]
        self._renews = renewals(state, self._outputs)
        self._gradients = {
            name: target
            for name, target in gradients(self._outputs).items()
            if target in state and NEW + target not in self._renews
        }
        self._sums = gradient_sums(state)
        self._own: dict[str, npt.NDArray[Any]] = {}  # state on the CPU, bound once a step has renewed it
        self._binding = session.io_binding()
        self._values = {name: OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in state.items()}
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)

    def step(self, batch: Mapping[str, npt.NDArray[Any]] | None = None) -> float:
        """Run one step, on a batch (arrays by input name) or on the one before; returns its loss.

        Raises
        ------
        UsageError
            The batch names an input that the model does not have.
        """
        from onnxruntime import OrtValue

        for name, array in (batch or {}).items():
            if name not in self._values:
                raise UsageError(f"the model has no input {name!r}: it has {', '.join(self._values)}")
            self._bind(name, OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), self._device, 0))
        for name in self._outputs:
            # Unallocated: the runtime makes each output when it is computed, as it does without binding.
            self._binding.bind_output(name, "cpu" if name == self._loss else self._device)
        self._session.run_with_iobinding(self._binding)
        made = dict(zip(self._outputs, self._binding.get_outputs(), strict=True))
        loss = float(made[self._loss].numpy())
        self._binding.clear_binding_outputs()
        for output, name in self._renews.items():
            self._renew(name, made.pop(output))
        for output, name in self._gradients.items():
            self._descend(name, made.pop(output))
        for total, name in self._sums.items():
            self._descend(name, self._values[total])
        return loss

    def state(self) -> Arrays:
        """Copies of all inputs as they are now."""
        return {name: value.numpy().copy() for name, value in self._values.items()}

    def _bind(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._binding.bind_ortvalue_input(name, value)

    def _renew(self, name: str, value: Any) -> None:
        """Let the next step read what this one put out: on CUDA as it is, on the CPU from memory of the loop's own.

        An output stays where ONNX Runtime's arena put it, and keeps gaps around it that fit nothing: training would
        hold up to a third more. Arrays that the caller gave are left alone.
        """
        from onnxruntime import OrtValue

        if self._device != "cpu":
            self._bind(name, value)
            return
        if name in self._own:
            np.copyto(self._own[name], value.numpy())
            return
        self._own[name] = np.array(value.numpy(), order="C")
        self._bind(name, OrtValue.ortvalue_from_numpy(self._own[name], "cpu", 0))

    def _descend(self, name: str, gradient: Any) -> None:
        from onnxruntime import OrtValue

        old = self._values[name].numpy()
        moved = np.asarray(old - self._rate * gradient.numpy(), old.dtype)
        self._bind(name, OrtValue.ortvalue_from_numpy(moved, self._device, 0))


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
        dtype = np.dtype(_DTYPES.get(kind, kind))
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
