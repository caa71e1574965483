"""What this machine offers to cukern, and what is missing: the data behind ``cukern info``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from . import cache, devices, driver, toolchain
from .errors import CudaUnavailableError, DriverError


@dataclass(frozen=True)
class Info:
    """State of the GPU stack. An empty string or None means "not there"; ``problems`` says why and what to do."""

    cukern: str
    cupy: str
    nvrtc: str
    nvrtc_build: str
    architectures: tuple[str, ...]
    headers: str
    headers_version: str
    driver: str
    gpus: tuple[devices.DeviceInfo, ...]
    cache: cache.CacheInfo
    kernels_src: str
    problems: tuple[str, ...] = field(default=())

    @property
    def usable(self) -> bool:
        """Whether kernels can run on a GPU here."""
        return bool(self.gpus) and not self.problems

    @property
    def can_compile(self) -> bool:
        """Whether kernels can be compiled here (no GPU needed)."""
        return bool(self.nvrtc and self.headers)


def info() -> Info:
    """Look at CuPy, NVRTC, CUDA's headers, the driver, the GPUs and the cache. Raises nothing and makes no context."""
    problems: list[str] = []
    wheels = toolchain.cupy_wheels()
    if len(wheels) > 1:
        problems.append(toolchain.two_wheels(wheels))
    cupy = _cupy_version(problems)
    nvrtc = build = headers = headers_version = ""
    architectures: tuple[str, ...] = ()
    try:
        nvrtc = ".".join(map(str, toolchain.nvrtc_version()))
        build = toolchain.nvrtc_build()
        architectures = tuple(f"sm_{n}" for n in toolchain.supported_architectures())
        folder = toolchain.headers()
        headers, headers_version = str(folder), ".".join(map(str, toolchain.header_version(folder) or ()))
    except CudaUnavailableError as error:
        _add(problems, str(error))
    version = ""
    gpus: tuple[devices.DeviceInfo, ...] = ()
    try:
        version, gpus = _gpus(problems)
    except (CudaUnavailableError, DriverError) as error:
        _add(problems, str(error))
    if version and nvrtc and not gpus and not problems:
        problems.append("the NVIDIA driver finds no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    if version and nvrtc and int(version.split(".")[0]) < int(nvrtc.split(".")[0]):
        _add(
            problems,
            f"the driver supports CUDA {version} and CuPy is built for CUDA {nvrtc.split('.')[0]}: update the driver, "
            f"or install the extra cukern[cuda{version.split('.')[0]}] in place of it",
        )
    return Info(
        cukern=importlib.import_module("cukern").__version__,
        cupy=cupy,
        nvrtc=nvrtc,
        nvrtc_build=build,
        architectures=architectures,
        headers=headers,
        headers_version=headers_version,
        driver=version,
        gpus=gpus,
        cache=_cache_info(problems),
        kernels_src=_sources(problems),
        problems=tuple(problems),
    )


def _cache_info(problems: list[str]) -> cache.CacheInfo:
    try:
        return cache.current().info()
    except ValueError as error:  # a bound that is no number
        _add(problems, str(error))
        return cache.Cache(max_bytes=0).info()


def _add(problems: list[str], text: str) -> None:
    if text not in problems:
        problems.append(text)


def _cupy_version(problems: list[str]) -> str:
    try:
        return str(devices.cupy().__version__)
    except CudaUnavailableError as error:
        _add(problems, str(error))
        return ""


def _gpus(problems: list[str]) -> tuple[str, tuple[devices.DeviceInfo, ...]]:
    calls = driver.get()
    found = []
    for device in range(calls.device_count()):
        try:
            found.append(devices.describe(device))
        except (RuntimeError, CudaUnavailableError) as error:
            _add(problems, str(error))
    return ".".join(map(str, calls.version())), tuple(found)


def _sources(problems: list[str]) -> str:
    from .source import kernels_src

    try:
        return str(kernels_src())
    except FileNotFoundError as error:
        problems.append(str(error))
        return ""
