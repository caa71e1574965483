"""Assembling sources and reading kernel signatures."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cukern.jit.signature import (
    Parameter,
    Signature,
    kernel_names,
    name_expression,
    parse,
    split_name,
    template_argument,
)
from cukern.jit.source import assemble, define_block, is_path, kernels_src


def body(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".cuh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_includes_are_expanded_once_with_line_markers(tmp_path: Path) -> None:
    write(tmp_path, a='#pragma once\n#include "b.cuh"\nint a;\n', b="#pragma once\nint b;\n")
    (tmp_path / "k.cu").write_text('#include "a.cuh"\n#include "b.cuh"\nint k;\n')
    text = assemble(tmp_path / "k.cu").text
    assert body(text) == ["int b;", "int a;", "int k;"]
    lines = text.splitlines()
    for name, statement, number in (("b.cuh", "int b;", 2), ("a.cuh", "int a;", 3), ("k.cu", "int k;", 3)):
        at = lines.index(statement)
        marker = max(i for i in range(at) if lines[i].startswith("#line"))
        counted = int(lines[marker].split()[1]) + (at - marker - 1)
        guards = [x for x in lines[marker + 1 : at] if x.startswith(("#ifndef CUKERN_SEEN", "#define CUKERN_SEEN"))]
        assert lines[marker].endswith(f'"{name}"')
        assert counted - len(guards) == number
    assert "#pragma once" not in text


def test_angle_includes_and_cuda_headers_in_quotes_are_left() -> None:
    text = assemble('#include <cuda_fp16.h>\n#include "cuda_bf16.h"\n').text
    assert "#include <cuda_fp16.h>" in text
    assert '#include "cuda_bf16.h"' in text


def test_our_headers_are_found_from_a_string_and_from_each_other() -> None:
    text = assemble('#include "ptx/mma.cuh"\n').text
    assert '#line 1 "common/types.cuh"' in text
    assert text.count("typedef __nv_bfloat16 bf16;") == 1


def test_a_missing_header_of_ours_names_file_line_and_places() -> None:
    with pytest.raises(FileNotFoundError, match=r'<source>:2: no header "common/nope.cuh" in .*kernels_src'):
        assemble('\n#include "common/nope.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"nope\.cu"):
        assemble("nope.cu")


def test_includes_in_comments_are_not_expanded(tmp_path: Path) -> None:
    source = '// #include "common/nope.cuh"\n/*\n#include "ptx/nope.cuh"\n*/ int x; /* a */ const char *s = "/*";\n'
    assert body(assemble(source).text)[-1].startswith("*/ int x;")
    assert '#line 1 "common/types.cuh"' in assemble('/* one line */ #include "common/types.cuh"\n').text


def test_a_header_first_met_in_a_dead_branch_is_still_there_later(tmp_path: Path) -> None:
    write(tmp_path, h="int h;\n")
    (tmp_path / "k.cu").write_text('#if 0\n#include "h.cuh"\n#endif\n#include "h.cuh"\n#include "h.cuh"\n')
    text = assemble(tmp_path / "k.cu").text
    assert text.count("int h;") == 2  # each under the guard of the same macro
    assert text.count("#ifndef CUKERN_SEEN_h_cuh") == 2


def test_headers_that_include_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, a='#include "b.cuh"\nint a;\n', b='#include "a.cuh"\nint b;\n')
    (tmp_path / "k.cu").write_text('#include "a.cuh"\n')
    assert body(assemble(tmp_path / "k.cu").text) == ["int b;", "int a;"]


def test_equal_names_in_two_folders_stay_apart(tmp_path: Path) -> None:
    write(tmp_path, x__u="int one;\n", y__u="int two;\n", x__a='#include "u.cuh"\n', y__a='#include "u.cuh"\n')
    (tmp_path / "k.cu").write_text('#include "x/a.cuh"\n#include "y/a.cuh"\n')
    assert body(assemble(tmp_path / "k.cu").text) == ["int one;", "int two;"]


def test_a_moved_folder_gives_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "first"
    shutil.copytree(kernels_src(), first)
    (first / "k.cu").write_text('#include "common/reduce.cuh"\n#include "own.cuh"\nint k;\n')
    (first / "own.cuh").write_text("int own;\n")
    monkeypatch.setenv("CUKERN_KERNELS_SRC", str(first))
    before = assemble(first / "k.cu").text
    second = tmp_path / "elsewhere" / "second"
    shutil.move(first, second)
    monkeypatch.setenv("CUKERN_KERNELS_SRC", str(second))
    assert assemble(second / "k.cu").text == before
    assert str(tmp_path) not in before


def test_kernels_src_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (kernels_src() / "common" / "types.cuh").is_file()
    monkeypatch.setenv("CUKERN_KERNELS_SRC", str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match="CUKERN_KERNELS_SRC"):
        kernels_src()


def test_the_user_sees_his_line(tmp_path: Path) -> None:
    source = assemble('#include "common/types.cuh"\nint second;\n')
    assert source.line("<source>", 2) == "int second;"
    assert "bf16" in source.line("common/types.cuh", 8)
    assert source.line("other", 1) == source.line("<source>", 99) == ""


def test_defines_come_first_sorted() -> None:
    assert (
        define_block({"B": 2, "A": None, "C": True, "D": 1.5}) == "#define A\n#define B 2\n#define C 1\n#define D 1.5\n"
    )
    assert define_block({"A": 1, "B": 2}) == define_block({"B": 2, "A": 1})
    assert assemble("int x;", {"N": 4}).text.startswith("#define N 4\n#line 1")
    with pytest.raises(ValueError, match="'A B'"):
        define_block({"A B": 1})
    with pytest.raises(ValueError, match="several lines"):
        define_block({"A": "1\n2"})


def test_path_or_text() -> None:
    assert is_path("a/b.cu")
    assert is_path(Path("x"))
    assert not is_path("int x; // .cu\n")
    assert not is_path("__global__ void f() {}")


# ---- signatures


def parameters(text: str, name: str) -> tuple[Parameter, ...]:
    found = parse(text, name).parameters
    assert found is not None
    return found


def test_pointers_scalars_qualifiers() -> None:
    text = """
    extern "C" __global__ void __launch_bounds__(256, 2) k(const float *__restrict__ x, half* y, __half const * const z,
        unsigned n, unsigned long long int big, const int m,
        bool flag, char c, double d, void *p, float **pp, int a[4]) {}
    """
    got = [(p.name, p.kind, p.dtype) for p in parameters(text, "k")]
    assert got == [
        ("x", "pointer", "float32"),
        ("y", "pointer", "float16"),
        ("z", "pointer", "float16"),
        ("n", "scalar", "uint32"),
        ("big", "scalar", "uint64"),
        ("m", "scalar", "int32"),
        ("flag", "scalar", "bool"),
        ("c", "scalar", "int8"),
        ("d", "scalar", "float64"),
        ("p", "pointer", ""),
        ("pp", "pointer", ""),
        ("a", "pointer", "int32"),
    ]
    assert parameters(text, "k")[0].c_type == "const float*"


def test_templates_aliases_and_structs() -> None:
    text = """
    typedef unsigned int u32; using i64 = long long; using Float = float;
    struct Args { int a; };
    template <class T, int N = 4, typename U = bf16>
    __global__ __launch_bounds__(N * 32) void k(const T *x, U *y, u32 n, i64 stride, Float e,
        const __grid_constant__ Args args, T v) { if (n < 3) return; }
    """
    got = [(p.name, p.kind, p.dtype) for p in parameters(text, "k<half, 8>")]
    assert got == [
        ("x", "pointer", "float16"),
        ("y", "pointer", "bfloat16"),
        ("n", "scalar", "uint32"),
        ("stride", "scalar", "int64"),
        ("e", "scalar", "float32"),
        ("args", "opaque", ""),
        ("v", "scalar", "float16"),
    ]
    assert parameters(text, "k<float, 8, half>")[1].dtype == "float16"


def test_dependent_types_and_unnamed_parameters() -> None:
    text = "template <class T> __global__ void k(typename Traits<T, 4>::type x, int, const float *, Vec<T, 4> *v) {}"
    got = [(p.name, p.kind, p.dtype) for p in parameters(text, "k<half>")]
    assert got == [
        ("x", "opaque", ""),
        ("argument 1", "scalar", "int32"),
        ("argument 2", "pointer", "float32"),
        ("v", "pointer", ""),
    ]


def test_comments_macros_and_forward_declarations_do_not_confuse() -> None:
    text = """
    // __global__ void k(int wrong);
    /* __global__ void k(int wrong); */
    #define K __global__ void k(int wrong)
    __global__ void k(float *x, int n);
    __global__ void k(float *x /* data */, int n // count
    ) {}
    """
    assert [p.name for p in parameters(text, "k")] == ["x", "n"]


def test_overloads_and_unknown_names_are_left_to_the_compiler() -> None:
    text = "__global__ void k(int a) {} __global__ void k(float a) {}"
    assert parse(text, "k") == Signature("k", None)
    assert parse(text, "other").parameters is None


def test_no_parameters() -> None:
    assert parameters("__global__ void k() {}", "k") == ()
    assert parameters("__global__ void k(void) {}", "k") == ()


def test_every_kernel_of_the_house_is_understood() -> None:
    files = sorted(kernels_src().glob("*.cu"))
    for file in files:
        text = assemble(file).text
        for name in kernel_names(text):
            found = parse(text, f"{name}<half>").parameters
            assert found is not None, f"{file.name}: {name}"


def test_names() -> None:
    assert name_expression("f", ("half", 128, True, np.float32, ml_dtypes.bfloat16)) == (
        "f<half, 128, true, float, __nv_bfloat16>"
    )
    assert name_expression("f", None) == name_expression(" f ", ()) == "f"
    assert split_name("ns::f<A<int, 2>, 3>") == ("f", ["A<int, 2>", "3"])
    assert template_argument(np.int64(3)) == "3"
    with pytest.raises(ValueError, match="already has template arguments"):
        name_expression("f<int>", ("half",))
    with pytest.raises(TypeError, match="expected a tuple"):
        name_expression("f", "half")
    with pytest.raises(TypeError, match="template argument"):
        template_argument(1.5)


def test_environment_is_not_needed_to_read_sources() -> None:
    assert os.environ.get("CUKERN_KERNELS_SRC") is None
