"""From CUDA source text to launches: assemble, compile for the exact architecture, cache, call.

>>> k = cukern.Kernel(source, "name", template=("half", 128))
>>> k(grid, block, (x, y, n), shared_mem=0)
>>> k.resources, k.ptx, k.sass

Compiling needs no GPU where ``arch=`` is given. Importing this makes no CUDA context.
"""

from .arch import ARCHITECTURES
from .cache import CacheInfo
from .devices import DeviceInfo
from .devices import current as device
from .errors import CacheMissError, CompileError, CudaUnavailableError, DriverError
from .kernels import Kernel
from .machine import Info, info
from .registry import Built, KernelSpec, compile_all, kernel, reload, variants
from .resources import Resources
from .source import kernels_src

__all__ = [
    "ARCHITECTURES",
    "Built",
    "CacheInfo",
    "CacheMissError",
    "CompileError",
    "CudaUnavailableError",
    "DeviceInfo",
    "DriverError",
    "Info",
    "Kernel",
    "KernelSpec",
    "Resources",
    "compile_all",
    "device",
    "info",
    "kernel",
    "kernels_src",
    "reload",
    "variants",
]
