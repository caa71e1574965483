"""From an address in a kernel's shared object to lines of its source."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .toolchain import HERE

Position = tuple[str, int]


def _load_address(path: Path, pc: int) -> int | None:
    base = None
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or fields[5] != str(path):
                continue
            lo, hi = (int(x, 16) for x in fields[0].split("-"))
            if base is None:
                base = lo
            if lo <= pc < hi:
                return base
    return None


def positions(path: Path, pc: int) -> list[Position]:
    """Source lines of an address, innermost first: where it is, then the callers it was inlined into."""
    base = _load_address(path, pc)
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if base is None or tool is None:
        return []
    # a return address is one past the call
    command = [tool, "-i", "-e", str(path), hex(pc - base - 1)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    out: list[Position] = []
    for text in done.stdout.splitlines():
        m = re.match(r"(.*):(\d+)", text)
        if not m or m[1].startswith("?") or int(m[2]) == 0 or str(HERE) in m[1]:
            continue
        out.append((m[1], int(m[2])))
    return out
