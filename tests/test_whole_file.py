"""Files that appear when they are whole, whoever writes beside."""

from __future__ import annotations

import os
import secrets
import threading

import pytest
from caches import TIGHT, two_level
from models import model, prompt
from saved_files import feed

from hf_sparsekv import SparseCache, user_file
from hf_sparsekv.policies import crossover
from hf_sparsekv.tuning.channels import calibrate
from hf_sparsekv.whole_file import replacing


@pytest.fixture(scope="module")
def caches():
    """Two, of different lengths."""
    made = [two_level(**TIGHT) for _ in range(2)]
    for cache, length in zip(made, (130, 90)):
        feed(cache, prompt(1, length)["input_ids"])
    return made


def test_two_threads_save_to_one_path(caches, tmp_path):
    path = tmp_path / "context"
    whole = []
    for cache in caches:
        cache.save(path)
        whole.append(path.read_bytes())
    for _ in range(30):
        start, errors = threading.Barrier(2), []

        def save(cache, start=start, errors=errors):
            start.wait()
            try:
                cache.save(path)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(cache,)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert path.read_bytes() in whole
        assert os.listdir(tmp_path) == ["context"]
    assert SparseCache.load(path).get_seq_length() in (130, 90)


def test_a_planted_link_is_not_followed(caches, tmp_path, monkeypatch):
    """Nor is a file overwritten that has the hidden file's name."""
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    names = iter(["planted", "taken", "free"])
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(names))
    planted = [folder / f".context.{name}.part" for name in ("planted", os.getpid())]
    for link in planted:
        link.symlink_to(victim)
    taken = folder / ".context.taken.part"
    taken.write_text("another's")
    caches[0].save(folder / "context")
    assert victim.read_text() == "precious" and taken.read_text() == "another's"
    assert all(link.is_symlink() for link in planted)
    assert SparseCache.load(folder / "context").get_seq_length() == 130


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_open(caches, tmp_path, mask, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = os.umask(mask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        caches[1].save(tmp_path / "cache")
        calibrate(model("llama"), [prompt(1, 40)["input_ids"]]).save(tmp_path / "channels")
        user_file.save(crossover.table_path(), 1, dict, "a GPU", {})
    finally:
        os.umask(before)
    made = [tmp_path / "cache", tmp_path / "channels", crossover.table_path()]
    assert {path.stat().st_mode for path in made} == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half of")
        raise error
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_errors_name_the_path(tmp_path):
    """Not the hidden file beside it."""
    path = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError, match=f"'{path}'$"), replacing(path):
        pass
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=f"'{path}'$"), replacing(path):
        pass
    assert os.listdir(tmp_path) == ["folder"]


def test_no_file_takes_the_place_of_a_device_or_pipe(tmp_path):
    """As ``--output /dev/null`` would."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=f"a device or pipe, which no file may replace: '{pipe}'$"), replacing(pipe):
        pytest.fail("a file was begun")
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
