"""The kernel cache: keys, races, corruption, folders that cannot be written, eviction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")

import cukern
from cukern.jit import CacheMissError, cache, compiler, kernels_src, toolchain
from cukern.jit.cache import Cache, make_key
from cukern.jit.compiler import Compiled, Usage

ROOT = Path(__file__).parent.parent
SOURCE = '#include "part.cuh"\n__global__ void f(float *x) { x[0] = VALUE; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUKERN_ASSERT_NO_COMPILE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of the compilations that happened."""
    done: list[str] = []
    real = compiler.compile_source

    def counted(source: Any, names: Any, target: Any, *, ptx: bool = False) -> Compiled:
        done.append(target.name)
        return real(source, names, target, ptx=ptx)

    monkeypatch.setattr(compiler, "compile_source", counted)
    return done


def user_kernel(place: Path, value: int = 1, arch: str = "sm_80", **more: Any) -> cukern.Kernel:
    place.mkdir(exist_ok=True)
    (place / "part.cuh").write_text(f"#define VALUE {value}\n")
    (place / "k.cu").write_text(SOURCE)
    return cukern.Kernel(place / "k.cu", "f", arch=arch, **more)


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("sm_*/*") if p.is_file())


def entry(size: int = 10, text: str = "log") -> Compiled:
    return Compiled(bytes(size), "sm_80", {"f": "_f"}, text, {"_f": Usage(8)}, {"_f": [(0, 8, "u64")]}, {"_f": 0})


# ---- the key


def test_same_text_hits_and_leaves_the_file_alone(tmp_path: Path, folder: Path, compiles: list[str]) -> None:
    first = user_kernel(tmp_path / "a")
    (file,) = entries(folder)
    before = file.stat().st_mtime_ns
    second = user_kernel(tmp_path / "a")
    assert compiles == ["sm_80"]
    assert first.cubin == second.cubin
    assert first.resources == second.resources
    assert file.stat().st_mtime_ns == before


def test_an_edited_header_is_seen(tmp_path: Path, compiles: list[str]) -> None:
    assert user_kernel(tmp_path / "a", 1).cubin != user_kernel(tmp_path / "a", 2).cubin
    assert len(compiles) == 2


