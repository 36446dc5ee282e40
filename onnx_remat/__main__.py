"""``python -m onnx_remat`` is the command ``onnx-remat``."""

from onnx_remat.cli import main

raise SystemExit(main())
