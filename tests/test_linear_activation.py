"""A product that ends in SwiGLU: what the two operators give one behind the other, and its arguments."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import jit, reference
from cukern.ops.linear import linear
from cukern.ops.swiglu import swiglu

HALVES = [np.float16, ml_dtypes.bfloat16]


def problem(backend: Any, rng: np.random.Generator, dtype: Any, m: int, n: int, k: int) -> tuple[Any, Any]:
    x = rng.standard_normal((m, k)).astype(dtype)
    return backend.put(x), backend.put((rng.standard_normal((n, k)) * 2 * k**-0.5).astype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 64), (5, 48, 264), (20, 34, 40), (3, 2, 19)])
def test_bits_of_the_two_operators(backend: Any, rng: np.random.Generator, dtype: Any, m: int, n: int, k: int) -> None:
    x, w = problem(backend, rng, dtype, m, n, k)
    bias = backend.put(rng.standard_normal(n, np.float32))
    for options in ({}, {"bias": bias}, {"dtype": np.float32}):
        want = backend.get(swiglu(linear(x, w, **options)))
        for _ in range(2):  # the second call repeats the first
            got = linear(x, w, activation="swiglu", **options)
            assert got.shape == (m, n // 2)
            np.testing.assert_array_equal(backend.get(got), want)
        np.testing.assert_allclose(
            want.astype(np.float32),
            reference.linear(
                *(backend.get(a).astype(np.float64) for a in (x, w)),
                bias=None if "bias" not in options else backend.get(bias),
                activation="swiglu",
            ),
            rtol=4 * float(ml_dtypes.finfo(dtype).eps),  # gate, up and the result are rounded
            atol=4 * float(ml_dtypes.finfo(dtype).eps),
        )
    out = backend.put(np.zeros((m, n // 2), dtype))
    assert linear(x, w, activation="swiglu", out=out) is out
    np.testing.assert_array_equal(backend.get(out), backend.get(swiglu(linear(x, w))))


def test_leading_axes_and_no_rows(backend: Any, rng: np.random.Generator) -> None:
    x, w = problem(backend, rng, np.float16, 6, 32, 64)
    got = linear(x.reshape(2, 3, 64), w, activation="swiglu")
    np.testing.assert_array_equal(backend.get(got).reshape(6, 16), backend.get(swiglu(linear(x, w))))
    assert linear(x[:0], w, activation="swiglu").shape == (0, 16)


def test_wrong_arguments(backend: Any, rng: np.random.Generator) -> None:
    x, w = problem(backend, rng, np.float16, 3, 32, 64)
    stream = backend.put(np.zeros((3, 32), np.float32))
    for options, match in (
        ({"activation": "gelu"}, "activation must be None or \"swiglu\", got 'gelu'"),
        ({"activation": ["swiglu"]}, "activation must be None"),
        ({"activation": np.array(["swiglu"])}, "activation must be None"),
        ({"activation": np.array(["swiglu", "swiglu"])}, "activation must be None"),
        ({"residual": stream}, "residual or activation, not both"),
        ({"out": backend.put(np.zeros((3, 32), np.float16))}, r"out has shape \(3, 32\), expected \(3, 16\)"),
        ({"out": w.reshape(-1)[:48].reshape(3, 16)}, "shares? memory"),
        ({"backend": "mkl"}, "backend must be"),
        ({"backend": np.array(["cukern", "cublas"])}, "backend must be"),
    ):
        with pytest.raises(ValueError, match=match):
            linear(x, w, **{"activation": "swiglu", **options})
    with pytest.raises(ValueError, match="N is odd"):
        linear(x, w[:31], activation="swiglu")
    for static in ("no", None, 2):
        for activation in (None, "swiglu"):
            with pytest.raises(TypeError, match="static_weight must be True or False"):
                linear(x, w, activation=activation, static_weight=static)


def test_wrong_arguments_of_the_reference(rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 8), (6, 8)))
    for options, match in (
        ({"activation": "relu"}, "activation must be None"),
        ({"activation": np.array("swiglu")}, "activation must be None"),
        ({"weight": w[:5]}, "N is odd"),
        ({"weight": w[0]}, "do not fit"),
        ({"weight": w[0, 0]}, "do not fit"),
        ({"residual": np.zeros((3, 6), np.float32)}, "residual or activation, not both"),
        ({"out": np.zeros((2, 3, 3), np.float16)}, r"out has shape \(2, 3, 3\), expected \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=match):
            reference.linear(**{"x": x, "weight": w, "activation": "swiglu", **options})  # type: ignore[arg-type]


def test_out_decides_the_dtype(backend: Any, rng: np.random.Generator) -> None:
    """As it does without an activation."""
    x, w = problem(backend, rng, np.float16, 3, 32, 64)
    want = linear(x, w, activation="swiglu", dtype=np.float32)
    out = backend.put(np.zeros((3, 16), np.float32))
    assert linear(x, w, activation="swiglu", out=out) is out
    np.testing.assert_array_equal(backend.get(out), backend.get(want))
    arrays = backend.get(x), backend.get(w)
    in_reference = reference.linear(*arrays, activation="swiglu", out=np.zeros((3, 16), np.float32))
    np.testing.assert_array_equal(in_reference, reference.linear(*arrays, activation="swiglu", dtype=np.float32))
    with pytest.raises(TypeError, match="out has dtype float32, expected float16"):
        linear(x, w, activation="swiglu", out=out, dtype=np.float16)


def test_edited_sources_are_read_again(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind `reload` a product and its activation are by kernels made anew, as those of every operator."""
    launched: list[cukern.Kernel] = []
    launch = cukern.Kernel.__call__

    def record(self: cukern.Kernel, *args: Any, **options: Any) -> None:
        launched.append(self)
        launch(self, *args, **options)

    monkeypatch.setattr(cukern.Kernel, "__call__", record)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 16), (8, 16)))
    with cukern.emulate():
        linear(x, w, activation="swiglu")
        linear(x, w, activation="swiglu")
        jit.reload()
        linear(x, w, activation="swiglu")
    product, activation, again, _, anew, activation_anew = launched
    assert product is again
    assert (product.name, activation.name) == (anew.name, activation_anew.name)
    assert product is not anew
    assert activation is not activation_anew
