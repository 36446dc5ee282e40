"""The arena against a second one written from its rules, against cases done by hand, and against ONNX Runtime's log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.ir import model_io
from onnx_remat.ir.graph import INPUT
from onnx_remat.ir.naming import renewals
from onnx_remat.measure import processes
from onnx_remat.memory import arena
from onnx_remat.memory.arena import Arena, Requests, run
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.peaks import requests, reserves
from onnx_remat.ort.prepare import Preparation
from onnx_remat.rewrite.pipeline import rewrite_model
from sample_models.chain import chain
from tests.support.slow import few

SAMPLES = Path(__file__).parents[2] / "sample_models"

MIB = 1 << 20
STEPS = 4


def step(sizes: list[int], events: list[int]) -> Requests:
    """A step whose buffers belong to values of the same numbers."""
    return Requests(np.array(events, np.int32), np.array(sizes, np.int64), np.arange(len(sizes), dtype=np.int32))


def slow_run(step: Requests, doubling: bool, kept: list[bool], steps: int) -> Arena:
    """The rules of `simulate.arena`, with lists of (address, bytes); regions lie a byte apart, so none merge."""
    free: list[tuple[int, int]] = []
    regions: list[tuple[int, int]] = []
    written: set[int] = set()  # units of 256 bytes, by address
    used: dict[int, tuple[int, int]] = {}
    late: dict[int, tuple[int, int]] = {}
    growth, lowest, most = MIB, 0, 0

    def give_back(chunk: tuple[int, int]) -> None:
        for other in list(free):
            if other[0] + other[1] == chunk[0] or chunk[0] + chunk[1] == other[0]:
                free.remove(other)
                chunk = min(chunk, other)[0], chunk[1] + other[1]
        free.append(chunk)

    for _ in range(steps):
        for event in step.events.tolist():
            if event < 0:
                if ~event in used:
                    give_back(used.pop(~event))
                continue
            asked = -(-int(step.size[event]) // 256) * 256
            if not asked:
                continue
            large = [chunk for chunk in free if chunk[1] >= asked]
            if large:
                chunk = min(large, key=lambda chunk: (chunk[1], chunk[0]))
                free.remove(chunk)
            else:
                size = asked
                if doubling and asked <= 1 << 30:
                    size = next(growth << k for k in range(31) if growth << k >= asked)
                    growth = min(2 * size, 1 << 30) if size == growth else size
                lowest -= size + 1
                chunk = lowest, size
                regions.append(chunk)
            if chunk[1] >= 2 * asked or chunk[1] - asked >= 128 * MIB:
                free.append((chunk[0] + asked, chunk[1] - asked))
                chunk = chunk[0], asked
            used[event] = chunk
            written |= set(range(chunk[0], chunk[0] + asked, 256))
            most = max(most, sum(size for _, size in [*used.values(), *late.values()]))
        for chunk in late.values():
            give_back(chunk)
        late = {b: chunk for b, chunk in used.items() if kept[b]}
        for b, chunk in used.items():
            if not kept[b]:
                give_back(chunk)
        used = {}
    return Arena(most, 256 * len(written), sum(size for _, size in regions))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Requests, list[bool]]:
    """Buffers of few sizes, so that chunks often tie, asked for and mostly given back in any order."""
    sizes = draw(st.lists(st.sampled_from([0, 4, 256, 300, 1000, 5000, 70_000, 3 * MIB]), min_size=1, max_size=24))
    events: list[int] = []
    alive: list[int] = []
    for b in range(len(sizes)):
        events.append(b)
        alive.append(b)
        for dying in draw(st.lists(st.sampled_from(alive), unique=True, max_size=3)):
            alive.remove(dying)
            events.append(~dying)
    return step(sizes, events), [draw(st.booleans()) and b in alive for b in range(len(sizes))]


@settings(deadline=None, max_examples=100)
@given(steps(), st.booleans(), st.integers(1, 4))
def test_agrees_with_a_slow_reference(drawn: tuple[Requests, list[bool]], doubling: bool, count: int) -> None:
    requested, kept = drawn
    found = run(requested, doubling=doubling, kept=np.array(kept), steps=count)
    assert found == slow_run(requested, doubling, kept, count)


def test_a_chunk_table_that_is_too_small_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    one = step(rng.integers(1, 10_000, 60).tolist(), [*range(60), *(~rng.permutation(60)).tolist()])
    wide = run(one, doubling=False)
    monkeypatch.setattr(arena, "_FIRST_CAPACITY", 4)
    assert run(one, doubling=False) == wide and wide.reserved > 0


def test_regions_double_from_one_mebibyte() -> None:
    three = step([100, 100, 5 * MIB, 100], [0, 1, 2, 3])
    assert run(three, doubling=True, steps=1) == Arena(5 * MIB + 768 + 3 * MIB, 5 * MIB + 768, MIB + 8 * MIB)
    assert run(three, doubling=False, steps=1).reserved == 5 * MIB + 768


def test_a_chunk_below_twice_the_request_is_handed_out_whole() -> None:
    assert run(step([1000, 600], [0, ~0, 1]), doubling=False, steps=1) == Arena(1024, 1024, 1024)
    assert run(step([1024, 512, 512], [0, ~0, 1, 2]), doubling=False, steps=1).reserved == 1024
    assert run(step([1023, 513, 256], [0, ~0, 1, 2]), doubling=False, steps=1).reserved == 1024 + 256


def test_a_doubled_region_is_at_most_a_gibibyte_unless_more_is_asked_for() -> None:
    assert run(step([1 << 30, 256, 3 << 30], [0, 1, 2]), doubling=True, steps=1).reserved == (1 + 1 + 3) << 30


def test_what_the_next_step_reads_holds_up_the_merging_of_chunks() -> None:
    two = step([1024, 1024, 2048], [0, 1, ~0, 2])
    assert run(two, doubling=False).reserved == 4096
    kept = np.array([False, True, False])
    # In the second step buffer 1 splits the third region, since the old buffer 1 has the second: 2 needs a new one.
    assert run(two, doubling=False, kept=kept).reserved == 4096 + 2048


# In a process of its own: an allocator that is registered stays. The log goes to standard error.
_OBSERVE = """
import sys
import onnxruntime as ort
from onnx_remat.measure.probe import random_feeds
from onnx_remat.ir.naming import renewals
from onnx_remat.session.training import Loop

