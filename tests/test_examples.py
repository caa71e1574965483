"""Every example runs as it is printed: the script, the pytest file and the notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cukern

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """The processes started here import the cukern under test, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(cukern.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def run(*command: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_generate(tmp_path):
    first, *lines = run(str(EXAMPLES / "generate.py"), cwd=tmp_path).splitlines()
    assert first.endswith("2 prompts in one batch:")
    text = "\n".join(lines)
    assert text.count("(32 tokens, mean log-probability -") == 2
    batched = text.split("- According to a careful calculation I have made")[1].split("\n  (32 tokens")[0]
    streamed = text.split("as it comes: According to a careful calculation I have made")[1]
    assert streamed == batched  # the same seed gives the same text, in a batch and alone


def test_generate_with_a_model_and_prompts(tmp_path):
    from cukern.models import demo_checkpoint

    out = run(str(EXAMPLES / "generate.py"), str(demo_checkpoint()), "Call me", cwd=tmp_path)
    assert "1 prompts in one batch" in out
    assert "- Call me" in out


def test_score(tmp_path):
    first, *lines, last = run(str(EXAMPLES / "score.py"), cwd=tmp_path).splitlines()
    assert first.endswith(": The whale ...")
    totals = [float(line.split()[0]) for line in lines]
    assert len(totals) == 3
    assert totals == sorted(totals, reverse=True)
    assert float(last.split("largest difference ")[1].split()[0]) < 1e-4


def test_my_kernel(tmp_path):
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_my_kernel.py"), cwd=tmp_path)
    assert "7 passed" in out


def test_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "kernel_playground.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without outputs, so that diffs stay readable
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert printed.count("largest error") == 2
    assert "zero" in printed.split("Error")[-1]  # the message of the broken kernel shows the name it does not know
