"""Forward models for `onnx_remat.converters.autodiff`: the onnx wheel's own, and modules exported by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx_remat.converters.autodiff import add_backward, initial_inputs
from onnx_remat.converters.checks import agreement as check
from onnx_remat.converters.checks import tolerances
from onnx_remat.converters.checks.finite_differences import in_float64
from onnx_remat.converters.optimizers import SGD
from onnx_remat.converters.pytorch.decisions import Replay
from onnx_remat.converters.pytorch.trace import eager_kernels

from onnx_remat.converters import names
from onnx_remat.errors import ConversionError
from onnx_remat.ort import runtime
from sample_models.networks import torch_models

LIGHT = {
    "bvlc_alexnet": 128, "densenet121": 4, "inception_v1": 8, "inception_v2": 4, "resnet50": 4, "shufflenet": 8,
    "squeezenet": 8, "vgg19": 12, "zfnet512": 48,
}  # fmt: skip
"""The onnx wheel's models without weights, and the batch they are trained with."""

TORCH = (
    "mlp", "resnet18", "resnet50", "densenet121", "unet", "vit_b", "vit_b-half", "gpt2-4", "gpt2-4-half", "gpt2-12",
    "gpt2-12-half", "bert", "bert-half", "llama",
)  # fmt: skip


def light(name: str) -> Callable[[], onnx.ModelProto]:
    """Build a training step of one of the `LIGHT` models; checked on a batch of two."""
    forward = light_forward(name)

    def export() -> onnx.ModelProto:
        found = add_backward(forward, "cross_entropy", training=True, dims={"batch": 2})
        step = add_backward(
            forward, "cross_entropy", optimizer=SGD(lr=0.01), training=True, dims={"batch": LIGHT[name]}, check=False
        )
        known = {p.key: p.value for p in found.metadata_props}
        check.note(step, {
            "check.error": known["check.differences"], "check.output": "differences in float64",
            "check.undetermined": known["check.untold"],
        })  # fmt: skip
        return step

    return export


