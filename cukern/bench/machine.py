"""The machine of a benchmark: GPU, driver, clocks, versions, date, and the floors measured in the same run."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from cukern.bench.report import Floors
from cukern.bench.timing import GpuTimer

__all__ = ["facts", "measure_floors", "peer_module", "require_gpu"]

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
_ASSUMED_FLOPS = 790e12  # H200, large fp16 product


def require_gpu() -> Any:
    """CuPy with a usable GPU.

    Raises
    ------
    RuntimeError
        There is none; the message says why.
    """
    from cukern.models.device import cuda_problem

    problem = cuda_problem()
    if problem:
        raise RuntimeError(f"bench measures a GPU, and none is usable: {problem}; see 'cukern info'")
    import cupy

    return cupy


def peer_module(name: str) -> Any:
    """torch or transformers if it can be imported, else None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def facts(device: str, query: Callable[[str, str], str] | None = None) -> dict[str, str]:
    """GPU, driver, clocks (MHz), power limit (W), date and versions.

    Parameters
    ----------
    device : str
        PCI bus id of the GPU (numbers mean something else to nvidia-smi where CUDA_VISIBLE_DEVICES is set).
    query : callable, optional
        (device, fields) -> one line of nvidia-smi's CSV; for tests.
    """
    import cukern

    names = ("gpu", "driver", "sm_mhz", "mem_mhz", "max_sm_mhz", "power_w")
    try:
        values = [v.strip() for v in (query or _nvidia_smi)(device, _QUERY).strip().split(",")]
    except (OSError, subprocess.SubprocessError):
        values = []
    if len(values) != len(names):
        values = [""] * len(names)
    found = dict(zip(names, values))
    found["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
    found["cukern"] = cukern.__version__
    for module in ("cupy", "torch", "transformers"):
        imported = peer_module(module)
        found[module] = str(getattr(imported, "__version__", "")) if imported is not None else ""
    return found


def _nvidia_smi(device: str, fields: str) -> str:
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def measure_floors(cupy: Any, timer: GpuTimer, torch: Any) -> Floors:
    """Bandwidth of a device-to-device copy of 1 GiB, and the rate of an 8192-cubed half-precision product by cuBLAS."""
    bandwidth = _copy_bandwidth(cupy, timer)
    if torch is None:
        return Floors(bandwidth, _ASSUMED_FLOPS)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty(n, n, device="cuda", dtype=torch.float16)
    return Floors(bandwidth, 2 * n**3 / timer.microseconds([lambda: torch.mm(a, b, out=out)]) * 1e6)


def _copy_bandwidth(cupy: Any, timer: GpuTimer) -> float:
    """Bytes read plus written a second."""
    size = 1 << 30
    source, target = cupy.zeros(size, cupy.uint8), cupy.zeros(size, cupy.uint8)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, size, cupy.cuda.get_current_stream())

    return 2 * size / timer.microseconds([copy]) * 1e6