path, strategy, limit, steps, threads, how = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
ort.set_default_logger_severity(1)
where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
ort.create_and_register_allocator(where, ort.OrtArenaCfg({"max_mem": limit, "arena_extend_strategy": strategy}))
options = ort.SessionOptions()
options.enable_mem_pattern = False
options.intra_op_num_threads = threads
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
options.add_session_config_entry("session.use_env_allocators", "1")
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
feeds = random_feeds(session, {})
names = [value.name for value in session.get_outputs()]
renewed = renewals(feeds, names) if how == "fed back" else {}
loop = Loop(session, feeds, "loss") if how == "loop" else None
print("RUN", file=sys.stderr, flush=True)
for _ in range(steps):
    if loop:
        loop.step()
        continue
    made = dict(zip(names, session.run(names, feeds)))
    feeds |= {renewed[name]: made[name] for name in renewed}  # arrays of session.run are the arena's own memory
    del made
print("DONE", file=sys.stderr, flush=True)
"""


def observe(path: Path, doubling: bool, how: str, limit: int = 0, steps: int = STEPS) -> tuple[int, list[int], bool]:
    """Bytes of weights in ONNX Runtime's arena, its regions by its own log, and whether the steps ran."""
    arguments = [int(not doubling), limit, steps, CPU.threads, how]
    done = subprocess.run(
        [sys.executable, "-c", _OBSERVE, str(path), *map(str, arguments)],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    weights = sum(map(int, re.findall(r"Reserving memory in BFCArena for Cpu size: (\d+)", done.stderr)))
    regions = [*map(int, re.findall(r"Extended allocation by (\d+) bytes", done.stderr.partition("RUN\n")[2]))]
    return weights, regions, "DONE\n" in done.stderr


def predicted(name: str, doubling: bool, how: str) -> int:
    """Bytes of the arena's regions, as `observe` should find them."""
    source = model_io.load(SAMPLES / f"{name}.onnx")
    executed = as_executed(source.model, source.folder, "all", Preparation(CPU))
    timeline, values = executed.timeline, executed.compiled.graph.values
    inputs = [name for name, value in values.items() if value.kind == INPUT]
    renewed = renewals(inputs, [name for name, value in values.items() if value.is_output])
    kept = np.array([how == "fed back" and name in renewed for name in values])
    return run(requests(executed, timeline), doubling=doubling, kept=kept, steps=STEPS).reserved


@pytest.mark.parametrize("how", few(["plain", "fed back"], ["plain"]))
@pytest.mark.parametrize("doubling", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few(["attention_stack", "residual_cnn"], ["residual_cnn"]))
def test_regions_are_those_of_onnxruntime(name: str, doubling: bool, how: str) -> None:
    pytest.importorskip("onnxruntime")
    path, found = SAMPLES / f"{name}.onnx", predicted(name, doubling, how)
    weights, regions, ran = observe(path, doubling, how)
    assert (sum(regions), ran) == (found, True)
    if not doubling and name == "attention_stack":  # one says that ONNX Runtime's limit is one of regions and weights
        assert observe(path, False, how, weights + found)[2]
        assert not observe(path, False, how, weights + found - 256)[2]


@pytest.mark.slow
def test_a_loop_leaves_no_state_in_the_arena() -> None:
    pytest.importorskip("onnxruntime")
    plain, fed_back = (predicted("attention_stack", False, how) for how in ("plain", "fed back"))
    assert sum(observe(SAMPLES / "attention_stack.onnx", False, "loop")[1]) == plain < fed_back


_THREE = "float[40, 1] a, float[40, 60] b, float[20, 40, 60] c"
_QUANTIZED = "uint8[40, 60] a, float sa, uint8 za, uint8[60, 50] b, float sb, uint8 zb, float sy, uint8 zy"


@pytest.mark.parametrize(
    ("inputs", "node"),
    [
        ("bool[20, 40, 1] c, float x, float[20, 40, 60] y", "Where (c, x, y)"),
        ("bool[40, 60] c, float[20, 40, 60] x, float[60] y", "Where (c, x, y)"),
        (_THREE, "Sum (a, b, c)"),
        *(pytest.param(_THREE, f"{op} (a, b, c)", marks=pytest.mark.slow) for op in ("Max", "Min", "Mean")),
        ("float[32, 48] a, float[48, 16] b", 'Einsum <equation = "ij,jk->ki"> (a, b)'),
        ("float[32, 99] a, uint8[99, 64] b, float s, uint8 z", "com.microsoft.DynamicQuantizeMatMul (a, b, s, z)"),
        (_QUANTIZED, "QLinearMatMul (a, sa, za, b, sb, zb, sy, zy)"),
        ("float[8, 3, 32, 32] x, float[8, 3, 3, 3] w", "Conv (x, w)"),
        ("float[4, 12, 10, 9] x, float[12, 6, 3, 3] w", "ConvTranspose (x, w)"),
        ("float[2, 50, 6, 7] x", "LRN <size = 3> (x)"),
        ("float16[20, 4, 600] x, float16[600] s, float16[600] b", "LayerNormalization (x, s, b)"),
        ("float[2, 300, 4, 5] x, float[300] s", "BatchNormalization <training_mode = 1> (x, s, s, s, s)"),
    ],
    ids=lambda text: text.split(" ")[0] if "(" in text else "",
)
def test_workspace_is_asked_for_before_outputs_by_some_kernels_and_after_by_others(
    inputs: str, node: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    outputs = "out, mean, variance" if "training_mode" in node else "out"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g ({inputs}) => ({outputs}) {{ {outputs} = {node} }}""")
    onnx.save(model, path := tmp_path / "one.onnx")
    executed = as_executed(model, None, "all", Preparation(CPU))
    asked = requests(executed, executed.timeline)
    sizes = [-(-int(asked.size[b]) // 256) * 256 for b in asked.events if b >= 0]
    regions = observe(path, False, "plain", steps=1)[1]
    if "Einsum" in node:  # of which the rule knows but one block, large enough for all
        assert sizes[0] > sizes[-1] == regions[-1] < regions[0]
    else:
        assert regions == sizes


def test_reserves_count_weights_and_inputs() -> None:
    source = model_io.load(SAMPLES / "chain.onnx")
    executed = as_executed(source.model, source.folder, "disable", Preparation(CPU))
    timeline = executed.timeline
    found = reserves(executed, timeline)
    assert timeline.peak < found.held < found.held_fed_back
    assert timeline.peak - executed.compiled.problem.base_bytes <= found.limit <= found.limit_fed_back


@pytest.mark.slow
def test_a_budget_that_covers_the_arena() -> None:
    path = SAMPLES / "attention_stack.onnx"
    plain, covered = (rewrite_model(path, "70%", effort=1.0, verify=how, arena=how == "run",
                                    run_by="session").report
                      for how in ("none", "run"))  # fmt: skip
    assert covered.measured is not None
    assert plain.after.total <= plain.budget < plain.arena_after.held
    assert covered.arena_after.held <= covered.budget
    assert covered.measured.after_arena is not None
    assert covered.measured.after < covered.measured.after_arena <= covered.budget + processes.RESOLUTION
    assert plain.measured is None or plain.measured.after_arena is None


def test_an_original_whose_arena_exceeds_the_budget_is_planned() -> None:
    model = chain(16, 4096, 64)
    budget = int(as_executed(model, None, "all", Preparation(CPU)).timeline.peak * 1.01)
    assert rewrite_model(model, budget, effort=0.3, run_by="session").report.notes
    report = rewrite_model(model, budget, effort=0.3, arena=True).report
    assert report.arena_after.held <= budget < report.arena_before.held
