"""Compare gradients with central differences of the loss, in float64.

The step, with all floating point widened to float64, runs on `exact.Evaluator`. The change of the loss along a random
direction must equal the change that the gradients predict, to 1e-6. Each parameter's part of the direction is scaled by
its own gradient: all contribute alike, and an error in the smallest gradient shows as much as one in the largest. If
the loss disagrees, bisection finds the parameter with the wrong gradient. Then the step runs on ONNX Runtime in its own
precision, and is compared with float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.messages import Setting

from .. import names
from . import default_level, tolerances
from .agreement import note
from .exact import Evaluator

DIRECTIONS = 2

_CHANGE, _LARGEST = 5e6, 1e-7  # change of the loss, in its rounding errors; of parameters, as a share of `_largest`
_OTHERWISE = Setting("example_inputs"), Setting("check", False)  # settings to name if the check is inconclusive
_FACTORS = (1, 0.1, 10, 100, 1000)  # tried in turn
_BOLDEST = 0.1  # largest change of a parameter in a direction, of its own size
_EPSILON = np.finfo(np.float64).eps
_EPSILONS = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}
_ROUNDING, _SLACK = 8 * _EPSILON, 4  # least noise of the loss, relative; factor of the jitter measured
_JITTERS = 3  # samples of the jitter of the loss
_NARROW = 10 * np.finfo(np.float32).eps / _EPSILON  # rounding of float32, in that of float64; 10: orders of sums
_SIZE = 2  # of symbolic dimensions in a generated batch
_ENTROPY = 0x6F6E6E782D72656D6174
_FEEDS, _JITTER, _DIRECTION = 0, 1, 2  # purposes of random numbers


@dataclass(frozen=True, slots=True)
class Found:
    """Results of the check.

    Attributes
    ----------
    differences : float
        Largest relative difference between the gradients and differences of the loss, in float64.
    untested : tuple of str
        Parameters whose gradients are too small, on the inputs of the check, to change the loss.
    precision : float or None
        Largest error, in norm, of an output of ONNX Runtime in float32 against float64; None if the step draws random
        numbers.
    """

    differences: float
    untested: tuple[str, ...]
    precision: float | None


def check(
    step: onnx.ModelProto,
    parameters: Sequence[str],
    values: Mapping[str, np.ndarray],
    example_inputs: Mapping[str, np.ndarray],
) -> Found:
    """Compare the gradients that a step outputs with finite differences of its loss.

    Parameters
    ----------
    step : onnx.ModelProto
        A step with outputs ``loss`` and ``grad.<name>``.
    parameters : sequence of str
    values, example_inputs : mapping of str to array
        Values of inputs; `example_inputs` takes precedence. `make_feeds` generates the others.

    Raises
    ------
    ConversionError
        A gradient has another shape than its parameter, is not finite, or differs from the finite differences by more
        than `tolerances.DIFFERENCE` (the message names the parameter); the step cannot be evaluated in float64, its
        outputs on ONNX Runtime differ by more than `tolerances.PRECISION`, or ONNX Runtime's default optimisations
        compute something else.
    """
    _check_examples(step, example_inputs)
    settled = ir.from_proto(default_level.seeded(step))
    feeds = make_feeds(step, values, example_inputs, _random(_FEEDS, 0))
    wide = widened(settled, ir.DataType.DOUBLE)
    exact = _doubled(feeds)
    step_in_full = Evaluator(wide)
    made = step_in_full.run(exact)
    loss = float(made[names.LOSS].reshape(()))
    gradients = {p: made[names.gradient(p)] for p in parameters}
    if not np.isfinite(loss):
        raise ConversionError("the loss is {} on the check's inputs: give {} or {}", loss, *_OTHERWISE)
    if bad := [p for p, g in gradients.items() if not np.isfinite(g).all()]:
        raise ConversionError(f"the gradient by {bad[0]!r} is not finite on the check's inputs; nothing was written")
    for p, g in gradients.items():
        if g.shape != exact[p].shape:
            raise ConversionError(
                f"the gradient by {p!r} has shape {list(g.shape)}, and {p!r} has {list(exact[p].shape)}; nothing was "
                "written"
            )
    line = _Line(Evaluator(_loss_only(wide)), step_in_full, exact, gradients, loss, _largest_difference(settled))
    worst = max(line.error(seed) for seed in range(DIRECTIONS))
    narrow = widened(settled, ir.DataType.FLOAT)
    kinds = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in narrow.graph.input}
    single = {name: exact[name].astype(kind) for name, kind in kinds.items()}
    plain = default_level.run(narrow, single)
    precision = None if default_level.is_random(step) else _precision(plain.outputs, made, line.noise)
    default_level.compare(narrow, single, plain.outputs, drawn=plain.drawn)
    return Found(worst, line.untested(), precision)


def _largest_difference(step: ir.Model) -> float:
    """Return the largest difference from a step's gradients that counts as equal.

    Constants of 16 bits, such as the share of an entry in a mean, are rounded: the gradients contain that error.
    """
    kinds = {value.dtype for value in step.graph.initializers.values()}
    return max([tolerances.DIFFERENCE, *(size for kind, size in _EPSILONS.items() if kind in kinds)])


def record(model: onnx.ModelProto, found: Found) -> None:
    """Record the result of the check in a model's metadata.

    Keys are ``check.differences``, ``check.untold`` (the number of gradients that were too small to check) and, if the
    step ran on ONNX Runtime, ``check.precision``; see `Found`.
    """
    known = {"check.differences": f"{found.differences:.2e}", "check.untold": str(len(found.untested))}
    if found.precision is not None:
        known["check.precision"] = f"{found.precision:.2e}"
    note(model, known)


class _Line:
    """Compare differences of the loss along random directions with the gradients' predictions."""

    def __init__(
        self,
        forward: Evaluator,
        step: Evaluator,
        at: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        loss: float,
        most: float,
    ) -> None:
        self._most = most
        self._forward, self._step, self._at, self._gradients, self._at_loss = forward, step, at, gradients, loss
        largest = {p: _largest(at[p]) for p in gradients}
        norms = {p: float(np.linalg.norm(g)) for p, g in gradients.items()}
        self._steps = {p: min(1.0 / norms[p], most) if norms[p] > 0 else most for p, most in largest.items()}
        self._shares = {p: norms[p] * step for p, step in self._steps.items()}
        self._scale = float(np.linalg.norm(list(self._shares.values())))
        self._direction: tuple[int, dict[str, np.ndarray]] = (-1, {})  # the last one: drawing is slow for large weights
        self.noise = max(_ROUNDING * max(abs(loss), 1e-3), _SLACK * self._jitter(loss))
        # A small step avoids kinks, a large one drowns rounding.
        room = min(largest[p] / step for p, step in self._steps.items())
        self._epsilon = _LARGEST * room
        if self._scale:
            self._epsilon = min(self._epsilon, _CHANGE * self.noise / self._scale)

    def _jitter(self, loss: float) -> float:
        """Return the largest error of the gradients' prediction when parameters change by their own rounding errors.

        The rounding error of a loss does not follow from its size: a loss near zero may be a sum of large terms.
        """
        worst = 0.0
        for number in range(_JITTERS):
            rng = _random(_JITTER, number)
            moved, predicted = {}, 0.0
            for p, gradient in self._gradients.items():
                at = self._at[p]
                moved[p] = at + _EPSILON * rng.standard_normal(at.shape) * (abs(at) + self._steps[p])
                predicted += float((gradient * (moved[p] - at)).sum())
            worst = max(worst, abs(self._loss(moved) - loss - predicted))
        return worst

    def _drawn(self, seed: int) -> dict[str, np.ndarray]:
        if self._direction[0] != seed:
            rng = _random(_DIRECTION, seed)
            drawn = {p: rng.standard_normal(g.shape) * self._steps[p] for p, g in self._gradients.items()}
            self._direction = seed, drawn
        return self._direction[1]

    def untested(self) -> tuple[str, ...]:
        """Return the parameters whose gradients change the loss too little for an error in them to show."""
        return tuple(p for p, share in self._shares.items() if share < tolerances.UNTESTED_SHARE * self._scale)

    def error(self, seed: int) -> float:
        """Return the relative difference along a direction through all parameters; raise ConversionError if it is too
        large."""
        if not self._scale:
            raise self._unseen(seed, "every gradient is zero on the check's inputs")
        found: list[tuple[float, float, float]] = []
        for factor in _FACTORS:
            error, rounding = self._difference(seed, factor)
            if error <= self._most and rounding <= tolerances.ROUNDING_SHARE:
                return error
            found.append((error, rounding, factor))
        if within := [error for error, rounding, _ in found if error <= rounding <= tolerances.ROUNDING_SHARE]:
            return min(within)
        if found[-1][1] > tolerances.ROUNDING_SHARE:
            raise self._unseen(seed, "all gradients are too small on the check's inputs to show in the loss")
        least, _, best = min(found)
        raise self._wrong(seed, best, f"differently than gradients predict, by {least:.2g} relative")

    def _unseen(self, seed: int, why: str) -> ConversionError:
        """Return the error for gradients that no difference can confirm: `why`, unless the loss does change.

        It does if its change is proportional to the step, equal on both sides, and far above its rounding: neither
        curvature nor a kink behaves like that.
        """
        seen = []
        for factor in _FACTORS[-2:]:
            sides, predicted, epsilon = self._sides(list(self._gradients), seed, factor)
            slopes = [side / epsilon - predicted for side in sides]
            seen += slopes if min(map(abs, slopes)) > self.noise / (epsilon * tolerances.SAME_SLOPE) else [0.0]
        if max(seen) - min(seen) < tolerances.SAME_SLOPE * max(map(abs, seen)):
            return self._wrong(seed, _FACTORS[-1], "although all gradients are almost zero")
        return ConversionError("{}: give {} or {}", why, *_OTHERWISE)

    def _wrong(self, seed: int, factor: float, how: str) -> ConversionError:
        """Return the error for wrong gradients: bisection finds the parameter, unless rounding explains the
        difference."""
        suspects = list(self._gradients)
        if self._lost(seed) > tolerances.SAME_SLOPE * abs(self._off(suspects, seed, factor)):
            return ConversionError(
                "rounding decides about the gradients on the check's inputs: give {} or {}", *_OTHERWISE
            )
        while len(suspects) > 1:
            halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            worse = [abs(self._off(half, seed, factor)) for half in halves]
            suspects = halves[1] if worse[1] > worse[0] else halves[0]
        return ConversionError(
            "the gradient by {!r} is wrong: along a random direction the loss changes {}; nothing was written ({} "
            "gives this check other inputs, such as distinct indices, and {} skips it)",
            suspects[0],
            how,
            *_OTHERWISE,
        )

    def _lost(self, seed: int) -> float:
        """Return the change of the gradients' slope along a direction when the inputs change by their own rounding
        errors."""
        rng, drawn = _random(_JITTER, _JITTERS), self._drawn(seed)
        moved = {
            name: at + _EPSILON * rng.standard_normal(at.shape) * at if at.dtype.kind == "f" else at
            for name, at in self._at.items()
        }
        made = self._step.run(moved)
        return abs(sum(float(((made[names.gradient(p)] - g) * drawn[p]).sum()) for p, g in self._gradients.items()))

    def _difference(self, seed: int, factor: float) -> tuple[float, float]:
        """Return the error of the gradients along a direction, and the share of rounding in it; relative to their
        size."""
        error = abs(self._off(list(self._gradients), seed, factor))
        return error / self._scale, self.noise / (factor * self._epsilon * self._scale)

    def _off(self, parameters: Sequence[str], seed: int, factor: float) -> float:
        """Return the loss's slope minus the gradients' prediction along the part of a direction in some parameters."""
        (up, down), predicted, epsilon = self._sides(parameters, seed, factor)
        return (up + down) / (2 * epsilon) - predicted

    def _sides(self, parameters: Sequence[str], seed: int, factor: float) -> tuple[tuple[float, float], float, float]:
        """Return the rise of the loss before and after the point, the slope that the gradients predict, and the step
        size."""
        drawn = self._drawn(seed)
        direction = {p: drawn[p] for p in parameters}
        predicted = sum(float((self._gradients[p] * d).sum()) for p, d in direction.items())
        epsilon = factor * self._epsilon
        up, down = (self._loss({p: self._at[p] + sign * epsilon * d for p, d in direction.items()}) for sign in (1, -1))
        return (up - self._at_loss, self._at_loss - down), predicted, epsilon

    def _loss(self, moved: Mapping[str, np.ndarray]) -> float:
        return float(self._forward.run({**self._at, **moved})[names.LOSS].reshape(()))


