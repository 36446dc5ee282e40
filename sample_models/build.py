"""Write the sample models: ``python -m sample_models.build [--out DIR]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from sample_models import attention_stack, chain, deep_mlp, residual_cnn

FOLDER = Path(__file__).parent

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "deep_mlp": deep_mlp.build,
    "residual_cnn": residual_cnn.build,
    "attention_stack": attention_stack.build,
    "chain": chain.build,
}


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one model, as they stand in the README's table."""

    name: str
    nodes: int
    parameters: int
    forward_mb: float
    saved_mb: float

    def row(self) -> str:
        """A Markdown table row."""
        sizes = f"{self.forward_mb:.0f} | {self.saved_mb:.0f}"
        return f"| `{self.name}` | {self.nodes} | {self.parameters:,} | {sizes} |"


def serialize(model: onnx.ModelProto) -> bytes:
    """The bytes of a model's file, the same at every build."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def summarize(name: str, model: onnx.ModelProto) -> Summary:
    """Count nodes, trained weights, and megabytes of forward values: all of them, and those read later."""
    graph = model.graph
    sizes = {value.name: nbytes(value) for value in [*graph.value_info, *graph.output]}
    forward = {name for node in graph.node if phase_of(node) == "forward" for name in node.output}
    later = {name for node in graph.node if phase_of(node) != "forward" for name in node.input}
    total, saved = (sum(sizes[name] for name in names) / 1e6 for names in (forward, forward & later))
    parameters = sum(nbytes(value) // 4 for value in graph.output if value.name.startswith("new."))
    return Summary(name, len(graph.node), parameters, total, saved)


def phase_of(node: onnx.NodeProto) -> str:
    """The phase a node is labelled with."""
    return {entry.key: str(entry.value) for entry in node.metadata_props}["phase"]


def nbytes(value: onnx.ValueInfoProto) -> int:
    """Bytes of a value of static shape."""
    tensor = value.type.tensor_type
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return int(itemsize) * prod(int(dim.dim_value) for dim in tensor.shape.dim)


def main(arguments: list[str] | None = None) -> None:
    """Write every model to a directory and print the README's table."""
    parser = argparse.ArgumentParser(description="Write the sample models and print a table of them.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory (default: this package's)")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for name, build in MODELS.items():
        model = build()
        (out / f"{name}.onnx").write_bytes(serialize(model))
        print(summarize(name, model).row())


if __name__ == "__main__":
    main()
