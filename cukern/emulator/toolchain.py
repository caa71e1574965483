"""The C++ compiler: which, with what options, and a cache of what it built."""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..jit import cache
from ..jit.errors import CacheMissError
from .errors import BuildError, ToolchainError

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
FOLDER = "emulator"  # of the kernel cache, which counts, bounds and clears it (jit/cache.py)
# part of every cache key; raise it when options or file formats change meaning
SCHEMA = "3"

_BASE = (
    "-std=c++17",
    "-march=native",
    "-fPIC",
    "-pthread",
    "-fno-strict-aliasing",  # CUDA code reads one type through a pointer to another
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # the text decides what is fused: the same bits from every compiler
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
)


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler: its command, whether it is GCC, and what identifies its output."""

    command: tuple[str, ...]
    gcc: bool
    zig: bool
    identity: str

    @property
    def name(self) -> str:
        return " ".join(self.command)


def _candidates() -> Iterable[tuple[str, ...]]:
    for name in ("g++", "clang++"):
        if shutil.which(name):
            yield (name,)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line for line in f if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def environment(zig: bool) -> dict[str, str]:
    """Environment for the compiler: English messages, and zig's cache in ours, as HOME may not be writeable."""
    env = dict(os.environ, LC_ALL="C.UTF-8", LANGUAGE="C")
    if zig and "ZIG_GLOBAL_CACHE_DIR" not in env:
        env["ZIG_GLOBAL_CACHE_DIR"] = str(cache_dir() / "zig")
    return env


@functools.cache
def _probe(command: tuple[str, ...]) -> Compiler:
    zig = "ziglang" in command or Path(command[0]).name == "zig"
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, env=environment(zig), timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ToolchainError(f"the C++ compiler {shlex.join(command)!r} does not run: {e}") from None
    text = (done.stdout + done.stderr).strip()
    if done.returncode or not text:
        why = (done.stderr.strip().splitlines() or ["no output"])[0][:200]
        raise ToolchainError(
            f"the C++ compiler {shlex.join(command)!r} does not work: with --version it ends with status "
            f"{done.returncode} ({why})"
        )
    return Compiler(command, "clang" not in text.lower(), zig, text.splitlines()[0] + "|" + _cpu())


def find_compiler() -> Compiler:
    """``CUKERN_CXX`` (may hold options), else g++, clang++, the ziglang wheel.

    Raises
    ------
    ToolchainError
        If there is none, or it does not run, or the platform is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise ToolchainError(f"emulation works on Linux only, not on {sys.platform}: use a container or WSL")
    chosen = os.environ.get("CUKERN_CXX", "").strip()
    if chosen:
        try:
            return _probe(tuple(shlex.split(chosen)))
        except (ValueError, ToolchainError) as e:  # ValueError: a quote that is not closed
            raise ToolchainError(f"CUKERN_CXX={chosen!r}: {e}") from None
    for command in _candidates():
        return _probe(command)
    raise ToolchainError(
        "emulation needs a C++17 compiler and found none: install g++ (apt install g++) or clang++, "
        "or the wheel (pip install 'cukern[emulator]'), or set CUKERN_CXX"
    )


@functools.cache
def _usable(folder: str) -> bool:
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@functools.cache
def _private_folder(instead_of: str) -> str:
    warnings.warn(
        f"the emulator's cache {instead_of} cannot be written: what is not there already is compiled for this process "
        "alone; set CUKERN_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
    folder = tempfile.mkdtemp(prefix="cukern-emulator-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork may end first
        shutil.rmtree(folder, ignore_errors=True)


def _shared_folder() -> Path:
    return cache.current().folder / FOLDER


def cache_dir() -> Path:
    """The folder `emulator` of the kernel cache; one of this process if that is not writeable."""
    path = _shared_folder()
    return path if _usable(str(path)) else Path(_private_folder(str(path)))


@functools.cache
def _headers() -> bytes:
    digest = hashlib.sha256()
    for folder in (INCLUDE, RUNTIME):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def key(*parts: object) -> str:
    """Cache key of a product of the present compiler and headers."""
    compiler = find_compiler()
    fields = (SCHEMA, compiler.command, compiler.identity, _BASE, _headers(), *parts)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:40]


def run(arguments: Sequence[str | Path]) -> None:
    """Run the compiler; :class:`BuildError` with its output if it fails, :class:`ToolchainError` if that says nothing
    about the text."""
    compiler = find_compiler()
    command = [*compiler.command, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, env=environment(compiler.zig))
    except OSError as e:
        raise ToolchainError(f"the C++ compiler {compiler.name!r} does not run: {e}") from None
    if done.returncode:
        log = (done.stderr + done.stdout).decode(errors="replace")
        if os.strerror(errno.ENOSPC) in log:
            raise ToolchainError(
                f"no space left on the disk to compile for emulation, in {cache_dir()} or {tempfile.gettempdir()}: "
                "make room, or set CUKERN_CACHE_DIR and TMPDIR to folders of another disk"
            )
        raise BuildError(f"{shlex.join(command)} failed:\n{log}", log)


def cached(name: str, build: Callable[[Path, Path], None]) -> Path:
    """The file `name` of the cache; where it is missing, ``build(scratch folder, output)`` makes it.

    The file appears in one step, so that two processes cannot see each other's half; a lock keeps the second one from
    compiling the same text again. It ends in the digest of the rest, which the loader does not look at: a damaged one
    would end the process, and is built again. Beyond the cache's bound what was used least goes.
    """
    target = _shared_folder() / name
    if _intact(target):  # also where nothing can be written
        cache.mark_used(target)
        return target
    folder = cache_dir()
    target = folder / name
    with cache.process_lock(folder / (name + ".lock")):
        if not _intact(target):
            if cache.compiling_forbidden():
                raise CacheMissError(
                    f"{target} is missing and CUKERN_ASSERT_NO_COMPILE is set: run this once without it, emulated "
                    "kernels are compiled when they are first used"
                )
            try:
                _make(target, build)
            except OSError as e:
                raise ToolchainError(
                    f"{target} cannot be written ({e.strerror or e}): make room, remove what is in its place, or set "
                    "CUKERN_CACHE_DIR to another folder"
                ) from e
            cache.current().evict(keep=target)
    return target


def _make(target: Path, build: Callable[[Path, Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        product = Path(scratch) / "product.so"
        build(Path(scratch), product)
        if not product.exists():
            name = find_compiler().name
            raise ToolchainError(
                f"the C++ compiler {name!r} reports success and wrote nothing: set CUKERN_CXX to another"
            )
        with open(product, "r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(product, target)


Loaded = TypeVar("Loaded")


def loaded(build: Callable[[], Path], load: Callable[[Path], Loaded]) -> Loaded:
    """What ``load`` makes of ``build``'s file; again where other processes remove it from the cache in between."""
    for _ in range(20):
        path = build()
        try:
            return load(path)
        except OSError as error:  # that it is there now says nothing: another process may have built it again
            failure = error
    if path.exists():
        raise failure
    raise ToolchainError(
        f"{path} was removed from the cache each time before it could be loaded: raise CUKERN_CACHE_MAX_MB, or give "
        "each process its own CUKERN_CACHE_DIR"
    )


