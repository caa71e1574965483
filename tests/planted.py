"""Kernels with a planted fault, for tests of the emulator. The wrong line is marked, and must be the one reported."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

import cukern
from cukern import emulator as E
from cukern.jit.source import assemble

HERE = "// fault"


def text(body: str, parameters: str = "float *x, int n", before: str = "") -> str:
    includes = "".join(f'#include "ptx/{name}.cuh"\n' for name in ("cp_async", "ldmatrix", "mma", "memory"))
    body = textwrap.dedent(body).strip()
    return f'{includes}{before}\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'


def launch(
    source: str, args: tuple[Any, ...], grid: int = 1, block: int = 64, check: bool = True, **options: Any
) -> None:
    launch_options = {k: options.pop(k) for k in ("shared_mem", "cooperative") if k in options}
    with cukern.emulate(check=check, **options):
        E.runtime_kernel(assembled(source), "k", filename="k.cu")((grid,), (block,), args, **launch_options)


def assembled(source: str) -> str:
    return assemble(source, filename="k.cu").text


def expect(kind: type[E.KernelFault], source: str, args: tuple[Any, ...], **options: Any) -> E.KernelFault:
    """The fault of a launch; where the source marks the faulty line, that is where it is."""
    with pytest.raises(kind) as caught:
        launch(source, args, **options)
    fault = caught.value
    assert type(fault) is kind
    assert fault.kernel == "k"
    assert fault.block is not None
    assert f"block {fault.block}" in str(fault)
    marked = [i for i, line in enumerate(source.splitlines(), 1) if HERE in line]
    if marked:
        assert (fault.file, fault.line) == ("k.cu", marked[0]) or ("k.cu", marked[0]) in fault.callers, str(fault)
        assert f":{marked[0]}" in str(fault)
    return fault


def f32(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.float32)
