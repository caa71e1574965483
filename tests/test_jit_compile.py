"""NVRTC without a GPU: machine code, its facts, readable errors, architectures, the disk cache's key."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import cukern
from cukern import jit
from cukern.jit import ARCHITECTURES, CompileError, CudaUnavailableError, driver, toolchain
from cukern.jit.arch import Target, for_capability, parse
from cukern.jit.compiler import parse_ptx, parse_usage
from cukern.jit.errors import parse_log
from cukern.jit.resources import computed_occupancy, largest_block

ADD = '#include "common/types.cuh"\ntemplate <class T, int N> __global__ void __launch_bounds__(N) add(T *x, float v) {\n  x[threadIdx.x] = from_float<T>(to_float(x[threadIdx.x]) + v);\n}\n'  # noqa: E501


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # not by the environment: the emulator's runtime library stays where it is for the whole process
    monkeypatch.setattr("cukern.jit.cache.default_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cubin_for_every_architecture(arch: str) -> None:
    k = cukern.Kernel(ADD, "add", template=("half", 128), arch=arch)
    cubin = k.cubin
    assert cubin[:4] == b"\x7fELF"
    # a whole ELF file ends with its last header table (getCUBIN drops a byte)
    phoff, shoff = struct.unpack_from("<QQ", cubin, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", cubin, 54)
    assert max(phoff + phentsize * phnum, shoff + shentsize * shnum) == len(cubin)
    assert k.resources.arch == arch
    assert (k.resources.local, k.resources.spill_stores, k.resources.max_threads) == (0, 0, 128)
    assert 4 <= k.resources.registers <= 32


def test_ptx_is_text_for_the_exact_target() -> None:
    ptx = cukern.Kernel(ADD, "add", template=("half", 128), arch="sm_90a").ptx
    assert ".target sm_90a" in ptx
    assert not ptx.endswith("\0")


def test_wgmma_compiles_for_sm_90a_only() -> None:
    source = """
    __global__ void f(float *out, unsigned long long a, unsigned long long b) {
      float d[4] = {};
      asm volatile("wgmma.fence.sync.aligned;");
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
      asm volatile("wgmma.commit_group.sync.aligned;\\n wgmma.wait_group.sync.aligned 0;");
      out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
    }"""
    assert cukern.Kernel(source, "f", arch="sm_90a").cubin
    with pytest.raises(CompileError, match=r"does not compile for sm_80(?s:.)*another architecture"):
        cukern.Kernel(source, "f", arch="sm_80")


def test_sass_or_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    k = cukern.Kernel(ADD, "add", template=("half", 128), arch="sm_80")
    monkeypatch.setattr(toolchain, "find_program", lambda name: None)
    with pytest.raises(CudaUnavailableError, match="nvidia-cuda-nvdisasm"):
        _ = k.sass


def test_sass_gets_the_whole_cubin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\necho "size $(wc -c < $2)"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    k = cukern.Kernel(ADD, "add", template=("half", 128), arch="sm_80")
    assert k.sass.split() == ["size", str(len(k.cubin))]


# ---- errors


def test_an_error_shows_the_users_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.cu"
    file.write_text('#include "common/types.cuh"\n\n__global__ void f(float *x) {\n  x[0] = missing + 1;\n}\n')
    with pytest.raises(CompileError) as error:
        cukern.Kernel(file, "f", arch="sm_80")
    text = str(error.value)
    assert "mine.cu:4: error:" in text
    assert "x[0] = missing + 1;" in text
    assert text.splitlines()[2].index("missing") == text.splitlines()[3].index("^")
    assert "tmp" not in text
    (diagnostic,) = error.value.diagnostics
    assert (diagnostic.file, diagnostic.line) == ("mine.cu", 4)


def test_an_error_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("\n\nint broken = ;\n")
    (tmp_path / "k.cu").write_text('#include "bad.cuh"\n__global__ void f() {}\n')
    with pytest.raises(CompileError, match=r"bad\.cuh:3: error(?s:.)*int broken = ;"):
        cukern.Kernel(tmp_path / "k.cu", "f", arch="sm_80")


def test_an_unknown_kernel_lists_those_there() -> None:
    with pytest.raises(CompileError, match=r"no kernel 'nope' in <source> \(kernels found: add\)"):
        cukern.Kernel(ADD, "nope")  # found without a compiler
    with pytest.raises(CompileError, match=r"no kernel 'from_float<float>'|no kernel 'T'"):
        cukern.Kernel(ADD, "T", arch="sm_80")


def test_a_template_without_its_arguments() -> None:
    with pytest.raises(CompileError, match=r"function template \"add\""):
        cukern.Kernel(ADD, "add", arch="sm_80")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("uint32_t a = 0; x[0] = a;", "u32"),
        ("x[0] = INFINITY;", "CUKERN_INF"),
        ("x[0] = std::max(1.f, 2.f);", "no C++ standard library"),
    ],
)
def test_hints_for_code_written_for_nvcc(line: str, advice: str) -> None:
    with pytest.raises(CompileError, match=f"hint: .*{advice}".replace("+", r"\+")):
        cukern.Kernel(f"__global__ void f(float *x) {{\n{line}\n}}", "f", arch="sm_80")


def test_a_missing_host_header_says_so() -> None:
    with pytest.raises(CompileError, match="hint: NVRTC has CUDA's own headers only"):
        cukern.Kernel("#include <stdio.h>\n__global__ void f() {}", "f", arch="sm_80")


def test_logs_are_read() -> None:
    log = """a.cu(3): warning #177-D: variable "q" was declared but never referenced
    int q;
        ^

