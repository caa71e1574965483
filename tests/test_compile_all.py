"""Every kernel variant that the operators declare compiles for every architecture, with nothing in local memory.

Compiling all of them takes minutes of processor time the first time; results stay in the kernel cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("cupy")

from cukern import jit
from cukern.jit import ARCHITECTURES, Built, KernelSpec, registry


def build(specs: list[KernelSpec], arch: str) -> list[Built]:
    jobs = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
    return jit.compile_all([arch], jobs=jobs, specs=specs)


def faults(built: list[Built]) -> list[str]:
    """What is wrong with each variant that failed, spills or has a stack."""
    out = []
    for b in built:
        if b.resources is None:
            out.append(f"{b.spec} [{b.arch}]: {b.error}")
        elif b.resources.spill_stores or b.resources.spill_loads or b.resources.local:
            r = b.resources
            out.append(
                f"{b.spec} [{b.arch}]: {r.registers} registers, spill {r.spill_stores}/{r.spill_loads} bytes, "
                f"local memory {r.local} bytes"
            )
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_variants(arch: str) -> None:
    assert not (found := faults(build(jit.variants(), arch))), "\n".join(found)


# ---- the registry itself


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[ModuleType]:
    """A stand-in for an operator module, with kernel sources of its own."""
    import sys

    from cukern.jit.source import kernels_src

    os.symlink(kernels_src() / "common", tmp_path / "common")
    (tmp_path / "ok.cu").write_text(
        '#include "common/types.cuh"\n'
        "template <int N> __global__ void ok(float *x) { x[0] = N; }\n"
        "template <int N> __global__ void __launch_bounds__(1024) spills(float *x) {\n"
        "  float a[N];\n#pragma unroll\n  for (int i = 0; i < N; ++i) a[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < N; ++i) x[i * 1024 + threadIdx.x] = a[N - 1 - i] * a[(i * 7) % N];\n}\n"
        "template <int N> __global__ void stack(float *x) { float a[N]; for (int i = 0; i < N; ++i) a[i] = x[i];\n"
        "  x[0] = a[(int)x[1]]; }\n"
    )
    monkeypatch.setenv("CUKERN_KERNELS_SRC", str(tmp_path))
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    made = ModuleType("fake_operator")
    monkeypatch.setitem(sys.modules, "fake_operator", made)
    jit.reload()
    yield made
    jit.reload()


def declare(module: ModuleType, *items: Any) -> list[KernelSpec]:
    module.kernel_variants = lambda: list(items)  # type: ignore[attr-defined]
    return jit.variants(["fake_operator"])


def test_variants_are_collected_without_repeats(module: ModuleType) -> None:
    item = ("ok.cu", "ok", (1,), {"B": 1, "A": None})
    specs = declare(module, item, item, ("ok.cu", "ok", (2,), None, ("sm_90a",)))
    assert specs == [
        KernelSpec("ok.cu", "ok", (1,), (("A", None), ("B", 1))),
        KernelSpec("ok.cu", "ok", (2,), (), ("sm_90a",)),
    ]
    assert str(specs[0]) == "ok.cu: ok<1> A=None B=1"
    with pytest.raises(TypeError, match=r"fake_operator\.kernel_variants\(\)"):
        declare(module, ("ok.cu", "ok"))


def test_compile_all_reports_in_order_and_calls_back(module: ModuleType) -> None:
    specs = declare(module, ("ok.cu", "ok", (1,), None), ("ok.cu", "ok", (2,), None, ("sm_90a",)))
    seen: list[tuple[str, int, int]] = []
    built = jit.compile_all(
        ("sm_80", "sm_90a"), jobs=2, specs=specs, progress=lambda b, done, total: seen.append((b.arch, done, total))
    )
    assert [(b.spec.template, b.arch) for b in built] == [((1,), "sm_80"), ((1,), "sm_90a"), ((2,), "sm_90a")]
    assert [s[1:] for s in seen] == [(1, 3), (2, 3), (3, 3)]
    assert not faults(built)
    with pytest.raises(ValueError, match="arch='volta'"):
        jit.compile_all(("volta",), specs=specs)


def test_spills_stacks_and_errors_are_found(module: ModuleType) -> None:
    specs = declare(
        module,
        ("ok.cu", "ok", (1,), None),
        ("ok.cu", "spills", (120,), None),
        ("ok.cu", "stack", (100,), None),
        ("ok.cu", "ok", ("int",), None),
        ("missing.cu", "ok", (1,), None),
    )
    found = faults(build(specs, "sm_90a"))
    assert len(found) == 4
    assert "spills<120>" in found[0]
    assert "local memory 400 bytes" in found[1]
    assert "ok<int>" in found[2]
    assert "missing.cu" in found[3]


def test_kernel_is_made_once_until_reload(module: ModuleType) -> None:
    first = jit.kernel("ok.cu", "ok", (1,))
    assert jit.kernel("ok.cu", "ok", (1,)) is first
    assert jit.kernel("ok.cu", "ok", (2,)) is not first
    assert jit.kernel("ok.cu", "ok", (1,), {"A": 1}) is not first
    jit.reload()
    assert jit.kernel("ok.cu", "ok", (1,)) is not first
    assert registry._memo
