"""`python -m onnx_remat.converters.autodiff FORWARD OUT`: append loss, backward and optimizer to a forward model."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx

from onnx_remat import files
from onnx_remat.app.flags import Parser, guarded
from onnx_remat.app.streams import complain, say
from onnx_remat.errors import MissingExtraError, UsageError
from onnx_remat.ir import model_io
from onnx_remat.ir.metadata import entries

from ..extras import require

_PROGRAM = "python -m onnx_remat.converters.autodiff"

try:
    require("convert", "onnx_ir", "onnxruntime")
except MissingExtraError as error:
    complain(f"{_PROGRAM}: error: {error}")
    sys.exit(error.exit_code)

from .. import optimizers
from .build import add_backward, initial_inputs
from .loss import NAMED

_FLAGS = {"example_inputs": "--example", "check": "--no-check", "wrt": "--wrt"}
"""Flag of each argument of `add_backward`, except those that planning has too."""

Factory: TypeAlias = Callable[..., optimizers.Optimizer]
OPTIMIZERS: dict[str, Factory] = {"sgd": optimizers.SGD, "adam": optimizers.Adam, "adamw": optimizers.AdamW}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    return guarded(_PROGRAM, _run, sys.argv[1:] if arguments is None else arguments, _FLAGS)


def _run(arguments: Sequence[str]) -> int:
    parser = Parser(prog=_PROGRAM, description=__doc__)
    parser.add_argument("forward", type=Path, help="a forward model in standard ONNX ops")
    parser.add_argument("out", type=Path, help="where to write the training step")
    parser.add_argument("--loss", help=f"{', '.join(NAMED)}, or the output that is the loss")
    parser.add_argument("--wrt", action="append", metavar="NAME", help="a parameter or pattern (repeat)")
    parser.add_argument("--frozen", action="append", default=[], metavar="NAME", help="not a parameter (repeat)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="output new parameters, not gradients")
    parser.add_argument(
        "--lr", type=_rate, default=1e-3, help="learning rate: a number, or the name of an input that gives it"
    )
    parser.add_argument("--training", action="store_true", help="BatchNormalization and Dropout in training mode")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="fix a symbolic size (repeat)")
    parser.add_argument("--values", type=Path, metavar="NPZ", help="write the step's first parameters and state here")
    parser.add_argument(
        "--example", type=Path, metavar="NPZ", help="inputs for the check, by name; others are generated"
    )
    parser.add_argument("--no-check", action="store_true", help="do not compare gradients with finite differences")
    parser.add_argument("--force", action="store_true", help="overwrite OUT and NPZ")
    given = parser.parse_args(arguments)
    optimizer = OPTIMIZERS[given.optimizer](lr=given.lr) if given.optimizer else None
    example = _arrays(given.example) if given.example else None
    target = files.check_target(given.out, given.forward, given.force)
    values = _values(given.values, target, given.force) if given.values else None
    step = add_backward(
        given.forward, given.loss, given.wrt, optimizer, training=given.training, frozen=given.frozen,
        dims=dict(_size(text) for text in given.dim), check=not given.no_check, example_inputs=example,
    )  # fmt: skip
    with files.together():
        if values is not None:
            with files.replacing(values, given.force) as partial:
                _store(partial, initial_inputs(given.forward, step, optimizer))
        model_io.save(step, target, None, given.force)
    if given.training and not _has_modes(model_io.load(given.forward).model):
        say(
            "--training changed nothing: the file has no BatchNormalization or Dropout; set the exporter to training"
            " mode, or it removes them"
        )
    parameters = sum(value.name.startswith(("grad.", "new.")) for value in step.graph.output)
    say(f"{given.out}: {len(step.graph.node)} nodes, {parameters} outputs besides the loss")
    ends = [value.name for value in (*step.graph.input, *step.graph.output)]
    state = {name.removeprefix(start) for name in ends for start in ("grad.", "new.") if name.startswith(start)}
    say(f"a batch is {', '.join(value.name for value in step.graph.input if value.name not in state)}")
    known = entries(step)
    if "check.differences" in known:
        say(f"gradients agree with differences of the loss, in float64, to {known['check.differences']}")
    if known.get("check.untold", "0") != "0":
        say(f"{known['check.untold']} of them are too small, on the check's inputs, for an error to show")
    say(f"\nwrote {', '.join(map(str, filter(None, (given.out, values))))}")
    return 0


def _values(path: Path, step: Path, force: bool) -> Path:
    """Return where numpy.savez writes to a path: it appends its suffix."""
    written = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    files.check_uses([], [files.Use(step, "OUT"), files.Use(written, "--values")])
    return files.check_target(written, None, force)


def _store(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as numpy.savez does, which takes names as keywords, and so none of its own, such as `file`."""
    with zipfile.ZipFile(path, "w") as members:
        for name, array in arrays.items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _has_modes(model: onnx.ModelProto) -> bool:
    """Return whether a forward model has ops that training mode changes."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(node.op_type in ("BatchNormalization", "Dropout") for node in nodes)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"--example {path} is not a readable .npz file: save the inputs with numpy.savez") from error


def _rate(text: str) -> optimizers.Rate:
    try:
        return float(text)
    except ValueError:
        return text


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal():
        raise UsageError(f"--dim {text!r} is not a size: use NAME=SIZE")
    return name, int(size)


if __name__ == "__main__":
    sys.exit(main())
