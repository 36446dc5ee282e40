"""Compare a step run with ONNX Runtime's default optimisations with the step run without them.

Converters compare a step with the framework with optimisations off, so that every node computes what its op defines.
Some default optimisations compute something else: see `onnx_remat.ort.known_bugs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from onnx_remat.errors import ConversionError
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.measure import fixed_draws
from onnx_remat.ort import known_bugs, runtime
from onnx_remat.session import heap

from .. import names
from . import agreement as check
from . import tolerances

_UNKNOWN = "pass check=False and run the step with ORT_DISABLE_ALL"


def seeded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose random nodes draw the same numbers in the first run of every session."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        if semantics(node.domain, node.op_type).random and not any(a.name == "seed" for a in node.attribute):
            seed = index if "Dropout" in node.op_type else float(index)
            node.attribute.append(onnx.helper.make_attribute("seed", seed))
    return copy


def is_random(model: onnx.ModelProto) -> bool:
    """Return whether any node draws random numbers."""
    return any(semantics(node.domain, node.op_type).random for node in model.graph.node)


@dataclass(frozen=True, slots=True)
class Plain:
    """Outputs of a step run without optimisations, and the draws of its random nodes; arrays by name."""

    outputs: dict[str, np.ndarray]
    drawn: dict[str, np.ndarray]


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Plain:
    """Run a step once without optimisations."""
    shown, draws = fixed_draws.with_draws_shown(model)
    made = runtime.outputs(shown, feeds)
    return Plain({value.name: made[value.name] for value in model.graph.output}, {name: made[name] for name in draws})


def compare(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    plain: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float] = tolerances.BY_DTYPE,
    drawn: Mapping[str, np.ndarray] | None = None,
    narrow: Mapping[str, np.dtype[Any]] | None = None,
) -> None:
    """Run a step with default optimisations, and compare every output with the step run without them.

    For an output ``new.<name>`` the comparison is of its change, since a parameter hardly moves in a step. If outputs
    differ, the step runs again on inputs changed by some rounding errors: a difference of the size of the resulting
    change is not a fault.

    Parameters
    ----------
    model : onnx.ModelProto
    feeds, plain : mapping of str to array
        The value of every input, and every output with optimisations off.
    tolerance : mapping of str to float
        As in `check.compare`.
    drawn : mapping of str to array, optional
        The draws of random nodes in the run of `plain`. Under other optimisations the draws differ, even with a seed:
        the generators count calls, and an unused mask is drawn differently.
    narrow : mapping of str to dtype, optional
        Types of inputs and outputs that the step rounds to, though it has them in float32 (`halves.widened`).

    Raises
    ------
    ConversionError
        An output differs: ONNX Runtime computes the step wrongly.
    """
    drawn, narrow = drawn or {}, narrow or {}
    model = fixed_draws.with_draws_given(model, drawn) if drawn else model
    expected = changes({value.name: plain[value.name] for value in model.graph.output}, feeds)
    made = changes(runtime.outputs(model, {**feeds, **drawn}, "all"), feeds)
    heap.trim()
    steps = {name: rounding(plain[name], narrow.get(name)) for name in expected if _before(name, feeds) is not None}
    found = check.differences(made, expected, tolerance, steps)
    moved = _moved_by_rounding(model, feeds, plain, drawn, narrow) if found.wrong else iter(())
    while found.wrong and (largest := next(moved, None)) is not None:  # often one sample is enough
        noise = {name: max(largest.get(name, 0.0), steps.get(name, 0.0)) for name in expected}
        found = check.differences(made, expected, tolerance, noise)
    if found.wrong:
        worst = max(found.wrong, key=lambda name: found.errors[name])
        known = known_bugs.warnings(model)
        raise ConversionError(
            f"ONNX Runtime computes this step wrongly with its default optimisations: {worst} "
            f"differs {check.by(found.errors[worst])} from the step without them, which is right "
            f"({len(found.wrong)} of {len(made)} outputs differ); {known[0] if known else _UNKNOWN}; "
            "nothing was written"
        )


def _before(output: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the input that an output updates, if it is floating point; None otherwise."""
    old = feeds.get(output.removeprefix(names.new(""))) if output.startswith(names.new("")) else None
    return old if old is not None and check.is_float(old) else None


def changes(outputs: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs; of those that update an input, the change."""
    old = {name: _before(name, feeds) for name in outputs}
    return {name: value if (was := old[name]) is None else value - was for name, value in outputs.items()}


def _epsilon(kind: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(kind).eps)  # type: ignore[no-untyped-call]


def rounding(value: np.ndarray, kind: np.dtype[Any] | None = None) -> float:
    """Return the distance from values of this size to the next number of a type, by default of their own."""
    return _epsilon(kind or value.dtype) * float(np.abs(value.astype(np.float64)).max(initial=0.0))


def _moved_by_rounding(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    plain: Mapping[str, np.ndarray],
    drawn: Mapping[str, np.ndarray],
    narrow: Mapping[str, np.dtype[Any]],
) -> Iterator[dict[str, float]]:
    """Yield the largest change of each output over 1, 2, ... samples with float inputs changed by rounding errors."""
    generator = np.random.default_rng(0)
    largest: dict[str, float] = {}
    for _ in range(tolerances.NOISE_SAMPLES):
        moved = {name: _nudged(value, generator, narrow.get(name, value.dtype)) for name, value in feeds.items()}
        made = changes(runtime.outputs(model, {**moved, **drawn}), moved)
        for name, value in changes({name: plain[name] for name in made}, feeds).items():
            if check.is_float(value) and value.shape == made[name].shape:
                with np.errstate(invalid="ignore"):  # infinities
                    apart = np.abs(made[name].astype(np.float64) - value.astype(np.float64))
                largest[name] = max(largest.get(name, 0.0), float(np.nan_to_num(apart, nan=0.0).max(initial=0.0)))
        yield largest


def _nudged(value: np.ndarray, generator: np.random.Generator, kind: np.dtype[Any]) -> np.ndarray:
    if not check.is_float(value):
        return value
    by = tolerances.NOISE_ULPS * _epsilon(kind) * generator.uniform(-1, 1, value.shape)
    return np.asarray(value.astype(np.float64) * (1 + by), kind).astype(value.dtype)
