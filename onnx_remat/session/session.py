"""A session with planned addresses: one slab contains every large value of a step, each at its planned offset.

onnxruntime's own session allocates each value while it runs, and keeps up to several times the memory of the live
values. `Session` binds each value to its offset once, when it opens the step; running the step allocates nothing large.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import warnings
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from onnx_remat import files
from onnx_remat.errors import ModelError, OnnxRematError, UsageError
from onnx_remat.fuse import driver, shim
from onnx_remat.session import cuda_memory, heap, loading, on_device
from onnx_remat.session.device import OUT_OF_MEMORY
from onnx_remat.session.interface import Arrays, check_mapping
from onnx_remat.session.on_device import DeviceMemory, StateMemory
from onnx_remat.session.on_host import HostMemory
from onnx_remat.session.plan_session import SessionRequest, plan_in_child
from onnx_remat.session.slab_layout import Donate
from onnx_remat.units import check_threads


class Session:
    """A training step that runs with all its large values in one slab.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or Result
        Any training step, rewritten or not.
    provider : str
        ``"cpu"``, or ``"cuda"``: slab and inputs are on the device. `run` copies numpy's arrays there. Those that
        another library holds on the device (``__cuda_array_interface__``) are read, and renewed, where they lie.
    dims : mapping of str to int, optional
        Sizes of all symbolic dimensions; every run uses these sizes.
    donate : bool or mapping of str to str
        Outputs to write in place of the inputs they renew: none, all ``new.<name>`` and ``newbuf.<name>``, or those
        of a mapping from output to input. `run` then overwrites the arrays it is given for these inputs.
    threads : int
        Intra-op threads; 0 for onnxruntime's default.
    level : str
        Graph optimisations that onnxruntime applies first: ``"all"``, ``"basic"`` or ``"disable"``.
    memory_limit : int
        Limit on the device memory of the whole session, in bytes: slab, inputs, weights and scratch memory; 0 for none.
    cuda_graph : bool or None
        Capture the step in a CUDA graph when the session opens, on inputs of zeros, and replay it: the host then
        launches one graph per step instead of every kernel. Refused for a step that draws random numbers, and for
        others that a graph cannot hold; with None they run without one. Open it before other threads use the device:
        during a capture it refuses, in every thread, what allocates and what waits.
    check : bool
        First run the step on random values, with `Session` and with onnxruntime's own session, each in a separate
        process, and compare every output: bit for bit at level "disable", within rounding at the others. This
        temporarily takes the memory of onnxruntime's own session, and a few seconds.
    fuse : bool
        Run groups of elementwise nodes, sums and normalisations as one compiled kernel each; not at level
        ``"disable"``. On the CPU elementwise results are bit-identical; large matrix products are computed by OpenBLAS
        and convolutions by oneDNN where that is faster, equal within rounding, as all results of CUDA kernels are.
    slab_of : Session, optional
        On the CPU, another session whose slab this one uses, if it is large enough: that of a larger batch. The two run
        one at a time, and a run overwrites views of the other's results.

    Attributes
    ----------
    inputs, outputs : tuple of Array
        Name, element type (``onnx.TensorProto``) and shape of each.
    donated : mapping of str to str
        Input by the output that is written in its place.
    not_donated : mapping of str to str
        Reason by output, for outputs of `donate` that are not written in place; `run` returns them like any other.
    renewals : mapping of str to str
        Input by output, of the pairs that were given as `donate`.
    slab_bytes : int
        Size of the slab; at most `live_bytes` of it are live at once.
    node_count, unfused_node_count : int
        Number of nodes that run, and of those that would run without fusion.
    bookkeeping_bytes : int
        ONNX Runtime's own memory for the graph on a CPU, as predicted.
    kernel_count : int
        Number of fused kernels among the nodes that run.
    not_fused : str
        Reason why the step runs unfused although `fuse` is True; empty where it is fused.

    Raises
    ------
    UsageError
        An argument is malformed, or a symbolic dimension has no size.
    ModelError
        The model cannot be loaded, or onnxruntime would run its nodes in another order than planned.
    VerificationError
        With `check`: an output differs from what onnxruntime's own session computes.

    Examples
    --------
    >>> from sample_models.chain import chain
    >>> with Session(chain(4, 64, 8)) as session:
    ...     made = session.run({array.name: np.ones(array.shape, np.float32) for array in session.inputs})
    >>> sorted(made) == sorted(array.name for array in session.outputs)
    True
    """

    def __init__(
        self,
        model: Any,
        provider: str = "cpu",
        *,
        dims: Mapping[str, int] | None = None,
        donate: Donate = False,
        threads: int = 0,
        level: str = "all",
        memory_limit: int = 0,
        cuda_graph: bool | None = False,
        check: bool = False,
        fuse: bool = True,
        slab_of: Session | None = None,
    ) -> None:
        # Of sessions with one slab, one runs at a time; re-entrant, as garbage collection may close another meanwhile.
        self.lock: AbstractContextManager[Any] = threading.RLock() if slab_of is None else slab_of.lock
        if provider not in ("cpu", "cuda"):
            raise UsageError(f"provider {provider!r}: sessions run on 'cpu' and 'cuda'")
        if (memory_limit or cuda_graph) and provider == "cpu":
            raise UsageError("memory_limit and cuda_graph are for a device: not with provider 'cpu'")
        if level not in ("disable", "basic", "all"):
            raise UsageError(f"level must be one of disable, basic, all, not {level!r}")
        threads = check_threads(threads)
        self._limit = memory_limit
        heap.give_back_large_blocks()
        donate = donate if isinstance(donate, bool) else dict(donate)
        self.renewals: Mapping[str, str] = {} if isinstance(donate, bool) else donate
        is_path = isinstance(model, str | os.PathLike)
        self._again = (os.fspath(model) if is_path else None, provider, dict(dims or {}), donate, threads, level,
                       memory_limit, cuda_graph, fuse)  # fmt: skip
        with files.scratch() as folder:
            path, target = _as_file(model, folder), _lean_file(folder)
            wanted = fuse is not False and level != "disable"
            lacking = _why_not_fused() if wanted else ""
            secret = shim.new_secret() if wanted and not lacking else 0
            self._step = plan_in_child(
                path, target, SessionRequest(provider, dict(dims or {}), donate, level, check, secret=secret)
            )
            self._lacking = self._step.fused.why_not or lacking
            if self._lacking and (lacking == self._lacking or self._lacking.startswith(driver.FAILS)):
                warnings.warn(f"steps run unfused, which takes longer: {self._lacking}", stacklevel=2)
            if why := self._step.in_turn:
                warnings.warn(f"copies to the host run in turn with kernels, maybe above budget: {why}", stacklevel=2)
            self._loose = self._step.loose
            self._names = dict.fromkeys(array.name for array in self._step.inputs)  # a set that keeps their order
            self._session: Any = None
            self._binding: Any = None
            self._memory: HostMemory | DeviceMemory | None = None
            if provider == "cpu":
                self._open_on_cpu(target, threads, slab_of)
            elif cuda_graph is None:
                captured = False
                with suppress(OnnxRematError):  # whose traceback holds the session: nothing is opened before it is gone
                    self._open_on_device(target, threads, provider, memory_limit, graph=True)
                    captured = True
                if not captured:
                    self._session = self._binding = self._memory = None
                    self._open_on_device(target, threads, provider, memory_limit, graph=False)
            else:
                self._open_on_device(target, threads, provider, memory_limit, cuda_graph)
        heap.trim()

    def _open_on_cpu(self, target: Path, threads: int, slab_of: Session | None) -> None:
        self._session = loading.load(target, list(self._step.execution_providers), threads, self._step.pool)
        self._binding = self._session.io_binding()
        self._bind_loose()
        shared = slab_of._memory if slab_of is not None else None
        slab = shared.slab if isinstance(shared, HostMemory) else None
        self._memory = HostMemory(self._binding, self._step, slab)

    def _open_on_device(self, target: Path, threads: int, device: str, memory_limit: int, graph: bool) -> None:
        step = self._step
        if graph:
            on_device.check_capturable(step)
        limit = on_device.scratch_limit(step, memory_limit) if memory_limit else 0
        providers = on_device.providers(step.execution_providers, limit, graph)
        host = StateMemory(step) if step.state_on_host else None
        self._session = loading.load(target, providers, threads, step.pool, state=host.address if host else 0)
        on_device.check_no_fallback(self._session, step.execution_providers[0])
        self._binding = self._session.io_binding()
        self._bind_loose()
        self._memory = DeviceMemory(self._binding, step, device, fixed=graph, host=host)
        if graph:
            self._run()

    inputs = property(lambda self: self._step.inputs)
    outputs = property(lambda self: self._step.outputs)
    defaults = property(lambda self: self._step.defaults)
    donated = property(lambda self: self._step.donated)
    not_donated = property(lambda self: self._step.not_donated)
    slab_bytes = property(lambda self: self._step.slab)
    live_bytes = property(lambda self: self._step.live)
    weight_bytes = property(lambda self: self._step.weights)
    workspace_bytes = property(lambda self: self._step.workspace)
    node_count = property(lambda self: self._step.nodes)
    unfused_node_count = property(lambda self: self._step.fused.unfused_nodes)
    bookkeeping_bytes = property(lambda self: self._step.books)
    kernel_count = property(lambda self: self._step.fused.kernels)
    not_fused = property(lambda self: self._lacking)

    def run(self, feeds: Mapping[str, Any], *, copy: bool = True) -> Arrays:
        """Run the step once.

        Parameters
        ----------
        feeds : mapping of str to array
            A value for every input, of its type and shape. Arrays of inputs in `donated` must be writeable.
        copy : bool
            Return copies. Otherwise the arrays are views of the slab, which the next run overwrites.

        Returns
        -------
        dict of str to array
            Every output; a donated output is the array given for its input, which now contains the new value.

        Raises
        ------
        UsageError
            An input is missing, unknown, or of another type or shape; the step was not run.
        ModelError
            onnxruntime failed during the step: some donated inputs may be renewed and others not.
        """
        check_mapping(feeds, "what is fed")
        with self.lock:
            if self.device is not None:
                self._check_complete(feeds)
                self.device.take(feeds)
            self.execute(feeds)
            made = self.results(copy=copy)
        return {array.name: made[array.name] for array in self.outputs}

    def execute(self, feeds: Mapping[str, Any]) -> None:
        """Run the step once and leave the outputs in the slab; see `results`. On a device, inputs keep earlier values.

        Hold `lock` until they are read, where other threads run the session, or one with the same slab.
        """
        memory = self._open()
        self._check_names(feeds)
        self._check_complete(feeds if self.device is None else {*feeds, *self.device.fed})
        memory.accept(feeds)
        heap.keep_trimmed()
        self._run()

    def _open(self) -> HostMemory | DeviceMemory:
        if self._memory is None:
            raise UsageError("the session is closed")
        return self._memory

    def _bind_loose(self) -> None:
        """Let onnxruntime allocate the outputs without an address; the first call puts them before all others."""
        for name in self._loose:
            self._binding.bind_output(name)

    def _run(self) -> None:
        self._bind_loose()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            if self.device is not None:
                with suppress(ModelError):  # what the step failed of says more
                    cuda_memory.wait()  # for copies that have begun: they read and write what the next call does
            full = any(sign in str(error) for sign in OUT_OF_MEMORY)
            hint = on_device.what_to_do_if_full(self._limit) if full else _misstated(str(error))
            raise ModelError("onnxruntime failed during the step: {}{}", loading.first_line(error), hint) from error

    def results(self, *, copy: bool = True) -> Arrays:
        """Return the outputs of the last run by name; a donated output is the array given for its input."""
        memory = self._open()
        return memory.results() if isinstance(memory, DeviceMemory) else memory.results(copy)

    @property
    def device(self) -> DeviceMemory | None:
        """Device memory that keeps inputs between runs; None on the CPU, where the caller's arrays are the inputs."""
        return self._memory if isinstance(self._memory, DeviceMemory) else None

    def fetch(self, names: Sequence[str]) -> Arrays:
        """Return copies of some outputs of the last run on a device, none of them donated."""
        if self.device is None:
            raise UsageError("fetch is for sessions on a device: use results on the CPU")
        return self.device.outputs(names)

    def close(self) -> None:
        """Free the slab and onnxruntime's session; views of the slab must not be used afterwards."""
        with self.lock:
            self._binding = self._session = self._memory = None
            heap.trim()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._again[0] is None:
            raise UsageError("only a session opened from a path can be pickled: save the model first")
        return _reopen, self._again

    def _check_names(self, feeds: Mapping[str, Any]) -> None:
        """Raise UsageError for an unknown input, and for another value of one that decides shapes."""
        for name in feeds:
            if name not in self._names:
                raise UsageError(f"the model has no input {name!r}: it has {', '.join(self._names)}")
        for name, default in self._step.shaping.items():
            if name in feeds and np.asarray(feeds[name]).tolist() != default:
                raise UsageError(
                    f"input {name!r} decides shapes, for which the session was planned with its default {default}: "
                    "leave it out, or change the default and open the model again"
                )

    def _check_complete(self, given: Container[str]) -> None:
        """Raise UsageError for an input that has neither a value nor a default."""
        for name in self._names:
            if name not in given and name not in self._step.defaults:
                raise UsageError(f"no value for input {name!r}")


