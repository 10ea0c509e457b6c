"""The cache of tables: keys, damage, and several processes at once."""

import logging
import os
import stat
import subprocess
import sys

import pytest

from loka_compile import store
from loka_compile.store import cache_dir, cache_path, load_cached, save_cached
from loka_compile.table import Header, Measurement, Table


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def table(*sites, target="h200", mere=0.1):
    rows = [Measurement(s, "forward", 1, 8, 4, 4, "bfloat16", "torch", "rowwise", 1.0, 1.0, 3.0, mere) for s in sites]
    return Table(Header(target=target, fingerprint=dict.fromkeys(sites, (4, 4))), rows)


def test_round_trip_and_miss(own_cache):
    assert load_cached("k") is None
    assert not own_cache.exists()
    path = save_cached("k", table("a#0"))
    assert path == cache_path("k")
    assert load_cached("k").digest() == table("a#0").digest()
    assert load_cached("other") is None


def test_default_folder_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("LOKA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    if sys.platform == "linux":
        assert str(cache_dir()) == "/somewhere/loka_compile"
    monkeypatch.setenv("LOKA_CACHE_DIR", "~/mine")
    assert cache_dir() == cache_dir().expanduser()
    assert cache_dir().name == "mine"


def test_keys_never_share_a_file_and_never_leave_the_folder(own_cache):
    keys = ["a", "b", "a/b", "a_b", "../../etc/passwd", "", "x" * 300, "x" * 301, "ä", "a\0b", ".", "A"]
    paths = [cache_path(key) for key in keys]
    assert len({str(p).lower() for p in paths}) == len(keys)
    assert {p.parent for p in paths} == {own_cache}
    for key in keys:
        assert save_cached(key, table("a#0")) is not None
        assert load_cached(key) is not None


def test_second_save_adds_its_sites():
    save_cached("k", table("a#0"))
    save_cached("k", table("b#0"))
    assert set(load_cached("k").header.fingerprint) == {"a#0", "b#0"}
    assert len(load_cached("k")) == 2


def test_unmergeable_table_is_replaced(caplog):
    save_cached("k", table("a#0"))
    with caplog.at_level(logging.INFO, logger="loka_compile.store"):
        save_cached("k", table("b#0", target="b200"))
    assert set(load_cached("k").header.fingerprint) == {"b#0"}
    assert "replaced" in caplog.text


def test_corrupt_file_is_logged_put_aside_and_ignored(caplog):
    path = save_cached("k", table("a#0"))
    path.write_text(path.read_text()[:-30])
    with caplog.at_level(logging.WARNING, logger="loka_compile.store"):
        assert load_cached("k") is None
    assert str(path) in caplog.text
    assert not path.exists()
    assert path.with_name(path.name + ".corrupt").exists()
    caplog.clear()
    assert load_cached("k") is None
    assert caplog.text == ""
    save_cached("k", table("b#0"))
    assert set(load_cached("k").header.fingerprint) == {"b#0"}


def test_saving_over_a_corrupt_file_works():
    path = save_cached("k", table("a#0"))
    path.write_bytes(b"\x00\xff")
    save_cached("k", table("b#0"))
    assert set(load_cached("k").header.fingerprint) == {"b#0"}


def test_file_of_another_version_is_a_miss_and_gets_overwritten(caplog):
    path = save_cached("k", table("a#0"))
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with caplog.at_level(logging.INFO, logger="loka_compile.store"):
        assert load_cached("k") is None
    assert "version 1" in caplog.text
    assert path.exists()
    save_cached("k", table("b#0"))
    assert set(load_cached("k").header.fingerprint) == {"b#0"}


def test_unwritable_folder_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path / "file" / "sub"))
    with caplog.at_level(logging.WARNING, logger="loka_compile.store"):
        assert save_cached("k", table("a#0")) is None
        assert load_cached("k") is None
    assert "LOKA_CACHE_DIR" in caplog.text


def test_unreadable_entry_is_a_warning(caplog):
    cache_path("k").mkdir(parents=True)  # a folder where the file should be: reading raises IsADirectoryError
    with caplog.at_level(logging.WARNING, logger="loka_compile.store"):
        assert load_cached("k") is None
    assert "cannot be read" in caplog.text


def test_lock_that_is_never_free_is_given_up(monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")
    save_cached("k", table("a#0"))
    handle = os.open(cache_path("k").with_suffix(".lock"), os.O_RDWR)
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with caplog.at_level(logging.WARNING, logger="loka_compile.store"):
            assert save_cached("k", table("b#0")) is None
        assert "stayed locked" in caplog.text
        assert set(load_cached("k").header.fingerprint) == {"a#0"}  # readers need no lock
    finally:
        os.close(handle)
    assert save_cached("k", table("b#0")) is not None


WORKER = """
import sys
from loka_compile.store import load_cached, save_cached
from loka_compile.table import Header, Measurement, Table

who = int(sys.argv[1])
for i in range(15):
    site = f"w{who}.l{i}#0"
    row = Measurement(site, "forward", 1, 8, 4, 4, "bfloat16", "torch", "rowwise", 1.0, 1.0, 3.0, 0.1)
    assert save_cached("shared", Table(Header(target="h200", fingerprint={site: (4, 4)}), [row])) is not None
    seen = load_cached("shared")
    assert seen is not None and site in seen.header.fingerprint
"""


def test_concurrent_processes_lose_no_row(own_cache):
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(i)], stderr=subprocess.PIPE) for i in range(4)]
    errors = [w.communicate(timeout=120)[1].decode() for w in workers]
    assert [w.returncode for w in workers] == [0] * 4, errors
    found = load_cached("shared")
    assert {r.site for r in found.rows} == {f"w{w}.l{i}#0" for w in range(4) for i in range(15)}
    left = {p.suffix for p in own_cache.iterdir()}
    assert left == {".json", ".lock"}


def test_processes_that_die_while_writing_leave_a_usable_cache(own_cache):
    code = WORKER.replace("range(15)", "range(10**6)")
    worker = subprocess.Popen([sys.executable, "-c", code, "0"], stderr=subprocess.DEVNULL)
    try:
        for _ in range(400):
            if cache_path("shared").exists():
                break
            worker.poll()
            assert worker.returncode is None
            import time

            time.sleep(0.05)
    finally:
        worker.kill()
        worker.wait()
    assert load_cached("shared") is not None  # whole, whenever the kill came
    assert save_cached("shared", table("after#0")) is not None  # and its lock died with it
    assert "after#0" in load_cached("shared").header.fingerprint


def test_files_are_readable_by_others_as_the_umask_says():
    old = os.umask(0o022)
    try:
        path = save_cached("k", table("a#0"))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
