"""The places a training step runs in without Python: Node, a browser, a C++ program; each run a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_remat.session.state_file import kinds_of, write_each
from tests.support.elsewhere import FOLDER, browser

MIB = 2**20
_SECONDS = 1800.0
_QUIET = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """What a training gives: its losses, and bytes of WebAssembly's heap (0 where there is none)."""

    losses: tuple[float, ...]
    heap: int = 0


def write_state(path: Path, feeds: Mapping[str, Any]) -> None:
    """Write values for a step's inputs, as `in_node` and the others read them."""
    write_each(path, kinds_of(feeds), feeds.values())


def in_python(model: Path, feeds: Mapping[str, Any], steps: int) -> Run:
    """Train with Python's onnxruntime, on one thread."""
    session, values = _session(model), dict(feeds)
    names, losses = [output.name for output in session.get_outputs()], []
    for _ in range(steps):
        made = dict(zip(names, session.run(None, values), strict=True))
        values |= {name.removeprefix("new."): made[name] for name in made if name.startswith("new.")}
        losses.append(float(made["loss"]))
    return Run(tuple(losses))


def in_node(model: Path, state: Path, steps: int, *flags: str) -> Run:
    """Train with examples/javascript/train.mjs.

    Raises
    ------
    subprocess.CalledProcessError
        The step failed there.
    """
    found = json.loads(_node(model, state, steps, "--json", *flags).splitlines()[-1])
    return Run(tuple(found["losses"]), found["heap"])


def in_browser(chromium: str, model: Path, state: Path, steps: int) -> Run:
    """Train with examples/javascript/worker.mjs; the files lie in one folder."""
    found = browser.train(chromium, model.parent, model.name, state.name, steps)
    return Run(tuple(found["losses"]), found["heap"])


def in_cpp(program: Path, model: Path, state: Path, steps: int) -> Run:
    """Train with examples/cpp/train.cpp, built by `build_cpp`, on one thread."""
    command: list[str | Path] = [program, model, state, str(steps)]
    environment = _QUIET | {"THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Run(tuple(float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()))


def build_cpp(headers: Path, folder: Path) -> Path:
    """Compile examples/cpp/train.cpp against the library inside Python's onnxruntime; returns the program."""
    import onnxruntime

    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    named, program = folder / "libonnxruntime.so.1", folder / "train"  # the name that the library gives itself
    named.symlink_to(library)
    source = FOLDER.parent / "cpp" / "train.cpp"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{headers}", f"-Wl,-rpath,{folder}")
    subprocess.run(["g++", *flags, source, named, "-o", program], check=True)
    return program


def fits(model: Path, state: Path, limit: int, steps: int = 2) -> bool:
    """Does the step run, twice over, in a WebAssembly heap of `limit` bytes?"""
    try:
        in_node(model, state, steps, "--wasm", "--heap", str(limit))
    except subprocess.CalledProcessError as error:
        if not any(words in error.stderr for words in ("bad_alloc", "Can't create a session", "out of memory")):
            raise
        return False
    return True


def smallest_heap(model: Path, state: Path, grown: int) -> int:
    """The smallest heap, in steps of 2 MiB, in which the step runs, given what it grows to without a limit.

    A heap grows by a fifth or to what is asked for, so that less than five sixths of it were too small.
    """
    grain = 2 * MIB
    least, enough = int(grown / 1.2) // grain, -(-grown // grain)
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if fits(model, state, middle * grain, steps=3) else (middle, enough)
    return min(grown, enough * grain)


def executed(model: Path, feeds: Mapping[str, Any], state: Path) -> tuple[list[str], list[str]]:
    """The nodes that Python's onnxruntime and WebAssembly's run at default options, in the order in which they run."""
    found = _node(model, state, 1, "--wasm", "--profile")
    in_wasm = json.loads(found[found.index("[\n{") : found.index("\n]") + 2])
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        session = _session(model, str(Path(home) / "profile"))
        session.run(None, dict(feeds))
        in_python = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _nodes(in_python), _nodes(in_wasm)


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference of two trainings' losses over the largest loss; 0 where they are bitwise equal float32.

    >>> difference([1.0, 2.0], [1.0, 2.0])
    0.0
    >>> difference([1.0], [1.0, 2.0])
    Traceback (most recent call last):
        ...
    ValueError: 1 losses where there should be 2
    """
    if len(found) != len(wanted):
        raise ValueError(f"{len(found)} losses where there should be {len(wanted)}")
    one, other = np.array(found, np.float32), np.array(wanted, np.float32)
    return float(np.max(np.abs(one - other)) / np.max(np.abs(other)))


def _node(model: Path, state: Path, steps: int, *flags: str) -> str:
    command = ["node", "train.mjs", str(model.resolve()), str(state.resolve()), "--steps", str(steps), *flags]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:  # WebAssembly that prints much into a pipe may stall
        subprocess.run(
            command, cwd=FOLDER, env=_QUIET, stdout=out, stderr=subprocess.PIPE, text=True, check=True, timeout=_SECONDS
        )
        out.seek(0)
        return out.read()


def _session(model: Path, profile: str = "") -> Any:
    import onnxruntime

    from onnx_remat.ort.runtime import session_options

    options = session_options()
    options.intra_op_num_threads = 1
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _nodes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    ran = (event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time"))
    return [f"{event['args']['op_name']} {event['name']}" for event in ran]
