"""What a run of onnx-remat takes on huge models: weights over 2 GiB, a file near 2 GB, 100,000 nodes, a million.

    python -m scripts.huge FOLDER [external inline nodes million] [--budget 60%] [--save NAME]

Seconds of the whole command, and the highest resident memory of its process. FOLDER needs 6 GB; a million nodes need
18 GB of memory and ten minutes. Budgets are of the sum of tensors, since ONNX Runtime is not asked about so many nodes
then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from scripts.results import Table, printed, save
from tests.rewrite.test_scale import deep

WIDTH = 4096


def frozen_stack(weights: int) -> onnx.ModelProto:
    """A step that trains a small head below a stack of frozen products; every weight is WIDTH x WIDTH floats."""
    make, nodes, h = helper.make_node, [], "x"
    for i in range(weights):
        nodes.append(make("MatMul", [h, f"w{i}"], [f"z{i}"], name=f"mm{i}"))
        nodes.append(make("Tanh", [f"z{i}"], [f"a{i}"], name=f"t{i}"))
        h = f"a{i}"
    nodes += [make("Mul", [h, h], ["sq"], name="sq"), make("ReduceMean", ["sq"], ["loss"], name="loss", keepdims=0)]
    g = h
    for i in reversed(range(weights)):
        nodes += [
            make("Mul", [f"a{i}", f"a{i}"], [f"s{i}"], name=f"s{i}"),
            make("Mul", [g, f"s{i}"], [f"gs{i}"], name=f"gs{i}"),
            make("Sub", [g, f"gs{i}"], [f"gz{i}"], name=f"gz{i}"),
            make("ReduceSum", [f"gz{i}", "rows"], [f"db{i}"], name=f"db{i}", keepdims=0),
            make("Transpose", [f"w{i}"], [f"wt{i}"], name=f"wt{i}", perm=[1, 0]),
            make("MatMul", [f"gz{i}", f"wt{i}"], [f"g{i}"], name=f"dx{i}"),
        ]
        g = f"g{i}"
    typed = helper.make_tensor_value_info
    outputs = [typed("loss", TensorProto.FLOAT, [])]
    outputs += [typed(f"db{i}", TensorProto.FLOAT, [WIDTH]) for i in range(weights)]
    rows = onnx.numpy_helper.from_array(np.array([0]), "rows")
    graph = helper.make_graph(nodes, "frozen", [typed("x", TensorProto.FLOAT, [2048, WIDTH])], outputs, [rows])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def external(folder: Path) -> Path:
    """2.4 GB of weights in a data file."""
    model, count = frozen_stack(36), 36
    size = WIDTH * WIDTH * 4
    generator = np.random.default_rng(0)
    with (folder / "external.bin").open("wb") as stream:
        for _ in range(count):
            stream.write((generator.standard_normal(WIDTH * WIDTH, np.float32) * 0.02).tobytes())
    for i in range(count):
        tensor = model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "external.bin"), ("offset", i * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
    (folder / "external.onnx").write_bytes(model.SerializeToString())
    return folder / "external.onnx"


def inline(folder: Path) -> Path:
    """1.95 GB of weights in the file itself."""
    model = frozen_stack(29)
    generator = np.random.default_rng(0)
    for i in range(29):
        tensor = model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        tensor.raw_data = (generator.standard_normal(WIDTH * WIDTH, np.float32) * 0.02).tobytes()
    (folder / "inline.onnx").write_bytes(model.SerializeToString())
    return folder / "inline.onnx"


def nodes(folder: Path) -> Path:
    """100,000 nodes."""
    return _deep(folder / "nodes.onnx", 100_000)


def million(folder: Path) -> Path:
    """A million nodes."""
    return _deep(folder / "million.onnx", 1_000_000)


def _deep(path: Path, count: int) -> Path:
    model = deep(count // 12 + 100)
    assert len(model.graph.node) >= count
    path.write_bytes(model.SerializeToString())
    return path


KINDS = {"external": external, "inline": inline, "nodes": nodes, "million": million}
_HEADS = ("file", "nodes", "bytes", "peak", "seconds", "resident")


def row(made: Path, out: Path, budget: str) -> tuple[str, ...]:
    """One run of the command."""
    start = time.perf_counter()
    command = [
        sys.executable, "-c",
        "import resource, sys; from onnx_remat.app.cli import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)",
        str(made), str(out), "--budget", budget, "--for", "session", "--force",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        return (made.stem, "", "", done.stderr.strip(), f"{seconds:.0f}", "")
    lines = done.stdout.strip().splitlines()
    size = sum(path.stat().st_size for path in (made, made.with_suffix(".bin")) if path.exists())
    count = len(onnx.load(str(made), load_external_data=False).graph.node)
    resident = int(lines[-1]) * 1024
    return (made.stem, f"{count:,}", f"{size / 1e9:.2f} GB", lines[0].partition(",")[0], f"{seconds:.0f}",
            f"{resident / 1e9:.1f} GB")  # fmt: skip


def main() -> None:
    """Make, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--save", default="", metavar="NAME", help="also write docs/results/data/NAME.json")
    given = parser.parse_args()

    def rows() -> Iterator[tuple[str, ...]]:
        for kind in given.kinds:
            made = given.folder / f"{kind}.onnx"
            yield row(made if made.exists() else KINDS[kind](given.folder), given.folder / "out.onnx", given.budget)

    seen = printed(rows())
    if given.save:
        command = f"python -m scripts.huge FOLDER {' '.join(given.kinds)} --budget {given.budget} --save {given.save}"
        save(given.save, Table(command, _HEADS, seen))


if __name__ == "__main__":
    main()
