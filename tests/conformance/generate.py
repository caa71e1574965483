"""Run the experiments on a GPU and keep what came out.

``python -m tests.conformance.generate``, from the root of a checkout, writes tests/conformance/golden.npz. Run it
again when a PTX wrapper is added or changed, on sm_80 or later; the file says on which card it was made.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import numpy as np

from . import cases

GOLDEN = Path(__file__).parent / "golden.npz"


def on_gpu() -> tuple[dict[str, np.ndarray], str]:
    """Results of the current CUDA device, and what it is."""
    import cupy

    import cukern

    def run(name: str, grid: int, args: tuple[Any, ...]) -> None:
        moved = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        cukern.Kernel(cases.SOURCE, name)((grid,), (256 if "values" in name else 32,), tuple(moved))
        for host, device in zip(args, moved):
            if isinstance(host, np.ndarray):
                host[...] = cupy.asnumpy(device)

    results = cases.results(run)
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    driver = cupy.cuda.runtime.driverGetVersion()
    today = datetime.date.today().isoformat()
    return results, f"{name}, sm_{device.compute_capability}, CUDA driver {driver}, {today}"


def save(path: Path, results: dict[str, np.ndarray], device: str) -> None:
    """Write one compressed file."""
    np.savez_compressed(path, device=np.array(device), **{k.replace("/", "|"): v for k, v in results.items()})


def load(path: Path = GOLDEN) -> tuple[dict[str, np.ndarray], str]:
    """Results and device of a golden file."""
    with np.load(path) as f:
        return {k.replace("|", "/"): f[k] for k in f.files if k != "device"}, str(f["device"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    parser.add_argument("--emulate", action="store_true", help="results of the emulator instead, to try the script")
    options = parser.parse_args()
    if options.emulate:
        results, device = cases.emulated(), "emulated"
    else:
        results, device = on_gpu()
    save(options.out, results, device)
    size = options.out.stat().st_size / 1024
    print(f"{options.out}: {len(results)} experiments on {device}, {size:.0f} KiB")
    for name, value in results.items():
        finite = np.isfinite(value).mean() if value.dtype.kind == "f" else 1.0
        print(f"  {name:28s} {value.shape!s:16s} {finite:7.1%} finite")


if __name__ == "__main__":
    main()