b.cu(7): error: no instance of overloaded function "g" matches the argument list
            argument types are: (int)
      g(1);
      ^

1 error detected in the compilation of "x.cu".
ptxas application ptx input, line 23; error   : Unknown modifier '.foo'
"""
    first, second, third = parse_log(log)
    assert (first.file, first.line, first.severity, first.text) == ("a.cu", 3, "warning", "int q;")
    assert (second.line, second.text, second.caret) == (7, "g(1);", 0)
    assert "argument types are: (int)" in second.message
    assert (third.file, third.line, third.message) == ("ptxas", 23, "Unknown modifier '.foo'")


# ---- facts


def test_usage_counts_the_worst_of_a_kernel_and_what_it_calls() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for helper
    40 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 40 bytes cumulative stack size
ptxas info    : Compiling entry function 'm' for 'sm_90a'
ptxas info    : Function properties for m
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""
    usage = parse_usage(log)
    k = usage["k"]
    assert (k.registers, k.shared, k.stack, k.spill_stores, k.spill_loads, k.barriers) == (40, 512, 40, 16, 12, 1)
    assert (usage["m"].registers, usage["m"].stack) == (8, 0)


def test_a_spill_is_seen() -> None:
    source = """__global__ void __launch_bounds__(1024) f(float *x) {
      float a[120];
    #pragma unroll
      for (int i = 0; i < 120; ++i) a[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
    #pragma unroll
      for (int i = 0; i < 120; ++i) x[i * 1024 + threadIdx.x] = a[119 - i] * a[(i * 7) % 120];
    }"""
    r = cukern.Kernel(source, "f", arch="sm_90a").resources
    assert r.spill_stores > 0
    assert r.spill_loads > 0
    assert r.max_threads == 1024


def test_parameter_layout_from_ptx() -> None:
    text = """
.visible .entry _Z1k(
	.param .u64 .ptr .global .align 16 _Z1k_param_0,
	.param .u32 _Z1k_param_1,
	.param .align 64 .b8 _Z1k_param_2[128],
	.param .u8 _Z1k_param_3,
	.param .f64 _Z1k_param_4
)
.maxntid 32, 4, 1
.minnctapersm 2
{
}
.entry empty()
{
}
"""
    parsed = parse_ptx(text)
    layout, threads = parsed["_Z1k"]
    assert [(o, s) for o, s, _ in layout] == [(0, 8), (8, 4), (64, 128), (192, 1), (200, 8)]
    assert threads == 128
    assert parsed["empty"] == ([], 0)


def test_occupancy_from_the_limits() -> None:
    # 64 warps a multiprocessor on sm_90: 128 threads -> 16 by warps; 232 registers -> 2 warps a partition
    assert computed_occupancy("sm_90a", 32, 0, 128) == 16
    assert computed_occupancy("sm_90a", 232, 0, 128) == 2
    assert computed_occupancy("sm_90a", 32, 100 << 10, 128) == 2
    assert computed_occupancy("sm_86", 16, 0, 32) == 16
    with pytest.raises(ValueError, match="sm_70"):
        computed_occupancy("sm_70", 16, 0, 32)
    assert largest_block(255) == 256
    assert largest_block(32, 256) == 256
    r = cukern.Kernel(ADD, "add", template=("half", 128), arch="sm_90a").resources
    if not jit.devices.gpu_present():
        assert r.occupancy(128) == 16
    assert r.occupancy((129, 1)) == 0
    with pytest.raises(ValueError, match="positive"):
        r.occupancy(0)


# ---- architectures


def test_architecture_of_a_card() -> None:
    known = (75, 80, 86, 87, 89, 90, 100, 120)
    expected = {
        (8, 0): "sm_80",
        (8, 6): "sm_86",
        (8, 8): "sm_87",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (12, 0): "sm_120a",
        (12, 1): "compute_120",
        (99, 0): "compute_120",
    }
    assert {c: for_capability(c, known).name for c in expected} == expected
    assert for_capability((12, 0), (80, 86, 89, 90)).name == "compute_90"
    with pytest.raises(RuntimeError, match=r"GTX 1080 has compute capability 6\.1.*CUDA 13"):
        for_capability((6, 1), known, "GTX 1080", "CUDA 13")
    with pytest.raises(RuntimeError, match=r"RTX 2080 has compute capability 7\.5"):
        for_capability((7, 5), known, "RTX 2080")


def test_architecture_spellings() -> None:
    assert parse("sm_90a").name == parse("90a").name == "sm_90a"
    assert parse(80).name == "sm_80"
    assert parse("compute_90").is_ptx
    for bad in ("sm90", "hopper", "sm_9", ""):
        with pytest.raises(ValueError, match="arch="):
            parse(bad)
    with pytest.raises(ValueError, match="not known to this NVRTC"):
        cukern.Kernel(ADD, "add", template=("half", 128), arch="sm_999")


def test_where_a_target_runs() -> None:
    assert Target("sm_80").runs_on((8, 6))
    assert not Target("sm_86").runs_on((8, 0))
    assert not Target("sm_80").runs_on((9, 0))
    assert Target("sm_90a").runs_on((9, 0))
    assert not Target("sm_100a").runs_on((10, 3))
    assert Target("compute_80").runs_on((12, 0))


# ---- toolchain


def test_a_missing_driver_is_advised_only_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARIES", ())
    with pytest.raises(CudaUnavailableError, match="if it has an NVIDIA GPU, install its driver; a"):
        driver.get.__wrapped__()


def include_folder(folder: Path, version: int | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "cuda_fp16.h").write_text("")
    if version is not None:
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return folder


def test_headers_of_nvrtcs_own_version_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "site" / "nvidia"
    old = include_folder(wheels / "cuda_runtime" / "include", 12090)
    new = include_folder(wheels / "cu13" / "include", 13000)
    kit = include_folder(tmp_path / "kit" / "include", 12040)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(toolchain.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(toolchain, "_toolkits", lambda: iter([tmp_path / "kit"]))
    for version, folder in (((12, 9), old), ((13, 0), new), ((13, 1), new), ((12, 4), kit), ((12, 6), old)):
        monkeypatch.setattr(toolchain, "nvrtc_version", lambda v=version: v)
        toolchain.headers.cache_clear()
        assert toolchain.headers() == folder
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (14, 0))
    toolchain.headers.cache_clear()
    with pytest.raises(CudaUnavailableError, match=r"no CUDA 14 headers.*CUDA 12\.9.*pip install"):
        toolchain.headers()
    monkeypatch.undo()
    toolchain.forget()


def test_a_folder_without_fp16_or_version_is_no_header_folder(tmp_path: Path) -> None:
    assert toolchain.header_version(tmp_path) is None
    assert toolchain.header_version(include_folder(tmp_path / "a", None)) is None
    assert toolchain.header_version(include_folder(tmp_path / "b", 13020)) == (13, 2)


def test_two_cupy_wheels_and_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cupy_wheels", lambda: ["cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0"])
    text = toolchain.no_cupy(ImportError("broken"))
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in text
    assert any("installed together" in p for p in jit.info().problems)
    monkeypatch.setattr(toolchain, "cupy_wheels", list)
    assert 'pip install "cukern[cuda12]"' in toolchain.no_cupy(ImportError("no"))


def test_info_says_what_is_here() -> None:
    info = jit.info()
    assert info.can_compile
    assert "sm_90" in info.architectures
    assert info.nvrtc_build
    assert (info.gpus and info.usable) or info.problems
    assert info.cache.entries == 0


def test_info_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CudaUnavailableError("CuPy finds no NVRTC library")

    monkeypatch.setattr(toolchain, "nvrtc", missing)
    info = jit.info()
    assert not info.can_compile
    assert "CuPy finds no NVRTC library" in info.problems


# ---- process


def test_import_makes_no_cuda_context_and_survives_a_fork() -> None:
    code = """
import os, sys
import cukern
from cukern import jit
k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f")
assert "cukern.emulator" not in sys.modules
loaded = [line for line in open("/proc/self/maps") if "libcuda.so" in line]
if not jit.devices.gpu_present():
    assert not loaded
pid = os.fork()
if pid == 0:
    cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f", arch="sm_80").cubin
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr


def test_virtual_device_without_a_gpu_and_under_emulation() -> None:
    with cukern.emulate():
        d = jit.device()
    assert (d.arch, d.sm_count, d.max_shared_mem) == ("sm_80", 8, 99 << 10)


def test_emulated_launch_converts_and_checks_like_a_gpu_launch() -> None:
    source = "__global__ void f(float *x, int n, float v) { int i = threadIdx.x; if (i < n) x[i] += v; }"
    k = cukern.Kernel(source, "f")
    x = np.zeros(4, np.float32)
    with cukern.emulate():
        k(1, 32, (x, 3, 2))
        assert x.tolist() == [2, 2, 2, 0]
        k(0, 32, (x, 3, 2))
        k(1, 32, (np.zeros(0, np.float32), 0, 2))
        for args, kind in [
            ((x, 3), TypeError),
            ((x.astype(np.float64), 3, 2), TypeError),
            ((x, 3.0, 2), TypeError),
            ((x[::2], 2, 2), ValueError),
            ((x, np.int64(3), 2), TypeError),
            ((SimpleNamespace(), 3, 2), TypeError),
        ]:
            with pytest.raises(kind, match="kernel 'f'"):
                k(1, 32, args)
        with pytest.raises(ValueError, match="65535"):
            k((1, 65536), 32, (x, 3, 2))
        with pytest.raises(ValueError, match="1024"):
            k(1, 2048, (x, 3, 2))
    assert x.tolist() == [2, 2, 2, 0]
