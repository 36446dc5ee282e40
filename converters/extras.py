"""Check that the packages of a converter are installed, before any of them is imported."""

from __future__ import annotations

from importlib.util import find_spec

from onnx_remat.errors import MissingExtraError


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtraError, which names the extra to install, if one of the packages is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f"{package} is not installed: pip install 'onnx-remat[{extra}]'", name=package)