def _intact(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:  # absent, or another user's
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(data[:-size]).digest() == data[-size:]


def build_runtime() -> Path:
    """Shared object of the runtime library."""

    def build(_: Path, out: Path) -> None:
        options = [*_BASE, "-O3", "-g1", "-w", f"-I{INCLUDE}", "-shared"]
        # kernels find the mathematical functions through the runtime; the C++ library is not used
        options += ["-nostdlib++"] if not find_compiler().gcc else []
        run([*options, "-o", out, RUNTIME / "runtime.cpp", "-Wl,--no-as-needed", "-lm"])

    return cached(f"runtime-{key('runtime')}.so", build)


def build_kernel(text: str, *, check: bool, debug: bool) -> Path:
    """Shared object of one kernel: its prepared text, plain, in check mode, or for a debugger."""

    def build(scratch: Path, out: Path) -> None:
        compiler = find_compiler()
        source = scratch / "kernel.cpp"
        source.write_text(text, encoding="utf-8")
        options = [*_BASE, "-w", f"-I{INCLUDE}", "-include", "cukern_emu.h", "-D__CUDA_ARCH__=800", "-D__CUDACC__=1"]
        if compiler.gcc:
            options.append("-fno-gnu-unique")  # else two modules share the thread-local variables of equal templates
            options.append("-fno-var-tracking")  # where variables lie: a fifth of the time, and no reader asks
        if platform.machine() in ("x86_64", "AMD64"):
            # a type aligned to 32 bytes may lie in a NumPy array aligned to 16: no instruction that minds
            options.append("-mprefer-vector-width=128")
            options += ["-mmove-max=128", "-mstore-max=128"] if compiler.gcc else []
            # a frame of more than a page touches each: it cannot step over the guard page into the stack below
            options.append("-fstack-clash-protection")
        options += ["-O0", "-g", "-DEMU_DEBUG"] if debug else ["-O1" if check else "-O2", "-g1"]
        options.append("-gdwarf-4")  # what symbols.py reads
        if check:
            options += ["-fsanitize=thread"]
            options += ["-fsanitize=alignment,bounds,shift,integer-divide-by-zero,return,unreachable"]
            if compiler.gcc:
                options += ["--param", "tsan-instrument-func-entry-exit=0"]
            else:
                options += ["-fno-sanitize-trap=all", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
            if not debug:
                options.append("-ftrivial-auto-var-init=pattern")
        else:
            options += ["-fno-sanitize=all"] if not compiler.gcc else []
        compiled = scratch / "kernel.o"
        run([*options, "-c", "-o", compiled, source])
        # no sanitizer library: the runtime library defines the hooks (zig adds its own unless told to optimise)
        link = ["-O2", "-nostdlib"] if compiler.zig else []
        if check:  # some compilers copy structs by calls of memcpy
            link += [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
        run(["-shared", *link, "-o", out, compiled])

    return cached(f"kernel-{key(text, check, debug)}.so", build)
