"""What the emulator makes of a kernel's text: shared memory in every spelling, names, template arguments, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import FILL, kernel, launch

import cukern
from cukern import emulator as E
from cukern.emulator import source, symbols, toolchain


@pytest.mark.parametrize(
    "declaration",
    [
        "extern __shared__ float s[];",
        "extern __shared__ __align__(16) float s[];",
        "extern __align__(64) __shared__ float s[];",
        "__align__(32) extern __shared__ float s[];",
        "extern __shared__ alignas(128) float s[];",
        "alignas(128) extern __shared__ float s[];",
        "extern __shared__ float __align__(16) s[];",
        "extern volatile __shared__ float s[];",
        "extern __shared__ unsigned char raw[]; float *s = reinterpret_cast<float *>(raw);",
        "extern __shared__ float4 quads[]; float *s = &quads[0].x;",
        "extern   __shared__\n  float\n  s[ ];",
        "__shared__ alignas(16) float s[64];",
        "alignas(16) __shared__ float s[64];",
        "__align__(16) __shared__ float s[64];",
        "static __shared__ float s[64];",
        "__shared__ static float s[64];",
        "__shared__ float s[64], unused[2];",
    ],
)
def test_spellings_of_shared_memory(declaration: str) -> None:
    x = np.zeros(64, np.float32)
    use = "s[threadIdx.x] = threadIdx.x;\n__syncthreads();\nx[threadIdx.x] = s[63 - threadIdx.x];"
    text = kernel(f"{declaration}\n{use}")
    launch(text, (x, 0), shared_mem=256)
    np.testing.assert_array_equal(x, np.arange(63, -1, -1))


@pytest.mark.parametrize("scope", ["{}", "namespace a {{ {} }}\nusing namespace a;", "/* {{ */ // {{\n{}"])
def test_dynamic_shared_memory_at_namespace_scope(scope: str) -> None:
    use = "s[threadIdx.x] = 1;\n__syncthreads();\nx[threadIdx.x] = s[63 - threadIdx.x];\nx[n] = 0; // fault"
    text = scope.format("extern __shared__ float s[];") + "\n" + kernel(use)
    x = np.zeros(64, np.float32)
    launch(text, (x, 63), shared_mem=256)
    assert x[:63].all()
    with pytest.raises(E.OutOfBounds) as caught:
        launch(text, (x, 64), shared_mem=256)
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "fault" in row)
    assert caught.value.line == line


def test_template_with_dynamic_shared_memory() -> None:
    text = (
        "template <class T, int N> __global__ void k(T *x) {\n  extern __shared__ T s[];\n  s[threadIdx.x] = T(N);\n"
        "  __syncthreads();\n  x[threadIdx.x] = s[63 - threadIdx.x];\n}"
    )
    for ctype, dtype in (("float", np.float32), ("int", np.int32)):
        x = np.zeros(64, dtype)
        launch(text, (x,), name=f"k<{ctype}, 5>", shared_mem=256)
        assert (x == 5).all()


def test_two_instances_do_not_share_their_shared_memory() -> None:
    text = """
template <int N> __global__ void k(float *x) {
  __shared__ float s[N];
  s[threadIdx.x] = N;
  __syncthreads();
  x[threadIdx.x] = s[N - 1 - threadIdx.x];
}"""
    for n in (64, 32, 64):
        x = np.zeros(n, np.float32)
        launch(text, (x,), name=f"k<{n}>", block=(n,))
        assert (x == n).all()


def test_comments_and_strings_are_left_alone() -> None:
    text = kernel(
        "// extern __shared__ float a[];\n"
        'const char *t = "extern __shared__ float b[];";\n'
        "x[threadIdx.x] = t[0]; /* __shared__ static */"
    )
    assert "emu_dynamic_shared" not in source.prepare(text, "k", "k.cu").text
    launch(text, (np.zeros(64, np.float32), 0))


def test_compile_error_shows_the_users_line() -> None:
    with pytest.raises(E.BuildError, match=r"k\.cu:2: .*undeclared_name") as caught:
        launch(kernel("x[0] = undeclared_name;"), (np.zeros(1, np.float32), 0))
    assert "undeclared_name" in caught.value.log


def test_missing_kernel_is_named() -> None:
    one = "template <class T> __global__ void __launch_bounds__(64) one(T *x) {}\n"
    text = one + kernel("x[0] = n;").replace(" k(", " two(")
    with pytest.raises(E.BuildError, match=r"no kernel 'three<float>' in k\.cu \(kernels found: one, two\)"):
        launch(text, (np.zeros(1, np.float32),), name="three<float>")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told before anything is compiled."""

    def build(*_: Any, **options: Any) -> Path:
        raise AssertionError("compiled")

    monkeypatch.setattr(toolchain, "build_kernel", build)


