"""Files take their places together or not at all; scratch folders do not outlive their process for long."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnx_remat import files
from onnx_remat.errors import UsageError
from onnx_remat.process.cache import cache_folder


def test_files_written_together_appear_together(tmp_path):
    with files.together():
        files.write_text("one", tmp_path / "a")
        files.write_text("two", tmp_path / "b")
        assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    assert [(tmp_path / name).read_text() for name in "ab"] == ["one", "two"]


def test_a_failure_leaves_none_of_them_and_no_folder(tmp_path):
    (tmp_path / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), files.together():
        files.write_text("new", tmp_path / "old")
        files.make_folder(tmp_path / "deep" / "er")
        files.write_text("new", tmp_path / "deep" / "er" / "b")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_name_may_be_as_long_as_names_may(tmp_path):
    longest = tmp_path / ("\u00e9" * 127)
    assert files.check_target(longest, None, force=False) == longest
    files.write_text("x", longest)
    assert longest.read_text() == "x"


@pytest.mark.parametrize("name", ["loop", "folder/x", "self"])
def test_a_loop_of_links_is_refused(name, tmp_path):
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "folder").symlink_to("folder")
    (tmp_path / "self").symlink_to("self")
    for write in (files.write_text, lambda _, path: files.check_target(path, None, force=True)):
        with pytest.raises(UsageError, match=r"is a loop of links|does not exist"):
            write("x", tmp_path / name)


def test_a_link_into_a_folder_that_is_not_there_is_refused_before_anything_is_planned(tmp_path):
    link = tmp_path / "out.onnx"
    link.symlink_to("nowhere/out.onnx")
    with pytest.raises(UsageError, match=r"folder .*nowhere does not exist: create it"):
        files.check_target(link, None, force=False)
    (tmp_path / "nowhere").mkdir()
    assert files.check_target(link, None, force=False) == link
    files.write_text("x", link)
    assert (tmp_path / "nowhere" / "out.onnx").read_text() == "x" and link.is_symlink()


@pytest.mark.parametrize("links", [True, False])
def test_without_force_one_writer_alone_gets_the_place(links, tmp_path, monkeypatch):
    """Who comes second leaves nothing of its files, data that both have aside."""
    if not links:  # a file system without hard links
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(UsageError, match="exists: pass force=True"), files.together():
        files.write_text("mine", tmp_path / "data", force=False)
        files.write_text("mine", tmp_path / "out", force=False)
        (tmp_path / "out").write_text("theirs")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"out": "theirs"}
    for theirs, refused in (("same", False), ("other", True)):
        (tmp_path / "out").unlink()
        try:
            with files.together():
                with files.replacing(tmp_path / "data", force=False, shared=True) as partial:
                    partial.write_text("same")
                files.write_text("mine", tmp_path / "out", force=False)
                (tmp_path / "data").write_text(theirs)
        except UsageError:
            assert refused
            assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"data": theirs}
        else:
            assert not refused
            assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"data": "same", "out": "mine"}


@pytest.mark.parametrize("name", ["a", "./a", "sub/../a", "link", "hard"])
def test_one_file_by_several_names_is_one_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("a").write_text("a")
    Path("link").symlink_to("a")
    os.link("a", "hard")
    with pytest.raises(UsageError, match="cannot be --json, it is the input"):
        files.check_uses([files.Use("a", "the input")], [files.Use(name, "--json")])
    files.check_uses([files.Use("a", "the input")], [files.Use("b", "--json"), files.Use("c", "--plot")])


_HOLDS = """
import signal, sys, time
from onnx_remat import files
from onnx_remat.app import streams
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever starts the tests may ignore it
try:
    with streams.terminable(), files.scratch() as scratch:
        print(scratch, flush=True)
        time.sleep(60)
except streams.Terminated as ended:
    ended.die()
"""


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGKILL, True)])
def test_scratch_folders_go_with_their_process_or_with_the_next(number, left, tmp_path, monkeypatch):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", _HOLDS], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    old = time.time() - 3600
    os.utime(folder, (old, old))
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    files._sweep.cache_clear()
    with files.scratch():  # another process does not take a folder that is in use, however old
        assert folder.exists()
    process.send_signal(number)
    assert process.wait() == -number
    assert folder.exists() == left
    files._sweep.cache_clear()
    with files.scratch():
        assert not folder.exists()
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_has_the_packages_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder.__wrapped__() == cache_folder()


def test_the_umask_is_read_and_not_set(tmp_path, monkeypatch):
    (tmp_path / "plain").touch()
    wanted = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("set"))
    assert files.mode_of_new_files() == wanted
