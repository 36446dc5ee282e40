"""Functions that run in a measured process and return its measurements.

Only `processes` calls them, in a `child`. They import as little as possible, because every import takes resident
memory, and nothing that another environment may lack.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_remat.session.heap import trim

Job = dict[str, Any]

_LEVELS = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}


def new_session(job: Job, path: str, default: bool, entries: Mapping[str, str] | None = None) -> Any:
    """Open a session on a model.

    `default` keeps the arena and, unless the job disables them, memory patterns; `entries` are further settings.
    """
    import onnxruntime as ort  # noqa: TID251 - the other half of processes.py, in a separate process

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[job["level"]])
    options.enable_cpu_mem_arena = default
    options.enable_mem_pattern = default and job.get("patterns", True)
    options.intra_op_num_threads = job["threads"]
    if job.get("optimized"):
        options.optimized_model_filepath = job["optimized"]
        # Weights in a second file, since one has at most 2 GiB. ONNX Runtime takes a name in the model's folder.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    if job.get("profile"):
        options.enable_profiling = True
        options.profile_file_prefix = job["profile"]
    if job.get("patient"):  # idle threads sleep: saves cores of a busy machine, but distorts times
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    providers: list[Any] = list(job["providers"])
    if job["device"] != "cpu":
        from onnx_remat.ort import libraries
        from onnx_remat.session import device

        libraries.load_cuda()
        providers[0] = (providers[0], device.provider_options(job.get("gpu_limit", 0)))
    session = ort.InferenceSession(path, options, providers=providers)
    if session.get_providers()[0] != job["providers"][0]:  # onnxruntime falls back to the CPU silently
        raise RuntimeError(f"no {job['providers'][0]} here: its driver or its libraries are missing")
    return session


def race(job: Job) -> Job:
    """Return times of alternating steps of two models, so that other load on the machine affects both equally."""
    # The threads of a session spin after its step: they would take cores from the other session.
    still = {"session.force_spinning_stop": "1"}
    sessions = [new_session(job, path, default=True, entries=still) for path in (job["path"], job["rival"])]
    feeds = random_feeds(sessions[0], job["dims"])
    for session in sessions:
        session.run(None, feeds)
    times = [[_timed(session, feeds) for session in sessions] for _ in range(job["runs"])]
    return {"seconds": [[pair[i] for pair in times] for i in (0, 1)]}


def measure(job: Job) -> Job:
    """Return the peak memory of one model; on request also save its outputs and a profile."""
    import numpy as np

    session = new_session(job, job["path"], default=False)
    feeds = random_feeds(session, job["dims"], job["feeds"])
    # The first run also makes code and thread stacks resident, which are not the step's memory.
    session.run(None, feeds)
    if job["default"]:
        session = new_session(job, job["path"], default=True)
        trim()
    resident_inputs = sum(array.nbytes for array in feeds.values()) + initializer_bytes(job["optimized"])
    before = reset_peak()
    outputs = session.run(None, feeds)
    if job["outputs"]:
        names = [value.name for value in session.get_outputs()]
        np.savez(job["outputs"], **{f"{i}:{names[i]}": _plain(made) for i, made in enumerate(outputs)})
    del outputs
    for _ in range(job["steps"] - 1):
        session.run(None, feeds)
    rise = resident("VmHWM") - before
    profile = session.end_profiling() if job["profile"] else ""
    return {"peak_bytes": resident_inputs + rise, "profile": profile}


def by_session(job: Job) -> Job:
    """Save the outputs of a step that `Session` runs on the feeds of `measure`, once per file, with state in place.

    Return the inputs that were overwritten although no output renews them.
    """
    import numpy as np

    from onnx_remat.session.session import Session

    feeds = random_feeds(new_session(job, job["path"], default=False), job["dims"], job["feeds"])
    with Session(
        job["path"], job["provider"], dims=job["dims"], donate=job["donate"], threads=job["threads"], level=job["level"]
    ) as session:
        for path in job["outputs"]:
            given = {name: array.copy() for name, array in feeds.items()}
            made = session.run(given)
            named: Any = {f"{i}:{name}": _plain(array) for i, (name, array) in enumerate(made.items())}
            np.savez(path, **named)
            renewed = session.donated.values()
            changed = [n for n, a in given.items() if n not in renewed and a.tobytes() != feeds[n].tobytes()]
    return {"changed": changed}


def profile(job: Job) -> Job:
    """Run steps under ONNX Runtime's profiler; the first is a warm-up that readers should skip."""
    session = new_session(job, job["path"], default=True)
    feeds = random_feeds(session, job["dims"])
    for _ in range(job["steps"] + 1):
        session.run(None, feeds)
    return {"profile": session.end_profiling()}


