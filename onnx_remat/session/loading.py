"""Load the lean graph of a step into ONNX Runtime; nothing here imports onnx, which takes memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from onnx_remat import messages
from onnx_remat.errors import ModelError
from onnx_remat.fuse import shim
from onnx_remat.session import kernel_file, scratch


def load(
    path: Path, providers: Sequence[Any], threads: int = 0, pool: int = 0, save_to: Path | None = None, state: int = 0
) -> Any:
    """Open ONNX Runtime's session on a lean graph: no optimisations, nodes in the file's order.

    Fused nodes find their kernels in the file that `kernel_file.path_of` names, if it exists.

    Parameters
    ----------
    path : Path
    providers : sequence
        Execution providers, as ``onnxruntime.InferenceSession`` takes them.
    threads : int
        Intra-op threads; 0 for ONNX Runtime's default.
    pool : int
        Bytes of the pool for scratch memory, see `scratch`; 0 for none.
    save_to : Path, optional
        Where to write the graph as ONNX Runtime loaded it.
    state : int
        Address of the step's state on the host.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Every bound value is an output: ONNX Runtime would duplicate each DequantizeLinear that has a reader.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if pool:
        scratch.use_pool(options, pool)
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_prepacking", "1")  # it is not to run
    kernels = kernel_file.path_of(path)
    if kernels.exists():
        shim.register(options)
    try:
        with kernel_file.offered(kernels, save_to is None, state) if kernels.exists() else nullcontext():
            return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"onnxruntime cannot load the step: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return ONNX Runtime's error in one line, without the middle of a long one: the cause is at its end."""
    line = messages.first_line(error)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


_LONGEST = 300


def load_and_save(path: str, target: str, providers: Sequence[str]) -> tuple[None, bytes]:
    """Load a lean graph and save it as loaded; runs in the worker process for `lean_graph.as_loaded`."""
    from onnx_remat.ort import libraries, runtime

    if providers[0] not in runtime.HOST:
        libraries.load_cuda()
    load(Path(path), providers, save_to=Path(target))
    return None, b""
