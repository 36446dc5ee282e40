"""``python -m onnx_remat`` is the command ``onnx-remat``."""

from onnx_remat.app.cli import main

raise SystemExit(main())
