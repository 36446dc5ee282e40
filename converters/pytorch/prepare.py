"""Prepare a step for training in place: export it, compare it with torch, plan it, write its file.

All of this takes memory that training does not need. Therefore `prepared` runs in a forked copy of the training process
where that is possible, and returns only what the training process cannot find out by itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import onnx
import onnx_ir as ir
import torch

from onnx_remat.errors import ConversionError
from onnx_remat.ir.metadata import entries
from onnx_remat.messages import Setting
from onnx_remat.options import PlanningOptions, parse_options
from onnx_remat.process import forked
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.rewrite.report import Report
from onnx_remat.units import Budget

from .. import names, plan_cache, shares
from . import export_cache, optimizer_facts, updates
from .arrays import tensor
from .export import checked_parts, compare, finished, step_of, traced
from .initial import initial_feeds
from .living import Living
from .lower import lower
from .outside import Outside
from .own_step import Known, Measurement, agree
from .preparation import Prepared, Request
from .step import StepParts
from .trace import Trace
from .unchanged import SettingPlace

OPSET = 20

_LR = "lr"


def prepared(request: Request, measured: Measurement | Known | None, apart: bool = False) -> Prepared:
    """Export a step, compare it with torch's if `check`, plan it if there is a budget, and write it.

    A share as budget is one of PyTorch's own step if that is `measured`. In a process `apart`, the step is compared
    while it is planned.

    Raises
    ------
    ConversionError, OnnxRematError
        The step cannot be exported, or no plan fits the budget.
    """
    try:
        return _prepared(request, measured, apart)
    finally:
        request.progress.clear()


def _prepared(request: Request, measured: Measurement | Known | None, apart: bool) -> Prepared:
    if request.budget is not None:
        parse_options({**request.planning})
    parameters = dict(request.model.named_parameters())
    twins = tuple(_with_rates(user, parameters) for user in request.users)
    step = step_of(request.model, request.batch, request.loss, twins, request.recipe, request.outputs)
    parts = checked_parts(request.loss_parts, request.attention_parts)
    request.progress("export", 0.0)
    graph, step = traced(step, OPSET, request.dynamic, feed=True)
    key = export_cache.key_of(graph, step, request)
    exported = export_cache.find(key)
    if exported is not None:
        before = exported.torch_bytes
        exported = replace(exported, torch_bytes=_own_bytes(request, measured, before))
        if exported.torch_bytes not in (0, before):  # as at the first share after a start without a budget
            export_cache.keep(key, exported)
        report = _planned(request, exported)
    else:
        made = lower(graph, step.inputs, OPSET, request.dynamic, *parts)
        check = partial(_compared, made, step, graph, request)
        if request.check and not apart:
            request.progress("compare with PyTorch", 0.0)
            check()
        with forked.Running(check, "the comparison") if request.check and apart else nullcontext() as comparison:
            exported = export_cache.Exported(finished(made, step), _own_bytes(request, measured))
            if request.provider == "cpu":
                _check_kernels(exported.step)
            report = _planned(request, exported, comparison)
            if comparison is not None:
                request.progress("compare with PyTorch", 0.0)
                comparison.answer()
        export_cache.keep(key, exported)
    return Prepared(
        tuple(step.trainable), _settings(twins), _started(step, graph, request.users, parameters),
        _own(exported.step, step), graph.outside, report=b"" if report is None else pickle.dumps(report),
        summary="" if report is None else shares.summary("PyTorch", exported.torch_bytes, report),
        outputs=request.outputs, torch_bytes=exported.torch_bytes, limit=0 if report is None else report.budget,
        conditions=graph.conditions,
    )  # fmt: skip


def _compared(made: ir.Model, step: StepParts, graph: Trace, request: Request) -> None:
    compare(made, step, graph, request.dynamic, distances=False)  # they are for the metadata of a file


def _own_bytes(request: Request, measured: Measurement | Known | None, before: int = 0) -> int:
    """Return what PyTorch's own step takes, or took `before` if that hardly differs; 0 if that was not measured.

    Where the step was compared before, its own run is the only one that finds an error in this batch.
    """
    if measured is None:
        return 0
    own = measured.result()
    if own.error and (request.is_share or before):
        remedy = "" if request.provider == "cpu" else ": a budget in bytes, or a share 'of the step', needs no run"
        raise ConversionError(f"PyTorch's own step fails: {own.error}{remedy}")
    return before if before and agree(own.bytes, before) else own.bytes


def _planned(
    request: Request, exported: export_cache.Exported, comparison: forked.Running[None] | None = None
) -> Report | None:
    """Write the step, planned if there is a budget; raise the error of the comparison as soon as it fails."""
    if request.budget is None:
        onnx.save(exported.step, request.path)
        return None
    budget, own = request.budget, exported.torch_bytes if request.is_share else 0
    if own:
        budget = Budget(bytes=budget.resolve(own))

    def progress(stage: str, fraction: float) -> None:
        if comparison is not None and comparison.has_answered():
            comparison.answer()
        request.progress(stage, fraction)

    sizes: PlanningOptions = {"dims": dict(request.sizes)} if request.sizes else {}
    options: PlanningOptions = sizes | {"progress": progress} | request.planning
    with shares.of("PyTorch", own):
        return plan_cache.rewritten(
            exported.step, budget, options, request.path, lambda: rewrite_model(exported.step, budget, **options)
        )


def prepared_apart(request: Request, measured: Measurement | Known | None, living: Living) -> Prepared | None:
    """Return the result of `prepared` with all tensors outside the step as places.

    Return None if one of them is unknown to the other process. Runs in a forked copy, which has one thread.
    """
    torch.set_num_threads(1)  # libgomp's threads did not survive the fork
    made = prepared(request, measured, apart=True)
    places = {name: living.place(one) for name, one in made.outside.items() if isinstance(one, Outside)}
    known = {name: place for name, place in places.items() if place is not None}
    if len(known) < len(places):
        return None
    return replace(made, outside=known)


def _with_rates(user: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer in which each learning rate is a tensor of its own, to become an input.

    A rate of None, as of Adafactor, stays: the optimizer computes it.
    """
    state = {name: user.state[p] for name, p in parameters.items() if p in user.state}
    made = updates.twin(user, parameters, parameters, state)
    for group in made.param_groups:
        for key in optimizer_facts.INPUTS:
            if group.get(key) is not None and (key == _LR or isinstance(group[key], torch.Tensor)):
                group[key] = torch.tensor(float(group[key]), dtype=optimizer_facts.settings_type(parameters))
    return made


