"""Linear layer on tensor cores: fp16 or bf16 in, fp32 sums in one fixed order at every batch size."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cukern.jit import registry
from cukern.jit.launch import check_flag
from cukern.ops import _linear_sm90
from cukern.ops import _linear_variants as variants
from cukern.ops._arrays import (
    BFLOAT16,
    CTYPES,
    FLOAT16,
    FLOAT32,
    Array,
    Place,
    as_dtype,
    as_rows,
    check_apart,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
    pointer,
)
from cukern.ops._fast import Plans, kinds, plain_dtype
from cukern.ops._linear_variants import Gpu
from cukern.ops.swiglu import swiglu
from cukern.reference.linear import linear as reference_linear

__all__ = ["kernel_variants", "linear"]

# Kernels count rows and columns in 32 bits (offsets in 64) and round them up to a tile.
_MAX_SIZE = 2**31 - 4096
_PLANS = Plans()
_IN_TWO: set[Any] = set()
"""Kinds of arguments for which product and activation are two kernels."""
_MOST_IN_TWO = 4096  # prompts of every length leave some
registry.at_reload.append(_IN_TWO.clear)


def linear(
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    dtype: Any = None,
    out: Array | None = None,
    static_weight: bool = False,
    backend: str = "cukern",
) -> Array:
    """``y = x @ weight.T``, plus a bias, plus a residual stream, in one kernel.

    Sums are taken in float32 in an order that depends on the shape of the weight alone (docs/numerics.md, item 1): a
    row of the result has the same bits whatever other rows are in the batch. The result is rounded once.

    Parameters
    ----------
    x : array [..., K]
        float16 or bfloat16; copied if not contiguous.
    weight : array [N, K]
        Same dtype, contiguous. Rows that do not start at multiples of 16 bytes (K % 8 != 0) are right but slower.
    bias : array [N], optional
        float32, or float16/bfloat16 (converted at every call: keep it in float32).
    residual : array [..., N], optional
        float32, contiguous: ``residual += y`` in place (``y`` not rounded before), and `residual` is returned.
    activation : {None, "swiglu"}
        "swiglu": the first half of `weight` is the gate, the second is up; the result [..., N / 2] is what
        :func:`cukern.ops.swiglu` makes of y, bit for bit. On sm_90a in the same kernel where there is no bias and N is
        a multiple of 16, else in one behind it. Not with `residual`.
    dtype : dtype, optional
        Of the result: that of `x` or float32 (logits); that of `out` or else `x` by default. float32 with `residual`.
    out : array [..., N], optional
        Written and returned; contiguous, no memory of an input. Not with `residual`.
    static_weight : bool
        Promises that nothing that is still queued or running writes `weight` (nothing ever writes a loaded model's).
        From compute capability 9.0 on the product then fetches it while the kernels ahead of it in the stream still
        run: at 9.0 that of any number of rows, later that of a few.
    backend : {"cukern", "cublas"}
        "cublas" calls the vendor's library, for comparison: its bits change with the batch, and it cannot be captured.

    Returns
    -------
    array [..., N]
        `out`, `residual`, or a new array.

    Raises
    ------
    TypeError
        Wrong dtypes, arrays in different places, a `static_weight` that is no bool.
    ValueError
        Shapes that do not fit, K = 0, a non-contiguous `weight`, `out` or `residual`, an `out` that shares memory with
        an input, an unknown `backend` or `activation`.
    RuntimeError
        ``backend="cublas"`` for arrays that are not on a GPU, or without the library.

    Notes
    -----
    NumPy arrays without emulation go to the reference (float32 and float64 too), with sums in NumPy's order.
    """
    simple = out is None and type(static_weight) is bool and plain_dtype(dtype)
    simple = simple and type(backend) is str and backend == "cukern" and (activation is None or type(activation) is str)
    if not simple:
        if activation is not None:
            return _activated(activation, x, weight, bias, residual, dtype, out, static_weight, backend, None)
        return _linear(x, weight, bias, residual, dtype, out, static_weight, backend, None)
    given, options = (x, weight, bias, residual), (dtype, static_weight, activation)
    found = _PLANS.find(given, options)
    if found is None:
        first = (given, options)
        if activation is not None:
            return _activated(activation, x, weight, bias, residual, dtype, out, static_weight, backend, first)
        return _linear(x, weight, bias, residual, dtype, out, static_weight, backend, None, first)
    plan, (x_address, weight_address, bias_address, residual_address) = found
    target = residual if residual is not None else plan.empty()
    address = target.data.ptr
    if plan.extra is None:
        plan.launch(x_address, weight_address, bias_address, residual_address, address)
    elif address % 16:  # an allocator of one's own; the Hopper kernel cannot write there
        if activation is not None:
            return swiglu(linear(x, weight, static_weight=static_weight))
        return _linear(x, weight, bias, residual, dtype, out, static_weight, backend, None)
    else:
        plan.launch(*plan.extra.leading(x_address, weight_address, bias_address, residual_address, address))
    return target


def _activated(
    activation: str,
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dtype: Any,
    out: Array | None,
    static_weight: bool,
    backend: str,
    given: tuple[Any, Any] | None,
) -> Array:
    """A product and SwiGLU: in one kernel where there is one, else in two."""
    seen = None if given is None else kinds(*given)
    if seen is None or seen[0] not in _IN_TWO:
        if not (isinstance(activation, str) and activation == "swiglu"):
            raise ValueError(f'linear: activation must be None or "swiglu", got {activation!r}')
        if residual is not None:
            raise ValueError(
                "linear: give residual or activation, not both: the residual is [..., N], the result N / 2"
            )
        _check_options(static_weight, backend)
        place, (x, weight, bias, out) = place_arrays("linear", x=x, weight=weight, bias=bias, out=out)
        if dtype is None and out is not None:
            dtype = out.dtype
        out_dtype, n = _check(place, x, weight, bias, None, dtype, None)
        if n % 2:
            raise ValueError(f'linear: activation="swiglu" halves the rows of weight {tuple(weight.shape)}, N is odd')
        shape = (*x.shape[:-1], n // 2)
        if out is not None:
            check_out("linear", out, shape, out_dtype)
            check_apart("linear", "out", out, x=x, weight=weight, bias=bias)
        rows, k = as_rows(x)
        plain = bias is None and backend == "cukern" and out_dtype == x.dtype
        if plain and place.kind == "cuda" and rows and n and n % 16 == 0:
            target = place.empty(shape, out_dtype) if out is None else out
            options: dict[str, Any] = {"static_weight": static_weight, "gated": True}
            launched = _linear_sm90.launched(contiguous(x, place), weight, None, None, target, rows, n, k, **options)
            if launched is not None:
                if given is not None:
                    _keep(given, launched, target)
                return target
        if seen is not None:
            if len(_IN_TWO) >= _MOST_IN_TWO:
                _IN_TWO.clear()
            _IN_TWO.add(seen[0])
    y = linear(x, weight, bias=bias, dtype=dtype, static_weight=static_weight, backend=backend)
    return swiglu(y, out=out)


def _keep(given: tuple[Any, Any], launched: _linear_sm90.Launched, target: Array) -> None:
    """A plan of what was launched on Hopper."""
    program, grid, block, arguments, shared_mem, cluster, maps = launched
    options: dict[str, Any] = {"extra": maps, "shared_mem": shared_mem, "cluster": cluster, "pdl": True}
    _PLANS.keep(*given, program, grid, block, arguments, target, **options)


def _linear_variant(
    variant: variants.Variant,
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    dtype: Any = None,
    out: Array | None = None,
    static_weight: bool = False,
) -> Array:
    """:func:`linear` by the kernel variant given, for tests and tuning. ValueError if it cannot run this weight."""
    return _linear(x, weight, bias, residual, dtype, out, static_weight, "cukern", variant)


def _linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dtype: Any,
    out: Array | None,
    static_weight: bool,
    backend: str,
    variant: variants.Variant | None,
    given: tuple[Any, Any] | None = None,
) -> Array:
    """`given`: arrays and options as given, to leave a plan for the next such call."""
    _check_options(static_weight, backend)
    place, (x, weight, bias, residual, out) = place_arrays(
        "linear", x=x, weight=weight, bias=bias, residual=residual, out=out
    )
    out_dtype, n = _check(place, x, weight, bias, residual, dtype, out)
    rows, k = as_rows(x)
    if backend == "cublas" and place.kind != "cuda":
        raise RuntimeError(f'linear: backend="cublas" needs arrays on a GPU, these are NumPy arrays ({place.kind})')
    if place.kind == "reference":
        return reference_linear(x, weight, bias=bias, residual=residual, dtype=out_dtype, out=out)
    shape = (*x.shape[:-1], n)
    target = residual if residual is not None else out if out is not None else place.empty(shape, out_dtype)
    if rows == 0 or n == 0:
        return target
    x = contiguous(x, place)
    if place.kind != "cuda" or (bias is not None and bias.dtype != FLOAT32):
        given = None
    if bias is not None:
        bias = contiguous(bias.astype(FLOAT32, copy=False), place)
    if backend == "cublas":
        _cublas(x, weight, bias, residual is not None, target, rows, n, k)
        return target
    aligned = k % 8 == 0 and pointer(weight) % 16 == 0
    gpu = variants.Gpu.of(_device())
    at_once = aligned and variants.at_once(rows, n, k, gpu) is not None
    if variant is None and place.kind == "cuda" and not at_once:
        launched = _linear_sm90.launched(x, weight, bias, residual, target, rows, n, k, static_weight=static_weight)
        if launched is not None:
            if given is not None:
                _keep(given, launched, target)
            return target
    plan = _plan(variant, CTYPES[x.dtype], CTYPES[out_dtype], rows, n, k, aligned, gpu)
    arguments = (x, weight, bias, residual, target, rows, n, k, *plan.arguments)
    if plan.weight_ready:
        arguments += (int(static_weight),)
    plan.kernel(plan.grid, plan.block, arguments, shared_mem=plan.shared_mem, pdl=plan.pdl)
    if given is not None:
        _PLANS.keep(
            *given, plan.kernel, plan.grid, plan.block, arguments, target, shared_mem=plan.shared_mem, pdl=plan.pdl
        )
    return target


def _check_options(static_weight: Any, backend: Any) -> None:
    check_flag("linear", "static_weight", static_weight)
    if not (isinstance(backend, str) and backend in ("cukern", "cublas")):
        raise ValueError(f'linear: backend must be "cukern" or "cublas", got {backend!r}')


def _check(
    place: Place,
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dtype: Any,
    out: Array | None,
) -> tuple[np.dtype, int]:
    """Everything about the arguments; the dtype of the result, and N."""
    halves = [FLOAT16, BFLOAT16]
    inputs = [*halves, FLOAT32, np.dtype(np.float64)] if place.kind == "reference" else halves
    check_dtype("linear", "x", x, inputs)
    check_dtype("linear", "weight", weight, [x.dtype])
    if x.ndim < 1:
        raise ValueError("linear: x has no axis, expected [..., K]")
    check_shape("linear", "weight", weight, (None, x.shape[-1]))
    n, k = (int(s) for s in weight.shape)
    if k == 0:
        raise ValueError(f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} have K = 0, nothing to sum over")
    if max(n, k, x.size // k) > _MAX_SIZE:
        raise ValueError(
            f"linear: {x.size // k} rows, N = {n}, K = {k}: each must be at most {_MAX_SIZE}; split the input"
        )
    if not weight.flags.c_contiguous:
        raise ValueError(
            f"linear: weight must be C-contiguous (strides {weight.strides}), it is too large to copy at every call; "
            "make it contiguous once"
        )
    shape = (*x.shape[:-1], n)
    wanted = None if dtype is None else as_dtype("linear", dtype)
    if bias is not None:
        check_dtype("linear", "bias", bias, [FLOAT32, *halves])
        check_shape("linear", "bias", bias, (n,))
    if residual is not None:
        if wanted not in (None, FLOAT32):
            raise ValueError(f"linear: with residual the result is float32, got dtype={wanted}")
        if out is not None:
            raise ValueError("linear: give residual or out, not both; with residual the result is written there")
        check_out("linear", residual, shape, FLOAT32, name="residual")
        return FLOAT32, n
    out_dtype = wanted if wanted is not None else x.dtype if out is None else out.dtype
    if out_dtype not in (x.dtype, FLOAT32):
        raise TypeError(f"linear: dtype must be {x.dtype} (that of x) or float32, got {out_dtype}")
    if out is not None:
        check_out("linear", out, shape, out_dtype)
        check_apart("linear", "out", out, x=x, weight=weight, bias=bias)
    return out_dtype, n


class _Plan(NamedTuple):
    """How one shape is launched. `weight_ready`: the kernel takes that argument."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    arguments: tuple[int, ...]
    weight_ready: bool
    pdl: bool


@functools.lru_cache(maxsize=8192)
def _plan(
    variant: variants.Variant | None, ctype: str, out_ctype: str, m: int, n: int, k: int, aligned: bool, gpu: Gpu
) -> _Plan:
    """Remembered, since decoding asks for the same few at every token."""
    from cukern import jit

    if variant is None:
        variant = variants.select(m, n, k, aligned, gpu)
    elif not variant.fits(m, n, k, gpu.max_shared) or (variant.kernel != "linear_tile" and not aligned):
        raise ValueError(f"linear: variant {variant} cannot run x [{m}, {k}] and a weight [{n}, {k}]")
    template = (ctype, out_ctype, *variant.template(variants.template_segment(n, k), aligned))
    return _Plan(
        jit.kernel(variant.file, variant.kernel, template),
        variant.grid(m, n, gpu),
        (variant.threads, 1, 1),
        variant.shared_mem(m, n, k),
        variant.arguments(m, n, k),
        variant.kernel != "linear_tile",
        True,  # all kernels here wait for the one ahead before they touch what it may have written
    )


registry.at_reload += [_plan.cache_clear, _linear_sm90._plan.cache_clear]  # they hold kernels


def _device() -> Any:
    from cukern import jit

    return jit.device()


def kernel_variants() -> list[tuple[str, str, tuple[str | int, ...], None]]:
    """What Qwen3 0.6B, 8B and the small models of the tests launch: (file, kernel, template, no defines).

    For compiling ahead and for the check that nothing spills; other shapes are compiled when they are met.
    """
    found: dict[tuple[str, str, tuple[str | int, ...], None], None] = {}
    gpus = (Gpu(46, 99 << 10, 100 << 10), Gpu(108, 163 << 10, 164 << 10), Gpu(132, 227 << 10, 228 << 10))

    def add(option: variants.Variant, ctype: str, out_ctype: str, n: int, k: int, aligned: bool = True) -> None:
        template: tuple[str | int, ...] = (
            ctype,
            out_ctype,
            *option.template(variants.template_segment(n, k), aligned),
        )
        found[(option.file, option.kernel, template, None)] = None

    for hidden, intermediate, heads in ((64, 176, 192), (1024, 3072, 2048), (4096, 12288, 4096)):
        for n, k, out in (
            (2 * heads, hidden, "same"),  # query, key and value heads; also the widest choice for N = 6144
            (hidden, heads, "float"),  # into the residual stream
            (2 * intermediate, hidden, "same"),
            (hidden, intermediate, "float"),
            (151936, hidden, "float"),  # logits
        ):
            for m in (1, 16, 32, 64, 128, 512, 4096):
                for gpu in gpus:
                    for ctype in ("half", "bf16"):
                        add(variants.select(m, n, k, True, gpu), ctype, ctype if out == "same" else out, n, k)
    for n in (8, 2**24):  # rows that do not start at 16 bytes
        add(variants.select(1, n, 257, False, gpus[0]), "half", "half", n, 257, False)
    return list(found)


def _cublas(
    x: Array, weight: Array, bias: Array | None, accumulate: bool, target: Array, m: int, n: int, k: int
) -> None:
    """target = x weight^T (+ target) by cublasGemmEx, fp32 sums; row-major y = x w^T is column-major y^T = w x^T."""
    try:
        from cupy.cuda import device
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise RuntimeError(
            'linear: backend="cublas" needs cuBLAS (pip install "cupy-cuda12x[ctk]" or a CUDA toolkit); '
            'use backend="cukern"'
        ) from error
    types = {FLOAT32: 0, FLOAT16: 2, BFLOAT16: 14}  # cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
    kind, out_kind = types[x.dtype], types[target.dtype]
    compute_32f, algorithm = 68, -1  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
    one, beta = np.ones(1, np.float32), np.full(1, float(accumulate), np.float32)
    cublas.gemmEx(
        device.get_cublas_handle(),
        cublas.CUBLAS_OP_T,
        cublas.CUBLAS_OP_N,
        *(n, m, k, one.ctypes.data),
        *(weight.data.ptr, kind, k, x.data.ptr, kind, k, beta.ctypes.data),
        *(target.data.ptr, out_kind, n, compute_32f, algorithm),
    )
    if bias is not None:
        target += bias.astype(target.dtype)
