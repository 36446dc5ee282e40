"""One file on the fake device, in a process of the GPU environment: JSON in, JSON out.

In: ``libraries`` (from build.build), ``path``, ``level``, and what may be set on a device (``settings``).
``arena``, if there: provider options in place of those under which every tensor is an allocation of its own.
Out: ``provider`` of the session, and of the second of two steps with inputs and outputs on the device: ``peak`` bytes
of what the step allocates, inputs and outputs included, ``waits``, ``copies`` and ``order``: per node its name, op and
execution provider.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.fake_cuda.device import Device

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


def main() -> None:
    """Run what stdin asks for."""
    job = json.load(sys.stdin)
    device = Device(Path(job["libraries"]))
    device.ort.set_default_logger_severity(4)
    for name, value in job.get("settings", {}).items():
        device.set(name, value)
    print(json.dumps(_step(device, job) | {"order": _order(device, job)}))


def _session(device: Device, job: dict[str, Any], **more: object) -> Any:
    options = device.ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    options.graph_optimization_level = getattr(device.ort.GraphOptimizationLevel, job["level"])
    for name, value in more.items():
        setattr(options, name, value)
    how = job.get("arena", device.exact())
    session = device.ort.InferenceSession(job["path"], options, providers=[("CUDAExecutionProvider", how)])
    session.disable_fallback()  # or it would run on the CPU without a word
    return session


def _feeds(device: Device, session: Any) -> tuple[dict[str, Any], int]:
    """Inputs on the device, and their bytes."""
    kinds = {"float": "float32", "double": "float64", "bfloat16": "uint16"}
    feeds, nbytes = {}, 0
    for put in session.get_inputs():
        kind = put.type[7:-1]
        array = np.zeros([d if isinstance(d, int) else 1 for d in put.shape], kinds.get(kind, kind))
        nbytes += array.nbytes
        make = device.ort.OrtValue
        feeds[put.name] = (
            make.ortvalue_from_shape_and_type(array.shape, _BFLOAT16, "cuda", 0)  # numpy has no bfloat16
            if kind == "bfloat16"
            else make.ortvalue_from_numpy(array, "cuda", 0)
        )
    return feeds, nbytes


def _step(device: Device, job: dict[str, Any]) -> dict[str, object]:
    session = _session(device, job)
    binding = session.io_binding()
    weights = device.read("live")
    inputs, fed = _feeds(device, session)
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    opened = device.read("live")
    for _ in range(2):
        binding.clear_binding_outputs()
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda")
        device.reset()
        before = device.read("live")
        session.run_with_iobinding(binding)
    return {
        "provider": session.get_providers()[0],
        "weights": weights,
        "peak": device.read("peak") - before + fed,
        "held": device.read("live") - opened + weights + fed,
        "waits": device.read("waits"),
        "copies": device.copies(),
    }


def _order(device: Device, job: dict[str, Any]) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        session = _session(device, job, enable_profiling=True, profile_file_prefix=f"{folder}/profile")
        session.run_with_ort_values([output.name for output in session.get_outputs()], _feeds(device, session)[0])
        events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    nodes.sort(key=lambda event: event["ts"])
    suffix = len("_kernel_time")
    return [(e["name"][:-suffix], e["args"]["op_name"], e["args"]["provider"]) for e in nodes]


if __name__ == "__main__":
    main()
