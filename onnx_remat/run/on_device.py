"""Memory of a CUDA device for `session.Session`: the slab and the inputs, each an allocation of its own size.

ONNX Runtime's Python interface allocates on a device from an arena whose regions double: 64 MiB for 40. The arena of a
session can be told to take what is asked and no more. So a session of one node, which is closed again at once, makes
every block: its outputs live on, and go when nobody refers to them any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.run.device import provider_options
from onnx_remat.run.opening import NUMPY, Array, Opened

_UNIT = 256  # what ONNX Runtime rounds every request up to


def providers(names: Sequence[str], limit: int, graph: bool = False) -> list[Any]:
    """What to make a session with: the device's arena takes what is asked, up to `limit` bytes unless 0.

    With `graph` the second step is captured in a CUDA graph, and all after it replay that.
    """
    options = provider_options(limit) | ({"enable_cuda_graph": "1"} if graph else {})
    return [(names[0], options), *names[1:]]


def check_capturable(step: Opened, loose: Sequence[str]) -> None:
    """UsageError where a graph of a step would not do what the step does."""
    why = ""
    if step.random:
        why = f"node {step.random!r} would draw the same random numbers in every step"
    elif loose:
        why = f"output {loose[0]!r} does not lie in the slab"
    elif step.defaults:
        why = f"input {step.defaults[0]!r} has a default value, which no graph could tell from another"
    if why:
        raise UsageError(f"cuda_graph: {why}")


def rounded(nbytes: int) -> int:
    """Bytes that an arena hands out for so many."""
    return -(-max(nbytes, 1) // _UNIT) * _UNIT


def scratch_limit(step: Opened, total: int) -> int:
    """What of `total` bytes is left to the session's own arena; UsageError where nothing is."""
    apart = rounded(step.slab) + sum(rounded(array.nbytes) for array in step.inputs)
    if total <= apart:
        raise UsageError(f"memory limit {total} is below the {apart} bytes of the slab and the inputs alone")
    return total - apart


def allocate(model: bytes, names: Sequence[str], device: str, sizes: Sequence[int]) -> list[Any]:
    """An ``OrtValue`` of bytes on the device, all of them zero, for each of `sizes`.

    Parameters
    ----------
    model : bytes
        A step that makes zeros, from `opening.zeros`.
    names : sequence of str
        Execution providers.
    device : str
        As ``OrtValue`` names it.
    sizes : sequence of int
        In bytes; at least one is taken.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=providers(names, 0))
    session.disable_fallback()
    if session.get_providers()[0] != names[0]:
        raise ModelError(f"onnxruntime makes no {names[0]} session here: see what it says of its libraries")
    blocks = []
    for size in sizes:
        binding = session.io_binding()  # its own: up to 1.28 what it returns lies in its own list
        binding.bind_cpu_input("size", np.array([max(size, 1)], np.int64))
        binding.bind_output("zeros", device)
        session.run_with_iobinding(binding)
        blocks.append(binding.get_outputs()[0])
    return blocks


class OnDevice:
    """The slab and the inputs of an opened step in a device's memory, and what is bound there.

    Parameters
    ----------
    binding : onnxruntime.IOBinding
        Of the session that runs the step.
    step : Opened
    device : str
        As ``OrtValue`` names it.
    model : bytes
        From `opening.zeros`.
    """

    def __init__(self, binding: Any, step: Opened, device: str, model: bytes) -> None:
        self._binding, self._step, self._device = binding, step, device
        self._formals = {array.name: array for array in step.inputs}
        sizes = [step.slab, *(array.nbytes for array in step.inputs)]
        slab, *blocks = allocate(model, step.execution_providers, device, sizes)
        self._slab, self._blocks = slab, dict(zip(self._formals, blocks, strict=True))
        self._fed: set[str] = set()
        for name in self._formals:
            if name not in step.defaults:
                self._bind_input(name)
        renewed = {name: output for output, name in step.donated.items()}
        self._bound = [place.name for place in step.places]
        for place in step.places:
            self._bind_output(place, slab.data_ptr() + place.offset)
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
        """Where an input lies."""
        return int(self._blocks[name].data_ptr())

    def feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy arrays to where the inputs of these names lie: all of their types and shapes."""
        for name, array in arrays.items():
            if array.nbytes:
                self._blocks[name].update_inplace(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            if name in self._step.defaults and name not in self._fed:
                self._bind_input(name)
            self._fed.add(name)

    def unfed(self) -> list[str]:
        """Inputs that must have a value, and have none yet."""
        return [name for name in self._formals if name not in self._fed and name not in self._step.defaults]

    def read(self, name: str) -> npt.NDArray[Any]:
        """A copy of an input as it is now."""
        formal = self._formals[name]
        data: npt.NDArray[np.uint8] = self._blocks[name].numpy()
        return data[: formal.nbytes].view(formal.dtype_name).reshape(formal.shape)

    def outputs(self, loose: Sequence[str], wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Copies of outputs of the last run, of which onnxruntime allocated the `loose` ones."""
        values = dict(zip([*self._bound, *loose], self._binding.get_outputs(), strict=True))
        return {name: values[name].numpy() for name in wanted}


def _element_type(dtype: int) -> Any:
    return np.dtype(NUMPY[dtype]).type if dtype in NUMPY else dtype
