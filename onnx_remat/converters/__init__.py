"""In a checkout, `onnx_remat.converters` is the folder `converters` at its top; a wheel has that folder right here."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "converters")]
