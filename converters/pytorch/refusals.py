"""Errors for steps that cannot be a graph: each names the operator, the module, the line and a remedy."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import torch

from onnx_remat.errors import ConversionError

_VALUE = "compute with tensors, torch.where for instance, or make it a number before training"
_SHAPE = "keep the shape: torch.where(mask, x, 0), and divide sums by mask.sum()"
_NOWHERE = "there is no ONNX operator for it: compute it outside the step, or with operators there are"

_COMPLEX = "compute with real and imaginary parts, as numbers of their own; there is no ONNX operator for FFTs"

_HINTS = {
    "nonzero": _SHAPE,
    "masked_select": _SHAPE,
    "_pack_padded_sequence": "run the layer over the padded batch, and pick the last state of each text by its length",
    "unique": "the number of distinct values depends on data: compute it outside the step, as part of the batch",
    "grouped_mm": "the sizes of groups depend on data: multiply by every expert's weights (in transformers, "
    "make the model with experts_implementation='batched_mm')",
    "repeat_interleave": "give output_size and repeats that are numbers, or gather by indices made outside the step",
}


class ComplexNumbers(Exception):
    """An operator of the step makes complex numbers."""

    def __init__(self, operator: object) -> None:
        super().__init__(str(operator))


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_CALLER = str(Path(_OURS, "step.py"))  # the file that runs the model


def check_modules(model: torch.nn.Module) -> None:
    """Raise ConversionError if a module is not Python code, or communicates between processes."""
    for path, module in model.named_modules():
        which = f"module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(f"{which} is TorchScript, which cannot be traced: give the module it was made from")
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ConversionError(
                f"{which} is a DistributedDataParallel, whose sums over processes are no part of a step: give its "
                ".module, and make the optimizer of that; for several processes see onnx_remat.distributed"
            )


def refusal(error: Exception, model: torch.nn.Module) -> ConversionError:
    """Return the error for a step that could not be traced.

    Parameters
    ----------
    error : Exception
        The exception of the step's code on tensors without data.
    model : torch.nn.Module
    """
    kind, text = type(error).__name__, " ".join(str(error).split())
    at = where(error, model)
    if kind == "DataDependentOutputException" or "functional tensor" in text or ".numpy() is not" in text:
        operator = f" ({error.func})" if hasattr(error, "func") else ""
        return ConversionError(f"the step's Python code reads the value of a tensor{operator}{at}: {_VALUE}")
    if kind == "DynamicOutputShapeException":
        operator = str(getattr(error, "func", text))
        return ConversionError(f"the shape of what {operator} makes depends on data{at}: {_hint(operator, _SHAPE)}")
    if isinstance(error, ComplexNumbers):
        return ConversionError(f"{text}{at} makes complex numbers, which no step can hold: {_COMPLEX}")
    if "_linalg_check_errors" in text:
        return ConversionError(f"linear algebra that may fail (inv, solve, cholesky) is in the step{at}: {_NOWHERE}")
    return ConversionError(f"the step cannot be traced{at}: {kind}: {text[:300]}")


def kept_parameter(at: str) -> ConversionError:
    """Return the error for a tensor that requires a gradient but is not in the step."""
    return ConversionError(
        f"a parameter is read that the step does not have{at}: one taken out of its module before the step is to "
        "be read inside, as model.get_parameter(...) or an attribute of the module; a loss with parameters of its "
        "own is to be a part of the model (model.loss = loss) before the optimizer is made, or frozen; a network that "
        "is not trained is to be frozen, too, or called under torch.no_grad()"
    )


def kept_outside(what: str) -> ConversionError:
    """Return the error for a tensor of the trace that code outside the model kept for the next run."""
    return ConversionError(
        f"{what}, was made by the step, and kept outside the model: if a cache keeps it, empty the cache and run the "
        "model once before the step is made, which then reads a constant; else make it a buffer of the model "
        "(register_buffer)"
    )


def untranslated(error: Exception, graph: torch.fx.Graph, lines: Mapping[str, str]) -> ConversionError:
    """Return the error for a step that could not be translated: cause, operator, its module, and its line by
    `lines`."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(cause).split())
    if found := re.search(r"op='(\w+\.[\w.]+)', overload='(\w+)'", text):
        operator = f"{found[1]}.{found[2]}"
        node = next((node for node in graph.nodes if str(node.target) == operator), None)
        return ConversionError(
            f"the step has {operator}{_of(node)}{lines.get(operator, '')}: {_hint(operator, _NOWHERE)}"
        )
    return ConversionError(f"the step cannot be written in ONNX: {text[:300]}")


def _hint(operator: str, otherwise: str) -> str:
    """Return the replacement for an operator."""
    return next((hint for name, hint in _HINTS.items() if name in operator), otherwise)


def complex_numbers(node: torch.fx.Node) -> ConversionError:
    """Return the error for a node of the backward pass or the update that makes complex numbers."""
    return ConversionError(f"{node.target}{_of(node)} makes complex numbers, which no step can hold: {_COMPLEX}")


def complex_input(which: str) -> ConversionError:
    """Return the error for a complex buffer or tensor of the batch."""
    return ConversionError(
        f"{which} holds complex numbers, which no step can: hold its real and imaginary parts, "
        "torch.view_as_real(...), and compute with these"
    )


def _of(node: torch.fx.Node | None) -> str:
    module = node.meta.get("custom", {}).get("module", "") if node is not None else ""
    return f" in module {module!r}" if module else ""


def where(error: BaseException, model: torch.nn.Module) -> str:
    """Return, in words, the path of the innermost module and the line of the user's code that raised an error."""
    names = {id(module): name for name, module in model.named_modules()}
    module, line = "", ""
    for frame, number in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and names.get(id(owner)):
            module = f" in module {names[id(owner)]!r}"
        if is_users(frame):
            line = line_of(frame.f_code.co_filename, number)
    return module + line


def here() -> str:
    """Return, in words, the line of the user's code that runs the current operator."""
    return next((line_of(frame.f_code.co_filename, number) for frame, number in running() if is_users(frame)), "")


def running() -> Iterator[tuple[FrameType, int]]:
    """Yield the current frames of the step with their lines, from the innermost outwards."""
    for frame, number in traceback.walk_stack(None):
        if frame.f_code.co_filename == _CALLER:
            break
        yield frame, number


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    return not frame.f_code.co_filename.startswith((_TORCH, _OURS, "<"))


def line_of(file: str, number: int) -> str:
    """Return a line of code, in words."""
    return f" at {file}:{number} `{linecache.getline(file, number).strip()}`"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of an error, from the converter's call of the model inwards."""
    found = list(traceback.walk_tb(error.__traceback__))
    inside = next((i for i, (frame, _) in enumerate(found) if frame.f_code.co_filename.startswith(_OURS)), 0)
    yield from found[inside:]


def one_size(
    name: str,
    axis: int,
    size: int,
    batch: Mapping[str, torch.Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
) -> ConversionError:
    """Return the error for a dynamic dimension of which the step needs the example's size."""
    others = [
        f"axis {other_axis} of {other}"
        for other, tensor in batch.items()
        for other_axis, length in enumerate(tensor.shape)
        if length == size and other_axis not in dynamic.get(other, {})
    ]
    if others:
        advice = f"{' and '.join(others)} {'are' if len(others) > 1 else 'is'} still fixed at that size: "
        advice += f"name what varies with it {dynamic[name][axis]!r}, too"
    else:
        advice = "the model or the loss says so: leave it out"
    return ConversionError(f"dynamic_dims: axis {axis} of {name} cannot vary, the step needs it to be {size}; {advice}")
