"""Small kernels and their launches, for tests of the emulator."""

from __future__ import annotations

from typing import Any

from cukern import emulator as E


def launch(
    text: str, args: tuple[Any, ...], grid: Any = (1,), block: Any = (64,), name: str = "k", **options: Any
) -> None:
    E.runtime_kernel(text, name, filename="k.cu")(grid, block, args, **options)


def kernel(body: str, parameters: str = "float *x, int n") -> str:
    return f'extern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'


FILL = kernel("x[blockIdx.x * blockDim.x + threadIdx.x] = n;")
