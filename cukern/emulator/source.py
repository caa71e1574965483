"""The few changes that turn an assembled CUDA text into C++, keeping every line where it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPORTS = "cukern exports"  # the "file" of what is appended to a kernel


@dataclass(frozen=True)
class Prepared:
    """Text for the C++ compiler and what was learnt on the way."""

    text: str
    dynamic_align: int
    prints: bool
    parameters: tuple[str, ...]
    found: bool  # whether a kernel of that name is declared


# comments and literals are skipped, everything else is searched
_SKIP = r"//[^\n]*|/\*.*?\*/|R\"(?P<d>[^\s()\\]*)\(.*?\)(?P=d)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_TOKEN = re.compile(_SKIP, re.S)
_ALIGN = r"(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)|__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)"
_DYNAMIC = re.compile(
    rf"(?P<before>(?:(?:{_ALIGN})\s*)*)\bextern\s+(?P<mid>(?:(?:{_ALIGN}|volatile)\s*)*)__shared__\s+"
    rf"(?P<after>(?:(?:{_ALIGN}|volatile)\s*)*)(?P<type>[\w:]+(?:\s*<[^;{{}}]*?>)?(?:\s+[\w:]+)*?)\s*(?P<late>(?:(?:{_ALIGN})\s*)*)"
    r"\b(?P<name>\w+)\s*\[\s*\]\s*;",
    re.S,
)
_STATIC = re.compile(r"\bstatic\s+__shared__\b|\b__shared__\s+static\b")
_ALIGNAS = re.compile(r"\b__shared__\s+alignas\s*\(((?:[^()]|\([^()]*\))*)\)")
_FIRST_ALIGNAS = re.compile(r"\balignas\s*\(((?:[^()]|\([^()]*\))*)\)\s*(static\s+)?__shared__\b")


def blank(text: str) -> str:
    """The text with comments and literals replaced by spaces of the same length, newlines kept."""
    return _TOKEN.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def _alignment(text: str) -> int:
    numbers = [int(n) for n in re.findall(r"\b(\d+)\b", text)]
    return max(numbers, default=1)


def _keep_lines(original: str, replacement: str) -> str:
    return replacement + "\n" * original.count("\n")


def prepare(text: str, name: str, filename: str) -> Prepared:
    """Rewrite shared-memory declarations and append the exports for the kernel `name`."""
    code = blank(text)
    align = 1
    edits: list[tuple[int, int, str]] = []
    for m in _DYNAMIC.finditer(code):
        found = m["before"] + m["mid"] + m["after"] + m["late"]
        align = max(align, _alignment(found) if found.strip() else 1)
        kind = ("volatile " if "volatile" in found else "") + m["type"]
        new = f"{kind} *{m['name']} = ({kind} *)::emu_dynamic_shared();"
        if not _inside_function(code[: m.start()]):
            here = _position(text, m.end(), filename)
            new = f'\n#define {m["name"]} (({kind} *)::emu_dynamic_shared())\n#line {here[1]} "{here[0]}"\n'
            edits.append((m.start(), m.end(), new))
        else:
            edits.append((m.start(), m.end(), _keep_lines(m[0], new)))
    for pattern, replacement in (
        (_STATIC, "__shared__"),
        (_ALIGNAS, r"__shared__ __attribute__((aligned(\1)))"),
        (_FIRST_ALIGNAS, r"__shared__ __attribute__((aligned(\1)))"),
    ):
        for m in pattern.finditer(code):
            if not any(a < m.end() and m.start() < b for a, b, _ in edits):
                edits.append((m.start(), m.end(), _keep_lines(m[0], m.expand(replacement))))
    body = text
    for start, end, new in sorted(edits, reverse=True):
        body = body[:start] + new + body[end:]
    head = "" if text.lstrip().startswith("#line") else f'#line 1 "{filename}"\n'
    out = f'{head}{body}\n#line 1 "{EXPORTS}"\nEMU_EXPORT({name})\n'
    parameters = _parameters(code, name)
    return Prepared(out, align, bool(re.search(r"\bprintf\s*\(", code)), parameters or (), parameters is not None)


def _inside_function(code: str) -> bool:
    """Whether the end of `code` lies inside a function body rather than at namespace scope."""
    stack: list[bool] = []
    last = 0
    for m in re.finditer(r"[{}]", code):
        if m[0] == "{":
            before = code[last : m.start()].rstrip()
            namespace = re.search(r"(?:\bnamespace\b[\w\s:]*|\bextern\s+[\"\s]*C?[\"\s]*)$", before) is not None
            stack.append(not namespace)
        elif stack:
            stack.pop()
        last = m.end()
    return any(stack)


def _position(text: str, end: int, filename: str) -> tuple[str, int]:
    """File and line number of offset `end`, by the ``#line`` markers before it."""
    file, line = filename, 1
    for row in text[:end].split("\n")[:-1]:
        m = re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', row)
        if m:
            line, file = int(m[1]), m[2] or file
        else:
            line += 1
    return file, line


def _parameters(code: str, name: str) -> tuple[str, ...] | None:
    """Names of the kernel's parameters, for messages; None if there is no such kernel."""
    base = name.split("<")[0].rsplit("::", 1)[-1].strip(" &")
    for m in re.finditer(rf"\b{re.escape(base)}\s*\(", code):
        head = code[max(0, m.start() - 400) : m.start()]
        if "__global__" not in head.rsplit(";", 1)[-1].rsplit("}", 1)[-1]:
            continue
        depth, parts, start = 1, [], m.end()
        for i in range(m.end(), len(code)):
            c = code[i]
            if c in "(<[{":
                depth += 1
            elif c in ")>]}":
                depth -= 1
            if depth == 0 or (c == "," and depth == 1):
                parts.append(code[start:i])
                start = i + 1
            if depth == 0:
                break
        names = [re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)?$", p.split("=")[0].strip()) for p in parts if p.strip()]
        return tuple(n[1] if n else "?" for n in names)
    return None
