"""The disk cache of compiled kernels: ``<cache folder>/sm_90a/<key>``, one file an entry.
What the emulator has built lies in a folder beside them, and is counted, bounded and deleted with them.

An entry is a line of magic with the SHA-256 of the rest, a line of JSON facts, and the binary. It is written to a
temporary, synced and renamed, so a reader sees all of it or nothing; a per-key lock makes processes that start
together compile once. A file that does not match its digest is set aside under ``corrupt/`` and rebuilt. Where the
folder cannot be written, kernels are kept in memory after one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from .compiler import Compiled
from .errors import CacheMissError

SCHEMA = 1
_MAGIC = b"CUKERN1 "
_STALE_SECONDS = 3600.0
_LOCK_SECONDS = 600.0
_DEFAULT_BOUND = 2 << 30
_ELSEWHERE = "set CUKERN_CACHE_DIR to a folder that can be written"
_NOWHERE = Path(os.devnull, "no home folder")
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}")
# of cukern/emulator/toolchain.py
_EMULATED_NAME = re.compile(r"(?:kernel|runtime)-[0-9a-f]{40}\.so")
_EMULATED_LOCK = re.compile(_EMULATED_NAME.pattern + r"\.lock")
_BUILD_FOLDER = re.compile(r"build-\w+")
_BUILD_NAME = re.compile(r"(?:kernel|product)\.\w+")
_STAGED_NAME = re.compile(r"cukern-\w+")
_CORRUPT_NAME = re.compile(r"(?:sm|compute)_\w+-[0-9a-f]{64}-\d+")


def make_key(fields: Mapping[str, object]) -> str:
    """SHA-256 over labelled, length-prefixed fields, in sorted order of the labels."""
    digest = hashlib.sha256(f"cukern {SCHEMA}".encode())
    for label, value in sorted(fields.items()):
        parts = [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
        digest.update(f"\0{label}:{len(parts)}".encode())
        for part in parts:
            data = part.encode()
            digest.update(f"\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def default_folder() -> Path:
    """``$CUKERN_CACHE_DIR``, else the platform's cache folder for "cukern"; the same after a change of directory.

    A user without a home has no such folder; what is returned then cannot be written, so that kernels are kept in
    memory.

    Raises
    ------
    ValueError
        If the variable begins with the home of a user who does not exist, or the directory it starts from is gone.
    """
    override = os.environ.get("CUKERN_CACHE_DIR")
    if override:
        return _chosen_folder(override)
    try:
        folder = Path(platformdirs.user_cache_dir("cukern", appauthor=False))
    except RuntimeError:
        return _NOWHERE
    return folder if folder.is_absolute() else _NOWHERE  # some versions leave the "~" in


@functools.cache
def _chosen_folder(text: str) -> Path:
    """Absolute from the first use on: a relative one would be another folder after ``os.chdir``."""
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"CUKERN_CACHE_DIR={text!r}: {error}") from None


def compiling_forbidden() -> bool:
    """``$CUKERN_ASSERT_NO_COMPILE``: what is not in the cache is an error."""
    return os.environ.get("CUKERN_ASSERT_NO_COMPILE", "") not in ("", "0")


def default_bound() -> int:
    """The largest size of the cache in bytes: ``$CUKERN_CACHE_MAX_MB`` megabytes, else 2 GiB.

    Raises
    ------
    ValueError
        If the variable is no non-negative integer.
    """
    text = os.environ.get("CUKERN_CACHE_MAX_MB")
    if not text:
        return _DEFAULT_BOUND
    if not text.strip().isdecimal():
        raise ValueError(f"CUKERN_CACHE_MAX_MB={text!r}: expected a whole number of megabytes")
    return int(text) << 20


@dataclass(frozen=True)
class CacheInfo:
    """State of the cache: folder, whether it can be written, entries, bytes, the bound, entries per architecture."""

    folder: Path
    writable: bool
    entries: int
    bytes: int
    max_bytes: int
    per_arch: dict[str, int]


class Cache:
    """One cache folder. Safe for threads and processes.

    Parameters
    ----------
    folder : Path, optional
        Where; created at the first write. Default: :func:`default_folder`.
    max_bytes : int, optional
        Least recently used entries beyond this are deleted after a write. Default: :func:`default_bound`.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.max_bytes = default_bound() if max_bytes is None else max_bytes
        self._memory: dict[tuple[str, str], Compiled] = {}
        self._warned = False
        self._guard = threading.Lock()
        self._locks: dict[tuple[str, str], threading.Lock] = {}

    def get_or_compile(self, arch: str, key: str, compile: Callable[[], Compiled], what: str = "a kernel") -> Compiled:
        """The entry for `key`, compiled and stored if it is not there; `what` it is, for the error.

        Raises
        ------
        CacheMissError
            On a miss while ``CUKERN_ASSERT_NO_COMPILE=1``.
        """
        found = self.get(arch, key)
        if found is not None:
            return found
        if compiling_forbidden():
            raise CacheMissError(
                f"{what} is not in the cache {self.folder} for {arch} and CUKERN_ASSERT_NO_COMPILE is set: "
                "run 'cukern compile' first (Kernel.compile for a kernel of your own), or unset it"
            )
        with self._guard:
            thread_lock = self._locks.setdefault((arch, key), threading.Lock())
        with thread_lock, self._lock(arch, key):
            found = self.get(arch, key)  # another process may have been first
            if found is None:
                found = compile()
                self._put(arch, key, found)
        return found

    def get(self, arch: str, key: str) -> Compiled | None:
        """The entry for `key`, or None."""
        in_memory = self._memory.get((arch, key))
        if in_memory is not None:
            return in_memory
        path = self.folder / arch / key
        try:
            data = path.read_bytes()
        except OSError:  # absent, or another user's: a miss
            return None
        entry = _decode(data)
        if entry is None:
            self._set_aside(path, arch)
            return None
        mark_used(path)
        return entry

    def info(self) -> CacheInfo:
        """Count entries and bytes."""
        entries = list(self._entries())
        per_arch: dict[str, int] = {}
        for path, _, _ in entries:
            per_arch[path.parent.name] = per_arch.get(path.parent.name, 0) + 1
        return CacheInfo(
            self.folder,
            _writable(self.folder),
            len(entries),
            sum(size for _, size, _ in entries),
            self.max_bytes,
            per_arch,
        )

    @property
    def num_in_memory(self) -> int:
        """Kernels of this process that could not be written to the folder."""
        return len(self._memory)

    def check_writable(self, arch: str) -> None:
        """Create the folders for entries of an architecture, and try a file there.

        Raises
        ------
        OSError
            Nothing can be written there; says where, why and what to do.
        """
        try:
            for folder in (self.folder / "tmp", self.folder / arch):
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise type(error)(
                f"the kernel cache {self.folder} cannot be written ({error.strerror or error}): {_ELSEWHERE}"
            ) from error

    def clear(self, arch: str | None = None) -> int:
        """Delete all entries (of one architecture), locks and what was set aside; returns how many entries went."""
        count = 0
        for path, _, _ in list(self._entries()):
            if arch in (None, path.parent.name):
                with contextlib.suppress(OSError):
                    path.unlink()
                    count += 1
        self._sweep(math.inf)
        self._memory = {k: v for k, v in self._memory.items() if arch is not None and k[0] != arch}
        return count

    # Only files that carry our names are ever counted or deleted: the folder may hold things of others as well.

    def _entries(self) -> Iterator[tuple[Path, int, int]]:
        """(path, bytes, last use in ns) of each entry."""
        for pattern, names in (("sm_*", _ENTRY_NAME), ("compute_*", _ENTRY_NAME), ("emulator", _EMULATED_NAME)):
            for folder in sorted(self.folder.glob(pattern)):
                for path in _files(folder, names):
                    with contextlib.suppress(OSError):
                        stat = path.stat()
                        yield path, stat.st_size, max(stat.st_atime_ns, stat.st_mtime_ns)

    def _leftovers(self) -> list[Path]:
        """What crashed writers left, and what was set aside."""
        places = (("tmp", _STAGED_NAME), ("corrupt", _CORRUPT_NAME), ("emulator", _EMULATED_LOCK))
        return [path for folder, names in places for path in _files(self.folder / folder, names)]

    def _abandoned_builds(self) -> Iterator[Path]:
        """Folders in which an emulated kernel was being compiled, which a process that ended left."""
        for folder in sorted((self.folder / "emulator").glob("build-*")):
            if _BUILD_FOLDER.fullmatch(folder.name) and not folder.is_symlink():
                with contextlib.suppress(OSError):
                    if all(_BUILD_NAME.fullmatch(name) for name in os.listdir(folder)):
                        yield folder

    def _sweep(self, before: float) -> None:
        """Delete leftovers last written before a time, and builds that no process can still be at."""
        for path in self._leftovers():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()
        for folder in self._abandoned_builds():
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < time.time() - _STALE_SECONDS:
                    shutil.rmtree(folder)

    def _lock(self, arch: str, key: str) -> contextlib.AbstractContextManager[None]:
        return process_lock(self.folder / "locks" / f"{arch}-{key}")

    def _put(self, arch: str, key: str, entry: Compiled) -> None:
        temporary = ""
        try:
            staging = self.folder / "tmp"
            target = self.folder / arch
            staging.mkdir(parents=True, exist_ok=True)
            target.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix="cukern-", dir=staging)
            with os.fdopen(handle, "wb") as file:
                file.write(_encode(entry))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target / key)
        except OSError as error:
            with contextlib.suppress(OSError):
                if temporary:
                    os.unlink(temporary)
            self._memory[arch, key] = entry
            self._warn(error)
            return
        self.evict(keep=target / key)

    def _warn(self, error: OSError) -> None:
        with self._guard:
            if self._warned:
                return
            self._warned = True
        warnings.warn(
            f"the kernel cache {self.folder} cannot be written ({error.strerror or error}): kernels are kept in memory "
            f"and compiled again by the next process; {_ELSEWHERE}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _set_aside(self, path: Path, arch: str) -> None:
        with contextlib.suppress(OSError):
            folder = self.folder / "corrupt"
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / f"{arch}-{path.name}-{os.getpid()}")

    def evict(self, keep: Path) -> None:
        """Hold the size bound, least recently used first; sweep what crashed writers left."""
        entries = sorted(self._entries(), key=lambda e: e[2])
        total = sum(size for _, size, _ in entries)
        for path, size, _ in entries:
            if total <= self.max_bytes:
                break
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
        self._sweep(time.time() - _STALE_SECONDS)