def _largest(value: np.ndarray) -> float:
    """Return the largest reasonable step of a parameter."""
    size = float(np.sqrt(np.mean(np.square(value)))) if value.size else 0.0
    return max(_BOLDEST * size, 1e-3 if value.ndim > 1 else _BOLDEST)  # biases and scales start at 0 and 1


def _precision(outputs: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray], noise: float) -> float:
    """Return the largest error of an output in norm; that of a vanishing gradient is relative to the largest gradient.

    `noise` is the rounding error of the loss in float64; the error of a loss near zero is relative to that of float32.

    Raise ConversionError beyond `tolerances.PRECISION`.
    """
    norms = {name: float(np.linalg.norm(value)) for name, value in exact.items()}
    largest = max((norm for name, norm in norms.items() if name.startswith(names.gradient(""))), default=0.0)
    worst = 0.0
    for name, value in outputs.items():
        least = tolerances.NEGLIGIBLE_GRADIENT * largest if name.startswith(names.gradient("")) else 1e-30
        if name == names.LOSS:
            least = _NARROW * noise / tolerances.PRECISION
        error = float(np.linalg.norm(value - exact[name])) / max(norms[name], least)
        if not error <= tolerances.PRECISION:
            raise ConversionError(
                "ONNX Runtime's float32 is off by {:.2g} relative in {} on the check's inputs: give other {} or {}",
                error,
                name,
                *_OTHERWISE,
            )
        worst = max(worst, error)
    return worst