def test_a_moved_folder_still_hits(tmp_path: Path, compiles: list[str]) -> None:
    user_kernel(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    cukern.Kernel(tmp_path / "b" / "k.cu", "f", arch="sm_80")
    assert len(compiles) == 1


def test_moved_kernel_sources_still_hit(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = '#include "common/reduce.cuh"\n__global__ void f(float *x) { x[0] = warp_reduce<Sum>(x[1]); }\n'
    cukern.Kernel(source, "f", arch="sm_80")
    shutil.copytree(kernels_src(), tmp_path / "copy")
    monkeypatch.setenv("CUKERN_KERNELS_SRC", str(tmp_path / "copy"))
    cukern.Kernel(source, "f", arch="sm_80")
    assert len(compiles) == 1
    types = tmp_path / "copy" / "common" / "types.cuh"
    types.write_text(types.read_text() + "// edited\n")
    cukern.Kernel(source, "f", arch="sm_80")
    assert len(compiles) == 2


def test_what_misses(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    user_kernel(tmp_path / "a")
    user_kernel(tmp_path / "a", arch="sm_86")
    user_kernel(tmp_path / "a", defines={"OTHER": 1})
    monkeypatch.setattr(toolchain, "nvrtc_build", lambda: "another build")
    user_kernel(tmp_path / "a")
    monkeypatch.setattr(toolchain, "headers_digest", lambda: "other headers")
    user_kernel(tmp_path / "a")
    monkeypatch.setenv("CUKERN_LINEINFO", "1")
    user_kernel(tmp_path / "a")
    assert compiles == ["sm_80", "sm_86", "sm_80", "sm_80", "sm_80", "sm_80"]


def test_the_order_of_options_and_defines_does_not_matter(
    tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_kernel(tmp_path / "a", defines={"A": 1, "B": 2})
    user_kernel(tmp_path / "a", defines={"B": 2, "A": 1})
    real = compiler.options
    monkeypatch.setattr(compiler, "options", lambda target: real(target)[::-1])
    user_kernel(tmp_path / "a", defines={"A": 1, "B": 2})
    assert len(compiles) == 1


def test_fields_cannot_run_into_each_other() -> None:
    keys = {
        make_key({"a": "x", "b": "y"}),
        make_key({"a": "xb", "b": "y"}),
        make_key({"a": ["x", "y"], "b": "y"}),
        make_key({"a": ["xy"], "b": "y"}),
        make_key({"a": "y", "b": "x"}),
        make_key({"a": ["x", ""], "b": "y"}),
    }
    assert len(keys) == 6
    assert make_key({"b": "y", "a": "x"}) == make_key({"a": "x", "b": "y"})


# ---- processes and threads


def test_two_processes_compile_once(tmp_path: Path, folder: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
import cukern
from cukern.jit import compiler
real = compiler.compile_source
def slow(*args, **more):
    Path({str(tmp_path)!r}, "compiled-" + sys.argv[1]).touch()
    time.sleep(1.0)
    return real(*args, **more)
compiler.compile_source = slow
k = cukern.Kernel("__global__ void f(float *x) {{ x[0] = 5; }}", "f", arch="sm_80")
print(len(k.cubin))
"""
    run = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    out = [p.communicate(timeout=120) for p in run]
    assert [p.returncode for p in run] == [0, 0], out
    assert out[0][0] == out[1][0]
    assert len(list(tmp_path.glob("compiled-*"))) == 1
    assert len(entries(folder)) == 1


def test_threads_compile_once(folder: Path) -> None:
    store = Cache(folder)
    calls: list[int] = []

    def build() -> Compiled:
        calls.append(1)
        time.sleep(0.05)
        return entry()

    threads = [threading.Thread(target=store.get_or_compile, args=("sm_80", "k" * 64, build)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1


def test_a_lock_that_cannot_be_had_does_not_stop_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.05)
    blocker = cache.filelock.FileLock(str(folder / "locks" / ("sm_80-" + "k" * 64)))
    (folder / "locks").mkdir(parents=True)
    with blocker:
        assert Cache(folder).get_or_compile("sm_80", "k" * 64, entry) == entry()


# ---- damage


def test_round_trip(folder: Path) -> None:
    store = Cache(folder)
    store.get_or_compile("sm_80", "a" * 64, lambda: entry(1000, "lög\n"))
    assert Cache(folder).get("sm_80", "a" * 64) == entry(1000, "lög\n")
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "garbage", "header only"])
def test_a_damaged_entry_is_set_aside_and_rebuilt(
    tmp_path: Path, folder: Path, compiles: list[str], damage: str
) -> None:
    good = user_kernel(tmp_path / "a").cubin
    (file,) = entries(folder)
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[-100] ^= 1
    file.write_bytes(
        {
            "empty": b"",
            "truncated": data[:-1],
            "flipped": bytes(flipped),
            "garbage": b"\xff" * 100,
            "header only": data.split(b"\n")[0],
        }[damage]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert user_kernel(tmp_path / "a").cubin == good
    assert len(compiles) == 2
    assert len(list((folder / "corrupt").iterdir())) == 1
    assert user_kernel(tmp_path / "a").cubin == good
    assert len(compiles) == 2


def test_an_entry_of_an_unknown_form_is_a_miss(folder: Path) -> None:
    import hashlib

    body = b'{"target": "sm_80"}\nbinary'
    path = folder / "sm_80" / ("b" * 64)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"CUKERN1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert Cache(folder).get("sm_80", "b" * 64) is None


# ---- folders that cannot be written


def check_memory_only(tmp_path: Path, compiles: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user_kernel(tmp_path / "a", 1)
        user_kernel(tmp_path / "a", 2)
        user_kernel(tmp_path / "a", 1)
    messages = [str(w.message) for w in caught if "kernel cache" in str(w.message)]
    assert len(messages) == 1, messages
    assert "CUKERN_CACHE_DIR" in messages[0]
    assert len(compiles) == 2  # the third is in memory


def test_a_cache_path_that_is_a_file(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "file"))
    check_memory_only(tmp_path, compiles)


def test_a_home_that_does_not_exist(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKERN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nonexistent")  # cannot be made by anyone
    check_memory_only(tmp_path, compiles)


def test_no_home_at_all(tmp_path: Path, folder: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    code = 'import cukern; cukern.Kernel("__global__ void f() {}", "f", arch="sm_80"); print("ran")'
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr


@pytest.mark.parametrize("answer", [RuntimeError("no home"), "~/.cache/cukern"], ids=["refuses", "keeps the ~"])
def test_a_user_without_a_home(
    tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch, answer: RuntimeError | str
) -> None:
    """A container that runs under a number which is no account: HOME is not set and the system knows none."""

    def user_cache_dir(*_: object, **__: object) -> str:
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr(cache, "_caches", {})
    monkeypatch.delenv("CUKERN_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", user_cache_dir)
    monkeypatch.chdir(tmp_path)
    check_memory_only(tmp_path, compiles)
    assert not (tmp_path / "~").exists()


def test_a_cache_in_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(ValueError, match="CUKERN_CACHE_DIR='~no-such-user/cache'"):
        cache.default_folder()


def test_a_read_only_folder(tmp_path: Path, folder: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    if os.geteuid() == 0:  # root writes anywhere: make the calls fail as they do for others
        real = Path.mkdir

        def refuse(path: Path, *args: Any, **more: Any) -> None:
            if folder in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            real(path, *args, **more)

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        folder.chmod(0o555)
    try:
        check_memory_only(tmp_path, compiles)
    finally:
        folder.chmod(0o755)


def test_a_full_disk(tmp_path: Path, folder: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    check_memory_only(tmp_path, compiles)
    assert not entries(folder)
    assert not list((folder / "tmp").iterdir())


def test_an_entry_that_cannot_be_read_is_a_miss(
    tmp_path: Path, folder: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_kernel(tmp_path / "a")
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.parent.name == "sm_80":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    user_kernel(tmp_path / "a")
    assert len(compiles) == 2


def test_entries_can_be_read_by_others(folder: Path) -> None:
    Cache(folder).get_or_compile("sm_80", "c" * 64, entry)
    (file,) = entries(folder)
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


# ---- size, information, switches


def test_least_recently_used_goes_first(folder: Path) -> None:
    store = Cache(folder, max_bytes=3500)
    for name in "abc":
        store.get_or_compile("sm_80", name * 64, lambda: entry(700))
        time.sleep(0.02)
    size = entries(folder)[0].stat().st_size
    store.max_bytes = 3 * size
    assert store.get("sm_80", "a" * 64)  # now b is the oldest
    time.sleep(0.02)
    store.get_or_compile("sm_80", "d" * 64, lambda: entry(700))
    assert [p.name[0] for p in entries(folder)] == ["a", "c", "d"]
    store.max_bytes = 10
    store.get_or_compile("sm_80", "e" * 64, lambda: entry(700))
    assert [p.name[0] for p in entries(folder)] == ["e"]  # what was just made stays


def test_what_crashed_writers_left_is_swept(folder: Path) -> None:
    store = Cache(folder)
    (folder / "tmp").mkdir(parents=True)
    for name, age in (("cukern-old", 7200), ("cukern-new", 10)):
        (folder / "tmp" / name).write_text("x")
        os.utime(folder / "tmp" / name, (time.time() - age,) * 2)
    store.get_or_compile("sm_80", "a" * 64, entry)
    assert [p.name for p in (folder / "tmp").iterdir()] == ["cukern-new"]


def test_files_of_others_in_the_folder_are_never_deleted(folder: Path) -> None:
    """CUKERN_CACHE_DIR=$HOME must not cost anyone their ~/tmp."""
    theirs = [
        folder / name for name in ("tmp/notes.txt", "corrupt/disk.img", "sm_80/results.csv", "sm_data/a" + "b" * 9)
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 1000)
        os.utime(path, (time.time() - 1e6,) * 2)
    store = Cache(folder, max_bytes=1)
    for name in "ab":
        store.get_or_compile("sm_80", name * 64, entry)
    assert store.info().entries == 1  # evicted down to the newest, and theirs are not counted
    store.clear()
    assert [p for p in theirs if not p.exists()] == []


def test_info_and_clear(folder: Path) -> None:
    store = Cache(folder)
    assert (store.info().entries, store.info().writable) == (0, True)
    for arch, name in (("sm_80", "a"), ("sm_80", "b"), ("sm_90a", "a")):
        store.get_or_compile(arch, name * 64, entry)
    info = store.info()
    assert (info.entries, info.per_arch) == (3, {"sm_80": 2, "sm_90a": 1})
    assert info.bytes == sum(p.stat().st_size for p in entries(folder))
    assert store.clear("sm_80") == 2
    assert store.info().per_arch == {"sm_90a": 1}
    assert store.clear() == 1
    assert store.info().entries == 0


def test_bound_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_MAX_MB", "5")
    assert Cache().max_bytes == 5 << 20
    monkeypatch.setenv("CUKERN_CACHE_MAX_MB", "lots")
    with pytest.raises(ValueError, match="CUKERN_CACHE_MAX_MB='lots'"):
        cache.default_bound()


def test_assert_no_compile(tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    user_kernel(tmp_path / "a")
    monkeypatch.setenv("CUKERN_ASSERT_NO_COMPILE", "1")
    user_kernel(tmp_path / "a")
    with pytest.raises(CacheMissError, match=r"kernel '\w+' of .*cukern compile.*Kernel\.compile"):
        user_kernel(tmp_path / "a", 2)
    with pytest.raises(CacheMissError, match=r"kernel 'f' of <source> -DN=3 -DFAST=True is not in the cache"):
        cukern.Kernel("__global__ void f() {}", "f", arch="sm_80", defines={"N": 3, "FAST": True})
    assert len(compiles) == 1


def test_a_failed_compilation_leaves_nothing_and_is_tried_again(folder: Path, compiles: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(cukern.CompileError):
            cukern.Kernel("__global__ void f() { wrong; }", "f", arch="sm_80")
    assert len(compiles) == 2
    assert not entries(folder)
