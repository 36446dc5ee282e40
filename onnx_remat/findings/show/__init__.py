"""Plots of a result: the memory of a step before and after, and the curve of peak against extra compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_remat.errors import UsageError

if TYPE_CHECKING:
    from onnx_remat.findings.sweep import Curve
    from onnx_remat.rewrite.pipeline import Result

IMAGES = (".png", ".svg", ".pdf")
KINDS = (*IMAGES, ".html", ".pickle")
"""Suffixes that `draw` supports: images, an interactive page, a snapshot for pytorch.org/memory_viz."""


def check(path: str, kinds: tuple[str, ...] = KINDS) -> None:
    """Raise before any work is done if `path` has an unknown suffix, or is an image and matplotlib is missing."""
    suffix = Path(path).suffix.lower()
    if suffix not in kinds:
        raise UsageError(f"cannot draw {path!r}: the name must end in {', '.join(kinds[:-1])} or {kinds[-1]}")
    if suffix in IMAGES:
        from onnx_remat.findings.show.figure import import_matplotlib

        import_matplotlib()


def draw(result: Result, path: str) -> None:
    """Draw the memory of a step before and after, in the format of the suffix of `path` (see `KINDS`).

    Raises
    ------
    UsageError
        The suffix is unknown.
    OnnxRematError
        `path` is an image and matplotlib is not installed.
    """
    check(path)
    _writer(Path(path).suffix.lower())(result, Path(path))


def _writer(suffix: str) -> Callable[[Result, Path], None]:
    if suffix == ".html":
        from onnx_remat.findings.show import page

        return page.write
    if suffix == ".pickle":
        from onnx_remat.findings.show import snapshot

        return snapshot.write
    from onnx_remat.findings.show import figure

    return figure.write


def draw_curve(curve: Curve, path: str) -> None:
    """Draw a sweep's curve as an image (see `IMAGES`)."""
    check(path, IMAGES)
    from onnx_remat.findings.show import figure

    figure.pareto(curve, Path(path))
