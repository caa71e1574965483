"""Fixtures shared by all tests: the backends on which an operator is tested."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before NumPy is imported: its threads get in each other's way where several test workers share few cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"


def gpu_missing() -> str:
    """Why GPU tests cannot run here, or an empty string."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    if not cupy.cuda.is_available():
        return "no usable NVIDIA GPU"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that several workers end at about the same time: half of them for the worker that begins at
    # the start, half for the one that begins in the middle.
    long = [item for item in items if "test_all_variants" in item.name]
    rest = [item for item in items if "test_all_variants" not in item.name]
    middle = len(rest) // 2
    items[:] = long[::2] + rest[:middle] + long[1::2] + rest[middle:]
    reason = gpu_missing()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C works, also in tests that a shell started in the background, where it is ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def large_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four layers of the 0.6B shape, on a GPU."""
    from cukern.models import Qwen3
    from cukern.testing.checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path_factory.mktemp("0.6B"), "0.6B", request.param, num_hidden_layers=4)
    return Qwen3.from_pretrained(folder, device="cuda", max_positions=16384)


class Backend:
    """Moves arrays to where an operator under test runs, and back."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, array: np.ndarray) -> Any:
        if self.name == "cuda":
            import cupy

            return cupy.asarray(array)
        return np.array(array)  # a copy: kernels may write in place

    def get(self, array: Any) -> np.ndarray:
        return array.get() if self.name == "cuda" else np.asarray(array)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The CUDA kernel on a GPU (where there is one), and the same text under emulation in check mode."""
    if request.param == "cuda":
        yield Backend("cuda")
        return
    import cukern

    with cukern.emulate(check=True):
        yield Backend("emulated")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers seeded by the test's name: fresh for every test, the same at every run."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(autouse=True, scope="session")
def _quiet_progress() -> None:
    os.environ.setdefault("CUKERN_NO_PROGRESS", "1")
