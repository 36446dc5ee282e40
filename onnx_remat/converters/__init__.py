"""In a checkout, `onnx_remat.converters` is the folder `converters` at its top; a wheel has that folder right here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__path__ = [str(Path(__file__).resolve().parents[2] / "converters")]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Type checkers know the folder as `converters`."""
