"""What becomes of a model that is rewritten, or opened by a `Session`, against stock ONNX Runtime.

The slab of a `Session` holds values of some kilobytes and more; small models would have none. `everything_bound` makes
it hold every value, and plans in this process, which takes a tenth of the time of one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

import onnx_remat
from onnx_remat import errors
from onnx_remat.options import PlanningOptions
from onnx_remat.session import plan_session
from onnx_remat.session import session as sessions
from onnx_remat.session.arrays import BY_BITS
from tests.support.graphs import session_of

LEVELS = ("disable", "basic", "all")
RIGHT, TOO_LOW, REFUSED, WRONG, FAILED, RAISED = "right", "no plan", "refused", "wrong", "failed", "raised"
KINDS = (RIGHT, TOO_LOW, REFUSED, WRONG, FAILED, RAISED)
"""Right; no plan within the budget; refused by a message; other numbers; onnxruntime fails to load or run what was
made; any other exception."""

_PLANNING: PlanningOptions = {"run_by": "session", "effort": 0.05, "verify": "check"}

RUNS = 2
"""Of one session, so that what a run leaves behind is seen."""

ROUNDING, _HALF_ROUNDING = 1e-4, 1e-2
"""How far a number may lie from another by rounding: a share of it, or of the largest of its tensor (at least 0.1)."""

Feeds = Mapping[str, Any]
Expected = Sequence[Mapping[str, Any]]
Outliers = float | Mapping[str, float]
"""Share of the elements of an output that may differ: of all outputs, or of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One of `KINDS`, and what was said or what differs."""

    kind: str
    message: str = ""

    @property
    def reason(self) -> str:
        """The message without names and numbers, so that equal reasons are equal."""
        return re.sub(r"-?\d+", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "'_'", self.message))


@contextlib.contextmanager
def everything_bound() -> Iterator[None]:
    """Sessions that are opened within the block plan in this process, and have every value in their slab."""

    def in_this_process(path: Path, target: Path, request: plan_session.SessionRequest) -> plan_session.SessionPlan:
        return plan_session.plan(path, target, replace(request, least=1))

    with mock.patch.object(sessions, "plan_in_child", in_this_process):
        yield


def stock(model: onnx.ModelProto | Path, level: str, feeds: Feeds, runs: int = RUNS) -> list[dict[str, Any]]:
    """What stock ONNX Runtime makes of a model in each of some runs, by output: ops that draw go on drawing.

    Feeds and outputs are as it takes and gives them; tensors of types that numpy lacks are arrays of their bits.
    """
    session = session_of(model, level)
    kinds = {value.name: _element_type(value.type) for value in (*session.get_inputs(), *session.get_outputs())}
    names = [value.name for value in session.get_outputs()]
    if not any(kind in BY_BITS for kind in kinds.values()):
        return [dict(zip(names, session.run(None, dict(feeds)), strict=True)) for _ in range(runs)]
    of_type = ort.OrtValue.ortvalue_from_numpy_with_onnx_type
    given = {name: of_type(np.ascontiguousarray(value), kinds[name]) for name, value in feeds.items()}
    made = [dict(zip(names, session.run_with_ort_values(names, given), strict=True)) for _ in range(runs)]
    return [{n: _bits(value) if kinds[n] in BY_BITS else value.numpy() for n, value in each.items()} for each in made]


def _element_type(text: str) -> int:
    """
    >>> _element_type("tensor(bfloat16)"), _element_type("seq(tensor(float))")
    (16, 0)
    """
    found = re.fullmatch(r"tensor\((\w+)\)", text)
    return dict(TensorProto.DataType.items()).get(found[1].upper(), 0) if found else 0


def _bits(value: Any) -> np.ndarray:
    """The elements of a tensor of a type that numpy lacks, as unsigned integers."""
    raw = (ctypes.c_uint8 * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    return np.frombuffer(raw, np.dtype(BY_BITS[value.element_type()])).reshape(value.shape()).copy()


def session_outcome(
    model: onnx.ModelProto | Path,
    level: str,
    feeds: Feeds,
    expected: Expected,
    outliers: Outliers = 0.0,
    **options: Any,
) -> Outcome:
    """Open a model by `Session` with everything bound, run it as often as `stock` did, and compare.

    Parameters
    ----------
    model : ModelProto or Path
    level : str
    feeds : mapping
    expected : sequence of mappings
        What `stock` makes at this level.
    outliers : float
        Share of the elements of an output that may differ where there are optimisations: see `difference`.
    **options
        Of `Session`.
    """
    made, changed = [], []
    try:
        with everything_bound(), onnx_remat.Session(model, level=level, threads=1, **options) as session:
            for _ in expected:
                given = {
                    name: value.copy() if isinstance(value, np.ndarray) else value for name, value in feeds.items()
                }
                made.append({name: np.array(value) for name, value in session.run(given).items()})
                plain = set(feeds) - set(session.donated.values())
                changed += [name for name in plain if difference({name: given[name]}, {name: feeds[name]})]
    except errors.OnnxRematError as error:
        failed = re.match("onnxruntime (failed during|cannot load) the step", str(error))
        return Outcome(FAILED if failed else REFUSED, str(error))
    except Exception as error:
        return Outcome(RAISED, f"{type(error).__name__}: {error}".partition("\n")[0])
    for run, (each, wanted) in enumerate(zip(made, expected, strict=True)):
        if found := difference(each, wanted, 0.0 if level == "disable" else ROUNDING, outliers):
            return Outcome(WRONG, f"run {run + 1}: {found}")
    return Outcome(WRONG, f"input {min(changed)} was written over") if changed else Outcome(RIGHT)


def rewrite_outcome(
    model: onnx.ModelProto | Path,
    budget: str,
    feeds: Feeds,
    expected: Mapping[str, Expected],
    outliers: float = 0.0,
    or_lowest: bool = False,
    rounding: float = ROUNDING,
) -> Outcome:
    """Rewrite a model to a budget, run the result at every level of `expected`, and compare.

    Results are to be equal to the last bit with optimisations off, unless the report says that they are not.

    Parameters
    ----------
    model : ModelProto or Path
    budget : str
    feeds : mapping
    expected : mapping
        What `stock` makes, by level.
    outliers : float
        See `difference`.
    or_lowest : bool
        Where there is no plan within the budget, rewrite to one near the lowest that was found.
    rounding : float
        How far numbers may lie apart where there are optimisations: see `difference`.
    """
    try:
        result = _rewritten(model, budget, or_lowest)
    except errors.BudgetInfeasibleError as error:
        return Outcome(TOO_LOW, str(error))
    except errors.OnnxRematError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(RAISED, f"{type(error).__name__}: {error}".partition("\n")[0])
    least = _HALF_ROUNDING if any("not to the last bit" in note for note in result.report.notes) else 0.0
    with tempfile.TemporaryDirectory() as folder:
        written: onnx.ModelProto | Path = result.model
        if result.folder is not None:
            written = Path(folder) / "result.onnx"
            result.save(written)
        for level, wanted in expected.items():
            try:
                made = stock(written, level, feeds)
            except Exception as error:
                return Outcome(FAILED, f"{level}: {error}".partition("\n")[0])
            for run, pair in enumerate(zip(made, wanted, strict=True)):
                near = least if level == "disable" else max(least, rounding)
                found = difference(*pair, near, outliers)
                if found and level != "disable":  # a fusion that rounds to 8 bits, not made in this file
                    found = difference(pair[0], expected["disable"][run], near, outliers)
                if found:
                    return Outcome(WRONG, f"{level}, run {run + 1}: {found}")
    return Outcome(RIGHT)


def _rewritten(model: onnx.ModelProto | Path, budget: str, or_lowest: bool) -> onnx_remat.Result:
    try:
        return onnx_remat.rewrite_model(model, budget, **_PLANNING)
    except errors.BudgetInfeasibleError as error:
        if not or_lowest:
            raise
        return onnx_remat.rewrite_model(model, int(1.05 * error.best_peak_bytes), **_PLANNING)


def difference(
    made: Mapping[str, Any], wanted: Mapping[str, Any], rounding: float = 0.0, outliers: Outliers = 0.0
) -> str:
    """How two sets of outputs differ; nothing where they do not.

    To the last bit, or by more than `rounding` in more than a share of the elements: where a graph rounds to 8 bits, or
    asks which of two numbers is greater, the last bit of one may decide.
    """
    if list(made) != list(wanted):
        return f"outputs are {', '.join(made)}, not {', '.join(wanted)}"
    for name, expected in wanted.items():
        share = outliers if isinstance(outliers, float) else outliers[name]
        if found := _differs(made[name], expected, rounding, share):
            return f"output {name} {found}"
    return ""


def unsettled(model: onnx.ModelProto | Path, level: str, feeds: Feeds, expected: Mapping[str, Any]) -> dict[str, float]:
    """Share of each output that `stock` itself makes otherwise when inputs change by a rounding error.

    A graph may ask whether a number is greater than what is equal to it but for rounding: tanh(atanh(y)) > y.
    """
    draws = np.random.default_rng(0)
    moved = {
        name: np.nextafter(value, np.where(draws.random(value.shape) < 0.5, -np.inf, np.inf).astype(value.dtype))
        if isinstance(value, np.ndarray) and value.dtype.kind == "f"
        else value
        for name, value in feeds.items()
    }
    (made,) = stock(model, level, moved, runs=1)
    shares = dict.fromkeys(expected, 0.0)
    for name, wanted in expected.items():
        if isinstance(wanted, np.ndarray) and wanted.size and wanted.dtype.kind in "bf":
            near = {"rtol": ROUNDING, "atol": ROUNDING} if wanted.dtype.kind == "f" else {"rtol": 0, "atol": 0}
            shares[name] = float((~np.isclose(made[name], wanted, equal_nan=True, **near)).mean())
    return shares


def _differs(made: Any, wanted: Any, share: float, outliers: float) -> str:
    if isinstance(wanted, list):
        if not isinstance(made, list) or len(made) != len(wanted):
            return "is another list"
        return next(filter(None, (_differs(a, b, share, outliers) for a, b in zip(made, wanted, strict=True))), "")
    if not isinstance(wanted, np.ndarray):
        return "" if made == wanted else f"is {made!r}, not {wanted!r}"
    if made.dtype != wanted.dtype or made.shape != wanted.shape:
        return f"is {made.dtype}{list(made.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.hasobject:
        return "" if (made == wanted).all() else "differs"
    if made.tobytes() == wanted.tobytes():
        return ""
    share = max(share, _HALF_ROUNDING if wanted.dtype == np.float16 and share else 0)
    if not share or wanted.dtype.kind not in "fc":
        count = int((made != wanted).sum())  # NaN counts, but is not alone: the bits differ
        allowed = int(outliers * wanted.size) if share else 0
        return "" if 0 < count <= allowed else f"differs in {count} of {wanted.size} elements"
    scale = float(np.abs(wanted).max(initial=0.1, where=np.isfinite(wanted)))
    far = ~np.isclose(made, wanted, rtol=share, atol=share * scale, equal_nan=True)
    if far.sum() <= outliers * wanted.size:
        return ""
    with np.errstate(all="ignore"):
        most = np.abs(made.astype("d") - wanted.astype("d"))[far]
    return f"differs in {int(far.sum())} of {wanted.size} elements, by up to {most.max():.3g} of {scale:.3g}"
