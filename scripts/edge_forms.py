"""Control edges of today against those of the first version: bits, peaks, and the time of a step.

    python -m scripts.edge_forms FOLDER_OR_FILE... [--budget 60%] [--effort 3] [--runs 31] [--save]

The first form was ``Reshape(value, Mul(Size(trigger), zeros))``, with as many zeros as the value has axes: on a CUDA
device the host waits at each. Here a step is rewritten as always, and its edges and private buffers are put into that
form: nothing else differs. Peaks are of a fresh process without the arena; seconds of one step are medians over steps
taken in turns, in a session with default options.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import helper

from onnx_remat.errors import OnnxRematError
from onnx_remat.ir.shapes import TAG, UNSEEN
from onnx_remat.measure import processes, verify
from onnx_remat.options import Options
from onnx_remat.ort.prepare import prepare_for_simulation
from onnx_remat.rewrite.pipeline import rewrite_model
from scripts.results import Table, printed, save

_HEADS = ("step", "edges", "nodes, then", "now", "bits", "peak, then, MB", "now", "ms, then", "now", "now of then")
_NONE, _TOKEN = f"{UNSEEN}_axes", f"{UNSEEN}_axes_after_"


def in_first_form(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """A rewritten model with edges as the first version wrote them, and how many there are."""
    tensors = prepare_for_simulation(model, Options().preparation()).tensors
    nodes = list(model.graph.node)
    maker = {name: node for node in nodes for name in node.output}
    triggers = {}  # the value that each token waits for
    for name in (name for name in maker if name.startswith(_TOKEN)):
        found = name
        while maker[found].op_type != "Unsqueeze":
            found = maker[found].input[0]
        triggers[name] = maker[found].input[0]
    hidden = {name for name in maker if name.endswith("__hidden")}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    graph.ClearField("node")
    made: set[str] = set()

    def zeros(rank: int) -> str:
        name = f"{TAG}zeros_{rank}"
        if name not in made:
            made.add(name)
            graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [rank], [0] * rank))
        return name

    def unseen(trigger: str, rank: int) -> str:
        """Zeros that nobody can fold, there after the trigger."""
        name = f"{TAG}first_{rank}_{trigger}"
        if name not in made:
            made.add(name)
            if (size := f"{TAG}size_{trigger}") not in made:
                made.add(size)
                graph.node.append(helper.make_node("Size", [trigger], [size]))
            graph.node.append(helper.make_node("Mul", [size, zeros(rank)], [name]))
        return name

    source = next((node.input[0] for node in nodes if node.op_type == "Size" and node.output[0] == f"{TAG}size"), "")
    edges = 0
    for node in nodes:
        if any(name.startswith(UNSEEN) or name in hidden or name == f"{TAG}size" for name in node.output):
            continue
        axes = next((name for name in node.input[1:] if name.startswith(_NONE)), "")
        if not axes:
            graph.node.append(node)
            continue
        edges += axes in triggers
        shape = unseen(triggers.get(axes, source), len(tensors[node.input[0]].shape))
        graph.node.append(helper.make_node("Reshape", [node.input[0], shape], [*node.output], name=node.name))
    return copy, edges


def row(path: Path, given: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """A line of the table."""
    now, then = folder / "now.onnx", folder / "then.onnx"
    result = rewrite_model(path, given.budget, effort=given.effort, run_by="session")
    result.save(now, force=True)
    first, edges = in_first_form(onnx.load(now))
    onnx.save(first, then)
    bits = verify.bitwise(now, then)
    peaks = [processes.measure(file).peak_bytes for file in (then, now)]
    seconds = processes.race(then, now, runs=given.runs)
    nodes = [len(onnx.load(file, load_external_data=False).graph.node) for file in (then, now)]
    return (
        path.stem, str(edges), *(f"{n:,}" for n in nodes), bits, *(f"{peak / 1e6:.1f}" for peak in peaks),
        *(f"{1e3 * s:.1f}" for s in seconds), f"{seconds[1] / seconds[0]:.3f}",
    )  # fmt: skip


def rows(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Every line, as it is measured."""
    for path in [file for p in given.paths for file in (sorted(p.glob("*.onnx")) if p.is_dir() else [p])]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield row(path, given, Path(folder))
            except OnnxRematError as error:
                print(f"{path.stem}: {error}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--effort", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/edge-forms.json")
    given = parser.parse_args()
    seen = printed(rows(given))
    if given.save:
        command = f"python -m scripts.edge_forms FOLDER --budget {given.budget} --save"
        save("edge-forms", Table(command, _HEADS, seen))


if __name__ == "__main__":
    main()
