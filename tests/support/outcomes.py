"""What becomes of a model that is rewritten, or opened by a `Session`, against stock ONNX Runtime.

The slab of a `Session` holds values of some kilobytes and more; small models would have none. `everything_bound` makes
it hold every value, and plans in this process, which takes a tenth of the time of one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Mapping
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
from onnx_remat.run import opening
from onnx_remat.run import session as sessions
from onnx_remat.run.opening import BY_BITS
from tests.support.graphs import session_of

LEVELS = ("disable", "basic", "all")
RIGHT, TOO_LOW, REFUSED, WRONG, FAILED, RAISED = "right", "no plan", "refused", "wrong", "failed", "raised"
KINDS = (RIGHT, TOO_LOW, REFUSED, WRONG, FAILED, RAISED)
"""Right; no plan within the budget; refused by a message; other numbers; onnxruntime fails to load or run what was
made; any other exception."""

_ROUNDING = {np.dtype(np.float16): 4e-3, np.dtype(np.float64): 1e-9}

Feeds = Mapping[str, Any]


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

    def in_this_process(path: Path, target: Path, wish: opening.Wish) -> opening.Opened:
        return opening.plan(path, target, replace(wish, least=1))

    with mock.patch.object(sessions, "open_step", in_this_process):
        yield


def stock(model: onnx.ModelProto | Path, level: str, feeds: Feeds) -> dict[str, Any]:
    """What stock ONNX Runtime makes of a model, by output.

    Feeds and outputs are as it takes and gives them; tensors of types that numpy lacks are arrays of their bits.
    """
    session = session_of(model, level)
    kinds = {value.name: _element_type(value.type) for value in (*session.get_inputs(), *session.get_outputs())}
    names = [value.name for value in session.get_outputs()]
    if not any(kind in BY_BITS for kind in kinds.values()):
        return dict(zip(names, session.run(None, dict(feeds)), strict=True))
    of_type = ort.OrtValue.ortvalue_from_numpy_with_onnx_type
    given = {name: of_type(np.ascontiguousarray(value), kinds[name]) for name, value in feeds.items()}
    made = dict(zip(names, session.run_with_ort_values(names, given), strict=True))
    return {name: _bits(value) if kinds[name] in BY_BITS else value.numpy() for name, value in made.items()}


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


def session_outcome(model: onnx.ModelProto | Path, level: str, feeds: Feeds, expected: Mapping[str, Any]) -> Outcome:
    """Open a model by `Session` with everything bound, run it twice, and compare.

    Parameters
    ----------
    model : ModelProto or Path
    level : str
    feeds : mapping
    expected : mapping
        What `stock` makes at this level.
    """
    given = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in feeds.items()}
    try:
        with everything_bound(), onnx_remat.Session(model, level=level, threads=1) as session:
            made = [session.run(given) for _ in range(2)]
    except errors.OnnxRematError as error:
        failed = re.match("onnxruntime (failed in the middle of|cannot load) the step", str(error))
        return Outcome(FAILED if failed else REFUSED, str(error))
    except Exception as error:
        return Outcome(RAISED, f"{type(error).__name__}: {error}".partition("\n")[0])
    for turn, each in enumerate(made):
        if found := difference(each, expected, level == "disable"):
            return Outcome(WRONG, f"run {turn + 1}: {found}")
    if changed := [name for name in feeds if difference({name: given[name]}, {name: feeds[name]}, True)]:
        return Outcome(WRONG, f"input {changed[0]} was written over")
    return Outcome(RIGHT)


def rewrite_outcome(
    model: onnx.ModelProto | Path, budget: str, feeds: Feeds, expected: Mapping[str, Mapping[str, Any]]
) -> Outcome:
    """Rewrite a model to a budget, run the result at every level of `expected`, and compare.

    Parameters
    ----------
    model : ModelProto or Path
    budget : str
    feeds : mapping
    expected : mapping
        What `stock` makes, by level.
    """
    try:
        result = onnx_remat.rewrite_model(model, budget, run_by="session", effort=0.05, verify="check")
    except errors.BudgetInfeasibleError as error:
        return Outcome(TOO_LOW, str(error))
    except errors.OnnxRematError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(RAISED, f"{type(error).__name__}: {error}".partition("\n")[0])
    for level, wanted in expected.items():
        try:
            made = stock(result.model, level, feeds)
        except Exception as error:
            return Outcome(FAILED, f"{level}: {str(error).partition(chr(10))[0]}")
        if found := difference(made, wanted, level == "disable"):
            return Outcome(WRONG, f"{level}: {found}")
    return Outcome(RIGHT)


def difference(made: Mapping[str, Any], wanted: Mapping[str, Any], bits: bool) -> str:
    """How two sets of outputs differ; nothing where they do not."""
    if list(made) != list(wanted):
        return f"outputs are {', '.join(made)}, not {', '.join(wanted)}"
    for name, expected in wanted.items():
        if found := _differs(made[name], expected, bits):
            return f"output {name} {found}"
    return ""


def _differs(made: Any, wanted: Any, bits: bool) -> str:
    if isinstance(wanted, list):
        if not isinstance(made, list) or len(made) != len(wanted):
            return "is another list"
        return next(filter(None, (_differs(a, b, bits) for a, b in zip(made, wanted, strict=True))), "")
    if not isinstance(wanted, np.ndarray):
        return "" if made == wanted else f"is {made!r}, not {wanted!r}"
    if made.dtype != wanted.dtype or made.shape != wanted.shape:
        return f"is {made.dtype}{list(made.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.hasobject:
        return "" if (made == wanted).all() else "differs"
    if made.tobytes() == wanted.tobytes():
        return ""
    if bits or wanted.dtype.kind not in "fc":
        return f"differs in {int((made != wanted).sum())} of {wanted.size} elements"
    share = _ROUNDING.get(wanted.dtype, 1e-4)
    scale = np.abs(wanted).max(initial=0, where=np.isfinite(wanted))
    if np.allclose(made, wanted, rtol=share, atol=share * float(scale), equal_nan=True):
        return ""
    with np.errstate(all="ignore"):
        return f"differs by {np.nanmax(np.abs(made.astype('d') - wanted.astype('d'))):.3g} of {float(scale):.3g}"
