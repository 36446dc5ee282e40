"""Does the exported step compute what torch computes?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import torch

from onnx_remat import runtime
from onnx_remat.errors import ConversionError

from .. import check, names
from . import reference
from .initial import initial_feeds
from .trace import Step


def step(
    proto: onnx.ModelProto,
    traced: Step,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    hidden: Mapping[str, str],
) -> check.Check:
    """Run the step once on ONNX Runtime; compare loss, gradients and buffers, then the update, with torch's.

    The update is compared with what the optimizer makes of the gradients ONNX Runtime found: Adam divides a gradient
    by its own magnitude, so one that is zero but for rounding would move its parameter by `lr` either way.

    Parameters
    ----------
    proto : onnx.ModelProto
    traced : Step
    model, optimizer
    hidden : mapping of str to str
        Values that hold gradients which are not put out, by gradient name.

    Raises
    ------
    ConversionError
        They disagree.
    """
    feeds = initial_feeds(proto, model, optimizer)
    feeds |= {n: reference.array(t) for n, t in zip(traced.batch.names, traced.batch.tensors, strict=True)}
    found = runtime.outputs(_with_outputs(proto, hidden.values()), feeds)
    for gradient, value in hidden.items():
        found[gradient] = found.pop(value)
    expected, noise = reference.outputs(traced)
    for name in [name for name in expected if name not in found]:
        if not np.array_equal(expected[name], feeds.get(name.removeprefix("new."), expected[name])):
            raise ConversionError(f"the converted step is wrong: it does not put out {name}; nothing was written")
        del expected[name]
    made = check.compare({name: found[name] for name in expected}, expected, noise=noise)
    if optimizer is not None:
        _update(optimizer, dict(model.named_parameters()), found, hidden, feeds)
    return made


def _with_outputs(proto: onnx.ModelProto, values: Iterable[str]) -> onnx.ModelProto:
    """A copy that puts out these values too."""
    known = {info.name: info for info in proto.graph.value_info}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.graph.output.extend(known[value] for value in values)
    return copy


def _update(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    found: Mapping[str, np.ndarray],
    gradients: Iterable[str],
    feeds: Mapping[str, np.ndarray],
) -> None:
    """Compare changes, not values: a parameter hardly moves in a step."""
    of = {name.removeprefix(names.gradient("")): found[name] for name in gradients}
    expected = reference.updated(optimizer, parameters, of)
    changes, answers, noise = {}, {}, {}
    for name, after in expected.items():
        before = feeds[name.removeprefix(names.new(""))].astype(np.float64)
        changes[name] = (found[name] - before).astype(after.dtype)
        answers[name] = (after - before).astype(after.dtype)
        noise[name] = float(np.finfo(after.dtype).eps * np.abs(after.astype(np.float64)).max(initial=0.0))
    check.compare(changes, answers, noise=noise)
