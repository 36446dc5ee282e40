"""Measure seconds per op, in the format of ONNX Runtime's profiles, for ``--costs``."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnx_remat import files
from onnx_remat.errors import UsageError
from onnx_remat.ir import model_io
from onnx_remat.ir.dims import check_dims
from onnx_remat.measure import processes
from onnx_remat.ort import runtime
from onnx_remat.units import check_threads

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """One event per node and graph optimisation level.

    ``dur`` (microseconds) is the median over all steps minus the profiler's overhead: the sum over all nodes is the
    time of a step without the profiler.
    """

    events: tuple[Event, ...]
    runs: int
    steps: int

    def to_json(self) -> str:
        """Return a list of events as ONNX Runtime writes it, for ``--costs`` and chrome://tracing."""
        return json.dumps(list(self.events), indent=0) + "\n"

    def to_text(self, rows: int = 10) -> str:
        """Return the op types with the most time, as ONNX Runtime executes the model by default."""
        by_type: dict[str, list[float]] = defaultdict(list)
        for event in self.events:
            if event["pid"] == LEVELS[-1]:
                by_type[event["args"]["op_name"]].append(event["dur"] * 1e-3)
        total = sum(map(sum, by_type.values()))
        ranked = sorted(by_type.items(), key=lambda item: (-sum(item[1]), item[0]))
        count = sum(map(len, by_type.values()))
        lines = [f"{total:.2f} ms in {count} ops, medians of {self.runs} x {self.steps} steps"]
        lines += [f"{sum(t):>9.3f} ms  {sum(t) / total:>6.1%}  {len(t):>5} x {name}" for name, t in ranked[:rows]]
        return "\n".join(lines)


LEVELS = ("disable", "all")
"""Profiled graph optimisation levels: a plan needs times of the file's ops, a prediction those of optimised ones."""


def profile(
    path: str | Path,
    dims: Mapping[str, int] | None = None,
    runs: int = 5,
    steps: int = 5,
    threads: int = 0,
    provider: str = "cpu",
    python: str = sys.executable,
    progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Profile:
    """Profile a model in fresh processes.

    Parameters
    ----------
    path : path
        An ONNX file.
    dims : mapping, optional
        Sizes of symbolic dimensions.
    runs, steps : int
        Number of processes per optimisation level, and of steps in each after a warm-up step.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.
    provider : str
        One of `registry.PROVIDERS`.
    python : str
        Interpreter whose ONNX Runtime runs the model, see `processes`.
    progress : callable
        As of `options.Options`.

    Raises
    ------
    UsageError
        `runs` or `steps` is not positive, `threads` is negative, or `dims` names an unknown dimension.
    ShapeError
        A symbolic dimension is not bound.
    VerificationError
        The model does not run.
    """
    if runs < 1 or steps < 1:
        raise UsageError("a profile needs at least one run of one step")
    threads = check_threads(threads)
    check_dims(model_io.load(path).model, dims or {})  # a dimension left open would be measured as 1
    how: dict[str, Any] = {"dims": dims, "threads": threads, "provider": provider, "python": python}
    with runtime.as_step(path) as step:
        events: list[Event] = []
        for i, level in enumerate(LEVELS):

            def tell(done: float, before: int = i, level: str = level) -> None:
                progress(f"measuring nodes at level {level}", (before + done) / len(LEVELS))

            events += _events(step, level, runs, steps, how, tell)
        return Profile(tuple(events), runs, steps)


def _events(
    path: Path, level: str, runs: int, steps: int, how: Mapping[str, Any], progress: Callable[[float], None]
) -> Iterator[Event]:
    """Yield one event per node at a level; `progress` receives the fraction that is done."""
    seen: dict[str, list[Event]] = defaultdict(list)
    for run in range(runs):
        progress(run / (runs + 1))
        for key, all_steps in _by_node(processes.profile(path, level, steps=steps, **how)).items():
            seen[key] += all_steps[-steps:]
    progress(runs / (runs + 1))
    medians = [statistics.median(e["dur"] for e in same) for same in seen.values()]
    recorded = [statistics.median(e[_RECORDED] for e in same) for same in seen.values()]
    step = min(processes.race(path, path, level=level, runs=runs * steps, **how))
    surcharge = max(0.0, sum(medians) - 1e6 * step) / max(1, sum(recorded))
    now = 0.0
    for same, median, count in zip(seen.values(), medians, recorded, strict=True):
        event = _event(same[0], max(_SHORTEST, median - count * surcharge), level, now)
        now += event["dur"]
        yield event


_KERNEL = "_kernel_time"

_SHORTEST = 0.1
"""Minimum time of a node in microseconds."""


def _by_node(events: list[Event]) -> dict[str, list[Event]]:
    """Return kernel events by node of the main graph, in execution order; a node's events in the order of steps."""
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)]
    nodes: dict[str, list[Event]] = defaultdict(list)
    for event in _outermost(kernels):
        nodes[f"{event['name']}#{event['args'].get('node_index')}"].append(event)
    return nodes


def _outermost(kernels: list[Event]) -> list[Event]:
    """Return the events in order of time, without those of bodies, which the time of a Loop includes, but their number.

    The profiler's overhead is that of every recorded event.
    """
    found: list[Event] = []

    def duration(event: Event) -> float:
        """Return the microseconds within which other events are those of bodies."""
        return float(event["dur"]) if event["args"].get("op_name") in _WITH_BODIES else 0.0

    end, outer = 0.0, None
    for event in sorted(kernels, key=lambda e: (float(e["ts"]), -duration(e))):
        if outer is None or float(event["ts"]) >= end:
            end, outer = float(event["ts"]) + duration(event), event | {_RECORDED: 0}
            found.append(outer)
        outer[_RECORDED] += 1
    return found


_RECORDED = "recorded"
"""Key of the number of events that an event contains, itself included."""

_WITH_BODIES = ("If", "Loop", "Scan")


def _event(first: Event, dur: float, level: str, start: float) -> Event:
    """Return the event of a node: its time, and the key that ``--costs`` looks up."""
    arguments = first["args"]
    return {
        "cat": "Node", "ph": "X", "pid": level, "tid": 0, "name": first["name"], "ts": round(start, 3),
        "dur": round(dur, 3),
        "args": {
            "op_name": arguments["op_name"], "input_type_shape": arguments["input_type_shape"],
            "output_size": arguments.get("output_size", "0"),
        },
    }  # fmt: skip


def node_seconds(threads: int = 0, nodes: int = 1000, provider: str = "cpu", python: str = sys.executable) -> float:
    """Measure ONNX Runtime's overhead per node in seconds, on nodes with almost nothing to compute."""
    names = [f"v{i}" for i in range(nodes + 1)]
    chain = [onnx.helper.make_node("Neg", [a], [b]) for a, b in itertools.pairwise(names)]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in (names[0], names[-1])]
    graph = onnx.helper.make_graph(chain, "chain", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    with files.scratch() as scratch:
        path = scratch / "chain.onnx"
        onnx.save(model, path)
        how: dict[str, Any] = {"threads": threads, "provider": provider, "python": python}
        return min(processes.race(path, path, level="disable", runs=25, **how)) / nodes
