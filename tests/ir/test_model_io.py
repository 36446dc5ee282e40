"""Models in and out: nothing is half written, external data travels along, and files lie about themselves in vain."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_remat
from onnx_remat import files
from onnx_remat.app import cli
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir import external_data, graph, large_files, model_io, shapes
from onnx_remat.ir.light import without_weights
from onnx_remat.split import split_step
from tests.support.graphs import mlp, model_of

make = helper.make_node
WEIGHT = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


def external(location="w.bin", offset=None, length=None, name="w"):
    """``y = x @ w`` with w in a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=WEIGHT.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    model = model_of([make("MatMul", ["x", name], ["y"], name="mm")], {"x": [2, 16]}, {"y": [2, 16]})
    model.graph.initializer.append(tensor)
    return model


def store(model, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())  # unchecked: some are meant to be wrong
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def home(tmp_path):
    """A folder with a model and its data file, and another next to it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "w.bin").write_bytes(WEIGHT.tobytes())
    store(external(), tmp_path / "here" / "m.onnx")
    return tmp_path


def test_three_ways_to_give_a_model(tmp_path):
    model = mlp(layers=1)
    path = store(model, tmp_path / "m.onnx")
    assert model_io.load(model).model is model and model_io.load(model).folder is None
    assert model_io.load(path.read_bytes()).model == model
    for given in (path, str(path)):
        source = model_io.load(given)
        assert source.model == model and source.folder == tmp_path.resolve()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\xff" * 99, "not an ONNX model"), (b"\x08\x07", "no graph")],
)  # fmt: skip
def test_files_that_are_no_models_are_refused(content, message, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        model_io.load(path)
    assert "m.onnx" in str(caught.value)
    with pytest.raises(ModelError, match=message):
        model_io.load(content)


def test_missing_files_and_truncated_files_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*ghost\.onnx"):
        model_io.load(tmp_path / "ghost.onnx")
    with pytest.raises(ModelError, match="truncated"):
        model_io.load(mlp(layers=2).SerializeToString()[:-7])


def test_contents_of_data_files_are_not_read(home, monkeypatch):
    (home / "here" / "w.bin").chmod(0)
    source = model_io.load(home / "here" / "m.onnx")
    assert not source.model.graph.initializer[0].raw_data
    assert external_data.paths(source.model) == ["w.bin"]


def test_a_model_in_memory_cannot_have_data_files():
    with pytest.raises(ModelError, match=r"'w' keeps its data in a file \('w.bin'\).*pass the path"):
        model_io.load(external())


@pytest.mark.parametrize("location", ["../w.bin", "sub/../../here2/w.bin", "/etc/hostname", "", "out.bin"])
def test_data_outside_the_folder_is_refused(location, home):
    """By a path that climbs out, by an absolute one, by none, or by a link."""
    (home / "w.bin").write_bytes(WEIGHT.tobytes())
    (home / "here2").mkdir()
    (home / "here2" / "w.bin").write_bytes(WEIGHT.tobytes())  # a folder whose name starts alike is outside, too
    (home / "here" / "out.bin").symlink_to(home / "w.bin")
    path = store(external(location), home / "here" / "m.onnx")
    with pytest.raises(ModelError, match=r"initializer 'w': external data .* is outside the model's folder"):
        model_io.load(path)


def test_missing_data_is_refused_by_initializer(home):
    with pytest.raises(ModelError, match=r"initializer 'w': external data file 'ghost.bin': No such file"):
        model_io.load(store(external("ghost.bin"), home / "here" / "m.onnx"))


@pytest.mark.parametrize(
    ("offset", "length", "message"),
    [
        (0, 1025, "needs 1024 bytes, its external data has 1025"),
        (8, 1024, "too short: 1024 bytes, 1032 needed"),
        (2000, None, "too short"),
        (-4, 1024, "too short"),
        (0, -1, "needs 1024 bytes, its external data has -1"),
        ("zero", 1024, "not a number"),
        (0, "1kB", "not a number"),
    ],
)
def test_short_data_is_refused(offset, length, message, home):
    with pytest.raises(ModelError, match=f"initializer 'w'.*{message}"):
        model_io.load(store(external(offset=offset, length=length), home / "here" / "m.onnx"))


@pytest.fixture
def cached(tmp_path):
    """A step with its data as Hugging Face's cache holds them: links in a snapshot to files with other names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "r"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    model = mlp(layers=6, batch=1024, width=32)
    frozen = model.graph.input[-1]
    model.graph.input.remove(frozen)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((32, 32), np.float32), frozen.name))
    onnx.save(model, blobs / "aa", save_as_external_data=True, location="bb", size_threshold=0)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "model.onnx_data"
    store(model, blobs / "aa")
    for name, blob in (("model.onnx", "aa"), ("model.onnx_data", "bb")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot / "model.onnx"


def test_a_step_in_the_cache_of_hugging_face_is_rewritten_and_opened(cached, tmp_path):
    pytest.importorskip("onnxruntime")
    made = onnx_remat.rewrite_model(cached, "80%", run_by="session", effort=0.3, verify="none")
    made.save(tmp_path / "out.onnx")
    assert names_in(tmp_path) == ["blobs", "model.onnx_data", "out.onnx", "snapshots"]
    assert onnx_remat.Session(cached, fuse=False).slab_bytes


def test_a_large_file_in_the_cache_of_hugging_face_is_saved_whole(cached, tmp_path, monkeypatch):
    model = model_io.load(cached).model
    model.graph.initializer.append(numpy_helper.from_array(np.ones((160, 160), np.float32), "large"))
    store(model, cached.resolve())
    model_io.save(model_io.load(cached).model, tmp_path / "whole.onnx", cached.parent.resolve())
    monkeypatch.setattr(large_files, "LARGE_FILE", 0)
    source = model_io.load(cached)
    model_io.save(source.model, tmp_path / "out.onnx", source.folder)
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def test_a_model_is_not_saved_next_to_links_to_data_elsewhere(cached):
    """ONNX Runtime refuses data outside the folder of a model that is no link itself."""
    source = model_io.load(cached)
    with pytest.raises(ModelError, match=r"leads out of .*write to another folder"):
        model_io.save(source.model, cached.with_name("out.onnx"), source.folder)
    with pytest.raises(UsageError, match="data of the model"):
        model_io.save(source.model, cached.with_name("model.onnx_data"), source.folder)
    assert names_in(cached.parent) == ["model.onnx", "model.onnx_data"]


def test_data_next_to_a_link_leads_nowhere_else(cached, tmp_path):
    (tmp_path / "elsewhere.bin").write_bytes((tmp_path / "blobs" / "bb").read_bytes())
    link = cached.with_name("model.onnx_data")
    link.unlink()
    with pytest.raises(ModelError, match=r"'model.onnx_data': No such file"):
        model_io.load(cached)
    link.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(ModelError, match=r"external data 'model.onnx_data' is outside the model's folder"):
        model_io.load(cached)


def test_data_of_a_linked_model_lies_next_to_its_file(home):
    (home / "there" / "m.onnx").symlink_to(home / "here" / "m.onnx")
    assert model_io.load(home / "there" / "m.onnx").folder == (home / "here").resolve()


def test_data_of_several_tensors_and_of_bodies_is_found(home):
    inner = external("body.bin", name="k").graph.initializer[0]
    out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [16, 16])]
    constant = make("Constant", [], ["c"])
    constant.attribute.append(helper.make_attribute("value", inner))
    branches = [
        helper.make_graph([constant, make("Neg", ["c"], ["z"])], "then", [], out),
        helper.make_graph([make("Neg", ["w"], ["z"])], "else", [], out),
    ]
    model = external()
    model.graph.input.append(helper.make_tensor_value_info("cond", TensorProto.BOOL, []))
    model.graph.node.append(
        make("If", ["cond"], ["picked"], name="if", then_branch=branches[0], else_branch=branches[1])
    )
    assert external_data.paths(model) == ["w.bin", "body.bin"]
    path = store(model, home / "here" / "m.onnx")
    with pytest.raises(ModelError, match=r"'k': external data file 'body.bin'"):
        model_io.load(path)


