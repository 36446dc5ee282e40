"""What training takes is predicted of the step as a session runs it: fused where kernels run, unfused elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper

import onnx_remat
from onnx_remat.app import cli
from onnx_remat.errors import UsageError
from onnx_remat.findings.explain import explain
from onnx_remat.fuse import machine_code, shim
from onnx_remat.ir import model_io
from onnx_remat.ir.dims import planned_dims
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels import costs
from onnx_remat.ort.prepare import prepare
from onnx_remat.ort.renewed import with_donations, with_slab_donations
from onnx_remat.rewrite.accounting import LoopMemory
from onnx_remat.rewrite.plan_files import Fitted
from onnx_remat.rewrite.relaxed import fused_cost, outside_kernels
from onnx_remat.session import fusing
from onnx_remat.session.prediction import Footprint, predict
from onnx_remat.session.session import Session
from sample_models.chain import chain
from tests.session.test_fused_session import adam
from tests.support.fusing import why_not
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")
PARTS = ("inputs", "weights", "slab", "workspace", "books")
SAMPLES = Path(onnx_remat.__file__).parents[1] / "sample_models"


def half() -> onnx.ModelProto:
    """Half precision: ONNX Runtime puts casts around what has no kernel of it, and fuses less."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "h"], ["h2"]), node("Add", ["h2", "h"], ["h3"]),
        node("Relu", ["h3"], ["h4"]), node("Sqrt", ["h4"], ["h5"]), node("Sub", ["h5", "h"], ["y"]),
    ]  # fmt: skip
    shapes = {"x": [64, 96], "w": [96, 64], "y": [64, 64]}
    kinds = {name: (onnx.TensorProto.FLOAT16, shape) for name, shape in shapes.items()}
    return model_of(nodes, {name: kinds[name] for name in "xw"}, {"y": kinds["y"]})


MODELS = {
    "adam": adam,
    "chain": lambda: chain(6, 128, 64),
    "half": half,
    "mlp": lambda: mlp(layers=4, batch=512, width=64),
    **{path.stem: path.as_posix for path in (SAMPLES / "attention_stack.onnx", SAMPLES / "residual_cnn.onnx")},
}
SLOW = {path.stem: path.as_posix for path in sorted((SAMPLES / "converted").glob("*.onnx"))}


def predicted(model: model_io.Model, fuse: bool = True) -> Footprint:
    source = model_io.load(model)
    options = Options(dims=planned_dims(source.model), run_by="loop")
    return predict(as_executed(source.model, source.folder, "all", options.preparation()), fuse=fuse)


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few([*MODELS, *SLOW], ["adam", "half", "attention_stack"]))
def test_the_slab_of_a_session_is_the_predicted_one(name, fuse, tmp_path):
    model = (MODELS | SLOW)[name]()
    expected = predicted(model, fuse)
    with Session(model, donate=True, fuse=fuse) as opened:
        assert (expected.slab, expected.live) == (opened.slab_bytes, opened.live_bytes)
        assert (expected.nodes, expected.kernels) == (opened.node_count, opened.kernel_count)
        assert expected.unfused_nodes == opened.unfused_node_count and expected.donated == len(opened.donated)
    assert bool(expected.kernels) == fuse
    assert expected.total - expected.books <= expected.unfused  # convolutions' code may take more than fewer nodes save
    assert expected.not_fused == ("" if fuse else "fuse=False")


def test_rewritten_steps_are_predicted_as_they_run():
    result = onnx_remat.rewrite_model(mlp(layers=6, batch=4096, width=32), "80%", effort=0.5)
    with Session(result, donate=True) as opened:
        assert result.report.loop_after.slab == opened.slab_bytes
        assert result.report.loop_after.kernels == opened.kernel_count > 1


def test_what_is_unfused_here_is_predicted_unfused(monkeypatch):
    monkeypatch.setattr(shim, "why_not", lambda: "there is no C compiler")
    result = onnx_remat.rewrite_model(adam(), "100%")
    taken = result.report.loop_before
    assert not taken.kernels and taken.total == taken.unfused == predicted(adam(), fuse=False).total
    assert "training is counted with nothing fused: there is no C compiler" in result.report.to_text()
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "why_not", lambda: "llvmlite is not installed")
    assert predicted(adam()).not_fused == "llvmlite is not installed"
    monkeypatch.undo()
    monkeypatch.setattr("onnx_remat.ort.runtime.installed", lambda: (1, 19, 2))
    assert "1.22 and newer, not of 1.19.2" in predicted(adam()).not_fused


def test_of_a_huge_step_nothing_is_fused(monkeypatch):
    monkeypatch.setattr(fusing, "MOST_NODES", 10)
    expected = predicted(adam())
    assert expected.not_fused == "it has over 10 nodes" and not expected.kernels and expected.total == expected.unfused


