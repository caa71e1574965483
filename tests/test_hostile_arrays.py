"""What no operator may do with arrays: touch the wrong memory, or fail without naming the argument.

The operators on rows, positions and caches, through one table; the odd cases of each are in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cukern
from cukern import ops
from cukern.ops._arrays import check_apart

HALF, FLOAT = np.float16, np.float32


def arguments(name: str) -> dict[str, Any]:
    """Good arguments of an operator, NumPy arrays and numbers."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = HALF) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    table, slots = ops.rope_table(16, 10, 1e4), np.array([2, -1, 5])
    caches = {"k_cache": normal(2, 2, 4, 16), "v_cache": normal(2, 2, 4, 16), "slot_mapping": slots}
    return {
        "embedding": lambda: {"ids": np.array([3, 0, 3]), "weight": normal(4, 16)},
        "rms_norm": lambda: {"x": normal(3, 16), "weight": normal(16, dtype=FLOAT)},
        "rope": lambda: {"x": normal(3, 2, 16), "positions": np.arange(3), "table": table},
        "swiglu": lambda: {"gate_up": normal(3, 32)},
        "kv_cache_write": lambda: {"k": normal(3, 2, 16), "v": normal(3, 2, 16), **caches},
        "qk_norm_rope_cache": lambda: {
            "qkv": normal(3, 5 * 16),
            "q_weight": normal(16, dtype=FLOAT),
            "k_weight": normal(16, dtype=FLOAT),
            "positions": np.arange(3),
            "table": table,
            **caches,
            "num_heads": 1,
            "num_kv_heads": 2,
        },
    }[name]()


NAMES = ("embedding", "rms_norm", "rope", "swiglu", "kv_cache_write", "qk_norm_rope_cache")
WRITTEN = ("k_cache", "v_cache")
EVERY_ARRAY = [(n, a) for n in NAMES for a, v in arguments(n).items() if isinstance(v, np.ndarray)]
INPUTS = [(n, a) for n, a in EVERY_ARRAY if a not in WRITTEN]


def call(backend: Any, name: str, given: dict[str, Any]) -> list[np.ndarray]:
    """The result and the written caches, on the host."""
    on = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    result = getattr(ops, name)(**on)
    return [backend.get(a) for a in (result, *(on[c] for c in WRITTEN if c in on)) if a is not None]


def refused(name: str, given: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        getattr(ops, name)(**given)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reversed": lambda a: np.ascontiguousarray(a[(slice(None, None, -1),) * a.ndim])[(slice(None, None, -1),) * a.ndim],
    "column slice": lambda a: np.concatenate([a, a + 1], axis=-1)[..., : a.shape[-1]],
    "every second": lambda a: np.repeat(a, 2, axis=0)[::2],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "odd address": lambda a: np.concatenate([a.reshape(-1)[:1], a.reshape(-1)])[1:].reshape(a.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_views_are_seen_as_what_they_are(backend: Any, name: str, argument: str, view: str) -> None:
    given = arguments(name)
    expected = call(backend, name, given)
    on = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in arguments(name).items()}
    base = VIEWS[view](given[argument])
    strides, offset = base.strides, 0
    owner = base
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    offset = base.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    if backend.name == "cuda":
        import cupy

        memory = cupy.asarray(owner)
        on[argument] = cupy.ndarray(base.shape, base.dtype, memory.data + offset, strides)
    else:
        on[argument] = base
    result = getattr(ops, name)(**on)
    got = [backend.get(a) for a in (result, *(on[c] for c in WRITTEN if c in on)) if a is not None]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


# Three tokens with one slot may land in it in any order.
@pytest.mark.parametrize(("name", "argument"), [i for i in INPUTS if i[1] != "slot_mapping"])
def test_broadcast_views(backend: Any, name: str, argument: str) -> None:
    given = arguments(name)
    first = given[argument][:1]
    copied, view = dict(given), dict(given)
    copied[argument] = np.repeat(first, len(given[argument]), axis=0)
    expected = call(backend, name, copied)
    on = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in arguments(name).items()}
    xp = np if backend.name != "cuda" else __import__("cupy")
    on[argument] = xp.broadcast_to(backend.put(first), view[argument].shape)
    result = getattr(ops, name)(**on)
    got = [backend.get(a) for a in (result, *(on[c] for c in WRITTEN if c in on)) if a is not None]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(("name", "argument"), EVERY_ARRAY)