def light_forward(name: str) -> onnx.ModelProto:
    """One of the `LIGHT` models with a batch of any size, where the file fixes it to one."""
    model = onnx.load(Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx")
    weights = {tensor.name for tensor in model.graph.initializer}
    (image,) = (value for value in model.graph.input if value.name not in weights)
    image.type.tensor_type.shape.dim[0].dim_param = "batch"
    for value in (*model.graph.output, *model.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        if node.op_type == "Dropout":  # masks differ from run to run, and outputs could not be compared
            node.op_type = "Identity"
            del node.attribute[:], node.output[1:]
    shapes = {node.input[1] for node in model.graph.node if node.op_type == "Reshape"}
    for tensor in model.graph.initializer:
        shape = onnx.numpy_helper.to_array(tensor).copy()
        if tensor.name in shapes and shape[0] == 1:
            shape[0] = 0  # as the input
            tensor.CopyFrom(onnx.numpy_helper.from_array(shape, tensor.name))
    return model


def exported(make: Callable[[], torch_models.Case]) -> Callable[[], onnx.ModelProto]:
    """Build a training step from torch's export of the forward pass; compared with torch's own gradients.

    First in float64, where no rounding hides a fault or makes one, to 1e-6. Then as ONNX Runtime computes the step in
    float32, with torch in float32 and in float64. What goes into a ReLU or a max-pool may fall on the other side of a
    kink by rounding alone, and one entry that does moves a gradient by a hundredth: torch decides those as the step
    did, see `converters.pytorch.decisions`.
    """
    torch.manual_seed(0)
    case = make()
    *inputs, target = case.batch.values() if isinstance(case.batch, dict) else case.batch

    def export() -> onnx.ModelProto:
        forward = torch_forward(case)
        options: dict[str, Any] = {"training": _normalizes(case.model), "check": False}
        step = add_backward(forward, "cross_entropy", wrt=[n for n, _ in case.model.named_parameters()], **options)
        feeds = initial_inputs(forward, step) | {
            name: value.numpy() for name, value in zip(_batch(step), (*inputs, target), strict=True)
        }
        wrt = [v.name.removeprefix(names.gradient("")) for v in step.graph.output if _is_gradient(v.name)]
        exact = _gradients(case, inputs, target, torch.float64)
        wide = in_float64(step, feeds)
        nil = dict.fromkeys(_nil(exact), 1.0)
        apart = check.compare({name: wide[name] for name in exact}, exact, {"float64": 1e-6}, nil)
        decided = [node.input[0] for node in step.graph.node if node.op_type in DECIDING and _is_forward(node)]
        made = runtime.outputs(_with_outputs(step, decided), feeds)
        seen, ours = [made[name] for name in decided], {name: made[name] for name in exact}
        single, exact = (_gradients(case, inputs, target, dtype, seen) for dtype in (torch.float32, torch.float64))
        noise = {name: float(np.abs(value - exact[name]).max()) for name, value in single.items()}
        found = check.compare(ours, single, noise=noise | nil)
        step = add_backward(forward, "cross_entropy", wrt=wrt, optimizer=SGD(lr=0.01), **options)
        check.record(step, check.exactly(found, ours, single, exact))
        check.note(step, {"check.in_float64": f"{apart.error:.2e}"})
        return step

    return export


DECIDING = ("Relu", "MaxPool")
"""Ops with a kink in the forward passes of these models, which torch runs in the same order."""


def torch_forward(case: torch_models.Case) -> onnx.ModelProto:
    """A case's forward pass by torch's exporter; its own optimiser would fold BatchNormalization and merge weights."""
    *inputs, _ = case.batch.values() if isinstance(case.batch, dict) else case.batch
    program = torch.onnx.export(
        _Scores(case.model).eval(), tuple(inputs), dynamo=True, optimize=False, verbose=False, external_data=False
    )
    case.model.train()
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    names_of: dict[int, str] = {}
    for name, parameter in case.model.named_parameters(remove_duplicate=False):
        # without the wrapper's prefix; a weight in two places has the name of the first
        _rename(model, f"model.{name}", names_of.setdefault(id(parameter), name))
    for name, _ in case.model.named_buffers():
        _rename(model, f"model.{name}", name)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors.values())
    return model


class _Scores(torch.nn.Module):
    """A model whose output is the scores alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        made = self.model(*inputs)
        scores: torch.Tensor = getattr(made, "logits", made)
        return scores


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for tensor in model.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def _normalizes(model: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


def _batch(step: onnx.ModelProto) -> list[str]:
    """The step's inputs for the batch: the last, after parameters and statistics."""
    held = {o.name.partition(".")[2] for o in step.graph.output}
    return [value.name for value in step.graph.input if value.name not in held]


def _nil(exact: dict[str, np.ndarray]) -> list[str]:
    """Gradients that are zero but for rounding, as of a bias before BatchNormalization."""
    sizes = {name: float(np.abs(value).max(initial=0)) for name, value in exact.items() if name != names.LOSS}
    return [name for name, size in sizes.items() if size < 1e-10 * max(sizes.values())]


def _is_gradient(name: str) -> bool:
    return name.startswith(names.gradient(""))


def _is_forward(node: onnx.NodeProto) -> bool:
    return any(p.key == "phase" and p.value == "forward" for p in node.metadata_props)


def _with_outputs(step: onnx.ModelProto, wanted: Sequence[str]) -> onnx.ModelProto:
    """A copy that also outputs these values."""
    made = onnx.ModelProto()
    made.CopyFrom(step)
    types = {value.name: value for value in (*step.graph.value_info, *step.graph.input)}
    made.graph.output.extend(types[name] for name in dict.fromkeys(wanted))
    return made


def _gradients(
    case: torch_models.Case,
    inputs: list[torch.Tensor],
    target: torch.Tensor,
    dtype: torch.dtype,
    decided: Sequence[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Loss and gradients by torch, buffers left as they were; where given, from what `DECIDING` ops read of a step."""
    model = case.model
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    model.zero_grad()
    values = iter(decided or ())
    watch = nullcontext() if decided is None else Replay(values, tolerances.BY_DTYPE)
    with eager_kernels():
        with watch:
            scores = _Scores(model)(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
        axis = 1 if scores.ndim >= 4 else -1
        loss = torch.nn.functional.cross_entropy(scores.movedim(axis, 1), target)
        loss.backward()
    if next(values, None) is not None:
        raise ConversionError("torch decides less often than the step: their decisions cannot be compared")
    made = {names.LOSS: loss.detach().numpy()}
    made |= {names.gradient(n): p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
    model.to(torch.float32)
    model.load_state_dict(buffers, strict=False)
    return made
