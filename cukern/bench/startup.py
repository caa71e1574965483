"""From the start of a process to the first token: imports, loading, compilation (or the cache), first step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from cukern.bench.report import Row

__all__ = ["startup"]

_SCRIPT = """
import json, sys, time
import cukern
imported = time.time()
llm = cukern.LLM(sys.argv[1], dtype=sys.argv[2], device=sys.argv[3], max_num_seqs=1, max_model_len=256)
loaded = time.time()
completion = llm.generate([[1, 2, 3, 4]], cukern.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
print(json.dumps({"import": imported, "load": loaded, "first": time.time(), "tokens": completion.token_ids}))
"""


def startup(folder: Path, dtype: str, name: str, device: str = "cuda") -> list[Row]:
    """Start a process twice: as the cubin cache is now, and with what the first one left there.

    Checked: both give the same token.

    Raises
    ------
    RuntimeError
        The process failed; the message ends with its last line.
    """
    rows, tokens = list[Row](), []
    for state in ("cache as found", "cache warm"):
        began = time.time()
        result = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(folder), dtype, device], capture_output=True, text=True, check=False
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"bench startup: the process ended with code {result.returncode}: {last}")
        at = json.loads(result.stdout.strip().splitlines()[-1])
        tokens.append(at["tokens"])
        parts = (at["import"] - began, at["load"] - at["import"], at["first"] - at["load"])
        rows.append(
            Row(
                "startup",
                f"{name}, {state}",
                dtype,
                (at["first"] - began) * 1e6,
                error=float(tokens[0] != at["tokens"]),
                limit=0.0,
                note="import {:.2f} s, load {:.2f} s, first token {:.2f} s".format(*parts),
            )
        )
    return rows
