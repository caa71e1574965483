"""Where NVRTC, CUDA's headers and the disassemblers are: pip wheels first, then a toolkit.

Nothing here touches a GPU or creates a context.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import CudaUnavailableError

_EXTRA = 'pip install "cukern[cuda12]" (or "cukern[cuda13]" for a CUDA 13 driver)'
# headers that kernels of ours include: their text is part of what decides a binary
_DIGESTED = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")


def cupy_wheels() -> list[str]:
    """The installed CuPy distributions, for example ["cupy-cuda12x 14.2.0"]."""
    found = []
    for name in ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def nvrtc() -> Any:
    """CuPy's NVRTC binding with the library loaded.

    Raises
    ------
    CudaUnavailableError
        Without CuPy, with two CuPy wheels at once, or without an NVRTC library; says what to install.
    """
    try:
        module = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise CudaUnavailableError(no_cupy(error)) from error
    try:
        module.getVersion()
        return module
    except Exception as error:  # the binding raises whatever its lazy loader met
        first = error
    for library in _nvrtc_libraries():
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            module.getVersion()
            return module
        except Exception:  # try the next candidate; the first error is what the user needs
            continue
    raise CudaUnavailableError(
        f"CuPy finds no NVRTC library ({first}): {_EXTRA}, or install a CUDA toolkit and set CUDA_PATH"
    ) from first


def two_wheels(wheels: list[str]) -> str:
    """What to do about two CuPy wheels in one environment."""
    names = " ".join(w.split()[0] for w in wheels)
    return (
        f"two CuPy wheels are installed together ({', '.join(wheels)}) and overwrite each other: "
        f"pip uninstall -y {names}, then {_EXTRA}"
    )


def no_cupy(error: ImportError) -> str:
    """Why CuPy cannot be imported, and what to do."""
    wheels = cupy_wheels()
    if len(wheels) > 1:
        return two_wheels(wheels)
    if wheels:
        return f"{wheels[0]} is installed but cannot be imported ({error})"
    return f"CuPy is not installed: {_EXTRA}"


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the loaded NVRTC."""
    major, minor = nvrtc().getVersion()
    return int(major), int(minor)


@functools.cache
def nvrtc_build() -> str:
    """The exact NVRTC build: what it writes into the head of an empty program's PTX."""
    module = nvrtc()
    program = module.createProgram("", "probe.cu", (), ())
    try:
        module.compileProgram(program, ())
        text = as_bytes(module.getPTX(program)).decode("ascii", "replace")
    finally:
        module.destroyProgram(program)
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("//") and line[2:].strip()]
    return "; ".join(lines)


def supported_architectures() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC compiles for, as numbers: 80, 86, 90, ..."""
    return tuple(sorted(int(n) for n in nvrtc().getSupportedArchs()))


def as_bytes(value: bytes | str) -> bytes:
    """What CuPy's binding gives as bytes or, in some versions, as str."""
    return value.encode("latin-1") if isinstance(value, str) else value


def _wheel_roots() -> Iterator[Path]:
    """Every ``site-packages/nvidia`` folder on the path."""
    for entry in dict.fromkeys(sys.path):
        root = Path(entry or ".") / "nvidia"
        if root.is_dir():
            yield root


def _toolkits() -> Iterator[Path]:
    seen = set()
    for place in (
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        "/usr/local/cuda",
        *sorted(glob.glob("/usr/local/cuda-*"), reverse=True),
        os.environ.get("CONDA_PREFIX"),
    ):
        if place and place not in seen and Path(place).is_dir():
            seen.add(place)
            yield Path(place)


def _nvrtc_libraries() -> Iterator[Path]:
    for root in _wheel_roots():
        for pattern in ("cuda_nvrtc/lib/libnvrtc.so.*", "cu1*/lib/libnvrtc.so.*"):
            yield from (p for p in sorted(root.glob(pattern)) if "alt" not in p.name)
    for kit in _toolkits():
        for pattern in ("lib64/libnvrtc.so.*", "lib/libnvrtc.so.*", "targets/*/lib/libnvrtc.so.*"):
            yield from (p for p in sorted(kit.glob(pattern)) if re.search(r"\.so\.\d+$", p.name))


def _include_folders() -> Iterator[Path]:
    override = os.environ.get("CUKERN_CUDA_INCLUDE")
    if override:
        yield Path(override)
    for root in _wheel_roots():
        yield root / "cuda_runtime" / "include"
        yield from sorted(root.glob("cu1*/include"), reverse=True)
    for kit in _toolkits():
        yield kit / "include"
        yield from sorted(kit.glob("targets/*/include"))


def header_version(folder: Path) -> tuple[int, int] | None:
    """(major, minor) of the CUDA headers in a folder, or None if kernels cannot include cuda_fp16.h from there."""
    try:
        if not (folder / "cuda_fp16.h").is_file():
            return None
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    m = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(m[1]) // 1000, int(m[1]) % 1000 // 10) if m else None


@functools.cache
def headers() -> Path:
    """The folder of CUDA headers to use: those of NVRTC's own version, else the same major version.

    Raises
    ------
    CudaUnavailableError
        If no folder holds CUDA headers of NVRTC's major version; names what was found and what to install.
    """
    wanted = nvrtc_version()
    near: Path | None = None
    seen: list[str] = []
    for folder in _include_folders():
        version = header_version(folder)
        if version is None:
            continue
        if version == wanted:
            return folder
        if version[0] == wanted[0] and near is None:
            near = folder
        seen.append(f"{folder} (CUDA {version[0]}.{version[1]})")
    if near is not None:
        return near
    package = "nvidia-cuda-runtime-cu12" if wanted[0] == 12 else "nvidia-cuda-runtime nvidia-cuda-crt"
    raise CudaUnavailableError(
        f"no CUDA {wanted[0]} headers for NVRTC {wanted[0]}.{wanted[1]} (found: {', '.join(seen) or 'none'}): "
        f"pip install {package}, or set CUDA_PATH to a CUDA {wanted[0]} toolkit"
    )


@functools.cache
def headers_digest() -> str:
    """Version and content of the CUDA headers that kernels use, without their place."""
    folder = headers()
    digest = hashlib.sha256()
    for name in _DIGESTED:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    major, minor = header_version(folder) or (0, 0)
    return f"{major}.{minor} {digest.hexdigest()[:16]}"


def find_program(name: str) -> str | None:
    """A CUDA command-line program (nvdisasm, cuobjdump): on PATH, in a wheel or in a toolkit."""
    on_path = shutil.which(name)
    if on_path:
        return on_path
    candidates: list[Path] = []
    for root in _wheel_roots():
        candidates += [*root.glob(f"*/bin/{name}"), *root.glob(f"*/*/bin/{name}")]
    candidates += [kit / "bin" / name for kit in _toolkits()]
    return next((str(p) for p in candidates if os.access(p, os.X_OK)), None)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by nvdisasm or cuobjdump."""
    tools = (("nvdisasm", ("-c",)), ("cuobjdump", ("-sass",)))
    for name, options in tools:
        program = find_program(name)
        if program is None:
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = subprocess.run([program, *options, file.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout
    raise CudaUnavailableError(
        "neither nvdisasm nor cuobjdump is found: install a CUDA toolkit (set CUDA_PATH), or pip install "
        "nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"
    )


def forget() -> None:
    """Drop what was found, so that the next call looks again (for tests and after an installation)."""
    for function in (nvrtc, nvrtc_build, headers, headers_digest):
        function.cache_clear()
