"""Sources, names and arguments as users really have them, and as nobody should: read right, or refused by name."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_cuda import FakeCuda, FakeLibrary, uninstall

import cukern
from cukern.jit.signature import parse, template_argument
from cukern.jit.source import assemble, define_block

TWICE = 'extern "C" __global__ void twice(float *x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }\n'


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile cäche"
    # not by the environment: the emulator's runtime library stays where it is for the whole process
    monkeypatch.setattr("cukern.jit.cache.default_folder", lambda: folder)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield FakeCuda(FakeLibrary(), monkeypatch)
    monkeypatch.undo()
    uninstall()


def kernel(source: Any, **options: Any) -> cukern.Kernel:
    return cukern.Kernel(source, "twice", arch="sm_80", **options)


def doubles(k: cukern.Kernel) -> bool:
    x = np.arange(4, dtype=np.float32)
    with cukern.emulate():
        k(1, 4, (x, 4))
    return bool((x == [0, 2, 4, 6]).all())


# ---- files


@pytest.mark.parametrize("name", ["plain.cu", "mit Leerzeichen.cu", "核 é.cu", 'quo"te\\s.cu'])
@pytest.mark.parametrize(
    ("head", "end"),
    [(b"", b"\n"), (b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"", b"\r")],
    ids=["", "BOM", "CRLF", "CR"],
)
def test_files_of_every_editor(tmp_path: Path, name: str, head: bytes, end: bytes) -> None:
    header, text = (
        "#pragma once\n#define FACTOR 2 // ×\n",
        '#include "my factor.cuh"\n// é\n' + TWICE.replace("2;", "FACTOR;"),
    )
    (tmp_path / "my factor.cuh").write_bytes(head + header.encode().replace(b"\n", end))
    (tmp_path / name).write_bytes(head + text.encode().replace(b"\n", end))
    assert doubles(kernel(tmp_path / name))


@pytest.mark.parametrize("name", ["ö.cu", 'quo"te.cu'])
def test_errors_show_the_line_of_an_odd_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf// 1\r\n// \x0c 2\r\nint oops\r\n" + TWICE.encode())
    with pytest.raises(cukern.CompileError) as caught:
        kernel(tmp_path / name)
    assert caught.value.diagnostics[0].file == name
    assert caught.value.diagnostics[0].line in (3, 4)


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_line_ends_end_a_comment(mark: str) -> None:
    assert doubles(kernel(f"// one{mark}line\n" + TWICE))


def test_a_directive_in_a_continued_comment_or_a_dead_branch_is_none() -> None:
    assert doubles(kernel('// so \\\n#include "common/absent.cuh"\n' + TWICE))
    assert doubles(kernel('#if 0\n#include "common/absent.cuh"\n#endif\n' + TWICE))


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "self.cu").write_text('#pragma once\n#include "self.cu"\n' + TWICE)
    assert doubles(kernel(tmp_path / "self.cu"))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "old.cu").write_bytes(("// é\n" + TWICE).encode(encoding))
    with pytest.raises(ValueError, match=r"old\.cu is not UTF-8 text"):
        kernel(tmp_path / "old.cu")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (None, TypeError, "source: expected CUDA C.. text or the path of a file, got NoneType"),
        (TWICE.encode(), TypeError, "got bytes"),
        (TWICE + "\0" + TWICE, ValueError, "NUL character"),
        (TWICE + "// \udc80", ValueError, "lone surrogate"),
        ("", cukern.CompileError, "no kernel 'twice'"),
        ("absent.cu", FileNotFoundError, r"absent\.cu"),
        (Path(__file__).parent, FileNotFoundError, "no CUDA source file"),
    ],
    ids=["None", "bytes", "NUL", "surrogate", "empty", "absent", "folder"],
)
def test_what_is_no_source(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernel(source)


def test_defines() -> None:
    assert define_block({"A": np.True_, "B": np.float16, "C": np.dtype("float32")}) == (
        "#define A 1\n#define B half\n#define C float\n"
    )
    assert doubles(kernel(TWICE.replace("2;", "sizeof(HUGE) - 999999;"), defines={"HUGE": '"' + "x" * 1_000_000 + '"'}))
    for wrong, error, message in [
        (["A"], TypeError, "expected a mapping"),
        ({5: 1}, ValueError, "5 is not a macro name"),
        ({"A\n": 1}, ValueError, "not a macro name"),
        ({"A": "1\r2"}, ValueError, "several lines"),
        ({"A": "1 \\"}, ValueError, "several lines"),
        ({"A": "1\0"}, ValueError, "NUL"),
    ]:
        with pytest.raises(error, match=message):
            assemble(TWICE, wrong)  # type: ignore[arg-type]


def test_template_and_options_of_a_wrong_kind() -> None:
    source = "template <class T> __global__ void twice(T *x, int n) { x[n] *= 2; }"
    for template in (4, None.__class__, (None,), (object(),), {"half"}):
        with pytest.raises(TypeError, match="template"):
            kernel(source, template=template)
    with pytest.raises(TypeError):
        template_argument(None)
    for size in ("1", 1.5, -1, True):
        with pytest.raises(ValueError, match="max_shared_mem"):
            kernel(TWICE, max_shared_mem=size)
    for flag in ("no", 1, None):
        with pytest.raises(TypeError, match=r"kernel '.*': cooperative must be True or False"):
            kernel(TWICE, cooperative=flag)


# ---- parameters of many styles


def packed(
    cuda: FakeCuda, parameters: str, args: tuple[Any, ...], sizes: list[int], head: str = "", **options: Any
) -> Any:
    cuda.expect(sizes)
    form = "template <class T> " if "template" in options else 'extern "C" '
    cukern.Kernel(f"{head}\n{form}__global__ void f({parameters}) {{}}", "f", **options)(1, 32, args)
    return cuda.library.snapshots[-1]


@pytest.mark.parametrize(
    ("parameters", "args", "formats", "head", "options"),
    [
        ("", (), "", "", {}),
        ("void", [], "", "", {}),
        ("T a, I n", (2.0, 3), "fi", "#define T float // real\n#define I  unsigned", {}),
        ("T a", (2.0,), "d", "#define R double\n#define T const R", {}),
        ("T a", (2.0,), "f", "", {"defines": {"T": "float"}}),
        ("PARAMETERS, bool b", (2.0, 3, True), "fi?", "#define PARAMETERS float a, \\\n  int n", {}),
        ("Color c", (1,), "i", "enum Color { RED, GREEN };", {}),
        ("Color c", (200,), "B", "enum class Color : unsigned char { RED = 200 };", {}),
        ("Color c", (-1,), "i", "enum Color { RED = -1 };", {}),
        ("[[maybe_unused]] int n, float x", (3, 0.5), "if", "", {}),
        (
            "typename A<T>::type a",
            (2.0,),
            "f",
            "template <class T> struct A { using type = T; };",
            {"template": ("float",)},
        ),
        ("char c, signed char s, unsigned char u", (65, -1, 255), "bbB", "", {}),
        ("long l, long long ll, size_t s", (-1, 2**63 - 1, 2**64 - 1), "qqQ", "", {}),
        ("void (*g)(int), int n", (None, 3), "Qi4x", "", {}),
    ],
)
def test_numbers_reach_the_kernel(
    cuda: FakeCuda, parameters: str, args: tuple[Any, ...], formats: str, head: str, options: dict[str, Any]
) -> None:
    codes = [c for c in formats if (c.isalpha() and c != "x") or c == "?"]
    found = packed(cuda, parameters, args, [struct.calcsize("=" + c) for c in codes], head, **options)
    assert [struct.unpack("=" + c, raw)[0] for c, raw in zip(codes, found)] == [a or 0 for a in args]


@pytest.mark.parametrize(
    "parameter", ["float x[4]", "float x[]", "float x[][4]", "float (*x)[4]", "T *const __restrict__ x"]
)
def test_arrays_reach_the_kernel(cuda: FakeCuda, parameter: str) -> None:
    x = cuda.array(4, np.float32)
    (raw,) = packed(cuda, parameter, (x,), [8], "#define T const float")
    assert struct.unpack("=Q", raw)[0] == x.data.ptr


def test_a_define_checks_the_dtype_of_arrays(cuda: FakeCuda) -> None:
    with pytest.raises(TypeError, match=r"'x' \(float\*\): expected a float32 array"):
        packed(cuda, "T *x", (cuda.array(4, np.float64),), [8], defines={"T": "float"})


def test_eight_bytes_by_value_are_no_place_for_an_array(cuda: FakeCuda) -> None:
    """The address would be taken for the struct's members without a word."""
    head = "struct Pair { int a; float b; };"
    assert packed(cuda, "Pair p", (struct.pack("if", 1, 2),), [8], head)[0] == struct.pack("if", 1, 2)
    for wrong in (cuda.array(4, np.float32), None, 5):
        with pytest.raises(TypeError, match=r"'p' \(Pair\): expected 8 bytes by value"):
            packed(cuda, "Pair p", (wrong,), [8], head)


