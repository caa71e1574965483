"""Processes as shells, containers and other users start them: closed streams, no home, another folder, no rights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cukern
from cukern.cli.generate import _json_numbers

ROOT = Path(cukern.__file__).parents[1]
GENERATE = "generate demo x --max-tokens 1 --device cpu"


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "CUKERN_CACHE_DIR": str(tmp_path / "cache")} | more


def shell(tmp_path: Path, arguments: str, redirections: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m cukern {arguments} {redirections}'
    return subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path, **more),
    )


@pytest.mark.parametrize(
    ("arguments", "redirections", "code", "words"),
    [
        (GENERATE, ">&-", 0, ""),
        (GENERATE, "<&- >&- 2>&-", 0, ""),
        ("generate demo --max-tokens 1 --device cpu", "<&-", 1, "prompt is empty"),
        ("cache show", ">&-", 0, ""),
        ("cache nothing", "2>&-", 2, ""),
        ("generate nowhere x", "2>&-", 1, ""),
        ("cache show", ">/dev/full", 1, "No space left"),
    ],
)
def test_closed_and_full_streams(tmp_path: Path, arguments: str, redirections: str, code: int, words: str) -> None:
    done = shell(tmp_path, arguments, redirections)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "NoneType" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_says_the_same_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cukern", "generate", "demo", "--max-tokens", "1", "--device", "cpu", "--json"],
        input=b"\xef\xbb\xbf" + "é中\U0001f638\r\n".encode(),
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env=environment(tmp_path, PYTHONIOENCODING=encoding),
    )
    assert json.loads(done.stdout)["prompt"] == "é中\U0001f638"


def test_numbers_that_json_has_not() -> None:
    value = {"a": [1.5, float("nan"), None], "b": (float("-inf"), 3), "c": "x", "d": True}
    assert _json_numbers(value) == {"a": [1.5, None, None], "b": [None, 3], "c": "x", "d": True}


def test_info_with_settings_that_are_none(tmp_path: Path) -> None:
    done = shell(tmp_path, "info --json", CUKERN_CACHE_MAX_MB="lots", CUKERN_KERNELS_SRC=str(tmp_path / "absent"))
    assert done.returncode == 0, done.stderr
    problems = " ".join(json.loads(done.stdout)["problems"])
    assert "CUKERN_CACHE_MAX_MB='lots'" in problems
    assert "absent' is not a folder" in problems


@pytest.mark.parametrize("home", [None, "", "/nonexistent"])
def test_without_a_home(tmp_path: Path, home: str | None) -> None:
    env = environment(tmp_path)
    for name in ("HOME", "CUKERN_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        env.pop(name, None)
    if home is not None:
        env["HOME"] = home
    command = [sys.executable, "-m", "cukern", *GENERATE.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())  # nothing such as a folder called "~"


def test_warnings_as_errors_and_every_module() -> None:
    script = """
import importlib, pkgutil
import cukern
for module in pkgutil.walk_packages(cukern.__path__, "cukern."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_examples_from_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "schreibgeschützt"
    place.mkdir()
    shutil.copy(ROOT / "examples" / "generate.py", place)
    place.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, place / "generate.py"], capture_output=True, text=True, check=False, cwd=place,
            env=environment(tmp_path),
        )  # fmt: skip
    finally:
        place.chmod(0o755)
    assert done.returncode == 0, done.stderr
