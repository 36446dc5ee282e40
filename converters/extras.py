"""What a converter says where its framework is missing."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error about a package that the installation extra `extra` brings, with how to install that.

    >>> missing(ModuleNotFoundError(name="torch"), "torch")
    ModuleNotFoundError("torch is not installed, this converter needs an extra: pip install 'onnx-remat[torch]'")
    """
    why = f"{error.name} is not installed, this converter needs an extra: pip install 'onnx-remat[{extra}]'"
    return ModuleNotFoundError(why, name=error.name, path=error.path)