def test_weights_are_left_out_of_what_analyses_copy():
    model = model_of(
        [make("MatMul", ["x", "w"], ["h"]), make("Reshape", ["h", "shape"], ["y"])], {"x": [2, 300]}, {"y": [600]},
        {"w": np.zeros((300, 300), np.float32), "shape": np.array([600])},
    )  # fmt: skip
    light = without_weights(model)
    assert [t.name for t in light.graph.initializer] == ["shape"]
    assert light.ByteSize() < 2000 < model.ByteSize()
    assert {v.name for v in light.graph.input} == {"x", "w"}
    onnx.checker.check_model(light, full_check=True)


def test_a_saved_model_is_the_model(tmp_path):
    model, path = mlp(layers=3), tmp_path / "m.onnx"
    model_io.save(model, path, None)
    assert onnx.load(path) == model
    assert names_in(tmp_path) == ["m.onnx"]


def test_saving_replaces_the_old_file_at_once(tmp_path):
    """A reader that has the old file open keeps reading the old one."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        model_io.save(mlp(layers=1), path, None)
        assert reader.read() == b"old"
    assert onnx.load(path) == mlp(layers=1)
    assert names_in(tmp_path) == ["m.onnx"]


def _fails(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def _half_written(self, data):
    with self.open("wb") as stream:
        stream.write(data[: len(data) // 2])
    _fails()


@pytest.mark.parametrize(
    ("owner", "method", "failure"),
    [(Path, "write_bytes", _half_written), (os, "fsync", _fails), (Path, "replace", _fails), (Path, "chmod", _fails)],
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(owner, method, failure, existing, tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    if existing:
        path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failure)
        with pytest.raises(ModelError, match=r"cannot write .*m\.onnx: No space left on device"):
            model_io.save(mlp(layers=1), path, None)
    assert names_in(tmp_path) == (["m.onnx"] if existing else [])
    assert not existing or path.read_bytes() == b"old"


def test_an_interrupt_in_the_middle_leaves_everything_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model_io.save(mlp(layers=1), path, None)
    assert names_in(tmp_path) == ["m.onnx"] and path.read_bytes() == b"old"


def test_texts_are_written_the_same_way(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    files.write_text("one", path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", _fails)
        with pytest.raises(ModelError, match=r"cannot write .*r\.json"):
            files.write_text("two", path)
    assert path.read_text() == "one" and names_in(tmp_path) == ["r.json"]


def test_data_files_are_carried_to_another_folder(home):
    source = model_io.load(home / "here" / "m.onnx")
    model_io.save(source.model, home / "there" / "out.onnx", source.folder)
    assert names_in(home / "there") == ["out.onnx", "w.bin"]
    assert np.array_equal(numpy_helper.to_array(onnx.load(home / "there" / "out.onnx").graph.initializer[0]), WEIGHT)
    assert model_io.load(home / "there" / "out.onnx").model == source.model


def test_data_files_in_subfolders_keep_their_place(home):
    (home / "here" / "data" / "deep").mkdir(parents=True)
    (home / "here" / "data" / "deep" / "w.bin").write_bytes(WEIGHT.tobytes())
    source = model_io.load(store(external("data/deep/w.bin", 0, 1024), home / "here" / "m.onnx"))
    model_io.save(source.model, home / "there" / "out.onnx", source.folder)
    assert (home / "there" / "data" / "deep" / "w.bin").read_bytes() == WEIGHT.tobytes()


def test_data_files_in_the_same_folder_are_left_alone(home):
    before = (home / "here" / "w.bin").stat()
    source = model_io.load(home / "here" / "m.onnx")
    model_io.save(source.model, home / "here" / "out.onnx", source.folder)
    after = (home / "here" / "w.bin").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert names_in(home / "here") == ["m.onnx", "out.onnx", "w.bin"]


def test_data_that_cannot_be_carried_leaves_the_old_model_intact(home, monkeypatch):
    source = model_io.load(home / "here" / "m.onnx")
    target = home / "there" / "out.onnx"
    target.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", _fails)
        with pytest.raises(ModelError, match="No space left"):
            model_io.save(source.model, target, source.folder)
    assert names_in(home / "there") == ["out.onnx"] and target.read_bytes() == b"old"


def test_a_rewritten_model_saves_with_its_data(home):
    model = mlp(layers=6, batch=512, width=16)
    weight = external().graph.initializer[0]
    weight.name = "w3"
    inputs = [v for v in model.graph.input if v.name != "w3"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.append(weight)
    result = onnx_remat.rewrite_model(store(model, home / "here" / "m.onnx"), "75%", effort=0.3, run_by="session")
    target = home / "there" / "out.onnx"
    result.save(target)
    assert (home / "there" / "w.bin").read_bytes() == WEIGHT.tobytes()
    with pytest.raises(UsageError, match="pass force=True"):
        result.save(target)
    first = target.read_bytes()
    result.save(target, force=True)
    assert target.read_bytes() == first


def test_targets_that_would_destroy_or_cannot_work_are_refused(tmp_path):
    source = store(mlp(layers=1), tmp_path / "in.onnx")
    (tmp_path / "link.onnx").symlink_to(source)
    os.link(source, tmp_path / "hard.onnx")
    for name in ("in.onnx", "link.onnx", "hard.onnx"):
        with pytest.raises(UsageError, match="is the input"):
            files.check_target(tmp_path / name, source, True)
    with pytest.raises(UsageError, match="is a directory"):
        files.check_target(tmp_path, source, True)
    with pytest.raises(UsageError, match="does not exist"):
        files.check_target(tmp_path / "no" / "out.onnx", source, True)
    (tmp_path / "old.onnx").write_bytes(b"old")
    with pytest.raises(UsageError, match="pass force=True"):
        files.check_target(tmp_path / "old.onnx", source, False)
    assert files.check_target(tmp_path / "old.onnx", source, True) == tmp_path / "old.onnx"
    assert files.check_target(str(tmp_path / "new.onnx"), None, False) == tmp_path / "new.onnx"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folders_that_cannot_be_written_are_refused(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="not writable"):
        files.check_target(folder / "out.onnx", None, False)
    with pytest.raises(ModelError, match="cannot write"):
        model_io.save(mlp(layers=1), folder / "out.onnx", None)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_new_files_get_the_permissions_of_any_new_file(umask, mode, home):
    source = model_io.load(home / "here" / "m.onnx")
    before = os.umask(umask)
    try:
        model_io.save(source.model, home / "there" / "out.onnx", source.folder)
    finally:
        assert os.umask(before) == umask  # saving does not leave it changed
    for name in names_in(home / "there"):
        assert stat.S_IMODE((home / "there" / name).stat().st_mode) == mode, name


def _refuse(*_):
    raise OSError(errno.EXDEV, "another disk")


def test_data_is_copied_where_it_cannot_be_linked(tmp_path, monkeypatch):
    """ONNX Runtime refuses symbolic links that lead out of the folder."""
    monkeypatch.setattr(external_data.os, "link", _refuse)
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "w.bin").write_bytes(b"data")
    external_data.link(external(), tmp_path / "from", tmp_path / "to")
    copy = tmp_path / "to" / "w.bin"
    assert copy.read_bytes() == b"data" and not copy.is_symlink()


def test_shapes_may_depend_on_constants_in_a_data_file(tmp_path):
    model = model_of(
        [make("Reshape", ["x", "to"], ["h"], name="view"), make("MatMul", ["h", "w"], ["y"], name="mm")],
        {"x": [4, 32]}, {"y": [8, 16]}, {"to": np.array([8, 16]), "w": WEIGHT},
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    source = model_io.load(path)
    assert shapes.infer(graph.build(source.model))["h"].shape == (8, 16)
    assert external_data.paths(source.model) == ["w.bin"]  # the weight's


def test_data_that_was_read_is_not_written_over(tmp_path, capsys):
    model, path = mlp(layers=1), tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = (tmp_path / "w.bin").read_bytes()
    assert not external_data.paths(model_io.load(path).model)
    assert cli.main([str(path), str(tmp_path / "w.bin"), "--budget", "100%", "--force"]) == 2
    assert "data of the model" in capsys.readouterr().err and (tmp_path / "w.bin").read_bytes() == before


@pytest.mark.parametrize("small", [True, False], ids=["read as a whole", "left in its file"])
def test_a_result_is_not_saved_over_its_models_data(small, tmp_path):
    weight = np.ones((4, 4) if small else (64, 64), np.float32)
    side = [len(weight), len(weight)]
    model = model_of([make("MatMul", ["x", "w"], ["y"], name="mm")], {"x": side}, {"y": side}, {"w": weight})
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = data.read_bytes()
    result = onnx_remat.rewrite_model(path, "100%", run_by="session", verify="none")
    with pytest.raises(UsageError, match="data of the model"):
        result.save(data, force=True)
    assert data.read_bytes() == before


def test_the_parts_of_a_step_are_not_saved_over_its_data(tmp_path):
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    onnx.save(mlp(layers=2, batch=4, width=4), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = data.read_bytes()
    with pytest.raises(UsageError, match="data of the model"):
        split_step(path).save(tmp_path / "g.onnx", data, force=True)
    assert data.read_bytes() == before and not (tmp_path / "g.onnx").exists()


def test_a_step_with_data_is_rewritten_where_nothing_can_be_linked(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    model, path = mlp(layers=6, batch=1024, width=32), tmp_path / "m.onnx"
    frozen = model.graph.input[-1]
    model.graph.input.remove(frozen)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((32, 32), np.float32), frozen.name))
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    monkeypatch.setattr(external_data.os, "link", _refuse)
    monkeypatch.setattr(os, "symlink", _refuse)
    made = onnx_remat.rewrite_model(path, "80%", run_by="session", effort=0.3)
    made.save(tmp_path / "out.onnx")
    assert made.report.recomputed and onnx_remat.Session(tmp_path / "out.onnx").slab_bytes