def test_macros_of_two_meanings_are_left_to_the_compiler(cuda: FakeCuda) -> None:
    head = "#ifdef WIDE\n#define T double\n#else\n#define T float\n#endif"
    for options, fmt in (({}, "f"), ({"defines": {"WIDE": 1}}, "d")):
        (raw,) = packed(cuda, "T a", (2.0,), [struct.calcsize(fmt)], head, **options)
        assert struct.unpack("=" + fmt, raw) == (2.0,)
    assert parse("#define A B\n#define B A\n__global__ void k(A x) {}", "k").parameters  # and a cycle ends


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("Color c", 2**32),
        ("Color c", 1.0),
        ("float x", 10**400),
        ("float x", np.float64(1)),
        ("int n", 1.0),
        ("int n", "1"),
        ("unsigned char c", b"A"),
        ("float *x", 12345),
        ("float *x", [1.0]),
        ("float *x", np.float32(1)),
    ],
)
def test_wrong_values_are_a_type_error_with_the_parameters_name(cuda: FakeCuda, parameter: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"parameter '{parameter.split()[-1].strip('*')}'"):
        packed(cuda, parameter, (value,), [8], "enum Color { RED };")
    assert not cuda.library.launches


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": (1.0, 1, 1)}, "grid="),
        ({"grid": np.array([1, 1, 1])}, "grid="),
        ({"block": np.array([32])}, "block="),
        ({"block": (32.0,)}, "block="),
        ({"shared_mem": [1]}, "shared_mem="),
        ({"shared_mem": True}, "shared_mem="),
        ({"stream": "side"}, "stream="),
        ({"pdl": "junk"}, "pdl must be True or False, got 'junk'"),
        ({"pdl": 1}, "pdl must be True or False, got 1"),
        ({"args": None}, "args must be a tuple"),
    ],
)
def test_launch_values_of_a_wrong_kind(cuda: FakeCuda, options: dict[str, Any], words: str) -> None:
    cuda.expect([])
    k = cukern.Kernel('extern "C" __global__ void f() {}', "f")
    grid, block, args = (options.pop(n, d) for n, d in (("grid", 1), ("block", 32), ("args", ())))
    with pytest.raises((TypeError, ValueError), match=words):
        k(grid, block, args, **options)
    assert not cuda.library.launches
    k(np.int32(1), np.int64(32), (), shared_mem=np.int64(16))
    assert cuda.library.launches[0].shared_mem == 16


