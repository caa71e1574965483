"""Time of work on the GPU: CUDA events around launches that were queued while the GPU was kept busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

__all__ = ["GpuTimer", "graphed", "in_graph", "median_wall"]

_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
_SAMPLE_US = 2000.0  # device time of one sample
_SAMPLES = 15
_MOST_CALLS = 100  # a launch queue holds about a thousand, and one call may launch several


class GpuTimer:
    """Times calls without the host's share.

    A kernel that spins is launched first; while it runs the host queues a batch of calls, which the GPU then works
    off without waiting for Python. A sample in which the host was too slow is thrown away and taken again with a
    longer spin. Calls of CuPy and of torch are timed alike: both go to the default stream.

    Parameters
    ----------
    cupy : module
    clock_mhz : float
        Highest multiprocessor clock, to turn microseconds into cycles to spin.
    """

    def __init__(self, cupy: Any, clock_mhz: float = 2000.0) -> None:
        from cukern.jit import Kernel

        self._cupy = cupy
        self._clock_mhz = clock_mhz
        self._spin = Kernel(_SPIN, "spin")

    def microseconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Median device time of one call.

        Parameters
        ----------
        calls : sequence of callables
            The same work on different memory; they are taken in turn, so that together they should exceed the L2 cache.
        """
        return self.compare([calls])[0]

    def compare(self, contenders: Sequence[Sequence[Callable[[], Any]]]) -> list[float]:
        """Median device time of one call of each contender, their samples taken in turn.

        A GPU that gets warm, or reaches its power limit, slows down: what is timed in turn is slowed down alike.

        Parameters
        ----------
        contenders : sequence of sequences of callables
            Of each, calls as for :meth:`microseconds`.
        """
        plans = []
        for calls in contenders:
            for call in (*calls, *calls)[: max(4, len(calls))]:
                call()
            self._cupy.cuda.runtime.deviceSynchronize()
            host, device = self._batch(calls, 5, spin_us=0.0)
            host, device = self._sample(calls, self._count(device), host)
            plans.append((calls, self._count(device), host))
        samples: list[list[float]] = [[] for _ in plans]
        turn = list(zip(plans, samples))
        for _ in range(_SAMPLES):
            for (calls, count, host), taken in turn:
                taken.append(self._sample(calls, count, host)[1])
            turn.reverse()  # nobody always comes behind the same other
        return [statistics.median(taken) for taken in samples]

    @staticmethod
    def _count(device_us: float) -> int:
        return max(1, min(_MOST_CALLS, int(_SAMPLE_US / max(device_us, 0.5))))

    def _sample(self, calls: Sequence[Callable[[], Any]], count: int, host_us: float) -> tuple[float, float]:
        """One batch that the host queued in time: (host, device) microseconds a call."""
        for _ in range(8):
            spin_us = 1.5 * host_us * count + 50.0
            host, device = self._batch(calls, count, spin_us)
            if host * count < spin_us or device > 2 * host:
                return host, device
            host_us = 1.5 * host
        return host, device

    def _batch(self, calls: Sequence[Callable[[], Any]], count: int, spin_us: float) -> tuple[float, float]:
        cuda = self._cupy.cuda
        start, stop = cuda.Event(), cuda.Event()
        if spin_us:
            self._spin((1,), (1,), (int(spin_us * self._clock_mhz),))
        start.record()
        began = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        host = (time.perf_counter() - began) * 1e6
        stop.record()
        stop.synchronize()
        return host / count, cuda.get_elapsed_time(start, stop) * 1e3 / count


def in_graph(microseconds: Callable[[Sequence[Callable[[], Any]]], float], cupy: Any, torch: Any = None) -> Any:
    """A function like `microseconds` that captures the calls into one CUDA graph and times its replays.

    Parameters
    ----------
    microseconds : callable
        Median microseconds of one of the calls that it is given.
    cupy : module
    torch : module or None
        Its calls are captured as well as CuPy's.
    """
    if not hasattr(cupy, "cuda"):  # NumPy, on the reference
        return microseconds
    return lambda calls: microseconds([graphed(calls, cupy, torch)]) / len(calls)


def graphed(calls: Sequence[Callable[[], Any]], cupy: Any, torch: Any = None) -> Callable[[], Any]:
    """A call that replays all calls from one CUDA graph. Parameters as of :func:`in_graph`."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with ExitStack() as stack:
        stack.enter_context(stream)
        if torch is not None:
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        for call in (*calls, *calls)[: max(4, len(calls))]:  # memory and kernels are there before the capture
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return graph.launch


def median_wall(work: Callable[[], Any], synchronize: Callable[[], Any], samples: int = 7) -> float:
    """Median wall time of work, in microseconds, after two rounds of warm-up; the host's share included."""
    times = []
    for i in range(samples + 2):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        if i >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
