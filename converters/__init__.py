"""Converters: whole training steps as ONNX graphs. Installed as `onnx_remat.converters`."""