def _misstated(error: str) -> str:
    """Return the end of a message for a step that makes a value of another shape than it states; else nothing.

    >>> _misstated("OrtValue provided for output 'y' of node 'n' has shape {2} but the computed output shape is {3}.")
    "; 'y' states shape {2}, but is of shape {3}: correct it in the model"
    """
    found = re.search(r"for output '(.*?)' of node .* has shape (\{.*?\}) but the computed .* is (\{.*?\})", error)
    if not found:
        return ""
    name, stated, made = found.groups()
    return f"; {name!r} states shape {stated}, but is of shape {made}: correct it in the model"


def seed_draws(seed: int) -> None:
    """Seed the random ops without a seed of their own in sessions opened from now on."""
    import onnxruntime

    onnxruntime.set_seed(seed)


def _why_not_fused() -> str:
    """Return why no step can have fused kernels in this process; empty where steps can."""
    import onnxruntime

    installed = [int(part) for part in re.findall(r"\d+", onnxruntime.__version__)[:3]]
    return shim.too_old(installed) or shim.why_not()


def _reopen(
    path: str, provider: str, dims: Mapping[str, int], donate: Donate, threads: int, level: str, limit: int,
    graph: bool | None, fuse: bool,
) -> Session:  # fmt: skip
    return Session(
        path, provider, dims=dims, donate=donate, threads=threads, level=level, memory_limit=limit, cuda_graph=graph,
        fuse=fuse,
    )  # fmt: skip


def _as_file(model: Any, folder: Path) -> Path:
    """Return the path of the model; a model that is not a file is written to `folder`."""
    if isinstance(model, str | os.PathLike):
        files.resolved(model)  # refuses a loop of links
        return files.reopened(model)
    if isinstance(model, bytes):
        path = folder / "model.onnx"
        path.write_bytes(model)
        return path
    from onnx_remat.ort import runtime

    if hasattr(model, "report") and hasattr(model, "folder"):
        return runtime.write_beside(model.model, model.folder, folder)
    if hasattr(model, "SerializeToString"):
        return runtime.write_beside(model, None, folder)
    raise UsageError(f"a session opens a path, bytes, an onnx.ModelProto or a Result, not {type(model).__name__}")


def _lean_file(folder: Path) -> Path:
    """Return where to write the lean graph: in a new folder, where links to the step's data files join it.

    None of these may have its name, so it is a random one.
    """
    home = folder / "lean"
    home.mkdir()
    return home / f"{secrets.token_hex(8)}.onnx"
