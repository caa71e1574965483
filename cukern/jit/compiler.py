"""NVRTC: assembled text in, machine code with its facts out. Needs no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import toolchain
from .arch import Target
from .errors import compile_error, hint_for
from .signature import kernel_names
from .source import Source

# Constant for every kernel: IEEE division, square root and subnormals (NVRTC's defaults); specialisation is in the
# text.
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")


@dataclass(frozen=True)
class Usage:
    """What ptxas says a kernel uses. Bytes, except `registers` (per thread) and `barriers`."""

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    barriers: int = 0


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    ``names`` maps each name expression to its mangled name; ``usage``, ``layout`` ((offset, size, PTX type) of each
    parameter) and ``max_threads`` (from ``__launch_bounds__``, 0 if not given) are keyed by mangled name.
    """

    binary: bytes
    target: str
    names: dict[str, str]
    log: str = ""
    usage: dict[str, Usage] = field(default_factory=dict)
    layout: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    max_threads: dict[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Everything but the binary, for JSON."""
        out = asdict(self)
        del out["binary"]
        return out

    @classmethod
    def from_facts(cls, binary: bytes, facts: dict[str, Any]) -> Compiled:
        return cls(
            binary=binary,
            target=facts["target"],
            names=dict(facts["names"]),
            log=facts["log"],
            usage={k: Usage(**v) for k, v in facts["usage"].items()},
            layout={k: [(int(o), int(s), str(t)) for o, s, t in v] for k, v in facts["layout"].items()},
            max_threads={k: int(v) for k, v in facts["max_threads"].items()},
        )


def options(target: Target) -> tuple[str, ...]:
    """The compiler options that decide a binary; the header folder is added at the call and is no part of the key."""
    line_info = ("-lineinfo",) if os.environ.get("CUKERN_LINEINFO") == "1" else ()
    return (*_OPTIONS, *line_info, f"-arch={target.name}")


def compile_source(source: Source, names: Sequence[str], target: Target, *, ptx: bool = False) -> Compiled:
    """Compile the kernels `names` of a source for one target.

    Parameters
    ----------
    source : Source
        Self-contained text.
    names : sequence of str
        Kernel names or name expressions ("f<half, 128>").
    target : Target
        The result is a cubin for an "sm" target and PTX for a "compute" one.
    ptx : bool
        Return PTX for an "sm" target as well.

    Raises
    ------
    CompileError
        With the user's file, line and the line's text.
    CudaUnavailableError
        Without NVRTC or CUDA's headers.
    """
    module = toolchain.nvrtc()
    program = module.createProgram(source.text, source.filename, (), ())
    try:
        for name in names:
            module.addNameExpression(program, name)
        try:
            module.compileProgram(program, (*options(target), f"-I{toolchain.headers()}"))
        except module.NVRTCError as error:
            log = module.getProgramLog(program) or str(error)
            version = ".".join(map(str, toolchain.nvrtc_version()))
            raise compile_error(
                ", ".join(names), target.name, f"NVRTC {version}", log, source.line, kernel_names(source.text), hint_for
            ) from None
        log = module.getProgramLog(program).strip("\0").strip()
        mangled = {name: module.getLoweredName(program, name) for name in names}
        text = toolchain.as_bytes(module.getPTX(program)).rstrip(b"\0")
        # CuPy's getCUBIN drops the last byte of the ELF file, which is a zero
        binary = text + b"\0" if target.is_ptx or ptx else module.getCUBIN(program) + b"\0"
    finally:
        module.destroyProgram(program)
    entries = parse_ptx(text.decode("utf-8", "replace"))
    usage = parse_usage(log)
    return Compiled(
        binary=binary,
        target=target.name,
        names=mangled,
        log=log,
        usage={m: usage[m] for m in mangled.values() if m in usage},
        layout={m: entries[m][0] for m in mangled.values() if m in entries},
        max_threads={m: entries[m][1] for m in mangled.values() if m in entries},
    )


_ENTRY_LINE = re.compile(r"Compiling entry function '([^']+)'")
_NUMBERS = (
    ("stack", re.compile(r"(\d+) bytes stack frame")),
    ("spill_stores", re.compile(r"(\d+) bytes spill stores")),
    ("spill_loads", re.compile(r"(\d+) bytes spill loads")),
    ("registers", re.compile(r"Used (\d+) registers")),
    ("barriers", re.compile(r"used (\d+) barriers")),
    ("shared", re.compile(r"(\d+) bytes smem")),
)


def parse_usage(log: str) -> dict[str, Usage]:
    """Read ptxas' verbose log; the result is keyed by mangled kernel name."""
    out: dict[str, Usage] = {}
    parts = _ENTRY_LINE.split(log)
    for name, text in zip(parts[1::2], parts[2::2]):
        # a device function that is called, not inlined, has numbers of its own in the kernel's part: the worst counts
        values = {key: max((int(n) for n in pattern.findall(text)), default=0) for key, pattern in _NUMBERS}
        out[name] = Usage(**values)
    return out


_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\((.*?)\)\s*)?([^{]*)\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\w*)((?:\s*\.\w+(?:\s+\d+)?)*)\s+[\w$]+(?:\[(\d+)\])?")
_MAXNTID = re.compile(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_WIDTH = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def parse_ptx(text: str) -> dict[str, tuple[list[tuple[int, int, str]], int]]:
    """Each kernel's parameters as (offset, size, PTX type) and its largest block, from PTX text."""
    out = {}
    for name, params, directives in _ENTRY.findall(text):
        layout, end = [], 0
        for align, kind, _, count in _PARAM.findall(params):
            width = _WIDTH.get(kind.lstrip("abdefghijklmnopqrstuvwxyz"), 1)
            size = width * int(count) if count else width
            alignment = int(align) if align and count else width
            offset = -(-end // alignment) * alignment
            layout.append((offset, size, kind if not count else "struct"))
            end = offset + size
        m = _MAXNTID.search(directives)
        threads = 1
        for n in m.groups() if m else ():
            threads *= int(n or 1)
        out[name] = (layout, threads if m else 0)
    return out
