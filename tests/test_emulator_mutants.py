"""The planted faults of tests/mutation fit the kernels as they are; running them takes longer (docs/mutation.md)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mutation import run
from mutation.mutants import MUTANTS, TESTS, Mutant


def test_there_are_enough() -> None:
    assert sum(not m.equivalent for m in MUTANTS) >= 40
    assert len({(m.file, m.what) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}-{m.what}")
def test_fault_applies(mutant: Mutant, tmp_path: Path) -> None:
    folder = tmp_path / "kernels_src"
    shutil.copytree(run.ROOT / "kernels_src", folder)
    before = {p: p.read_text(encoding="utf-8") for p in folder.rglob("*.cu*")}
    run.apply(mutant, folder)
    assert sum(p.read_text(encoding="utf-8") != old for p, old in before.items()) == 1
    assert all((run.ROOT / "tests" / t).is_file() for t in TESTS[mutant.file])
