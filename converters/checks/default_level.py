"""Compare what ONNX Runtime's default optimisations make of a step with the step run without them.

Converters compare a step with the framework with optimisations off, where every node computes what it says. Some of
the default ones compute something else: see `onnx_remat.ort.known_bugs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """A copy whose random nodes draw the same in the first run of every session."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        if semantics(node.domain, node.op_type).random and not any(a.name == "seed" for a in node.attribute):
            seed = index if "Dropout" in node.op_type else float(index)
            node.attribute.append(onnx.helper.make_attribute("seed", seed))
    return copy


def is_random(model: onnx.ModelProto) -> bool:
    """Does any node draw random numbers?"""
    return any(semantics(node.domain, node.op_type).random for node in model.graph.node)


@dataclass(frozen=True, slots=True)
class Plain:
    """Outputs of a step run without optimisations, and what its random nodes drew; arrays by name."""

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
) -> None:
    """Run a step with default optimisations, and compare every output with the step run without them.

    Of an output ``new.<name>`` its change is compared: a parameter hardly moves in a step. Where they are apart, the
    step is run again on inputs moved by some rounding errors: what moves as much is no fault.

    Parameters
    ----------
    model : onnx.ModelProto
    feeds, plain : mapping of str to array
        A value for every input, and every output with optimisations off.
    tolerance : mapping of str to float
        As in `check.compare`.
    drawn : mapping of str to array, optional
        What random nodes drew in the run that `plain` is of. With other optimisations they draw something else, seeded
        or not: their generators count calls, and a mask that nobody reads is not drawn alike.

    Raises
    ------
    ConversionError
        They differ: ONNX Runtime computes the step wrongly.
    """
    drawn = drawn or {}
    model = fixed_draws.with_draws_given(model, drawn) if drawn else model
    expected = changes({value.name: plain[value.name] for value in model.graph.output}, feeds)
    made = changes(runtime.outputs(model, {**feeds, **drawn}, "all"), feeds)
    heap.trim()
    steps = {name: rounding(plain[name]) for name in expected if _before(name, feeds) is not None}
    found = check.differences(made, expected, tolerance, steps)
    moved = _moved_by_rounding(model, feeds, plain, drawn) if found.wrong else iter(())
    while found.wrong and (largest := next(moved, None)) is not None:  # a step takes long: one sample is often enough
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
    """The value that an output renews, where it is of floating point."""
    old = feeds.get(output.removeprefix(names.new(""))) if output.startswith(names.new("")) else None
    return old if old is not None and check.is_float(old) else None


def changes(outputs: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs, those that renew an input as what they add to it."""
    old = {name: _before(name, feeds) for name in outputs}
    return {name: value if (was := old[name]) is None else value - was for name, value in outputs.items()}


def _epsilon(value: np.ndarray) -> float:
    return float(ml_dtypes.finfo(value.dtype).eps)  # type: ignore[no-untyped-call]


def rounding(value: np.ndarray) -> float:
    """How far a value of this size is from the next."""
    return _epsilon(value) * float(np.abs(value.astype(np.float64)).max(initial=0.0))


def _moved_by_rounding(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    plain: Mapping[str, np.ndarray],
    drawn: Mapping[str, np.ndarray],
) -> Iterator[dict[str, float]]:
    """How far each output moves, at most, when float inputs move by as much as kernels round: in 1, 2... samples."""
    generator = np.random.default_rng(0)
    largest: dict[str, float] = {}
    for _ in range(tolerances.NOISE_SAMPLES):
        moved = {name: _nudged(value, generator) for name, value in feeds.items()}
        made = changes(runtime.outputs(model, {**moved, **drawn}), moved)
        for name, value in changes({name: plain[name] for name in made}, feeds).items():
            if check.is_float(value) and value.shape == made[name].shape:
                with np.errstate(invalid="ignore"):  # infinities
                    apart = np.abs(made[name].astype(np.float64) - value.astype(np.float64))
                largest[name] = max(largest.get(name, 0.0), float(np.nan_to_num(apart, nan=0.0).max(initial=0.0)))
        yield largest


def _nudged(value: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    if not check.is_float(value):
        return value
    by = tolerances.NOISE_ULPS * _epsilon(value) * generator.uniform(-1, 1, value.shape)
    return np.asarray(value.astype(np.float64) * (1 + by), value.dtype)
