"""Memory of a CUDA device for `session.Session`: one block with the slab, then the inputs one after the other.

The driver allocates in units of two megabytes: hundreds of inputs with an allocation each would take some hundred
megabytes more than their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ort import libraries
from onnx_remat.session.cuda_memory import Block
from onnx_remat.session.device import provider_options
from onnx_remat.session.plan_session import NUMPY, Array, SessionPlan

_UNIT = 256  # ONNX Runtime rounds up every request to a multiple of this


def providers(names: Sequence[str], limit: int, graph: bool = False) -> list[Any]:
    """Return a session's execution providers: the device's arena grows by each request, up to `limit` bytes unless 0.

    With `graph`, the second step is captured in a CUDA graph, which all later steps replay. This loads CUDA's libraries
    if they are not loaded yet. cuDNN chooses convolution algorithms by its heuristic: that was a quarter faster than
    onnxruntime's exhaustive search, which also takes seconds (ResNet-50 on an H100).
    """
    libraries.load_cuda()
    options = (
        provider_options(limit)
        | {"cudnn_conv_algo_search": "HEURISTIC"}
        | ({"enable_cuda_graph": "1"} if graph else {})
    )
    return [(names[0], options), *names[1:]]


def check_capturable(step: SessionPlan, loose: Sequence[str]) -> None:
    """Raise UsageError where a CUDA graph would not compute what the step computes."""
    why = ""
    if step.random:
        why = f"node {step.random!r} would draw the same random numbers in every step"
    elif loose:
        why = f"output {loose[0]!r} is not in the slab"
    elif step.on_host:
        why = "values are moved to the host and back, which a graph cannot contain"
    elif step.defaults:
        why = f"input {step.defaults[0]!r} has a default value, which a graph would replay for every input"
    if why:
        raise UsageError(f"cuda_graph: {why}")


def check_provider(session: Any, name: str) -> None:
    """Raise ModelError where onnxruntime fell back to the CPU, which it does silently."""
    if session.get_providers()[0] != name:
        raise ModelError(f"onnxruntime makes no {name} session here: see its log for a library that it cannot load")


def rounded(nbytes: int) -> int:
    """Return the bytes that an arena allocates for a request of `nbytes`."""
    return -(-max(nbytes, 1) // _UNIT) * _UNIT


def scratch_limit(step: SessionPlan, total: int) -> int:
    """Return the part of `total` bytes that is left to the session's arena; UsageError where nothing is left."""
    apart = rounded(step.slab) + sum(rounded(array.nbytes) for array in step.inputs)
    if total <= apart:
        raise UsageError(f"memory_limit {total} is below the {apart} bytes of the slab and the inputs: raise it")
    return total - apart


class DeviceMemory:
    """The slab and the inputs of a step in a device's memory, bound to the session that runs it.

    Parameters
    ----------
    binding : onnxruntime.IOBinding
        Of the session that runs the step.
    step : SessionPlan
    device : str
        Name of the device, as in ``OrtValue``.
    """

    def __init__(self, binding: Any, step: SessionPlan, device: str) -> None:
        self._binding, self._step, self._device = binding, step, device
        self._formals = {array.name: array for array in step.inputs}
        self._offsets, end = {}, rounded(step.slab)
        for array in step.inputs:
            self._offsets[array.name] = end
            end += rounded(array.nbytes)
        self._block = Block(end)
        self._fed: set[str] = set()
        for name in self._formals:
            if name not in step.defaults:
                self._bind_input(name)
        renewed = {name: output for output, name in step.donated.items()}
        self._bound = [place.name for place in step.places]
        for place in step.places:
            self._bind_output(place, self._block.address + place.offset)
        for name, output in renewed.items():
            self._bind_output(Array(output, self._formals[name].dtype, self._formals[name].shape), self.address(name))
            self._bound.append(output)

    def _bind_input(self, name: str) -> None:
        formal = self._formals[name]
        kind = _element_type(formal.dtype)
        self._binding.bind_input(name, self._device, 0, kind, formal.shape, self.address(name))

    def _bind_output(self, array: Array, address: int) -> None:
        self._binding.bind_output(array.name, self._device, 0, _element_type(array.dtype), array.shape, address)

    def address(self, name: str) -> int:
        """Return the address of an input."""
        return self._block.address + self._offsets[name]

    def feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy arrays, of the types and shapes of these inputs, to the addresses of the inputs."""
        for name, array in arrays.items():
            self._block.write(self._offsets[name], array)
            if name in self._step.defaults and name not in self._fed:
                self._bind_input(name)
            self._fed.add(name)

    def unfed(self) -> list[str]:
        """Return the inputs that need a value and have none yet."""
        return [name for name in self._formals if name not in self._fed and name not in self._step.defaults]

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of an input's current value."""
        formal = self._formals[name]
        array = np.empty(formal.shape, formal.dtype_name)
        self._block.read(self._offsets[name], array)
        return array

    def outputs(self, loose: Sequence[str], wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Return copies of outputs of the last run; onnxruntime allocated those in `loose`."""
        values = dict(zip([*self._bound, *loose], self._binding.get_outputs(), strict=True))
        return {name: values[name].numpy() for name in wanted}


def _element_type(dtype: int) -> Any:
    return np.dtype(NUMPY[dtype]).type if dtype in NUMPY else dtype
