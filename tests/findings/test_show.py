"""Pictures, the page and the memory snapshot: they say what the simulator says, in forms their readers open."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_remat.app import cli
from onnx_remat.errors import UsageError
from onnx_remat.findings.show import draw, page, slab, snapshot, trace
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes
from sample_models.chain import chain
from tests.support.graphs import mlp
from tests.support.slow import few


@pytest.fixture(scope="module")
def result():
    return rewrite_model(mlp(layers=8, batch=512, width=32), "60%", effort=0.5, run_by="session")


@pytest.fixture(scope="module")
def for_loop():
    pytest.importorskip("onnxruntime")
    return rewrite_model(mlp(layers=8, batch=16384, width=32), "60%", effort=0.5)


ALIGNMENT = 64  # of addresses in the slab


def data_of(path):
    return json.loads(re.search(r"const DATA = (.*);\n", path.read_text())[1])


@pytest.mark.slow
def test_slabs_say_what_the_report_says(for_loop):
    for laid, taken in zip((slab.before(for_loop), slab.after(for_loop)), for_loop.report.loops(), strict=True):
        held = laid.live_at(laid.busiest)
        most = sum(block.bytes for block in held)
        assert max(step.bytes for step in laid.steps) == laid.steps[laid.busiest].bytes == most
        assert 0 <= taken.live - most < ALIGNMENT * len(held)
        assert sum(size for _, size in laid.inputs) == taken.inputs


@pytest.mark.parametrize("fuse", few([True, False], [True]))
def test_a_slab_is_drawn_fused_where_it_is_counted_fused(fuse):
    """Fused, a chain is a few kernels, which no plan shrinks."""
    pytest.importorskip("onnxruntime")
    model = mlp(layers=8, batch=1024, width=64) if fuse else chain(16, 1024, 256)
    result = rewrite_model(model, "85%", effort=0.5, fuse=fuse)
    for laid, taken in zip((slab.before(result), slab.after(result)), result.report.loops(), strict=True):
        assert max(block.offset + block.bytes for block in laid.blocks) == taken.slab
        assert len(laid.steps) == taken.nodes


def test_values_of_a_slab_never_overlap(for_loop):
    for laid in (slab.before(for_loop), slab.after(for_loop)):
        for step in range(len(laid.steps)):
            alive = sorted((b.offset, b.offset + b.bytes) for b in laid.live_at(step))
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(alive))


def test_the_largest_gap_lies_between_values_or_above_them():
    blocks = [slab.Block("a", "forward", 0, 64, 0, 1), slab.Block("b", "forward", 192, 64, 0, 0)]
    laid = slab.Slab((*blocks, slab.Block("c", "forward", 64, 192, 2, 2)), (), 0, ())
    assert [laid.largest_gap(step) for step in range(4)] == [128, 192, 64, 256]


def test_the_page_for_a_loop_draws_what_training_takes(for_loop, tmp_path):
    """The figures of its heading, and nothing that was written is above the budget."""
    page.write(for_loop, tmp_path / "x.html")
    data = data_of(tmp_path / "x.html")
    assert data["byLoop"] and data["verdict"] == for_loop.report.verdict()
    for drawn, total in zip((data["before"], data["after"]), for_loop.report.covered(), strict=True):
        outside = sum(size for _, _, size in drawn["residents"])
        assert drawn["peak"] == outside + drawn["slab"] == total
        top = outside + max(low + size for low, size in zip(drawn["offset"], drawn["size"], strict=True))
        assert outside < top <= total
    assert data["after"]["peak"] <= data["budget"] < data["before"]["peak"]


def test_traces_say_what_the_report_says(result):
    for step, peak in ((trace.before(result), result.report.before), (trace.after(result), result.report.after)):
        assert step.peak == peak.total == max(op.bytes for op in step.steps)
        op = step.steps[step.peak_step]
        held = sum(b.bytes for b in step.live_at(step.peak_step)) + op.workspace
        assert held + sum(size for _, _, size in step.residents) == step.peak
        assert [b.value for b in step.live_at(step.peak_step)][:1] == [peak.top[0].value]


def test_sections_follow_labels_structure_and_clones(result):
    before, after = trace.before(result), trace.after(result)
    section = {op.label: op.section for op in before.steps}
    assert section["act0"] == "forward" and section["aa3"] == "backward" and section["update2"] == "optimizer"
    assert "recompute" not in section.values()
    assert sum(op.section == "recompute" for op in after.steps) == result.report.recomputed > 0


def replay(events):
    """Highest sum of live allocations of a device trace; fails on a free of what is not allocated."""
    live, segments, peak = {}, {}, 0
    for event in events:
        action, at, size = event["action"], event["addr"], event["size"]
        if action == "segment_alloc":
            segments[at] = size
        elif action == "alloc":
            assert size <= segments[at]
            live[at] = size
            peak = max(peak, sum(live.values()))
        elif action == "free_completed":
            assert live.pop(at) == size
        elif action == "segment_free":
            assert segments.pop(at) == size
    return peak, live


def test_snapshot_replays_to_the_same_peaks(result, tmp_path):
    draw(result, str(tmp_path / "memory.pickle"))
    data = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    for device, peak in enumerate((result.report.before.total, result.report.after.total)):
        highest, left = replay(data["device_traces"][device])
        assert highest == peak
        assert left == {s["address"]: s["total_size"] for s in data["segments"] if s["device"] == device}


def test_torch_reads_the_snapshot(result):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = snapshot.snapshot(trace.before(result), trace.after(result))
    assert "Device 1" in viz.trace(data)
    assert "total_allocated" in viz.segsum(data)
    assert "<html>" in viz.trace_plot(data)


def test_figure_is_a_picture_of_its_kind_and_reproducible(result, tmp_path):
    pytest.importorskip("matplotlib")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        for name in ("a", "b"):
            draw(result, str(tmp_path / (name + suffix)))
        first, second = ((tmp_path / (name + suffix)).read_bytes() for name in ("a", "b"))
        assert first.startswith(magic) and first == second


@pytest.mark.parametrize("run_by", few(["loop", "session"], ["session"]))
def test_names_in_a_picture_are_no_formulas(run_by, tmp_path):
    pytest.importorskip("matplotlib")
    model = chain(8, 512, 64)
    made = {name: f"a$^$b{name}" for node in model.graph.node for name in node.output}
    made = {name: new for name, new in made.items() if name not in {value.name for value in model.graph.output}}
    for node in model.graph.node:
        node.input[:], node.output[:] = (
            [made.get(name, name) for name in names] for names in (node.input, node.output)
        )
    del model.graph.value_info[:]
    draw(rewrite_model(model, "90%", run_by=run_by, effort=0.1), str(tmp_path / "picture.svg"))
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_figure_of_a_missing_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    import onnx

    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "in.onnx")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--budget", "70%", "--plot", "x.png"])
    assert code == 4 and "onnx-remat[plot]" in capsys.readouterr().err
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", ["x.gif", "x", "x.json"])
def test_unknown_endings_are_refused_before_any_work(name, tmp_path, capsys):
    code = cli.main(["nowhere.onnx", str(tmp_path / "out.onnx"), "--budget", "70%", "--plot", name])
    assert code == 2 and ".html" in capsys.readouterr().err
    with pytest.raises(UsageError):
        draw(None, name)


def test_page_needs_no_network_and_cannot_be_broken_by_names(tmp_path):
    model = mlp(layers=4, batch=64, width=8)
    evil = "</script><b>&\"'"
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [evil if n == "z1" else n for n in names]
    result = rewrite_model(model, "80%", effort=0.2, run_by="session")
    page.write(result, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert text.count("</script>") == 1
    assert not re.search(r"https?://|src=|@import", text)
    data = data_of(tmp_path / "x.html")
    assert evil in data["before"]["value"] and data["after"]["peak"] == result.report.after.total


CHROME = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def in_browser(result, tmp_path):
    """The page's document once op 0 of the second chart was clicked and the first was moved on by one op."""
    page.write(result, tmp_path / "x.html")
    click = (
        "<script>window.onerror = e => document.title = 'broken: ' + e;"
        "const box = $('after').getBoundingClientRect();"
        "for (const kind of ['mousemove', 'click']) $('after').dispatchEvent(new MouseEvent(kind,"
        " {clientX: box.left + PAD.left + 1, clientY: box.top + 50}));"
        "$('before').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));</script>"
    )
    (tmp_path / "x.html").write_text((tmp_path / "x.html").read_text().replace("</body>", click + "</body>"))
    dom = subprocess.run(
        [CHROME, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", (Path(tmp_path) / "x.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "broken" not in dom.split("</head>")[0]
    return dom, dict(re.findall(r'<h2 id="([^"]+)">([^<]*)</h2>', dom))


@pytest.mark.skipif(not CHROME, reason="no Chromium on this machine")
def test_page_works_in_a_browser(result, tmp_path):
    dom, heads = in_browser(result, tmp_path)
    assert "held at op 0, MatMul" in heads["at-after"] or "held at op 0, Size" in heads["at-after"]
    assert f"held at op {trace.before(result).peak_step + 1}" in heads["at-before"]
    assert re.search(r'id="tip"[^>]*display: block', dom)
    assert f"{len(set(result.recomputed))} ops" in heads["title-again"]
    assert dom.count("<tr>") > 10
    assert heads["title-after"] == f"after: peak {format_bytes(result.report.after.total)}"


@pytest.mark.skipif(not CHROME, reason="no Chromium on this machine")
def test_page_for_a_loop_works_in_a_browser(for_loop, tmp_path):
    dom, heads = in_browser(for_loop, tmp_path)
    report = for_loop.report
    assert heads["title-after"] == f"after: training takes {format_bytes(report.loop_after.total)}"
    slab_before = format_bytes(report.loop_before.slab)
    step = slab.before(for_loop).busiest + 1
    assert re.fullmatch(rf"before: [^ ]+ .?B of the slab's {slab_before} in use at op {step}, \w+", heads["at-before"])
    assert "as onnx_remat.training.Loop lays them out" in dom and "all but the slab" in dom
    assert re.search(r'id="tip"[^>]*display: block', dom)


NODE = shutil.which("node")

DOM = """
class Element {
  constructor() { this.children = []; this.style = {}; this.textContent = ''; this.className = ''; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  addEventListener() {}
  getContext() { return new Proxy({}, { get: (o, k) => o[k] ?? (() => {}), set: (o, k, v) => (o[k] = v, true) }); }
  get clientWidth() { return 1000; }
  get clientHeight() { return 230; }
}
const elements = {};
globalThis.document = { getElementById: id => elements[id] ??= new Element(), createElement: () => new Element() };
globalThis.window = { addEventListener() {}, innerWidth: 1000, innerHeight: 800 };
eval(require('fs').readFileSync(0, 'utf8'));
const box = (frame, parent) => [frame.children[0].textContent, parseFloat(frame.style.width) * parent / 100,
  frame.children[1].children.map(inner => box(inner, parseFloat(frame.style.width) * parent / 100))];
console.log(JSON.stringify(['before', 'after'].map(id => box(elements['flame-' + id].children[0], 100))));
"""


@pytest.mark.skipif(not NODE, reason="no node on this machine")
@pytest.mark.parametrize("made", ["result", "for_loop"])
def test_flame_graphs_of_the_page_are_as_wide_as_their_bytes(made, request, tmp_path):
    result = request.getfixturevalue(made)
    page.write(result, tmp_path / "x.html")
    script = (tmp_path / "x.html").read_text().partition("<script>")[2].partition("</script>")[0]
    done = subprocess.run([NODE, "-e", DOM], input=script, capture_output=True, text=True, check=True)
    peaks, loops = (result.report.before, result.report.after), result.report.loops()
    for i, ((name, width, inside), peak) in enumerate(
        zip(json.loads(done.stdout), [each.total for each in loops or peaks], strict=True)
    ):
        assert name.endswith(format_bytes(peak)) and width == pytest.approx(100)
        assert 95 < sum(inner[1] for inner in inside) <= 100.001
        outside = "all but the slab" if loops else "inputs and weights"
        residents = next(inner for inner in inside if inner[0].startswith(outside))
        held = loops[i].total - loops[i].slab if loops else peaks[i].inputs + peaks[i].weights
        assert residents[1] == pytest.approx(100 * held / peak, rel=0.01)