def _settings(twins: tuple[torch.optim.Optimizer, ...]) -> dict[str, SettingPlace]:
    """Return the place of each setting that is an input, by input name."""
    of = {
        id(value): (index, place, key)
        for index, twin in enumerate(twins)
        for place, group in enumerate(twin.param_groups)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    }
    return {name: of[id(value)] for name, value in optimizer_facts.settings(twins).items()}


def _started(
    step: StepParts,
    graph: Trace,
    users: tuple[torch.optim.Optimizer, ...],
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the initial state of parameters without state; as in torch, those without a gradient get none."""
    outputs = set(graph.outputs)
    known = {name for user in users for name, parameter in parameters.items() if user.state.get(parameter)}
    return {
        name: {slot: _small(value) for slot, value in pieces.items()}
        for name, pieces in step.state.items()
        if name not in known and any(names.new(names.state(name, slot)) in outputs for slot in pieces)
    }


def _own(proto: onnx.ModelProto, step: StepParts) -> dict[str, torch.Tensor]:
    """Return the initial state that is in neither the module nor an optimizer's tensors."""
    tensors = {name for name, _ in [*step.model.named_parameters(), *step.model.named_buffers()]}
    users = {names.state(name, slot) for name, slots in step.state.items() for slot in slots}
    return {
        name: _small(tensor(value))
        for name, value in initial_feeds(proto, step.model, step.optimizers).items()
        if name not in tensors and (name not in users or not value.shape)
    }


def _small(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, in the memory of one element if all have the same bits."""
    value = value.detach().contiguous()
    if value.numel() > 1:
        elements = value.reshape(-1).view(torch.uint8).reshape(value.numel(), -1)
        if bool((elements == elements[0]).all()):
            return value.reshape(-1)[:1].clone().expand(value.shape)
    return value


def _check_kernels(proto: onnx.ModelProto) -> None:
    """Raise ConversionError if the CPU has no kernels for a type in which the step computes."""
    narrow = {v.name for v in proto.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16}
    first = next((node for node in proto.graph.node if narrow.intersection(node.output)), None)
    if first is not None:
        own = entries(first)
        of_optimizer = own.get("phase") == "optimizer"
        raise ConversionError(
            "{} computes in bfloat16, for which ONNX Runtime's CPU has few kernels: {}; for a GPU, call "
            "export_training_step and rewrite the step with {}",
            "the optimizer" if of_optimizer else own.get("module") or first.name,
            "let it keep its state in float32" if of_optimizer else "leave torch.autocast out, or call model.float()",
            Setting("provider", "cuda"),
        )
