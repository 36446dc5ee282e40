"""Weights inside a large file stay there: what is written is byte for byte what a whole parse leads to."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_remat
from onnx_remat.errors import ModelError
from onnx_remat.ir import external_data, large_files, model_io
from onnx_remat.ort import runtime
from tests.support.graphs import mlp

SIDE = 160  # 100 kB of weight


def frozen(layers: int = 6, side: int = SIDE) -> onnx.ModelProto:
    """An MLP's step whose weights are in the file; every second one has a doc_string, which comes after the data."""
    model = mlp(layers=layers, batch=256, width=side)
    generator = np.random.default_rng(0)
    names = {f"w{i}" for i in range(layers)}
    kept = [v for v in model.graph.input if v.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for i in range(layers):
        weight = numpy_helper.from_array((generator.standard_normal((side, side)) * 0.1).astype(np.float32), f"w{i}")
        weight.doc_string = "stays" * (i % 2)
        model.graph.initializer.insert(i, weight)
    model.metadata_props.add(key="kept", value="yes")
    return model


@pytest.fixture
def path(tmp_path):
    (tmp_path / "m.onnx").write_bytes(frozen().SerializeToString(deterministic=True))
    return tmp_path / "m.onnx"


@pytest.fixture
def every_file_is_large(monkeypatch):
    monkeypatch.setattr(large_files, "LARGE_FILE", 0)


def test_weights_stay_in_the_file_and_come_back(path, tmp_path, every_file_is_large):
    source = model_io.load(path)
    assert source.model.ByteSize() < 20_000 < path.stat().st_size
    stored = [t for t in source.model.graph.initializer if large_files.is_stored(t)]
    assert [t.name for t in stored] == [f"w{i}" for i in range(6)]
    assert external_data.paths(source.model) == []
    assert model_io.weight_bytes(source.model) == model_io.weight_bytes(onnx.load(path))
    (tmp_path / "there").mkdir()
    model_io.save(source.model, tmp_path / "there" / "copy.onnx", source.folder)
    assert (tmp_path / "there" / "copy.onnx").read_bytes() == path.read_bytes()
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["copy.onnx"]


def test_a_rewritten_file_is_the_same_either_way(path, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    written = []
    for limit in (2**40, 0):
        monkeypatch.setattr(large_files, "LARGE_FILE", limit)
        result = onnx_remat.rewrite_model(path, "70%", effort=0.2, run_by="session")
        assert result.report.recomputed
        result.save(tmp_path / "out.onnx", force=True)
        written.append((tmp_path / "out.onnx").read_bytes())
    assert written[0] == written[1]


def test_what_the_runtime_folds_of_weights_is_predicted(path, monkeypatch):
    """The same peaks and the same file whether the runtime saw the weights or not."""
    pytest.importorskip("onnxruntime")
    seen = []
    for limit in (2**40, 1000):
        monkeypatch.setattr(runtime, "MOST_WEIGHTS", limit)
        result = onnx_remat.rewrite_model(path, 2_100_000, effort=0.2, run_by="session")
        seen.append((result.report.before, result.report.after, result.report.peaks_by_level, result.model))
    assert seen[0] == seen[1]
    transposed = 5 * SIDE * SIDE * 4  # of each weight but the first, folded when the original is loaded
    assert seen[0][0].weights > model_io.weight_bytes(frozen()) + transposed - 1000


@pytest.mark.parametrize("name", ["a:big.onnx", r"..\big.onnx", os.fsdecode(b"\xff.onnx")])
def test_a_large_file_may_have_any_name(name, path, tmp_path, every_file_is_large):
    (tmp_path / "odd").mkdir()
    odd = path.rename(tmp_path / "odd" / name)
    source = model_io.load(odd)
    model_io.save(source.model, tmp_path / "copy.onnx", source.folder)
    assert (tmp_path / "copy.onnx").read_bytes() == odd.read_bytes()


def test_a_model_in_memory_cannot_refer_to_a_file(path, every_file_is_large):
    with pytest.raises(ModelError, match=r"'w0' keeps its data in a file .* pass the path"):
        model_io.load(model_io.load(path).model)
    model_io.save(model_io.load(path).model, path.with_name("copy.onnx"), None)
    assert path.with_name("copy.onnx").stat().st_size < 20_000


@pytest.mark.parametrize("cut", [1, 1000, 300_000])
def test_truncated_large_files_are_refused(path, cut, every_file_is_large):
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(ModelError, match="truncated"):
        model_io.load(path)


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x3a\xff\xff\xff\xff\x0f", b"\x07\x00", b"\x0b", b"\x80" * 11])
def test_large_files_that_are_no_models_are_refused(data, tmp_path, every_file_is_large):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError, match="not an ONNX model"):
        model_io.load(tmp_path / "m.onnx")


def test_data_of_a_wrong_length_is_refused(tmp_path, every_file_is_large):
    model = frozen()
    model.graph.initializer[2].raw_data += b"\0"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="'w2' needs 102400 bytes"):
        model_io.load(tmp_path / "m.onnx")


def test_a_file_that_changes_meanwhile_is_not_mixed_with_itself(path, tmp_path, every_file_is_large):
    source = model_io.load(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="changed during the run"):
        model_io.save(source.model, tmp_path / "out.onnx", source.folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_result_may_replace_its_source(path, every_file_is_large):
    pytest.importorskip("onnxruntime")
    result = onnx_remat.rewrite_model(path, "70%", effort=0.2, run_by="session")
    result.save(path, force=True)
    assert [numpy_helper.to_array(t).tobytes() for t in onnx.load(path).graph.initializer[:6]] == [
        numpy_helper.to_array(t).tobytes() for t in frozen().graph.initializer[:6]
    ]


def test_more_than_two_gigabytes_are_refused_before_anything_is_written(path, tmp_path, monkeypatch):
    monkeypatch.setattr(large_files, "LARGE_FILE", 0)
    source = model_io.load(path)
    monkeypatch.setattr(large_files, "_MOST_BYTES", 600_000)
    with pytest.raises(ModelError, match="2 GiB"):
        model_io.save(source.model, tmp_path / "out.onnx", source.folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


_LOAD = "import sys, resource\nfrom onnx_remat.ir import model_io\nmodel_io.load(sys.argv[1])\n"
_LOAD += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path):
    """A file of 300 MB: loading it takes no more memory than loading a small one, within 30 MB."""
    small, large = tmp_path / "small.onnx", tmp_path / "large.onnx"
    small.write_bytes(frozen(layers=1).SerializeToString())
    model = frozen(layers=1)
    model.graph.initializer.append(helper.make_tensor("big", 1, [75_000_000], bytes(300_000_000), raw=True))
    large.write_bytes(model.SerializeToString())
    del model
    peaks = [int(subprocess.check_output([sys.executable, "-c", _LOAD, p])) * 1024 for p in (small, large)]
    assert peaks[1] - peaks[0] < 30 * 2**20
