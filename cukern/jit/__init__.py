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
from .kernels import Kernel, disassemble, kernel, reload
from .resources import Resources
from .source import kernels_src

__all__ = [
    "ARCHITECTURES",
    "CacheInfo",
    "CacheMissError",
    "CompileError",
    "CudaUnavailableError",
    "DeviceInfo",
    "DriverError",
    "Kernel",
    "Resources",
    "device",
    "disassemble",
    "kernel",
    "kernels_src",
    "reload",
]
