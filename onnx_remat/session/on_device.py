"""Memory of a CUDA device for `session.Session`: a block for the slab, and one for inputs that lie nowhere else.

The driver allocates in units of two megabytes: hundreds of inputs with an allocation each would take some hundred
megabytes more than their sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.messages import Message, Setting, Word
from onnx_remat.ort import libraries
from onnx_remat.session.apart import check_apart
from onnx_remat.session.arrays import Array
from onnx_remat.session.cuda_memory import Block, HostBlock, move, read, wait, write
from onnx_remat.session.device import provider_options
from onnx_remat.session.device_arrays import DeviceArray, check_renewable
from onnx_remat.session.interface import Arrays, bindable
from onnx_remat.session.plan_session import SessionPlan

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


def check_capturable(step: SessionPlan) -> None:
    """Raise UsageError where a CUDA graph would not compute what the step computes."""
    why = ""
    if step.random:
        why = f"node {step.random!r} would draw the same random numbers in every step"
    elif step.loose:
        why = f"output {step.loose[0]!r} is not in the slab"
    elif step.read_on_host:
        why = f"input {step.read_on_host!r} is read in host memory: a graph would replay its first value"
    elif step.moved_in_turn:
        why = "values are moved to the host on the kernels' stream, which a graph cannot contain"
    elif step.defaults:
        why = f"input {step.defaults[0]!r} has a default value, which a graph would replay for every input"
    if why:
        raise UsageError(f"cuda_graph: {why}")


def check_no_fallback(session: Any, name: str) -> None:
    """Raise ModelError where onnxruntime fell back to the CPU, which it does silently."""
    if session.get_providers()[0] != name:
        raise ModelError(f"onnxruntime makes no {name} session here: see its log for a library that it cannot load")


def rounded(nbytes: int) -> int:
    """Return the bytes that an arena allocates for a request of `nbytes`."""
    return -(-max(nbytes, 1) // _UNIT) * _UNIT


def scratch_limit(step: SessionPlan, total: int) -> int:
    """Return the part of `total` bytes that is left to the session's arena; UsageError where nothing is left."""
    inputs = (array for array in step.inputs if array.name not in step.state_on_host)
    apart = rounded(step.slab) + sum(rounded(array.nbytes) for array in inputs)
    if total <= apart:
        given = Setting("memory_limit", total)
        raise UsageError("{} is below the {} bytes of the slab and the inputs: raise it", given, apart)
    return total - apart


def what_to_do_if_full(limit: int) -> Message:
    """Return the end of a message for a step that finds no memory on the device, under a limit unless it is 0."""
    if limit:
        more = Setting("memory_limit"), Setting("cudnn_workspace", Word("SIZE"))
        return Message("; the device is full: raise {}, or plan with a larger {}", *more)
    return Message("; the device is full: free memory on it, or plan with a {} that fits", Setting("budget"))


class StateMemory:
    """A step's state on the host, which the step itself copies to the device and back.

    Attributes
    ----------
    address : int
    arrays : mapping of str to array
        The values by their inputs: views of that memory.
    """

    def __init__(self, step: SessionPlan) -> None:
        formals = {array.name: array for array in step.inputs}
        ends = [offset + formals[name].nbytes for name, offset in step.state_on_host.items()]
        self._block = HostBlock(max(ends))
        self.address = self._block.address
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, offset in step.state_on_host.items():
            array = formals[name]
            data = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(self.address + offset))
            self.arrays[name] = data.view(array.dtype_name).reshape(array.shape)