def test_what_is_no_array_is_named(name: str, argument: str, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops._arrays, "_emulating", lambda: emulated)
    good = arguments(name)[argument]
    for wrong, error in [
        (None, TypeError),
        (good.tolist(), TypeError),
        ("text", TypeError),
        (good.reshape(-1)[0], TypeError),
        (np.ma.masked_array(good, mask=True), TypeError),
        (good.astype(good.dtype.newbyteorder(">")), TypeError),
        (good.astype(object), TypeError),
        (good.astype(np.complex64), TypeError),
        (good[None, None, None], ValueError),
    ]:
        if argument in ("ids", "x", "gate_up") and error is ValueError:
            continue  # any number of leading axes
        refused(name, arguments(name) | {argument: wrong}, error, rf"\b{argument}\b")


class Exporter:
    """A DLPack object whose export fails, or works."""

    def __init__(self, array: np.ndarray | None) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        if self.array is None:
            raise BufferError("the export failed")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_dlpack_objects() -> None:
    given = arguments("swiglu")
    assert ops.swiglu(Exporter(given["gate_up"])).shape == (3, 16)
    refused("swiglu", {"gate_up": Exporter(None)}, TypeError, r"gate_up \(Exporter\) .*the export failed")


OUTS = {
    "embedding": (3, 16),
    "rms_norm": (3, 16),
    "rope": (3, 2, 16),
    "swiglu": (3, 16),
    "qk_norm_rope_cache": (3, 1, 16),
}


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", OUTS)
def test_outs_that_cannot_be_written(name: str, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops._arrays, "_emulating", lambda: emulated)
    shape = OUTS[name]
    frozen = np.zeros(shape, HALF)
    frozen.flags.writeable = False
    for out, error, message in [
        (frozen, ValueError, "out is read-only"),
        (np.broadcast_to(HALF(0), shape), ValueError, "out must be C-contiguous"),
        (np.zeros((*shape[:-1], 32), HALF)[..., ::2], ValueError, "out must be C-contiguous"),
        (np.zeros(shape, HALF)[::-1], ValueError, "out must be C-contiguous"),
        (np.zeros(np.prod(shape) + 1, HALF)[1:].reshape(shape), ValueError, "16 bytes"),
        (np.zeros(shape, np.int16), TypeError, "dtype"),
        (np.zeros((*shape, 1), HALF), ValueError, "out has shape"),
        (np.zeros(shape).tolist(), TypeError, "out must be"),
    ]:
        refused(name, arguments(name) | {"out": out}, error, message)


# ---- shared memory


