"""A step that was opened before opens without planning; any change of what its plan depends on plans again."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat import Session
from onnx_remat.errors import OnnxRematError
from onnx_remat.session import plan_cache, plan_session
from tests.support.graphs import mlp
from tests.support.slow import few


class Planned(Exception):
    """A step was planned."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_cache.ENTRIES, "folder", lambda: tmp_path / "sessions")
    return tmp_path / "sessions"


@pytest.fixture
def no_planning(monkeypatch):
    def fail(*_, **__):
        raise Planned

    return lambda: monkeypatch.setattr(plan_session, "Child", fail)


@pytest.fixture
def path(tmp_path):
    onnx.save(mlp(layers=4, batch=256, width=32), tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


def feeds(session):
    draws = np.random.default_rng(0)
    return {each.name: draws.standard_normal(each.shape).astype(each.dtype_name) for each in session.inputs}


def ran(session):
    with session:
        return session.run(feeds(session))


def test_it_opens_without_planning_and_computes_the_same(path, no_planning):
    first = Session(path)
    facts = (first.kernel_count, first.slab_bytes, first.bookkeeping_bytes, first.inputs, first.outputs)
    made = ran(first)
    no_planning()
    again = Session(path)
    assert again.kernel_count > 0
    assert (again.kernel_count, again.slab_bytes, again.bookkeeping_bytes, again.inputs, again.outputs) == facts
    for name, value in ran(again).items():
        np.testing.assert_array_equal(value, made[name])


def test_a_step_given_as_bytes_opens_from_the_same_entry(path, no_planning):
    ran(Session(path))
    no_planning()
    ran(Session(path.read_bytes()))


OPTIONS = [{"donate": True}, {"level": "basic"}, {"fuse": False}, {"level": "disable"}]


@pytest.mark.parametrize("options", few(OPTIONS, OPTIONS[1:3]))
def test_other_options_plan_again(path, no_planning, options):
    ran(Session(path))
    no_planning()
    with pytest.raises(Planned):
        Session(path, **options)


def test_a_changed_file_is_planned_again(path, no_planning):
    ran(Session(path))
    no_planning()
    model = onnx.load(path)
    model.producer_name = "another"
    with pytest.raises(Planned):
        Session(model.SerializeToString())


def test_other_code_or_packages_plan_again(path, no_planning, monkeypatch):
    ran(Session(path))
    no_planning()
    monkeypatch.setattr(plan_cache, "surroundings", lambda: "another version")
    with pytest.raises(Planned):
        Session(path)


@pytest.mark.parametrize("name", few(["lean.onnx", "lean.kernels", "plan.json", "digests.json"], ["lean.kernels"]))
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(file.read_bytes()[:-9]),
        *(
            pytest.param(damage, marks=pytest.mark.slow)
            for damage in (
                lambda file: file.write_bytes(bytes(file.stat().st_size)),
                lambda file: file.write_bytes(b"[]"),
                lambda file: file.unlink() or file.symlink_to("/etc/passwd"),
            )
        ),
    ],
    ids=["gone", "cut", "zeros", "other", "link"],
)
def test_an_entry_that_is_damaged_is_planned_again(path, folder, name, damage, no_planning):
    made = ran(Session(path))
    (entry,) = folder.iterdir()
    damage(entry / name)
    for _ in range(2):
        for value, expected in zip(ran(Session(path)).values(), made.values(), strict=True):
            np.testing.assert_array_equal(value, expected)
        no_planning()


@pytest.mark.parametrize("other", few(["file", "link"], ["file"]))
def test_what_is_in_an_entrys_place_is_replaced(path, folder, other, no_planning):
    ran(Session(path))
    (entry,) = folder.iterdir()
    entry.rename(folder / "moved")
    if other == "file":
        entry.write_text("a file")
    else:
        entry.symlink_to("nowhere")
    ran(Session(path))
    no_planning()
    ran(Session(path))


@pytest.mark.slow
def test_files_of_two_entries_are_not_mixed(path, folder):
    """Another process may replace an entry while this one copies its files."""
    ran(Session(path))
    (entry,) = folder.iterdir()
    kernels = (entry / "lean.kernels").read_bytes()
    (entry / "plan.json").write_text("{")
    ran(Session(path))  # the entry has another secret now
    assert (entry / "lean.kernels").read_bytes() != kernels
    (entry / "lean.kernels").write_bytes(kernels)
    ran(Session(path))


def test_a_file_that_is_replaced_while_it_is_planned_is_not_kept(path, folder, monkeypatch):
    other = path.with_name("other.onnx")
    onnx.save(mlp(layers=5, batch=256, width=32), other)
    found = plan_cache.key_of

    def replaced(*arguments):
        key = found(*arguments)
        other.replace(path)
        return key

    monkeypatch.setattr(plan_cache, "key_of", replaced)
    ran(Session(path))
    assert not folder.exists()


def test_the_oldest_entries_go_and_strays_with_them(path, folder, monkeypatch):
    monkeypatch.setattr(plan_cache.ENTRIES, "most", 2)
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text("a stray file")
    for options in ({}, {"fuse": False}, {"donate": True}):
        ran(Session(path, **options))
    assert len([*folder.iterdir()]) == 2 and all(each.is_dir() for each in folder.iterdir())


def test_a_check_always_runs(path, no_planning):
    ran(Session(path))
    no_planning()
    with pytest.raises(Planned):
        Session(path, check=True)


@pytest.mark.parametrize("size", few([1024, 64], [64]))
@pytest.mark.parametrize("folded", few([False, True], [True]))
def test_weights_in_another_file_are_read_each_time(tmp_path, folder, folded, size):
    """The file that names them stays the same when they change."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [size], np.ones(size, np.float32).tobytes(), raw=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in "xy")
    nodes = [helper.make_node("Neg", ["w"], ["v"]), helper.make_node("Mul", ["x", "v" if folded else "w"], ["y"])]
    graph = helper.make_graph(nodes[not folded :], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    x = {"x": np.ones(size, np.float32)}
    with Session(path) as session:
        assert abs(session.run(x)["y"][0]) == 1
    (tmp_path / "weights.bin").write_bytes(np.full(size, 2, np.float32).tobytes())
    with Session(path) as session:
        assert abs(session.run(x)["y"][0]) == 2
    assert not folder.exists() or not [*folder.iterdir()]


def test_a_refusal_is_not_kept(tmp_path, folder):
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(OnnxRematError):
        Session(path)
    assert not folder.exists()


def test_two_threads_open_one_entry_at_once(path, no_planning):
    made = ran(Session(path))
    no_planning()
    found: list[dict] = []
    threads = [threading.Thread(target=lambda: found.append(ran(Session(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for each in found:
        for name, value in each.items():
            np.testing.assert_array_equal(value, made[name])


def test_a_folder_that_cannot_be_written_changes_nothing(path, folder):
    folder.write_text("a file")
    ran(Session(path))
    ran(Session(path))


def test_kernels_that_do_not_fit_this_process_are_planned_again(path, no_planning, monkeypatch):
    """Those of oneDNN, where it has another number of processors, say."""
    made = ran(Session(path))
    monkeypatch.setattr(plan_session.kernel_file, "fit_here", lambda kernels: False)
    for name, value in ran(Session(path)).items():
        np.testing.assert_array_equal(value, made[name])
    no_planning()
    with pytest.raises(Planned):
        Session(path)