class DeviceMemory:
    """The slab and the inputs of a step in a device's memory, bound to the session that runs it.

    Inputs that are copied here lie in one block; others lie where their library holds them, see `bind`.

    Parameters
    ----------
    binding : onnxruntime.IOBinding
        Of the session that runs the step. The outputs that ONNX Runtime allocates are bound first.
    step : SessionPlan
    device : str
        Name of the device, as in ``OrtValue``.
    fixed : bool
        Whether no address may change: all inputs have their places from the start, and are copied there.
    host : StateMemory, optional
        Inputs that lie on the host.

    Attributes
    ----------
    lying : dict of str to DeviceArray
        Inputs that lie where another library holds them.
    use : int
        Number of the last use, see `take`.
    """

    def __init__(
        self, binding: Any, step: SessionPlan, device: str, fixed: bool = False, host: StateMemory | None = None
    ) -> None:
        self._host, self.on_host = host, host.arrays if host else {}  # the arrays are views of the host's memory
        self._binding, self._step, self._device, self.fixed = binding, step, device, fixed
        self._formals = {array.name: array for array in step.inputs}
        self._renewed = {name: output for output, name in step.donated.items()}
        self._slab = Block(rounded(step.slab))
        self._blocks: list[Block] = []
        self._place: dict[str, int] = {}  # addresses of inputs in these blocks
        self.lying: dict[str, DeviceArray] = {}
        self.use = 0
        self._fed: set[str] = set()
        self._given: Arrays = {}  # the caller's arrays of inputs that are renewed here, which get the new values
        self._outputs: dict[str, int] = {}  # addresses of outputs that have one
        for place in step.places:
            self._bind_output(place, self._slab.address + place.offset)
        if fixed:
            self._make_places()
            for name in self._formals:
                if name not in step.defaults:
                    self._bind_input(name)

    def _make_places(self) -> None:
        """Allocate a block with a place for each input that lies nowhere yet."""
        offsets, end = {}, 0
        for name, formal in self._formals.items():
            if name not in self.lying and name not in self._place and name not in self.on_host:
                offsets[name] = end
                end += rounded(formal.nbytes)
        block = Block(end)
        self._blocks.append(block)
        self._place |= {name: block.address + offset for name, offset in offsets.items()}

    def _bind_input(self, name: str) -> None:
        if name in self.on_host:
            return
        formal, address = self._formals[name], self.address(name)
        self._binding.bind_input(name, self._device, 0, formal.element_type, formal.shape, address)
        if (output := self._renewed.get(name)) is not None:
            self._bind_output(Array(output, formal.dtype, formal.shape), address)

    def _bind_output(self, array: Array, address: int) -> None:
        self._binding.bind_output(array.name, self._device, 0, array.element_type, array.shape, address)
        self._outputs[array.name] = address

    def address(self, name: str) -> int:
        """Return the address of an input."""
        return self.lying[name].address if name in self.lying else self._place[name]

    def take(self, names: Container[str]) -> int:
        """Begin a use of this memory that gives these inputs, so that others have their defaults; return its number."""
        self.use += 1
        if left := {name for name in self._fed if name not in names}:
            self._fed -= left
            self.lying = {name: array for name, array in self.lying.items() if name not in left}
            self._binding.clear_binding_inputs()
            for name in self.fed:
                self._bind_input(name)
        return self.use

    def accept(self, feeds: Mapping[str, Any]) -> None:
        """Copy a run's inputs of the host to the device, and bind those of the device where they lie.

        Where addresses are fixed, those of the device are copied as well.

        Raises
        ------
        UsageError
            An array is of another type or shape, or the step cannot renew it.
        """
        given = {n: bindable(n, self._formals[n].formal, value, n in self._renewed, True) for n, value in feeds.items()}
        lying = {name: array for name, array in given.items() if isinstance(array, DeviceArray)}
        for name in lying.keys() & self.on_host.keys():
            raise UsageError(f"input {name!r} lies on the host between steps: pass an array of the host")
        if self.fixed:
            for name in lying.keys() & self._renewed.keys():
                raise UsageError(
                    f"cuda_graph renews input {name!r} in the session's own memory: pass an array of the host"
                )
            lying = {}
        new = {name: array for name, array in given.items() if not isinstance(array, DeviceArray)}
        held = {name: array for name, array in self._given.items() if name not in given} | new
        check_apart(((a.ctypes.data, a.nbytes, name) for name, a in held.items()), self._renewed, "pass a copy of one")
        self.bind(lying)
        self.feed({name: array for name, array in given.items() if name not in lying})
        for name in given.keys() & self._renewed.keys():
            self._given.pop(name, None)
            if name not in lying:
                self._given[name] = given[name]

    def bind(self, arrays: Mapping[str, DeviceArray]) -> None:
        """Let inputs lie where another library holds them; arrays are of the inputs' types and shapes.

        Afterwards that library has finished with all inputs that it holds, also with those from earlier calls.
        """
        changed = {n: a for n, a in arrays.items() if n not in self.lying or self.lying[n].address != a.address}
        if changed:
            check_renewable(self.lying | dict(arrays), self._renewed)
        self.lying.update(arrays)
        self._fed.update(arrays)
        for name in changed:
            self._bind_input(name)
        if self.lying:
            wait()  # for the streams of that library: the session's own waits for none of them

    def feed(self, arrays: Mapping[str, npt.NDArray[Any] | DeviceArray], where_they_lie: bool = False) -> None:
        """Copy arrays, of the types and shapes of these inputs, to places of their own.

        With `where_they_lie`, inputs that another library holds are overwritten there instead.
        """
        if arrays and (self.lying or any(isinstance(array, DeviceArray) for array in arrays.values())):
            wait()  # for the streams of other libraries: copies wait for none of them
        moved = set() if where_they_lie else self.lying.keys() & arrays.keys()
        for name in moved:
            del self.lying[name]
        if any(name not in self.lying and name not in self._place and name not in self.on_host for name in arrays):
            self._make_places()
        for name, array in arrays.items():
            if name in self.on_host:
                if isinstance(array, DeviceArray):
                    read(array.address, self.on_host[name])
                else:
                    np.copyto(self.on_host[name], array)
            elif isinstance(array, DeviceArray):
                move(self.address(name), array.address, array.nbytes)
            else:
                write(self.address(name), array)
            if name in moved or (name not in self._fed and (name in self._step.defaults or not self.fixed)):
                self._bind_input(name)
            self._fed.add(name)

    @property
    def fed(self) -> list[str]:
        """Return the inputs that have been given a value, in the step's order."""
        return [name for name in self._formals if name in self._fed]

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of the current value of an input that has been given one."""
        if name in self.on_host:
            return self.on_host[name].copy()
        if name in self.lying:
            wait()
        return _copy(self._formals[name], self.address(name))

    def outputs(self, wanted: Sequence[str]) -> Arrays:
        """Return copies of outputs of the last run, none of them donated."""
        formals = {array.name: array for array in self._step.outputs}
        values = {}
        if not self._outputs.keys() >= {*wanted}:  # the binding wraps all outputs, a microsecond for each
            values = dict(zip(self._step.loose, self._binding.get_outputs(), strict=False))  # they were bound first
        made = {}
        for name in wanted:
            array, address = formals[name], self._outputs.get(name)
            made[name] = array.copy_of(values[name], read) if address is None else _copy(array, address)
        return made

    def results(self) -> Arrays:
        """Return copies of all outputs of the last run; a donated output is the array given for its input."""
        made = self.outputs([array.name for array in self._step.outputs if array.name not in self._step.donated])
        for output, name in self._step.donated.items():
            if name in self.lying:
                made[output] = self.lying[name].owner
                continue
            made[output] = self.read(name)
            if name in self._given:
                np.copyto(self._given[name], made[output])
                made[output] = self._given[name]
        return made


def _copy(array: Array, address: int) -> npt.NDArray[Any]:
    """Return what lies at an address of the device as an array of the host."""
    made = np.empty(array.shape, array.dtype_name)
    read(address, made)
    return made
