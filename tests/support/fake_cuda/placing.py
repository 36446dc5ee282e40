"""Many small files on the fake device, in a process of the GPU environment: JSON in, JSON out.

In: ``libraries`` (from build.build) and ``paths`` of models in which one node is named ``tested``; those whose other
nodes are not to be run end in ``.place.onnx``.
Out, per path: ``error``, or the ``nodes`` of the file as ONNX Runtime saves it (op, name, inputs, outputs: where a
value crosses between host and device lies a Memcpy) and, where it is run, the ``allocated`` bytes of the device, one
entry per allocation of a second step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.support.fake_cuda.device import Device

NO_RUN = ".place.onnx"


def main() -> None:
    """Do what stdin asks for."""
    job = json.load(sys.stdin)
    device = Device(Path(job["libraries"]))
    device.ort.set_default_logger_severity(4)
    with tempfile.TemporaryDirectory() as folder:
        found = [_one(device, path, f"{folder}/{i}.onnx") for i, path in enumerate(job["paths"])]
    print(json.dumps(found))


def _one(device: Device, path: str, saved: str) -> dict[str, Any]:
    options = device.ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    options.graph_optimization_level = device.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = saved
    try:
        session = device.ort.InferenceSession(path, options, providers=[("CUDAExecutionProvider", device.exact())])
        session.disable_fallback()
        assert session.get_providers()[0] == "CUDAExecutionProvider"
        nodes = onnx.load(saved).graph.node
        answer = {"nodes": [(n.op_type, n.name, list(n.input), list(n.output)) for n in nodes]}
        return answer if path.endswith(NO_RUN) else answer | {"allocated": _run(device, session, path)}
    except Exception as error:
        return {"error": str(error)[:300]}


def _run(device: Device, session: Any, path: str) -> list[int]:
    fed = {
        value.name: np.ones([d.dim_value for d in value.type.tensor_type.shape.dim],
                            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in onnx.load(path).graph.input
    }  # fmt: skip
    binding = session.io_binding()
    for name, array in fed.items():
        binding.bind_ortvalue_input(name, device.ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")
    for _ in range(2):
        device.reset()
        session.run_with_iobinding(binding)
    return [event.bytes for event in device.events() if event.kind == "M"]


if __name__ == "__main__":
    main()