def mark_used(path: Path) -> None:
    """The access time is the recency, also where the system does not keep it; the modification time stays."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


@contextlib.contextmanager
def process_lock(path: Path) -> Iterator[None]:
    """A lock between processes. Where none can be had (read-only, no file locks, time-out) work goes on without."""
    lock: filelock.BaseFileLock | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(str(path), timeout=_LOCK_SECONDS)
        lock.acquire()
    except (OSError, NotImplementedError):  # a time-out is the first, no file locks here the second
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _files(folder: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return [Path(e.path) for e in os.scandir(folder) if names.fullmatch(e.name) and e.is_file()]
    except OSError:
        return []


def _umask() -> int:
    """The process's umask without changing it (os.umask would, for a moment, for every thread)."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError):
        return 0o022


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _encode(entry: Compiled) -> bytes:
    body = json.dumps(entry.facts()).encode() + b"\n" + entry.binary
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data: bytes) -> Compiled | None:
    head, _, body = data.partition(b"\n")
    if (
        not head.startswith(_MAGIC)
        or head[len(_MAGIC) :].decode("ascii", "replace") != hashlib.sha256(body).hexdigest()
    ):
        return None
    line, _, binary = body.partition(b"\n")
    try:
        facts: dict[str, Any] = json.loads(line)
        return Compiled.from_facts(binary, facts)
    except (ValueError, KeyError, TypeError):
        return None


_caches: dict[tuple[Path, int], Cache] = {}


def current() -> Cache:
    """The cache of the folder that the environment names now; one object a folder, so that it warns once."""
    where = (default_folder(), default_bound())
    cache = _caches.get(where)
    if cache is None:
        cache = _caches.setdefault(where, Cache(*where))
    return cache