def _random(purpose: int, number: int) -> np.random.Generator:
    """Return a generator with a seed of its own: many models draw their weights from ``default_rng(0)``."""
    return np.random.default_rng([_ENTROPY, purpose, number])


def _check_examples(step: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> None:
    """Raise UsageError where an example has another rank than its input."""
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in step.graph.input}
    for name, array in given.items():
        if np.ndim(array) != ranks.get(name, np.ndim(array)):
            raise UsageError(f"the example of {name!r} has {np.ndim(array)} axes, and the input has {ranks[name]}")


def make_feeds(
    step: onnx.ModelProto,
    values: Mapping[str, np.ndarray],
    example_inputs: Mapping[str, np.ndarray],
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Return a value for every input: the example, the file's value, or random data; symbolic sizes become 2.

    Random data are normal for floating point, and zeros and ones for integers. Weights of the file whose entries are
    all equal are placeholders: they would make all channels alike, and gradients vanish or explode. They are replaced
    by random weights (He et al. 2015). A vector of one value other than 0 and 1 is replaced by random entries around
    the root of that value, since a variance of that value would cancel a scale of that value.
    """
    given = {n: _varied(v, rng) if n not in example_inputs else v for n, v in {**values, **example_inputs}.items()}
    sizes: dict[str, int] = {}
    for value in step.graph.input:
        if not value.type.HasField("tensor_type"):
            raise ConversionError(
                "the check makes tensors, and input {!r} is none: leave it out with {}",
                value.name,
                Setting("check", False),
            )
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param and value.name in given:
                sizes[dim.dim_param] = given[value.name].shape[i]
    feeds = {}
    for value in step.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = tuple(d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, _SIZE) for d in kind.shape.dim)
        if value.name in given:
            feeds[value.name] = given[value.name].astype(dtype)
        elif ir.DataType(kind.elem_type).is_floating_point():
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            feeds[value.name] = rng.integers(0, 2, shape).astype(dtype)
    return feeds


def _varied(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if value.size < 2 or not ir.tensor(value).dtype.is_floating_point() or (value != value.flat[0]).any():
        return value
    if value.ndim == 1:
        same = value.flat[0] in (0, 1)
        return value if same else rng.uniform(0.5, 1.5, value.shape) * np.sqrt(abs(float(value.flat[0])))
    drawn: np.ndarray = rng.standard_normal(value.shape) * np.sqrt(2 * len(value) / value.size)
    return drawn


def widened(source: ir.Model, to: ir.DataType) -> onnx.ModelProto:
    """Return a copy in which all floating point narrower than `to` is of that type."""
    model = source.clone()
    halves = [ir.DataType.FLOAT16, ir.DataType.BFLOAT16]
    narrow = halves if to == ir.DataType.FLOAT else [*halves, ir.DataType.FLOAT]
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    made = [v for node in nodes for v in node.outputs]
    stored = [v for graph in model.graphs() for v in graph.initializers.values()]
    for value in (*model.graph.inputs, *stored, *made):
        if value.dtype in narrow:
            value.type = ir.TensorType(to)
        if value.const_value is not None and value.const_value.dtype in narrow:
            value.const_value = ir.tensor(value.const_value.numpy().astype(to.numpy()), name=value.name)
    for node in nodes:
        if node.op_type == "GroupNormalization" and (model.opset_imports[""] or 0) > 20:
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(to))
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:  # the default is zeros of float32
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(to.numpy())))
            if name in ("to", "dtype") and attribute.value in [int(n) for n in narrow]:
                node.attributes[name] = ir.AttrInt64(name, int(to))
    return ir.to_proto(model)


def in_float64(step: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return every output of a step, computed in float64 throughout."""
    return Evaluator(widened(ir.from_proto(step), ir.DataType.DOUBLE)).run(_doubled(feeds))


def _doubled(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    floating = {n for n, v in feeds.items() if ir.DataType.from_numpy(v.dtype).is_floating_point()}
    return {n: v.astype(np.float64) if n in floating else v for n, v in feeds.items()}


def _loss_only(step: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(step)
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name == names.LOSS]
    passes.RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)