def test_the_report_says_which_it_counts(tmp_path, capsys):
    onnx.save(adam(), tmp_path / "in.onnx")
    found = {}
    for flags in ([], ["--no-fuse"]):
        path = tmp_path / "report.json"
        assert not cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--budget", "100%", "--force",
                             "--json", str(path), *flags])  # fmt: skip
        found[bool(flags)] = json.loads(path.read_text())["loop_after"]
        text = capsys.readouterr().out
        assert "nodes that Loop runs" in text and "the same with nothing fused" in text
        assert ("counted with nothing fused: --no-fuse" if flags else "or with --no-fuse, it takes") in text
    assert found[False]["kernels"] > 2 and not found[True]["kernels"] and found[True]["not_fused"] == "fuse=False"
    parts = {flag: sum(each[part] for part in PARTS) for flag, each in found.items()}
    assert parts[True] == found[True]["unfused"] == found[False]["unfused"] > parts[False]
    with pytest.raises(UsageError, match="fuse must be True or False"):
        onnx_remat.rewrite_model(adam(), "100%", fuse="no")


@pytest.mark.slow
def test_explain_names_the_groups(tmp_path):
    onnx_remat.rewrite_model(mlp(layers=6, batch=4096, width=32), "80%", effort=0.5).save(tmp_path / "small.onnx")
    found = explain(tmp_path / "small.onnx")
    with Session(tmp_path / "small.onnx", donate=True) as opened:
        assert len(found.fused) == opened.kernel_count
        inside = sum(len(each.nodes) for each in found.fused)
        assert opened.unfused_node_count - inside + opened.kernel_count >= opened.node_count
    assert all(len(each.nodes) == sum(each.ops.values()) >= 1 for each in found.fused)
    assert found.fused[0].nodes[0] in found.to_text() and not found.not_fused


def masked() -> onnx.ModelProto:
    """Unfused a mask lies next to two values as large as the output, fused only they do.

    No kernel reads as many lines in turns as the Transpose does.
    """
    node = helper.make_node
    nodes = [
        node("Transpose", ["x"], ["h"]), node("Neg", ["h"], ["n"]), node("Greater", ["h", "n"], ["on"]),
        node("Where", ["on", "h", "n"], ["y"]),
    ]  # fmt: skip
    return model_of(nodes, {"x": [1024, 64]}, {"y": [64, 1024]})


@pytest.mark.parametrize("make", [masked, adam, lambda: chain(6, 128, 64), lambda: mlp(layers=4, batch=512, width=64)])
def test_bounds_hold_for_fused_steps(make):
    source = model_io.load(make())
    executed = as_executed(source.model, source.folder, "all", Options(run_by="loop").preparation())
    expected, compiled = predict(executed), with_donations(executed.compiled)
    own = with_slab_donations(compiled)
    inner = outside_kernels(own, compiled)
    memory = LoopMemory(compiled, own, 0, options=Options(run_by="loop"), optimized=inner, outside=inner)
    resident = own.base_bytes
    small = 4096 * own.n_values  # those that stay with ONNX Runtime
    assert memory.floor - resident <= expected.live + expected.workspace + small
    floor = replace(memory, optimized=own, outside=None).floor - resident
    assert make is not masked or expected.live < floor


def test_a_kernel_takes_the_time_of_what_it_reads_and_writes():
    device = costs.PRESETS["cpu"]
    one, other = predicted(masked()), predicted(masked(), fuse=False)
    size = 256 * 256 * 4
    copied, started = 2 * size / device.bandwidth, device.overhead
    # Neg, Greater and Where: unfused each reads and writes all of its own, a mask of a byte for four among it.
    apart = (2 * size) + (2 * size + size // 4) + (3 * size + size // 4)
    assert other.seconds == pytest.approx(copied + apart / device.bandwidth + 4 * started)
    assert one.seconds == pytest.approx(2 * copied + 2 * started)


def test_what_runs_again_within_a_kernel_costs_the_bytes_that_cross_its_border():
    source = model_io.load(masked())
    compiled = prepare(source.model, Options(run_by="loop").preparation())
    share = dict(zip([op.node.op_type for op in compiled.graph.ops],
                     fused_cost(compiled.problem, compiled.graph) / compiled.problem.cost, strict=True))  # fmt: skip
    assert share["Transpose"] == 1
    assert share["Neg"] == pytest.approx(1 / 2)  # reads h, and leaves what Where and Greater read alone
    assert share["Greater"] == pytest.approx(4 / 9) and share["Where"] == pytest.approx(8 / 13)


@pytest.mark.slow
def test_the_report_says_how_much_longer_a_step_takes():
    report = onnx_remat.rewrite_model(mlp(layers=6, batch=4096, width=32), "80%", effort=0.5).report
    after, before = report.loop_after.seconds, report.loop_before.seconds
    assert report.extra_time() == pytest.approx(after / before - 1) and after > 0
    row = f"predicted step time {report.extra_time():+.2%}".split()
    assert row in [line.split() for line in report.to_text().splitlines()]


def test_of_two_files_the_one_that_runs_faster_is_better():
    report = onnx_remat.rewrite_model(adam(), "100%").report
    plan = onnx_remat.plan_model(adam(), "100%")
    slow, fast = (replace(report.loop_before, seconds=seconds) for seconds in (2.0, 1.0))
    more = replace(plan, extra_compute=0.5)
    assert Fitted(more, None, {}, fast).preference() < Fitted(plan, None, {}, slow).preference()
    assert Fitted(plan, None, {}).preference() < Fitted(more, None, {}).preference()
