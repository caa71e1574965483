"""How a tensor core adds: candidate rules, and a search for the one that explains the golden results.

A step of mma.m16n8k16 forms exact products, aligns them and the accumulator to the largest exponent, cuts each to a
fixed number of bits, adds the integers and converts the sum to float32. What differs between GPU generations is how
many products are summed at once, how many bits are kept, and how the cuts round.
``python -m tests.conformance.rules`` prints the best rules for golden.npz.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import cases, generate

Array = np.ndarray
ZERO = -100000  # exponent of a zero, below every other


@dataclass(frozen=True)
class Rule:
    """One way to add. `group`: products summed at once with the accumulator. `kept`: bits below the largest exponent.
    `align`, `final`: "truncate" or "nearest". `normalised`: a product's exponent is that of its value, rather than the
    sum of the factors' exponents."""

    group: int
    kept: int
    align: str = "truncate"
    final: str = "truncate"
    normalised: bool = False


@dataclass(frozen=True)
class Factors:
    """Numbers as integer significand times 2**exponent; `top` is the exponent of the leading bit (of the format's
    implicit bit for a subnormal)."""

    significand: Array
    exponent: Array
    top: Array


def split(values: Array, fraction: int, smallest: int) -> Factors:
    """Exact decomposition of float64 `values` of a format with `fraction` bits and smallest normal exponent."""
    _, e = np.frexp(values)
    top = np.where(values == 0, ZERO, np.maximum(e - 1, smallest)).astype(np.int64)
    exponent = np.where(values == 0, 0, top - fraction)
    return Factors(np.ldexp(values, -exponent).astype(np.int64), exponent, top)


def shifted(significand: Array, by: Array, how: str) -> Array:
    """significand * 2**by as an integer, sign and magnitude rounded."""
    magnitude, left = np.abs(significand), np.maximum(by, 0)
    right = np.minimum(-np.minimum(by, 0), 62)
    out = magnitude << left
    if how == "nearest":
        half = np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 0)
        even = (out >> right) & 1
        out = np.where(right > 0, out + half - 1 + even, out)
    return np.sign(significand) * (out >> right)


def to_float32(total: Array, exponent: Array, how: str) -> Array:
    """total * 2**exponent as float32."""
    exact = np.ldexp(total.astype(np.float64), exponent.astype(np.int64))
    with np.errstate(over="ignore"):
        out = exact.astype(np.float32)
    if how == "truncate":
        over = (np.abs(out.astype(np.float64)) > np.abs(exact)) & (np.abs(exact) < 2.0**128)
        return np.where(over, np.nextafter(out, np.float32(0)), out)
    return out


def accumulate(rule: Rule, dtype: str, a: Array, b: Array, c: Array) -> Array:
    """What `rule` makes of C + A * B: bit patterns A [n, 16, 16], B [n, 16, 8], float32 C [n, 16, 8], all finite."""
    width, fraction, bias = cases.DTYPES[dtype]
    del width
    fa = split(cases.exact(dtype, a), fraction, 1 - bias)
    fb = split(cases.exact(dtype, b), fraction, 1 - bias)
    acc = c
    for k in range(0, 16, rule.group):
        s = slice(k, k + rule.group)
        product = fa.significand[:, :, s, None] * fb.significand[:, None, s, :]
        exponent = fa.exponent[:, :, s, None] + fb.exponent[:, None, s, :]
        if rule.normalised:
            _, top = np.frexp(product.astype(np.float64))
            top = np.where(product == 0, ZERO, top - 1 + exponent)
        else:
            top = np.where(product == 0, ZERO, fa.top[:, :, s, None] + fb.top[:, None, s, :])
        fc = split(acc.astype(np.float64), 23, -126)
        largest = np.maximum(top.max(axis=2), fc.top)
        base = largest - rule.kept
        total = shifted(product, exponent - base[:, :, None, :], rule.align).sum(axis=2)
        total += shifted(fc.significand, np.where(fc.significand == 0, 0, fc.exponent - base), rule.align)
        base = np.where(largest == ZERO, 0, base)
        acc = to_float32(total, base, rule.final)
    return acc


def candidates() -> list[Rule]:
    """All combinations worth trying."""
    how = ("truncate", "nearest")
    return [Rule(*x) for x in itertools.product((4, 8, 16), range(22, 31), how, how, (False, True))]


def mismatches(
    rule: Rule, results: dict[str, Array], dtype: str, kinds: list[str], tiles: int | None = None
) -> dict[str, int]:
    """How many results of each kind of data the rule gets wrong in any bit."""
    data = cases.mma_data(dtype)
    out = {}
    for kind in kinds:
        a, b, c = (x[:tiles] for x in data[kind])
        got = accumulate(rule, dtype, a, b, c)
        want = results[f"mma/{dtype}/{kind}"][:tiles]
        out[kind] = int((got.view(np.uint32) != want.view(np.uint32)).sum())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, default=generate.GOLDEN)
    parser.add_argument("--show", type=int, default=6)
    options = parser.parse_args()
    results, device = generate.load(options.golden)
    print(device)
    for dtype in cases.DTYPES:
        kinds = [k for k in cases.mma_data(dtype) if k != "special"]
        # few tiles to sieve, all of them for the best
        few = {r: sum(mismatches(r, results, dtype, kinds, tiles=2).values()) for r in candidates()}
        for rule in sorted(few, key=lambda r: few[r])[: options.show]:
            wrong = mismatches(rule, results, dtype, kinds)
            print(f"{dtype} {rule}: {sum(wrong.values())} of {len(kinds) * cases.TILES * 128} differ", wrong)


if __name__ == "__main__":
    main()
