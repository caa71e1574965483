"""Errors of the compiler path, and the reading of NVRTC's log into them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


class CudaUnavailableError(RuntimeError):
    """CuPy, NVRTC, CUDA's headers, the driver or a GPU is missing; the message says which and what to install."""


class CacheMissError(RuntimeError):
    """A kernel would have to be compiled while ``CUKERN_ASSERT_NO_COMPILE=1`` forbids it."""


class DriverError(RuntimeError):
    """A call into the CUDA driver failed; ``code`` is the CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Diagnostic:
    """One error or warning of the compiler: where, what, and the text of that line."""

    file: str
    line: int
    severity: str
    message: str
    text: str = ""
    caret: int = -1

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        out = f"{where}{self.severity}: {self.message}"
        if self.text:
            out += f"\n    {self.text}"
            if self.caret >= 0:
                out += "\n    " + " " * self.caret + "^"
        return out


class CompileError(RuntimeError):
    """A kernel does not compile.

    Attributes
    ----------
    diagnostics : list of Diagnostic
        File and line as the user wrote them, with the line's text.
    log : str
        The compiler's log, unchanged.
    """

    def __init__(self, message: str, diagnostics: list[Diagnostic] | None = None, log: str = "") -> None:
        super().__init__(message)
        self.diagnostics = diagnostics or []
        self.log = log


_FRONT = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<severity>(?:catastrophic )?error|warning|remark)\b[^:]*: (?P<msg>.*)$"
)
_PTXAS = re.compile(r"^ptxas (?P<where>.*?line (?P<line>\d+))?.*?(?P<severity>error|fatal)\s*: (?P<msg>.*)$")
NAME_MAP = "__nv_name_map"  # the file that NVRTC invents for name expressions


def parse_log(log: str, line_text: Callable[[str, int], str] | None = None) -> list[Diagnostic]:
    """Read NVRTC's log; ``line_text(file, line)`` supplies a line's text where the log does not show it."""
    lines = log.splitlines()
    found: list[Diagnostic] = []
    for i, line in enumerate(lines):
        m = _FRONT.match(line)
        if m:
            text, caret = "", -1
            message = m["msg"]
            j = i + 1
            # a long message goes on in indented lines; the source line and its caret come last
            while j < len(lines) and lines[j].startswith(" ") and lines[j].strip() != "^":
                j += 1
            if j < len(lines) and lines[j].strip() == "^" and j > i + 1:
                shown = lines[j - 1]
                text = shown.strip()
                caret = lines[j].index("^") - (len(shown) - len(shown.lstrip()))
                message = " ".join([message, *(x.strip() for x in lines[i + 1 : j - 1])])
            elif line_text is not None:
                text = line_text(m["file"], int(m["line"])).strip()
            found.append(Diagnostic(m["file"], int(m["line"]), m["severity"], message, text, caret))
            continue
        m = _PTXAS.match(line)
        if m:
            found.append(Diagnostic("ptxas", int(m["line"] or 0), m["severity"], m["msg"]))
    return found


def compile_error(
    name: str,
    target: str,
    compiler: str,
    log: str,
    line_text: Callable[[str, int], str],
    kernels: list[str],
    explain: Callable[[Diagnostic], str] | None = None,
) -> CompileError:
    """The readable error for a failed compilation of ``name``."""
    diagnostics = parse_log(log, line_text)
    errors = [d for d in diagnostics if d.severity != "warning" and d.severity != "remark"]
    own = [d for d in errors if d.file != NAME_MAP]
    if errors and not own:
        offered = ", ".join(kernels) or "none"
        return CompileError(
            f"no kernel {name!r} in this source: {errors[0].message} (kernels found: {offered})", errors, log
        )
    shown = own[:10]
    head = f"kernel {name!r} does not compile for {target} ({compiler})"
    body = "\n".join(str(d) for d in shown) if shown else log.strip()
    if len(own) > len(shown):
        body += f"\n... and {len(own) - len(shown)} more (see .log)"
    hint = next((h for d in own if explain and (h := explain(d))), "")
    return CompileError(f"{head}:\n{body}{chr(10) + hint if hint else ''}", diagnostics, log)


# What code written for nvcc trips over under NVRTC.
_HINTS = (
    (r"uint\d+_t|int\d+_t|uintptr_t|size_t", 'use u32, u64, i64 of "common/types.cuh", or the built-in types'),
    (r"INFINITY|FLT_MAX|NAN\b|HUGE_VALF?", 'use CUKERN_INF and CUKERN_NAN of "common/types.cuh"'),
    (r"namespace \"std\"|\bstd\b", "NVRTC has no C++ standard library"),
    (
        r"cannot open source file",
        "NVRTC has CUDA's own headers only (cuda_fp16.h, cuda_bf16.h, ...), not the host's or <cuda.h>, <mma.h>",
    ),
    (r"wgmma|setmaxnreg|\.target|tcgen05", "this instruction needs another architecture"),
)


def hint_for(diagnostic: Diagnostic) -> str:
    """One line of advice for a frequent cause, or an empty string."""
    for pattern, advice in _HINTS:
        if re.search(pattern, diagnostic.message):
            return f"hint: {advice}"
    return ""
