"""Compilers, caches and folders: the emulator works with each compiler, in awkward places, from several processes."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cukern.emulator import ToolchainError, toolchain
from cukern.jit.errors import CacheMissError

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = r"""
import numpy as np, cukern
from cukern import emulator as E
SOURCE = '''
#include "common/reduce.cuh"
#include "ptx/mma.cuh"
template <class T> __global__ void k(const T *x, float *y, int n) {
  __shared__ float part[2];
  const float v = block_reduce<Sum, 2>(threadIdx.x < n ? to_float(x[threadIdx.x]) : 0.f, part);
  u32 a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  float c[4] = {1.f, 1.f, 1.f, 1.f};
  if (threadIdx.x < 32) mma_m16n8k16<half>(c, a, a[0], a[1]);
  y[threadIdx.x] = v + c[0] + expf(0.f);
}
extern "C" __global__ void bad(float *y) {
  __shared__ float s[64];
  s[threadIdx.x] = 1.f;
  __syncthreads();
  y[threadIdx.x + 1] = s[threadIdx.x]; // line 16
}
'''
x = np.arange(50).astype(np.float16)
for check in (False, True):
    with cukern.emulate(check=check):
        y = np.full(64, np.nan, np.float32)
        cukern.Kernel(SOURCE, 'k', template=('half',))((1,), (64,), (x, y, 50))
        assert (y[:32] == 1225 + 17 + 1).all() and (y[32:] == 1225 + 1 + 1).all(), y
with cukern.emulate(check=True):
    try:
        cukern.Kernel(SOURCE, 'bad')((1,), (64,), (np.zeros(64, np.float32),))
    except E.OutOfBounds as e:
        assert e.line == 16 and e.index == (64,) and e.thread == (63, 0, 0), e
    else:
        raise AssertionError('no fault')
print('well')
"""


def run(cache: Path, *, package: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUKERN_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(package), "CUKERN_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, cwd=cache)


def compilers() -> list[str]:
    found = [c for c in ("g++", "clang++", "clang++-14", "clang++-17") if shutil.which(c)]
    if importlib.util.find_spec("ziglang"):
        found.append(f"{sys.executable} -m ziglang c++")
    return found


@pytest.mark.parametrize("compiler", compilers())
def test_each_compiler(compiler: str, tmp_path: Path) -> None:
    done = run(tmp_path, CUKERN_CXX=compiler)
    assert done.stdout == "well\n", done.stderr


def test_compiler_with_options(tmp_path: Path) -> None:
    compiler = toolchain.find_compiler().name
    done = run(tmp_path, CUKERN_CXX=f"{compiler} -DEMU_UCONTEXT")  # the portable way to switch stacks
    assert done.stdout == "well\n", done.stderr


def test_software_half(tmp_path: Path) -> None:
    """Without the hardware's conversions the results are the same."""
    done = run(tmp_path, CUKERN_CXX=f"{toolchain.find_compiler().name} -mno-f16c -mno-avx")
    assert done.stdout == "well\n", done.stderr


