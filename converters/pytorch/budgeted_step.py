"""What `budgeted` returns: a step on ONNX Runtime that updates the tensors of a module in place."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.messages import Setting
from onnx_remat.session import heap
from onnx_remat.session.session import Session

from .. import names, shares
from .arrays import tensor as copied
from .batch import Batch
from .devices import (
    HOST,
    device_of,
    fits,
    in_one_piece,
    kept_on_host,
    readable,
    restored,
)
from .holders import held
from .outside import Outside, check_tensors_apart, memory, shares_memory
from .preparation import Prepared
from .sizes import Sessions, Written
from .unchanged import Facts

if TYPE_CHECKING:  # modules that take memory, which only the preparation of a step needs
    from onnx_remat.rewrite.report import Report

    from .step import Loss

_Layout: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Address, shape, strides and type of a tensor."""


class StepLoss(float):
    """The loss of a step: a number that a training loop may also treat as a tensor."""

    def item(self) -> float:
        """Return the number."""
        return float(self)

    def detach(self) -> StepLoss:
        """Return the loss itself, which has no history."""
        return self

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UsageError: the step has computed the gradients and updated the module."""
        raise UsageError(
            "the step has already computed the gradients and updated the module: leave out loss.backward()"
        )


class Budgeted:
    """A training step of a module on ONNX Runtime: ``step(batch)`` trains and returns the loss.

    It runs where the module is, on the CPU or on a CUDA device, and updates the tensors of the module and of the
    optimizer's state in place; on a device, all of that state is there. Between steps, evaluation,
    ``state_dict()`` and ``load_state_dict()`` of both work as usual. Every step reads the learning rates from
    ``optimizer.param_groups``.

    Attributes
    ----------
    torch_bytes : int
        Memory that training in PyTorch takes, Python and its libraries not included; 0 if it was not measured, because
        there is no budget, or it is a number of bytes and nothing is checked.
    summary : str
        A line on PyTorch's own step, if it was measured, and this one, and the first line of the report; empty without
        a budget.
    outputs : dict of str to torch.Tensor
        Copies of the parts of the model's output that `budgeted` was asked for, of the last step, where the module is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        users: tuple[torch.optim.Optimizer, ...],
        batch: Batch,
        prepared: Prepared,
        outside: Mapping[str, Outside],
        written: Written,
        threads: int,
        loss: Loss | None,
    ) -> None:
        self._loss = loss  # its tensors are read as long as they exist
        self._device = device_of(model)
        self.torch_bytes, self._report, self.summary = prepared.torch_bytes, prepared.report, prepared.summary
        self._optimizers, self._model, self._written = users, model, written
        self._batch = replace(batch, tensors=())  # frees the example
        self._shapes = {name: tensor.shape for name, tensor in zip(batch.names, batch.tensors, strict=True)}
        self._sessions = Sessions(written, written.sizes(batch), threads, self._device.type, prepared)
        self._trained, self._settings = prepared.trained, prepared.settings
        self._facts = self._now(dict(model.named_parameters()))
        _start(users, dict(model.named_parameters()), prepared.started)
        wanted = {array.name for array in self._session.inputs}
        current = self._current(dict(model.named_parameters()))
        self._own = {
            name: value.clone().to(self._device)
            for name, value in prepared.own.items()
            if name not in current and name in wanted
        }
        self._arrays: dict[str, Any] = {name: readable(tensor) for name, tensor in self._own.items()}
        self._unread = set(self._own)  # inputs whose arrays are others than in the last run
        self._rates: dict[str, float] = {}
        self._wanted = [name for name in current if name in wanted]
        self._numbers = [name for _, _, name in self._counts(dict(model.named_parameters()))]
        self._outside = {name: one for name, one in outside.items() if name in wanted}
        buffers = self._places(current, self._renewed() & dict(model.named_buffers()).keys())
        for one in self._outside.values():
            if memory(one.alias) in buffers:
                raise shares_memory(one.label, f"buffer {buffers[memory(one.alias)]}")
        self._outside = held(self._outside)
        self._bound: dict[str, _Layout] = {}
        self._formals = {array.name: array for array in self._session.outputs}
        self._kept = {names.output(name): name for name in prepared.outputs}
        self.outputs: dict[str, torch.Tensor] = {}
        self._failed = ""
        self._undoes = self._device != HOST  # a step that fails, which is the first: the device may be too small
        self._turn = threading.RLock()  # threads take their steps one after the other

    def __call__(self, batch: Any, *more: Any) -> StepLoss:
        """Train on one batch, of the structure of the example, and return the loss.

        Raises
        ------
        UsageError
            The batch does not match the example, the module is in another mode, or a constant setting has changed. The
            step did not run.
        ModelError
            ONNX Runtime failed during the step: some parameters are updated and some are not. If it was the first on a
            device, which may be too small, all are as they were before: the host keeps a copy during that step.
        """
        if more:
            raise UsageError(
                f"a step takes one batch, not {1 + len(more)} arguments: pass one tuple, like the example batch"
            )
        with self._turn:
            return self._train(batch)

    def _train(self, batch: Any) -> StepLoss:
        if self._failed:
            raise UsageError(f"this step is no longer usable ({self._failed}): load the state and make a new one")
        parameters = dict(self._model.named_parameters())
        self._facts.check(self._now(parameters))
        given = self._flat(batch)
        current = self._current(parameters)
        self._bind(current, {*parameters, *dict(self._model.named_buffers())})
        counted = list(self._counts(parameters)) if self._numbers else []
        self._read_counts({name: pieces[slot] for pieces, slot, name in counted})
        for name, (optimizer_, group, key) in self._settings.items():
            rate = float(self._optimizers[optimizer_].param_groups[group][key])
            if name in self._own and self._rates.get(name) != rate:
                self._own[name].fill_(rate)
                self._rates[name] = rate
        wanted = self._arrays if self._device == HOST else {name: self._arrays[name] for name in self._unread}
        feeds = wanted | self._read_outside(current) | given
        with self._session.lock:
            before = kept_on_host(self._renewed_tensors(current)) if self._undoes else []
            self._failed = "interrupted"
            try:
                self._session.execute(feeds)
            except UsageError:  # the step did not run
                self._failed = ""
                raise
            except BaseException as error:
                undone = self._undoes and restored(before)
                self._failed = "" if undone else type(error).__name__
                if isinstance(error, ModelError):
                    whole = "; module and optimizer are as they were before" if undone else ""
                    raise ModelError("{}{}", shares.in_budgeted(error.message), whole) from error
                raise
            del before
            self._undoes = False
            self._unread.clear()
            made = self._session.results(copy=False)
            for output in self._session.not_donated:
                _renew(self._arrays[output.removeprefix(names.new(""))], made[output])
            self.outputs = {name: self._tensor(output, made[output]) for output, name in self._kept.items()}
            loss = StepLoss(self._formals[names.LOSS].number(made[names.LOSS]))
        self._failed = ""
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        for pieces, slot, name in counted:
            pieces[slot] = type(pieces[slot])(self._own[name].item())
        return loss

    def _tensor(self, output: str, value: np.ndarray) -> torch.Tensor:
        """Return a copy of an output where the module is."""
        made = copied(value)
        return (made.view(torch.bfloat16) if self._formals[output].is_bfloat else made).to(self._device)

    @property
    def report(self) -> Report | None:
        """Return the report of the rewrite, None without a budget. The modules of its classes take about 90 MB."""
        report: Report | None = pickle.loads(self._report) if self._report else None
        return report

    @property
    def extra(self) -> dict[str, torch.Tensor]:
        """Return the state outside module and optimizer, by name: averages, sums of micro-batches, the loss scale."""
        return dict(self._own)

    def close(self) -> None:
        """Free all memory except that of the module and the optimizer."""
        with self._turn:
            self._sessions.close()
            self._written.folder.cleanup()
            self._arrays, self._bound, self._outside = {}, {}, {}
            self._failed = "closed"

    def __reduce__(self) -> NoReturn:
        """Raise UsageError: a copy would train the tensors of the original."""
        raise UsageError(
            "a step cannot be copied or pickled: copy the model and the optimizer, or save their state_dict(), and "
            "make a new step of these"
        )

    def __enter__(self) -> Budgeted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flat(self, batch: Any) -> dict[str, Any]:
        """Return the arrays of a batch by input name; contiguous ones are not copied here."""
        given = self._batch.like(batch)
        wanted = {array.name for array in self._session.inputs}
        tensors = {name: tensor for name, tensor in zip(given.names, given.tensors, strict=True) if name in wanted}
        self._check_shapes(tensors)
        self._sessions.use(self._written.sizes(given))
        for name, tensor in tensors.items():
            if tensor.device not in (HOST, self._device) or tensor.layout != torch.strided:
                where = f"give a dense tensor on {self._device}"
                raise UsageError(f"{name} is {tensor.layout} on {tensor.device}: {where}")
        return {name: readable(in_one_piece(tensor)) for name, tensor in tensors.items()}

    def _check_shapes(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raise UsageError if a fixed dimension has another size than in the example."""
        for name, tensor in given.items():
            example, is_open = self._shapes[name], self._written.dynamic.get(name, {})
            fits = tensor.dim() == len(example) and all(
                axis in is_open or size == example[axis] for axis, size in enumerate(tensor.shape)
            )
            if fits:
                continue
            pairs = list(zip(tensor.shape, example, strict=False))
            axis = next((i for i, (size, other) in enumerate(pairs) if size != other and i not in is_open), 0)
            first = "if only the last batch is smaller, let the data loader drop it (drop_last=True)"
            raise UsageError(
                "{} has shape {}, and the example {}: {}; otherwise leave the size open with {}, and for every other "
                "input that has it",
                name,
                list(tensor.shape),
                list(example),
                "pad all batches to one length" if axis else first,
                Setting("dynamic_dims", {name: {axis: "length" if axis else "batch"}}),
            )

    @property
    def _session(self) -> Session:
        return self._sessions.current

    def _now(self, parameters: Mapping[str, torch.nn.Parameter]) -> Facts:
        return Facts.of(self._model, self._optimizers, set(self._settings.values()), parameters, self._loss)

    def _current(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return the current tensors of module and optimizers that the step trains, by input name."""
        found: dict[str, torch.Tensor] = dict(parameters)
        found |= dict(self._model.named_buffers())
        for optimizer in self._optimizers:
            for name in self._trained:
                for slot, value in optimizer.state.get(parameters[name], {}).items():
                    if isinstance(value, torch.Tensor):
                        found[names.state(name, slot)] = value
        return found

    def _bind(self, current: Mapping[str, torch.Tensor], own: Collection[str]) -> None:
        """Update the arrays that share the tensors' memory: the user may have loaded or replaced some tensors.

        `own` are the names of the module's, whose device the user chose.
        """
        changed = []
        for name in self._wanted:
            if name not in current:
                raise UsageError(f"{name} is gone from the module or the optimizer: make a new step")
            if current[name].device != self._device and name in own:
                raise UsageError(
                    f"{name} is on {current[name].device} and the step runs on {self._device}: move the module back, "
                    f"model.to({str(self._device)!r}), or make a new step"
                )
        for name in self._wanted:
            state = current[name]
            if state.device != self._device:  # PyTorch counts steps on the host, and so do its checkpoints
                state.data = state.data.to(self._device)
            if _layout(state) != self._bound.get(name):
                changed.append(name)
        if changed:
            check_tensors_apart({name: current[name] for name in self._wanted}, self._renewed())
            heap.trim_soon()  # frees the previous tensors, and the checkpoint that these came from
        for name in changed:
            tensor = current[name]
            if not fits(tensor):
                tensor.data = in_one_piece(tensor.data)
            self._unread.add(name)
            self._bound[name], self._arrays[name] = _layout(tensor), readable(tensor)

    def _read_counts(self, counts: Mapping[str, float]) -> None:
        for name in self._numbers:
            if name not in counts:
                raise UsageError(f"{name} is gone from the optimizer: make a new step")
            self._own[name].fill_(counts[name])

    def _read_outside(self, current: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return current arrays of the tensors outside the step; copies of those that the step would change."""
        renewed = self._places(current, self._renewed()) if self._outside else {}
        made = {}
        for name, one in self._outside.items():
            tensor = one.current()
            whole = in_one_piece(tensor)
            made[name] = readable(whole.clone() if memory(whole) in renewed else whole)
        return made

    def _places(self, current: Mapping[str, torch.Tensor], inputs: Iterable[str]) -> dict[int, str]:
        """Return the names of these trained tensors, by the address of their memory."""
        return {memory(current[name]): name for name in inputs if name in current}

    def _renewed(self) -> set[str]:
        """Return the inputs that a step updates in place."""
        return {*self._session.donated.values(), *(o.removeprefix(names.new("")) for o in self._session.not_donated)}

    def _renewed_tensors(self, current: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a step updates in place."""
        return [current[name] if name in current else self._own[name] for name in self._renewed()]

    def _counts(self, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yield the Python numbers in an optimizer's state, which cannot share memory: dict, key and input name."""
        for optimizer in self._optimizers:
            for name in self._trained:
                pieces = optimizer.state.get(parameters[name], {})
                for slot, value in pieces.items():
                    if isinstance(value, int | float) and names.state(name, slot) in self._own:
                        yield pieces, slot, names.state(name, slot)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _renew(place: Any, value: np.ndarray) -> None:
    """Copy a new value to an input's array, see `readable`."""
    if isinstance(place, np.ndarray):
        np.copyto(place, value)
    else:
        place.copy_(torch.from_numpy(value.view(np.uint16) if place.dtype == torch.uint16 else value))


def _start(
    users: Iterable[torch.optim.Optimizer],
    parameters: Mapping[str, torch.Tensor],
    started: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Store the state before the first step in optimizers that have none."""
    for user in users:
        held = {id(parameter) for group in user.param_groups for parameter in group["params"]}
        for name, pieces in started.items():
            if id(parameters[name]) in held:
                where = parameters[name].device
                user.state[parameters[name]] = {slot: value.clone().to(where) for slot, value in pieces.items()}
