"""ONNX's own backend tests, as the installed onnx package has them, with what stock ONNX Runtime makes of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnx_remat.session.arrays import BY_BITS
from tests.support.outcomes import LEVELS, Outcome, rewrite_outcome, session_outcome, stock

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")
BUDGETS = ("100%", "90%")


@dataclass(frozen=True, slots=True)
class Case:
    """A model with one or several sets of inputs and outputs.

    Attributes
    ----------
    name : str
        Its folder among ONNX's tests, and its name.
    model : ModelProto
    sets : tuple of (list, list)
        Inputs and outputs, in the model's order.
    rtol, atol : float
        How far outputs may lie from these.
    """

    name: str
    model: onnx.ModelProto
    sets: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float = 1e-3
    atol: float = 1e-7


def cases() -> Iterator[Case]:
    """All of them, always in the same order."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        nodes = load_model_tests(kind="node")
    for test in sorted(nodes, key=lambda test: test.name):
        yield Case(f"node/{test.name}", test.model, tuple(test.data_sets), test.rtol, test.atol)
    for kind in FOLDERS:
        for test in sorted(load_model_tests(kind=kind), key=lambda test: test.name):
            yield _in_folder(f"{kind}/{test.name}", Path(test.model_dir), test.rtol, test.atol)
    for path in sorted((DATA / "light").glob("*.onnx")):
        yield _light(path)


def _in_folder(name: str, folder: Path, rtol: float, atol: float) -> Case:
    model = onnx.load(folder / "model.onnx")
    sets = []
    for each in sorted(folder.glob("test_data_set_*")):
        sides = (("input", model.graph.input), ("output", model.graph.output))
        sets.append(tuple(
            [_stored(each / f"{side}_{i}.pb", value.type) for i, value in enumerate(values)
             if (each / f"{side}_{i}.pb").exists()]
            for side, values in sides
        ))  # fmt: skip
    return Case(name, model, tuple(sets), rtol, atol)


def _stored(path: Path, kind: onnx.TypeProto) -> Any:
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))
    return onnx.TensorProto.FromString(path.read_bytes())


def _light(path: Path) -> Case:
    """A network whose weights are all alike; its inputs are made as ONNX's runner makes them."""
    model = onnx.load(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    feeds = []
    for value in model.graph.input:
        if value.name not in stored:
            shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
            feeds.append(_ramp(value.type.tensor_type.elem_type, shape))
    made = [onnx.TensorProto.FromString(p.read_bytes()) for p in sorted(path.parent.glob(f"{path.stem}_output_*.pb"))]
    return Case(f"light/{path.stem}", model, ((feeds, made),))


def _ramp(kind: int, shape: list[int]) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count) / count).reshape(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))


def _plain(value: Any) -> Any:
    """A value as `stock` takes and gives it."""
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype) if not value.dtype.hasobject else TensorProto.STRING
        return value.view(BY_BITS[kind]) if kind in BY_BITS else value
    return [_plain(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Usable:
    """A case that stock ONNX Runtime passes: feeds by name, and what it makes of them by level, in every run."""

    case: Case
    feeds: dict[str, Any]
    expected: dict[str, list[dict[str, Any]]]


def usable(case: Case) -> Usable | str:
    """The case as far as stock ONNX Runtime passes it at its defaults, or why it does not."""
    inputs, outputs = ([_plain(value) for value in side] for side in case.sets[0])
    stored = {tensor.name for tensor in case.model.graph.initializer}
    names = [value.name for value in case.model.graph.input]
    if len(inputs) < len(names):
        names = [name for name in names if name not in stored]
    feeds = {name: value for name, value in zip(names, inputs, strict=False) if value is not None}
    try:
        expected = {level: stock(case.model, level, feeds) for level in LEVELS}
    except Exception as error:
        return str(error).partition("\n")[0]
    made = expected["all"][0]  # the runtime's default
    for name, value in zip(made, outputs, strict=False):
        if not _near(made[name], value, case):
            return f"output {name} is not the expected one"
    return Usable(case, feeds, expected)


def _near(made: Any, wanted: Any, case: Case) -> bool:
    if isinstance(wanted, list):
        return isinstance(made, list) and len(made) == len(wanted) and all(
            _near(a, b, case) for a, b in zip(made, wanted, strict=True)
        )  # fmt: skip
    if wanted is None or made is None:
        return wanted is made
    made, wanted = np.asarray(made), np.asarray(wanted)
    if made.shape != wanted.shape:
        return False
    if made.dtype.kind not in "fc":
        return bool((made == wanted).all()) if made.dtype.kind not in "u" else _close(made, wanted, 0, 1)
    return made.dtype == wanted.dtype and _close(made, wanted, case.rtol, case.atol)


def _close(made: np.ndarray, wanted: np.ndarray, rtol: float, atol: float) -> bool:
    return np.allclose(made.astype("d"), wanted.astype("d"), rtol=rtol, atol=atol, equal_nan=True)


def outcomes(found: Usable) -> dict[str, Outcome]:
    """What becomes of a case, by column of the table."""
    model = found.case.model
    rows = {f"rewrite {budget}": rewrite_outcome(model, budget, found.feeds, found.expected) for budget in BUDGETS}
    return rows | {
        f"Session {level}": session_outcome(model, level, found.feeds, found.expected[level]) for level in LEVELS
    }


@functools.cache
def _all() -> tuple[Case, ...]:
    return tuple(cases())


def names() -> tuple[str, ...]:
    """Of all cases, in their order."""
    return tuple(case.name for case in _all())


def try_case(number: int) -> str | dict[str, Outcome]:
    """What becomes of the case of this number, or why stock ONNX Runtime does not pass it."""
    found = usable(_all()[number])
    return found if isinstance(found, str) else outcomes(found)
