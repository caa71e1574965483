"""The package as installed: a fast import that needs no GPU, and a wheel that carries the kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("cupy", "numpy.random", "tokenizers", "jinja2", "typer", "safetensors", "cukern.emulator")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_light() -> None:
    """`import cukern` brings in nothing heavy, so it is fast and creates no CUDA context."""
    loaded = run("import sys, cukern; print(' '.join(sys.modules))").split()
    assert not [name for name in HEAVY if name in loaded]


def test_public_names_resolve() -> None:
    import cukern

    for name in cukern.__all__:
        assert getattr(cukern, name) is not None
    for name in cukern.ops.__all__:
        assert callable(getattr(cukern.ops, name))


def test_ops_and_reference_have_the_same_signatures() -> None:
    """The oracle takes what the operator takes; `variant` and launch hints of the operator are private to it."""
    import inspect

    import cukern

    for name in cukern.reference.__all__:
        op = inspect.signature(getattr(cukern.ops, name)).parameters
        ref = inspect.signature(getattr(cukern.reference, name)).parameters
        assert list(op)[: len(ref)] == list(ref) or set(ref) <= set(op), name


def test_assert_close_says_where_a_tolerance_belongs() -> None:
    import numpy as np

    from cukern.testing import assert_close

    with pytest.raises(KeyError, match=r"no tolerance for 'nope'.*cukern/testing/__init__.py"):
        assert_close("nope", np.zeros(1), np.zeros(1))


def test_unknown_name() -> None:
    import cukern

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = cukern.no_such_thing