# ---- emulated


def test_macro_parameters_under_emulation() -> None:
    k = kernel(TWICE.replace("float *x, int n", "PARAMETERS"), defines={"PARAMETERS": "float *x, int n"})
    assert doubles(k)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stream": "junk"}, TypeError, "stream: expected"),
        ({"cluster": (2, 1, 1)}, ValueError, r"cluster=\(2, 1, 1\).*not emulated"),
        ({"cluster": "junk"}, TypeError, "cluster='junk'"),
        ({"pdl": "junk"}, TypeError, "pdl must be True or False, got 'junk'"),
        ({"shared_mem": True}, ValueError, "shared_mem=True"),
    ],
)
def test_launch_values_that_an_emulated_kernel_refuses(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    x = np.ones(4, np.float32)
    with cukern.emulate(), pytest.raises(error, match=words):
        kernel(TWICE)(1, 4, (x, 4), **options)
    assert (x == 1).all()


def test_launch_values_that_change_nothing_under_emulation() -> None:
    x = np.ones(4, np.float32)
    with cukern.emulate():
        kernel(TWICE)(1, 4, (x, 4), stream=0, cluster=(1, 1, 1), pdl=True)
    assert (x == 2).all()


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.broadcast_to(np.float32(1), (4,)), ValueError, "not contiguous"),
        (np.zeros(8, np.float32)[::2], ValueError, "not contiguous"),
        (np.zeros(4, np.float32)[::-1], ValueError, "not contiguous"),
        (np.zeros(4, ">f4"), TypeError, "expected a float32 array, got a NumPy >f4 array"),
        (np.ma.array(np.zeros(4, np.float32), mask=[1, 0, 0, 0]), TypeError, r"a masked array.*\.filled\("),
        ([0.0] * 4, TypeError, "got a list"),
    ],
    ids=["broadcast", "strided", "reversed", "big-endian", "masked", "list"],
)
def test_arrays_that_an_emulated_kernel_refuses(array: Any, error: type[Exception], message: str) -> None:
    with cukern.emulate(), pytest.raises(error, match=message):
        kernel(TWICE)(1, 4, (array, 4))


HIDDEN = """
#define KERNEL(name) extern "C" __global__ void name(float *x, int n)
KERNEL(twice) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
"""
OPAQUE = """
template <class T> struct Pointer { typedef T *type; };
__global__ void twice(Pointer<float>::type x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
"""
BY_VALUE = """
struct Pair { int a, b; };
__global__ void twice(Pair p, float *x) { x[threadIdx.x] *= p.a; }
"""


@pytest.mark.parametrize("source", [HIDDEN, OPAQUE], ids=["signature", "type"])
@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(8, np.float32)[::2], ValueError, "not contiguous"),
        (np.zeros(4, ">f4"), TypeError, "expected the machine's byte order, got a NumPy >f4 array"),
        (np.ma.array(np.zeros(4, np.float32), mask=[1, 0, 0, 0]), TypeError, "a masked array"),
    ],
    ids=["strided", "big-endian", "masked"],
)
def test_arrays_for_parameters_that_the_source_does_not_explain(
    source: str, array: Any, error: type[Exception], message: str
) -> None:
    k = kernel(source)
    with cukern.emulate(), pytest.raises(error, match=f"'twice', parameter .*{message}"):
        k(1, 4, (array, 4))
    assert doubles(k)


def test_records_by_value_have_the_machines_byte_order() -> None:
    x = np.ones(4, np.float32)
    with cukern.emulate():
        kernel(BY_VALUE)(1, 4, (np.array((3, 4), "i4,i4"), x))
        with pytest.raises(TypeError, match="byte order"):
            kernel(BY_VALUE)(1, 4, (np.array((3, 4), ">i4,>i4"), x))
    assert (x == 3).all()
