"""From the start of a process to the first token: imports, loading, compilation (or the cache), first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cukern.bench.report import Row

__all__ = ["startup"]

_FIRST_TOKEN = """
import json, sys, time
import cukern
imported = time.time()
llm = cukern.LLM(sys.argv[1], dtype=sys.argv[2], device=sys.argv[3], max_num_seqs=1, max_model_len=256)
loaded = time.time()
completion = llm.generate([[1, 2, 3, 4]], cukern.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
print(json.dumps({"import": imported, "load": loaded, "first": time.time(), "tokens": completion.token_ids}))
"""
_COMPILE = """
import json
from cukern import jit
built = jit.compile_all([jit.device().arch])
print(json.dumps({"kernels": len(built), "errors": [b.error for b in built if b.error]}))
"""


def startup(folder: Path, dtype: str, name: str, device: str = "cuda") -> Iterator[Row]:
    """Start processes that give one token: with an empty cubin cache, with what the first one left there, and (on a
    GPU) after all kernels were compiled ahead, in parallel.

    Checked: all give the same token, and the last one compiles nothing. Rows come as they are measured.

    Raises
    ------
    RuntimeError
        A process failed; the message ends with its last line.
    """
    tokens: list[list[int]] = []

    def first_token(state: str, cache: str, **environment: str) -> Row:
        began = time.time()
        at = _run(_FIRST_TOKEN, cache, str(folder), dtype, device, **environment)
        tokens.append(at["tokens"])
        parts = (at["import"] - began, at["load"] - at["import"], at["first"] - at["load"])
        return Row(
            "startup",
            f"{name}, {state}",
            dtype,
            (at["first"] - began) * 1e6,
            error=float(tokens[0] != at["tokens"]),
            limit=0.0,
            note="import {:.2f} s, load {:.2f} s, first token {:.2f} s".format(*parts),
        )

    with tempfile.TemporaryDirectory(prefix="cukern-cache-") as cache:
        yield first_token("cache empty", cache)
        yield first_token("cache warm", cache)
    if device == "cpu":
        return
    with tempfile.TemporaryDirectory(prefix="cukern-cache-") as cache:
        began = time.time()
        built = _run(_COMPILE, cache)
        note = f"{built['kernels']} kernels on {os.cpu_count()} processors"
        took = (time.time() - began) * 1e6
        yield Row("startup", "all kernels compiled", "", took, error=len(built["errors"]), limit=0.0, note=note)
        yield first_token("compiled ahead", cache, CUKERN_ASSERT_NO_COMPILE="1")


def _run(script: str, cache: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a process prints as its last line."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "CUKERN_CACHE_DIR": cache, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"bench startup: the process ended with code {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
