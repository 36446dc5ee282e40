"""Measured seconds and scratch memory per op, in the layout of ONNX Runtime's own profiles, for ``--costs``."""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_remat import runtime
from onnx_remat.errors import UsageError

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """One event per node and graph optimisation level, its ``dur`` (microseconds) the median over all steps."""

    events: tuple[Event, ...]
    runs: int
    steps: int

    def to_json(self) -> str:
        """A list of events as ONNX Runtime writes it, readable by ``--costs`` and by chrome://tracing."""
        return json.dumps(list(self.events), indent=0) + "\n"

    def to_text(self, rows: int = 10) -> str:
        """The op types that take the most time, as ONNX Runtime executes the model by default."""
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
"""Graph optimisation levels profiled: a plan needs times of the file's own ops, a prediction those of fused ones."""


def profile(
    path: str | Path, dims: Mapping[str, int] | None = None, runs: int = 5, steps: int = 5, threads: int = 0
) -> Profile:
    """Profile a model in fresh processes.

    Parameters
    ----------
    path : path
        An ONNX file.
    dims : mapping, optional
        Sizes of symbolic dimensions.
    runs, steps : int
        Processes per optimisation level, and steps in each after one to warm up.
    threads : int
        Intra-op threads, 0 for ONNX Runtime's default.

    Raises
    ------
    UsageError
        `runs` or `steps` is not positive.
    VerificationError
        The model does not run.
    """
    if runs < 1 or steps < 1:
        raise UsageError("a profile needs at least one run of one step")
    events: list[Event] = []
    for level in LEVELS:
        seen: dict[str, list[Event]] = defaultdict(list)
        scratch: dict[str, int] = {}
        for _ in range(runs):
            found, statistics_text = runtime.profile(Path(path), level, steps=steps, dims=dims, threads=threads)
            for key, all_steps in _by_node(found).items():
                seen[key] += all_steps[-steps:]
            scratch |= _workspace(statistics_text)
        now = 0.0
        for same in seen.values():
            name = same[0]["name"].removesuffix(_KERNEL)
            event = _median(same, level, now, scratch.get(name, 0))
            now += event["dur"]
            events.append(event)
    return Profile(tuple(events), runs, steps)


_KERNEL = "_kernel_time"


def _by_node(events: list[Event]) -> dict[str, list[Event]]:
    """Kernel events by node, in the order nodes ran; a node's events in the order of steps."""
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)]
    nodes: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        nodes[f"{event['name']}#{event['args'].get('node_index')}"].append(event)
    return nodes


def _median(same: list[Event], level: str, start: float, workspace: int) -> Event:
    """One event for a node: the median of its times, and what ``--costs`` looks it up by."""
    arguments = same[0]["args"]
    return {
        "cat": "Node", "ph": "X", "pid": level, "tid": 0, "name": same[0]["name"], "ts": round(start, 3),
        "dur": statistics.median(e["dur"] for e in same),
        "args": {
            "op_name": arguments["op_name"], "input_type_shape": arguments["input_type_shape"],
            "output_size": arguments.get("output_size", "0"), "workspace_bytes": workspace,
        },
    }  # fmt: skip


def _workspace(text: str) -> dict[str, int]:
    """Temporary allocations in bytes by node name, from ONNX Runtime's node memory statistics."""
    rows = csv.DictReader(text.splitlines())
    return {row["#name"].rpartition("_")[0]: int(row["total_temp_allocations"]) for row in rows}
