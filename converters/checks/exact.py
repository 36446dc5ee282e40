"""Models in float64, on onnx's reference implementation and the kernels of `exact_ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from threadpoolctl import ThreadpoolController

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Message, Setting

from .exact_ops import OPS


class Evaluator:
    """Run a model on the reference implementation, and free each value after its last reader.

    Parameters
    ----------
    model : onnx.ModelProto
        A model of standard ops whose floating-point values are float64.

    Raises
    ------
    ConversionError
        The reference implementation lacks an op.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        try:
            self._reference = ReferenceEvaluator(model, new_ops=OPS)
        except Exception as error:
            raise ConversionError("the gradients cannot be checked in float64: {}; {}", _line(error), _HINT) from error
        self._threads = ThreadpoolController()
        nodes = self._reference.rt_nodes_
        last = {name: i for i, node in enumerate(nodes) for name in node.input}
        if any(node.need_context() for node in nodes):  # bodies capture values that are not inputs of the node
            last = {}
        kept = set(self._reference.output_names)
        self._done: list[list[str]] = [[] for _ in nodes]
        for name, i in last.items():
            if name not in kept:
                self._done[i].append(name)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return every output by name.

        Raises
        ------
        ConversionError
            A node fails; the message names it.
        """
        with self._threads.limit(limits=1):  # on busy cores, a product's threads wait far longer than they run
            return self._run(feeds)

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        values: dict[str, Any] = {"": None, **self._reference.rt_inits_, **feeds}
        for node, done in zip(self._reference.rt_nodes_, self._done, strict=True):
            context = {"context": values} if node.need_context() else {}
            try:
                with np.errstate(all="ignore"):
                    made = node.run(*(values[name] for name in node.input), **context)
            except Exception as error:
                proto = node.onnx_node
                raise ConversionError(
                    f"the gradients cannot be checked in float64: {proto.op_type} node {proto.name!r} fails: "
                    f"{_line(error)}; {_HINT}"
                ) from error
            values.update(zip(node.output, made, strict=False))
            for name in done:
                values.pop(name, None)
        return {name: values[name] for name in self._reference.output_names}


_HINT = Message("{} skips the check", Setting("check", False))


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
