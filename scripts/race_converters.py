"""Step times of the PyTorch converter's graph and of `add_backward`'s, for the same models, steps taken in turns.

    python -m scripts.convert_models --converter pytorch --converter autodiff --model mlp --out DIR
    python -m scripts.race_converters DIR

Both train with SGD on ONNX Runtime's CPU, default session options; a ratio above 1 says that `add_backward`'s is the
slower one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnx_remat.measure import processes


def main() -> None:
    """Race every model of which the folder holds both graphs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", help="only this one (repeat)")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    print("| model | nodes | seconds a step, PyTorch converter | add_backward | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for path in sorted(arguments.folder.glob("*.autodiff.onnx")):
        model = path.name.removesuffix(".autodiff.onnx")
        rival = path.with_name(f"{model}.pytorch.onnx")
        if rival.exists() and (not arguments.model or model in arguments.model):
            print(race(model, path, rival, arguments.runs), flush=True)


def race(model: str, path: Path, rival: Path, runs: int) -> str:
    """One row of the table."""
    ours, theirs = onnx.load(path), without_counters(onnx.load(rival))
    rename_batch(ours, theirs)
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        first, second = Path(scratch) / "ours.onnx", Path(scratch) / "theirs.onnx"
        onnx.save(ours, first)
        onnx.save(theirs, second)
        mine, other = processes.race(first, second, runs=runs)
    nodes = f"{len(theirs.graph.node)}, {len(ours.graph.node)}"
    return f"| {model} | {nodes} | {other:.3f} | {mine:.3f} | {mine / other:.2f} |"


def without_counters(step: onnx.ModelProto) -> onnx.ModelProto:
    """A step without torch's count of batches, which nothing reads."""
    model = ir.from_proto(step)
    model.graph.outputs[:] = [v for v in model.graph.outputs if not str(v.name).endswith("num_batches_tracked")]
    passes.RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = [v for v in model.graph.inputs if v.uses()]
    return ir.to_proto(model)


def rename_batch(step: onnx.ModelProto, like: onnx.ModelProto) -> None:
    """Make a step take the feeds of another: its batch, which comes last, under those names; the rest is not read."""
    known, own = ({v.name for v in m.graph.input} for m in (like, step))
    new = [v for v in like.graph.input if v.name not in own]
    old = [v.name for v in step.graph.input if v.name not in known]
    constant = len(new) - len(old)  # buffers that are inputs of one, and constants of the other
    names = {name: value.name for name, value in zip(old, new[constant:], strict=True)}
    for value in step.graph.input:
        value.name = names.get(value.name, value.name)
    for node in step.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    step.graph.input.extend(new[:constant])


if __name__ == "__main__":
    main()
