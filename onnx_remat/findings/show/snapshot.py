"""Export of a step in the format of PyTorch's CUDA memory snapshots, for pytorch.org/memory_viz.

Device 0 is the original, device 1 the rewritten model. Every buffer is a separate segment at a unique address, as ONNX
Runtime allocates without its arena. Frames name the value, its node and its phase.

References
----------
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html: the entries of a snapshot.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import files
from onnx_remat.findings.show import trace

if TYPE_CHECKING:
    from onnx_remat.rewrite.pipeline import Result

_ALIGNMENT = 512


def write(result: Result, path: Path) -> None:
    """Write the snapshot of a result."""
    files.write_bytes(pickle.dumps(snapshot(trace.before(result), trace.after(result))), path)


def snapshot(*traces: trace.Trace) -> dict[str, Any]:
    """Return a snapshot with one device per trace."""
    devices = [list(_events(each)) for each in traces]
    return {
        "segments": [s for device, events in enumerate(devices) for s in _left_over(device, events)],
        "device_traces": devices,
        "allocator_settings": {},
    }


def _events(step: trace.Trace) -> Iterator[dict[str, Any]]:
    """Yield allocations and frees in order, each buffer in a separate segment."""
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for i, buffer in enumerate(step.buffers):
        starting.setdefault(buffer.start, []).append(i)
        ending.setdefault(buffer.end, []).append(i)
    address = _ALIGNMENT
    where: dict[int, int] = {}
    last = len(step.steps) - 1

    def event(action: str, at: int, size: int, number: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
        return {"action": action, "addr": at, "size": size, "stream": 0, "time_us": number, "frames": frames}

    def allocate(size: int, number: int, frames: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        nonlocal address
        yield event("segment_alloc", address, size, number, frames)
        yield event("alloc", address, size, number, frames)
        address += -(-size // _ALIGNMENT) * _ALIGNMENT

    def free(at: int, size: int, number: int, frames: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for action in ("free_requested", "free_completed", "segment_free"):
            yield event(action, at, size, number, frames)

    for name, kind, size in step.residents:
        if size:
            yield from allocate(size, 0, [{"name": name, "filename": kind, "line": 0}])
    for number, op in enumerate(step.steps):
        about = {"name": op.label, "filename": f"{op.section} {op.op_type}", "line": number}
        for i in starting.get(number, ()):
            buffer = step.buffers[i]
            where[i] = address
            if buffer.bytes:
                yield from allocate(buffer.bytes, number, [_frame(buffer.value, number), about])
        if op.workspace:
            at, frames = address, [_frame("workspace", number), about]
            yield from allocate(op.workspace, number, frames)
            yield from free(at, op.workspace, number, frames)
        for i in ending.get(number, ()) if number < last else ():
            if size := step.buffers[i].bytes:
                yield from free(where[i], size, number, [_frame(step.buffers[i].value, number), about])


def _frame(value: str, number: int) -> dict[str, Any]:
    return {"name": value, "filename": "value", "line": number}


def _left_over(device: int, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the segments that are still allocated after the last event."""
    allocated: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["action"] == "alloc":
            allocated[event["addr"]] = event
        elif event["action"] == "free_completed":
            del allocated[event["addr"]]
    for address, event in allocated.items():
        size = event["size"]
        block = {
            "address": address, "size": size, "requested_size": size, "state": "active_allocated",
            "frames": event["frames"],
        }  # fmt: skip
        yield {
            "device": device, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
            "requested_size": size, "stream": 0, "segment_type": "large", "is_expandable": False, "frames": [],
            "blocks": [block],
        }  # fmt: skip
