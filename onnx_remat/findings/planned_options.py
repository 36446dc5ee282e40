"""The options of a file's plan, read from the file, to simulate it as it was planned."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnx_remat.ir.dims import check_dims, with_planned
from onnx_remat.options import Options
from onnx_remat.write.decided import Planned


def options_of(
    model: onnx.ModelProto, plan: Planned, dims: Mapping[str, int] | None = None, provider: str | None = None
) -> Options:
    """Return the options with which a file was planned; `dims` and `provider` replace those of the plan.

    Raises
    ------
    UsageError
        The model has no symbolic dimension of a name in `dims`.
    """
    provider = provider or plan.provider
    workspace = plan.workspace if provider != "cpu" else None
    sizes = with_planned(model, dims or {})
    if dims:
        check_dims(model, sizes)
    return Options(provider=provider, dims=sizes, cudnn_workspace=workspace, run_by=plan.run_by, fuse=plan.fuse)