def train(job: Job) -> Job:
    """Train for some steps (see `onnx_remat.session.training`); return the peak over them, and the loss of each."""
    from onnx_remat.session.training import Loop, initial_state

    session = new_session(job, job["path"], default=job["default"])
    state = initial_state(session, job["dims"], job["state"])
    resident_inputs = sum(array.nbytes for array in state.values()) + initializer_bytes(job["optimized"])
    loop = Loop(session, state, job["loss"], device=job["device"])
    del state
    # The first steps also make code and thread stacks resident, and scatter small blocks over the heap until it stops
    # growing (about 1 MB, ten steps): none of that is the step's memory.
    warm = max(1, min(10, job["steps"] // 3))
    losses = [loop.step() for _ in range(warm)]
    before = reset_peak()
    losses += [loop.step() for _ in range(job["steps"] - warm)]
    rise = resident("VmHWM") - before
    driver = 0
    if job["device"] != "cpu":
        from onnx_remat.session import device

        driver = device.driver_bytes()
    return {"peak_bytes": resident_inputs + rise, "losses": losses, "driver_bytes": driver}


def _plain(made: Any) -> Any:
    """Return an output as a file of numpy takes it without pickling: strings are objects in ONNX Runtime's arrays."""
    return made.astype(str) if getattr(getattr(made, "dtype", None), "kind", "") == "O" else made


FEEDS = ("plain", "wide", "hostile")
"""Kinds of random feeds: numbers that suit a training step; a wide range, with denormals and zeros of both signs; and
the latter with NaN and infinities in inputs that no output renews (in weights they would spread to every value)."""


def random_feeds(session: Any, dims: dict[str, int], how: str = FEEDS[0]) -> dict[str, Any]:
    """Return random inputs of a step: floats of a kind in `FEEDS`, positive where the name means a variance.

    Integer inputs are 0 or 1, valid ids in every vocabulary and set of classes; strings are their digits.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    renewed = [value.name for value in session.get_outputs()]
    feeds = {}
    for value in session.get_inputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        if kind not in (*_FLOATS, *_OTHERS):
            raise RuntimeError(f"input {value.name!r} of type {kind} cannot be random: leave the run out")
        shape = [d if isinstance(d, int) else dims.get(d, 1) for d in value.shape]
        if kind in _FLOATS:
            array = np.abs(generator.standard_normal(shape, np.float32) * 0.05) + 0.01
            sign = 1.0 if any(part in value.name for part in _POSITIVE) else generator.choice([-1.0, 1.0], size=shape)
            if how != FEEDS[0]:
                array = _odd(array, generator, how == "hostile" and f"new.{value.name}" not in renewed)
            feeds[value.name] = np.asarray(array * sign, dtype=_FLOATS[kind])
        elif kind == "bool":
            feeds[value.name] = generator.integers(0, 2, shape).astype(bool)
        elif kind == "string":
            feeds[value.name] = generator.integers(0, 2, shape).astype(str).astype(object)
        else:
            feeds[value.name] = np.asarray(generator.integers(0, 2, shape), dtype=kind)
    return feeds


def _odd(array: Any, generator: Any, with_nan: bool) -> Any:
    """Return positive numbers of a wide range, a tenth of them zeros and denormals; a few NaN and infinite."""
    import numpy as np

    array = array * generator.choice(np.array([0.1, 1, 30, 300], np.float32), array.shape)
    some = generator.random(array.shape)
    array = np.where(some < 0.1, generator.choice(np.array([0, 0, 1e-40], np.float32), array.shape), array)
    if with_nan:
        array = np.where(some > 0.998, generator.choice(np.array([np.nan, np.inf], np.float32), array.shape), array)
    return array


_POSITIVE = ("var", "_sq", ".nu", "second_moment", "learning_rate")
"""Parts of the names of inputs that are never negative: BatchNorm's variance, Adam's second moment."""

_FLOATS = {"float": "float32", "double": "float64", "float16": "float16"}
_OTHERS = ("bool", "string", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def initializer_bytes(path: str) -> int:
    """Return the bytes of the initializers in a file: they are resident before the run starts."""
    import onnx

    from onnx_remat.ir.constant_nodes import tensor_of
    from onnx_remat.ir.dtypes import tensor_bytes

    graph = onnx.load(path, load_external_data=False).graph
    constants = filter(None, map(tensor_of, graph.node))
    return sum(tensor_bytes(t.data_type, t.dims) for t in [*graph.initializer, *constants])


def reset_peak() -> int:
    """Reset the kernel's high-water mark of this process and return the bytes resident now."""
    now = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return now


def library_bytes() -> int:
    """Return the resident bytes of files that are mapped as code: the interpreter and the libraries.

    Such pages are shared between processes, and come and go without the step: the kernel maps as many around a first
    call as happen to be in its cache, and takes them back when it likes.
    """
    mapped: dict[str, int] = {}
    code, file = set(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            _, *path = rest.split(maxsplit=4)[3:]
            file = path[0] if path and path[0].startswith("/") else ""
            if rest[2] == "x":
                code.add(file)
        elif first in ("Rss:", "Anonymous:"):
            mapped[file] = mapped.get(file, 0) + int(rest.split()[0]) * (1024 if first == "Rss:" else -1024)
    return sum(nbytes for file, nbytes in mapped.items() if file and file in code)


def resident(field: str) -> int:
    """Return `field` of this process in bytes: ``VmRSS``, ``RssFile``, or ``VmHWM``, the most since the last reset."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the system does not report {field} of a process: measure peaks on Linux")


def _timed(session: Any, feeds: dict[str, Any]) -> float:
    start = time.perf_counter()
    session.run(None, feeds)
    return time.perf_counter() - start