ONE = "template <class T> __global__ void k(T *x) {}"
TWO = "template <class T, int N = 2>\n__global__ void __launch_bounds__(64) k(T *x) {}"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (ONE, "k", r"'k' is a template <class T>: give template=\(\.\.\.\)"),
        (f"namespace a {{ {ONE} }}", "a::k", "'k' is a template <class T>: give"),
        (ONE, "k<float, 3>", r"takes 1 argument, template=\('float', '3'\) was given"),
        (TWO, "k<float, 3, 4>", "takes 1 to 2 arguments, .* was given"),
        (TWO.replace(" = 2", ""), "k<float>", r"takes 2 arguments, template=\('float',\) was given"),
        (ONE, "k<3>", "'class T' is a type, '3' was given"),
        (TWO, "k<float, half>", "'int N = 2' is a value, 'half' was given"),
        (kernel(""), "k<float>", r"'k' is no template, template=\('float',\) was given"),
        (f"template <class T> struct A {{}}; {kernel('')}", "k<A<int>>", "no template"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_template_arguments_that_do_not_fit(text: str, name: str, message: str) -> None:
    with pytest.raises(E.BuildError, match=message):
        launch(text, (None,), name=name)


def test_template_argument_that_is_not_known() -> None:
    with pytest.raises(E.BuildError, match=r"its name: .*flaot") as caught:
        launch(ONE, (None,), name="k<flaot>")
    assert "launch.h" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("template <class... T> __global__ void k(T *...x) {}", "k<float, int, half>"),
        ("template <class T, bool B = (2 > 1), class U = int> __global__ void k(T *x) {}", "k<float, false, half>"),
        ("template <class T, bool B> __global__ void k(T *x) {}", "k<int, (2 > 1)>"),
        (f"{ONE} {kernel('')}", "k<float>"),
        ("template <class T> __global__ void k(T *x); template <> __global__ void k(int *x) {}", "k<int>"),
        ("template <class T = int> __global__ void k(T *x); template <class T> __global__ void k(T *x) {}", "k<>"),
        ("template <template <class> class A, class T> __global__ void k(A<T> *x) {}", "k<B, int>"),
        (f"namespace a {{ {ONE} }} namespace b {{ template <int N> __global__ void k(int *x) {{}} }}", "a::k<int>"),
        ("#define KERNEL(name) __global__ void name\nKERNEL(k)(int *x) {}", "k"),
        ("#define NAME k\n__global__ void NAME(int *x) {}", "k"),
        ("#define JOIN(a, b) a##b\n__global__ void JOIN(pre, fix)(int *x) {}", "prefix"),
        ("__device__ void k(int *x, int n) {}\n__global__ void k(int *x) {}", "k"),
    ],
)
def test_names_that_may_be_right(text: str, name: str) -> None:
    assert not source.misnamed(text, name, "k.cu")


@pytest.mark.parametrize("head", ["__device__ void", "void", "template <class T> __device__ void"])
@pytest.mark.usefixtures("no_compiler")
def test_a_function_that_is_no_kernel(head: str) -> None:
    text = f"{head} f(float *x) {{}}\n__global__ void k(float *x) {{ f(x); }} // __global__ f(x)"
    with pytest.raises(E.BuildError, match=r"'f' is a function without __global__ in k\.cu \(kernels found: k\)"):
        launch(text, (np.zeros(1, np.float32),), name="f<float>" if "template" in head else "f")


def test_names_that_nvrtc_lacks_are_missing_here_too() -> None:
    for name in ("INFINITY", "std::min(1, 2)", "M_PI"):
        with pytest.raises(E.BuildError):
            launch(kernel(f"x[0] = {name};"), (np.zeros(1, np.float32), 0))


def test_a_header_of_the_users_may_have_any_name() -> None:
    """Faults in it are its own, even if the emulator has a file of that name."""
    at = "__device__ __forceinline__ float at(const float *x, int i) { return x[i]; }"
    text = f'#line 1 "math.h"\n{at}\n#line 1 "k.cu"\n'
    with pytest.raises(E.OutOfBounds) as caught:
        launch(text + kernel("x[0] = at(x, n);"), (np.zeros(1, np.float32), 1))
    assert (caught.value.file, caught.value.line) == ("math.h", 1)
    assert caught.value.callers == (("k.cu", 2),)


def test_position_of_nonsense_is_unknown(tmp_path: Path) -> None:
    for content in (b"", b"not an object", b"\x7fELF\x02\x01" + bytes(100)):
        path = tmp_path / "x.so"
        path.write_bytes(content)
        assert symbols.positions(path, 1234) == []
        assert symbols.shared_variables(path) == []


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZZ1kE4part", "part"),
        ("_ZZ9rms_normI6__halfLi8EEvPT_E6groups", "groups"),
        ("_ZZ1kE4part_0", "part"),
        ("s", "s"),
    ],
)
def test_names_of_shared_variables(mangled: str, name: str) -> None:
    assert symbols._plain(mangled) == name


def test_memoised() -> None:
    assert E.runtime_kernel(FILL, "k", filename="k.cu") is E.runtime_kernel(FILL, "k", filename="k.cu")


def test_debug_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_EMULATE_DEBUG", "1")
    x = np.zeros(64, np.float32)
    for check in (False, True):
        with cukern.emulate(check=check):
            launch(FILL, (x, 4 + check))
        assert (x == 4 + check).all()