def shared(name: str, written: str, argument: str) -> dict[str, Any]:
    """Arguments in which an array that is written begins one row inside an input."""
    given = arguments(name)
    shape = given[written].shape if written in given else OUTS[name]
    other = given[argument]
    rows = np.zeros(other.nbytes + 2 * int(np.prod(shape)) * 4 + 64, np.uint8)
    given[argument] = rows[: other.nbytes].view(other.dtype).reshape(other.shape)
    given[argument][...] = other
    dtype = given[written].dtype if written in given else HALF
    begin = 16 if other.nbytes > 16 else 0
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    given[written] = rows[begin : begin + size].view(dtype).reshape(shape)
    return given


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    ("name", "written", "argument"),
    [
        *((n, "out", a) for n, a in INPUTS if n in ("embedding", "rms_norm", "rope", "swiglu")),
        *(("qk_norm_rope_cache", "out", a) for a in ("qkv", "table", "k_cache", "v_cache")),
        *((n, "k_cache", "v_cache") for n in ("kv_cache_write", "qk_norm_rope_cache")),
    ],
)
def test_written_memory_must_not_be_an_inputs(
    name: str, written: str, argument: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's threads would read what others have written already; the CPU's result would be another one."""
    monkeypatch.setattr(ops._arrays, "_emulating", lambda: emulated)
    refused(name, shared(name, written, argument), ValueError, f"{written} shares memory with {argument}")


def test_residual_must_be_apart() -> None:
    both = np.zeros((4, 16), FLOAT)
    weight = np.ones(16, FLOAT)
    for x, residual in ((both, both), (both[:3], both[1:])):
        refused(
            "rms_norm", {"x": x, "weight": weight, "residual": residual}, ValueError, "residual shares memory with x"
        )
    refused(
        "rms_norm",
        {"x": np.ones((4, 16), HALF), "weight": weight, "residual": both, "out": both},
        ValueError,
        "out shares memory with residual",
    )


def test_check_apart() -> None:
    memory = np.zeros(64, np.uint8)
    check_apart("f", "out", memory[:16], x=memory[16:], y=None, z=memory[:0])
    check_apart("f", "out", memory[:0], x=memory)
    check_apart("f", "out", memory[:16], same="x", x=memory[:16])
    check_apart("f", "out", memory, x=memory[::2])  # copied before the kernel runs
    for x, same in ((memory[15:], ""), (memory[:16], ""), (memory[:8], "x"), (memory[8:24], "x")):
        with pytest.raises(ValueError, match="out shares memory with x"):
            check_apart("f", "out", memory[:16], same=same, x=x)


# ---- places


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy arrays on two GPUs that are not there; a launch is recorded. The current GPU is 0."""
    pytest.importorskip("cupy")
    from fake_cuda import FakeCuda, FakeLibrary, uninstall

    yield FakeCuda(FakeLibrary(), monkeypatch)
    monkeypatch.undo()
    uninstall()


@pytest.mark.parametrize(("name", "argument"), EVERY_ARRAY)
def test_arrays_in_two_places(two_gpus: Any, name: str, argument: str) -> None:
    good = arguments(name)

    def on(device: int) -> dict[str, Any]:
        return {
            k: two_gpus.array(v.shape, v.dtype, device) if isinstance(v, np.ndarray) else v for k, v in good.items()
        }

    if len(good) > 1:
        other = two_gpus.array(good[argument].shape, good[argument].dtype, 1)
        refused(name, on(0) | {argument: other}, ValueError, rf"different GPUs .*{argument} on 1")
        refused(name, on(0) | {argument: good[argument]}, TypeError, f"{argument} on the CPU")
    refused(name, on(1), ValueError, r"the arrays are on GPU 1, but the current one is 0; .*cupy\.cuda\.Device\(1\)")
    assert not two_gpus.library.launches


# ---- past 2**31 elements


def last_equals_alone(put: Any, count: int) -> None:
    """The last of many tokens has the bits it has alone: `count` tokens of 64 x 128 elements, and a cache as large."""
    rng = np.random.default_rng(0)
    heads, dim, block_size = 64, 128, 16
    table = put(ops.rope_table(dim, 16, 1e4))
    one = put(rng.standard_normal((1, heads, dim)).astype(HALF))
    xp = type(one).__module__.split(".")[0]
    xp = np if xp == "numpy" else __import__(xp)
    x = xp.zeros((count, heads, dim), HALF)
    x[-1] = one[0]
    positions = xp.full(count, 9, np.int32)
    expected = ops.rope(one, positions[:1], table)
    result = ops.rope(x, positions, table, out=x)
    xp.testing.assert_array_equal(result[-1], expected[0])
    assert not result[-2].any()

    blocks = -(-count // block_size)
    weight, slot = put(np.ones(dim, FLOAT)), xp.full(1, blocks * block_size - 1, np.int64)
    small = [xp.zeros((1, heads, block_size, dim), HALF) for _ in range(2)]
    large = [xp.zeros((blocks, heads, block_size, dim), HALF) for _ in range(2)]
    qkv = xp.concatenate([one, one, one], axis=1).reshape(1, -1)
    sizes = {"num_heads": heads, "num_kv_heads": heads}
    for caches, at in ((small, xp.full(1, block_size - 1, np.int64)), (large, slot)):
        ops.qk_norm_rope_cache(qkv, weight, weight, positions[:1], table, *caches, at, **sizes)
    for a, b in zip(small, large):
        xp.testing.assert_array_equal(a[0], b[-1])
        assert b[-1].any()
        assert not b[0].any()
    ops.kv_cache_write(one, one, *large, slot)
    for cache in large:
        xp.testing.assert_array_equal(cache[-1, :, -1], one[0])


def test_last_equals_alone() -> None:
    with cukern.emulate():
        last_equals_alone(np.array, 33)


@pytest.mark.gpu
@pytest.mark.slow
def test_last_equals_alone_past_two_to_the_31_elements() -> None:
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    last_equals_alone(cupy.asarray, 2**18 + 3)


# ---- numbers


@pytest.mark.parametrize("name", ["rms_norm", "qk_norm_rope_cache"])
def test_eps_of_every_kind(backend: Any, name: str) -> None:
    expected = call(backend, name, arguments(name) | {"eps": 2.0**-10})
    for eps in (np.float32(2.0**-10), np.float64(2.0**-10), np.float16(2.0**-10), np.array(2.0**-10)):
        on = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in arguments(name).items()}
        got = backend.get(getattr(ops, name)(**on, eps=eps))
        np.testing.assert_array_equal(got, expected[0])
    for eps in ("1e-6", None, [1e-6], 1j):
        refused(name, arguments(name) | {"eps": eps}, TypeError, "eps must be a number")
    for eps in (-1e-6, np.nan, np.inf, 1e39):
        refused(name, arguments(name) | {"eps": eps}, ValueError, "eps must be finite and not negative")


def test_head_counts_of_every_kind(backend: Any) -> None:
    name = "qk_norm_rope_cache"
    expected = call(backend, name, arguments(name))
    counts = {"num_heads": np.int64(1), "num_kv_heads": np.uint8(2)}
    for a, b in zip(call(backend, name, arguments(name) | counts), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for argument in counts:
        for wrong in (1.0, "1", None):
            refused(name, arguments(name) | {argument: wrong}, TypeError, f"{argument} must be an integer")
        for wrong in (0, -1, True):
            refused(name, arguments(name) | {argument: wrong}, ValueError, f"{argument} must be at least 1")


@pytest.mark.parametrize("name", ["embedding", "rms_norm"])
def test_dtypes_of_every_kind(name: str) -> None:
    for dtype in ("float32", FLOAT, np.dtype(FLOAT)):
        assert getattr(ops, name)(**arguments(name), dtype=dtype).dtype == FLOAT
    for dtype in ("float33", 5, object(), int, "int8"):
        refused(name, arguments(name) | {"dtype": dtype}, TypeError, "dtype is")


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope_cache"])
def test_a_table_without_rows(name: str) -> None:
    """Row 0 stands in for a position outside the table, so there must be one."""
    refused(name, arguments(name) | {"table": np.zeros((0, 16), FLOAT)}, ValueError, "table has no rows")
    nothing = {"positions": np.zeros(0, int)}
    if name == "rope":
        assert ops.rope(np.zeros((0, 2, 16), HALF), nothing["positions"], np.zeros((0, 16), FLOAT)).shape == (0, 2, 16)


def test_positions_and_ids_far_outside(backend: Any) -> None:
    far = np.array([-1, 2**40, -(2**63), 2**63 - 1, 10])
    for given in (
        {"name": "rope", "x": np.ones((5, 1, 16), HALF), "positions": far, "table": ops.rope_table(16, 10, 1e4)},
        {"name": "embedding", "ids": far, "weight": np.ones((10, 16), HALF)},
    ):
        name = given.pop("name")
        assert np.isnan(call(backend, name, given)[0]).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((8.0, 10, 1e4), "head_dim must be an integer"),
        (("8", 10, 1e4), "head_dim must be an integer"),
        ((8, 10.5, 1e4), "max_positions must be an integer"),
        ((8, None, 1e4), "max_positions must be an integer"),
        ((8, 10, "1e4"), "theta must be a number"),
        ((8, 10, True), "theta must be a number"),
        ((8, 10, 10**400), "theta must be a finite number above 1"),
        ((8, 10, 1e4, "yarn"), "scaling must be a mapping"),
        ((8, 10, 1e4, [("rope_type", "yarn")]), "scaling must be a mapping"),
        ((8, 10, 1e4, {"rope_type": ["yarn"]}), r"rope_type \['yarn'\] is not supported"),
        ((8, 10, 1e4, {"rope_type": "default", "rope_theta": "1e4"}), "rope_theta must be a number"),
        ((8, 10, 1e4, {"rope_type": "default", 5: 1}), "does not know 5"),
    ],
)
def test_tables_of_wrong_things(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^rope_table: .*{message}"):
        ops.rope_table(*given)


@pytest.mark.filterwarnings("error")
def test_inf_and_nan_pass_through_the_reference_in_silence() -> None:
    odd = np.array([[np.inf, -np.inf, np.nan, 65504] * 4] * 3, HALF)
    for name, argument in (("rms_norm", "x"), ("rope", "x"), ("swiglu", "gate_up"), ("qk_norm_rope_cache", "qkv")):
        given = arguments(name)
        given[argument] = np.resize(odd, given[argument].shape)
        assert np.isnan(getattr(ops, name)(**given)).any()