def test_folders_with_spaces_and_letters_of_other_alphabets(tmp_path: Path) -> None:
    package = tmp_path / "пакет с пробелами – 包"
    shutil.copytree(ROOT / "cukern", package / "cukern", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels_src", package / "kernels_src")
    cache = tmp_path / "кэш и ещё ' кавычка"
    cache.mkdir()
    done = run(cache, package=package)
    assert done.stdout == "well\n", done.stderr
    assert list(cache.rglob("kernel-*.so"))


def test_package_folder_that_cannot_be_written(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(ROOT / "cukern", package / "cukern", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels_src", package / "kernels_src")
    before = sorted(p for p in package.rglob("*") if "__pycache__" not in p.parts)
    for p in package.rglob("*"):
        p.chmod(p.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    cache = tmp_path / "cache"
    cache.mkdir()
    done = run(cache, package=package, PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "well\n", done.stderr
    assert sorted(p for p in package.rglob("*") if "__pycache__" not in p.parts) == before


def test_two_processes_at_once(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUKERN_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(ROOT), "CUKERN_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for p in running:
        out, error = p.communicate(timeout=300)
        assert out == "well\n", error
    folder = tmp_path / "emulator"
    assert not [p for p in folder.iterdir() if p.name.startswith("build-")]
    assert len(list(folder.glob("kernel-*.so"))) == 3


def shared_objects(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / "emulator").glob("*.so")}


@pytest.mark.parametrize("left", [0, 9000, -1])
def test_damaged_files_are_built_again(left: int, tmp_path: Path) -> None:
    """What a full disk or a power loss leaves: nothing, the beginning, or all of it with a wrong byte."""
    assert run(tmp_path).returncode == 0
    whole = shared_objects(tmp_path)
    assert len(whole) == 4  # the runtime, a kernel in both modes, a kernel in check mode
    for name, data in whole.items():
        damaged = data[:left] if left >= 0 else data[:500] + bytes([data[500] ^ 1]) + data[501:]
        (tmp_path / "emulator" / name).write_bytes(damaged)
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert shared_objects(tmp_path).keys() == whole.keys()
    assert all(toolchain._intact(tmp_path / "emulator" / name) for name in whole)


def test_filled_cache_that_cannot_be_written_is_used(tmp_path: Path) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    scratch.mkdir()
    assert run(cache).returncode == 0
    if os.access(cache, os.W_OK) and os.geteuid() == 0:  # root may write anywhere: a folder that is none
        unusable = "from cukern.emulator import toolchain; toolchain._usable = lambda _: False\n"
    else:
        unusable = ""
        (cache / "emulator").chmod(0o555)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUKERN_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
    done = subprocess.run(
        [sys.executable, "-c", unusable + PROGRAM], env=env, capture_output=True, text=True, cwd=cache
    )
    (cache / "emulator").chmod(0o755)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert "cannot be written" not in done.stderr
    assert not list(scratch.iterdir())


def test_cache_folder_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUKERN_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(scratch)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert done.stderr.count("the emulator's cache") == 1
    assert "set CUKERN_CACHE_DIR" in done.stderr
    assert not list(scratch.glob("cukern-emulator-*"))


def test_the_kernel_cache_counts_and_clears_what_was_built(tmp_path: Path) -> None:
    from cukern.jit.cache import Cache

    assert run(tmp_path).returncode == 0
    cache = Cache(tmp_path)
    assert cache.info().per_arch == {"emulator": 4}
    assert cache.clear("sm_90a") == 0
    assert cache.clear() == 4
    assert not shared_objects(tmp_path)


def test_clearing_removes_locks_and_what_ended_builds_left(tmp_path: Path) -> None:
    from cukern.jit.cache import Cache

    folder = tmp_path / "emulator"
    stays = ["build-running/kernel.cpp", "build-theirs/notes.txt", "theirs.lock"]
    goes = ["build-old_1234/kernel.cpp", f"kernel-{'a' * 40}.so.lock", f"runtime-{'b' * 40}.so.lock"]
    for name in (*stays, *goes):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for name in ("build-old_1234", "build-theirs"):
        os.utime(folder / name, (time.time() - 7200,) * 2)
    assert Cache(tmp_path).clear() == 0
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == stays
    assert not (folder / "build-old_1234").exists()


def build(_: Path, out: Path) -> None:
    out.write_bytes(b"built")


def test_lock_that_cannot_be_had_does_not_stop_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another user, in a cache that both share."""
    import filelock

    def refuse(lock: filelock.BaseFileLock, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", lock.lock_file)

    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert toolchain._intact(toolchain.cached("kernel-x.so", build))
    monkeypatch.undo()
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    (tmp_path / "emulator" / "kernel-y.so.lock").mkdir()  # a folder stands in its place
    assert toolchain._intact(toolchain.cached("kernel-y.so", build))


def test_what_was_built_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUKERN_CACHE_MAX_MB", "1")
    names = [f"kernel-{letter * 40}.so" for letter in "abcd"]

    def build(_: Path, out: Path) -> None:
        out.write_bytes(bytes(400 << 10))

    for name in (*names[:2], names[0], names[2]):  # the first is used again before the third is built
        toolchain.cached(name, build)
        time.sleep(0.02)
    assert sorted(shared_objects(tmp_path)) == [names[0], names[2]]
    monkeypatch.setenv("CUKERN_CACHE_MAX_MB", "0")
    toolchain.cached(names[3], build)
    assert sorted(shared_objects(tmp_path)) == [names[3]]  # what was just made stays
    monkeypatch.setenv("CUKERN_CACHE_MAX_MB", "abc")
    with pytest.raises(ValueError, match="CUKERN_CACHE_MAX_MB='abc'"):
        toolchain.cached(names[3], build)


def test_what_another_process_removed_is_built_again(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    built: list[Path] = []

    def build() -> Path:
        built.append(path)
        return path

    def load(path: Path) -> str:
        if len(built) < needed[0]:
            raise FileNotFoundError(path)
        return "loaded"

    needed = [2]
    assert toolchain.loaded(build, load) == "loaded"
    built.clear()
    needed[0] = 12
    assert toolchain.loaded(build, load) == "loaded"
    needed[0] = 1000
    with pytest.raises(ToolchainError, match=r"x\.so was removed .*: raise CUKERN_CACHE_MAX_MB, or give each process"):
        toolchain.loaded(build, load)
    path.write_text("no object")
    built.clear()
    with pytest.raises(OSError):
        toolchain.loaded(build, load)


def test_works_with_a_bound_of_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, CUKERN_CACHE_MAX_MB="0")
    assert done.stdout == "well\n", done.stderr
    assert len(shared_objects(tmp_path)) == 1


def test_cache_folder_that_changes_in_a_process(tmp_path: Path) -> None:
    """Kernels built later still work with the one runtime library."""
    change = f"\nimport os; os.environ['CUKERN_CACHE_DIR'] = {str(tmp_path / 'other')!r}\n"
    again = PROGRAM.replace("y[threadIdx.x] = v", "y[threadIdx.x] = 0.f + v")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUKERN_CACHE_DIR": str(tmp_path / "one")}
    program = [sys.executable, "-c", PROGRAM + change + again]
    done = subprocess.run(program, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "well\nwell\n"), done.stderr
    assert any(name.startswith("kernel-") for name in shared_objects(tmp_path / "other"))


def test_relative_cache_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cukern.jit.cache import default_folder

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("CUKERN_CACHE_DIR", f"cache of {tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    assert default_folder() == tmp_path / f"cache of {tmp_path.name}"
    monkeypatch.chdir(elsewhere)
    assert default_folder() == tmp_path / f"cache of {tmp_path.name}"
    monkeypatch.setenv("CUKERN_CACHE_DIR", "where nothing is")
    elsewhere.rmdir()
    with pytest.raises(ValueError, match=r"CUKERN_CACHE_DIR='where nothing is': .*No such file"):
        default_folder()


def test_compiling_can_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUKERN_ASSERT_NO_COMPILE", "1")

    def build(scratch: Path, out: Path) -> None:
        out.write_bytes(b"built")

    with pytest.raises(
        CacheMissError, match=r"kernel-1\.so is missing and CUKERN_ASSERT_NO_COMPILE is set: run this once"
    ):
        toolchain.cached("kernel-1.so", build)
    monkeypatch.setenv("CUKERN_ASSERT_NO_COMPILE", "0")
    assert toolchain.cached("kernel-1.so", build).read_bytes().startswith(b"built")
    monkeypatch.setenv("CUKERN_ASSERT_NO_COMPILE", "1")
    assert toolchain.cached("kernel-1.so", build).exists()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKERN_CXX", raising=False)
    monkeypatch.setattr(toolchain, "_candidates", lambda: iter(()))
    with pytest.raises(ToolchainError, match=r"apt install g\+\+.*pip install 'cukern\[emulator\]'.*CUKERN_CXX"):
        toolchain.find_compiler()


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ToolchainError, match="Linux only"):
        toolchain.find_compiler()


def test_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CXX", "/no/such/compiler")
    with pytest.raises(ToolchainError, match="/no/such/compiler"):
        toolchain.find_compiler()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", r"reports success and wrote nothing: set CUKERN_CXX"),
        ("echo 'ld: final link failed: No space left on device' >&2; exit 1", "no space left on the disk.*make room"),
        ('rm "$0"; exit 0', "wrote nothing|does not run"),
    ],
    ids=["does nothing", "full disk", "vanishes"],
)
def test_compiler_that_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo g++ of {tmp_path}; exit 0; fi\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CUKERN_CXX", str(compiler))
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolchainError, match=message):
        toolchain.build_kernel("", check=False, debug=False)
    assert [p.name for p in (tmp_path / "cache" / "emulator").iterdir() if p.name.startswith("build-")] == []


def test_product_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    (tmp_path / "emulator" / "kernel-x.so").mkdir(parents=True)
    with pytest.raises(ToolchainError, match=r"kernel-x\.so cannot be written \(Is a directory\).*CUKERN_CACHE_DIR"):
        toolchain.cached("kernel-x.so", build)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolchainError, match=r"kernel-y\.so cannot be written \(No space left on device\): make room"):
        toolchain.cached("kernel-y.so", build)


def test_order_of_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert [c[0] for c in toolchain._candidates()][:2] == ["g++", "clang++"]


def test_import_leaves_the_emulator_alone() -> None:
    code = "import sys, cukern, cukern.ops; print([m for m in sys.modules if m.startswith('cukern.emulator')])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
