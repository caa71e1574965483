"""The few changes that turn an assembled CUDA text into C++, keeping every line where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..jit.signature import SCALARS, kernel_names, split_commas

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


def _base(name: str) -> str:
    """The function's own name in a name expression."""
    return name.split("<")[0].rsplit("::", 1)[-1].strip(" &")


def _declarations(code: str, base: str) -> Iterator[tuple[str, int]]:
    """Every place where `base` is declared or called: what stands before it in its statement, and where its ( ends."""
    for m in re.finditer(rf"\b{re.escape(base)}\s*\(", code):
        start = 1 + max(code.rfind(c, 0, m.start()) for c in ";{}")
        yield code[start : m.start()], m.end()


def _parameters(code: str, name: str) -> tuple[str, ...] | None:
    """Names of the kernel's parameters, for messages; None if there is no such kernel."""
    for head, begin in _declarations(code, _base(name)):
        if "__global__" not in head:
            continue
        depth, parts, start = 1, [], begin
        for i in range(begin, len(code)):
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


def misnamed(text: str, name: str, filename: str) -> str:
    """Why `name` can mean no kernel of the text, told before the C++ compiler's words for it; "" if it may."""
    code, base = blank(text), _base(name)
    defines = re.findall(r"^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\.)*", code, re.M | re.S)
    if any(re.search(rf"__global__|##|\b{re.escape(base)}\b", d) for d in defines):
        return ""  # a macro may make the declaration or the name
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.)*", "", code, flags=re.M | re.S)
    found = list(_declarations(code, base))
    heads = [head for head, _ in found if "__global__" in head]
    kernels = kernel_names(text)
    if not heads and base not in kernels:
        names = ", ".join(kernels) or "none"
        what = f"{base!r} is a function without __global__" if found else f"no kernel {name!r}"
        return f"{what} in {filename} (kernels found: {names})"
    return _template_mismatch(heads, name, base)


def _template_mismatch(heads: list[str], name: str, base: str) -> str:
    """What is wrong with the template arguments of `name`, going by the heads of the kernel's declarations."""
    _, given, rest = name.partition("<")
    arguments = split_commas(rest.rpartition(">")[0])
    told = "".join(f"{a!r}, " for a in arguments).rstrip(" " if len(arguments) == 1 else ", ")
    lists = [head.split("__global__")[0] for head in heads]
    lists = [head for head in lists if not re.search(r"\btemplate\s*<\s*>", head)]  # a specialisation adds nothing
    templates = [m[1] for head in lists if (m := re.search(r"\btemplate\s*<(.*)>", head, re.S))]
    if lists and given and not any(re.search(r"[<>]|\btemplate\b", head) for head in lists):
        return f"kernel {base!r} is no template, template=({told}) was given"
    if not templates or len(templates) < len(lists):
        return ""  # also a plain kernel among templates: the compiler chooses
    shown = "template <" + " ".join(templates[-1].split()) + ">"
    if not given:
        return f"kernel {base!r} is a {shown}: give template=(...)"
    if any("..." in t or t.count("<") != t.count(">") for t in (*templates, rest[:-1])):
        return ""  # as many as one likes; or a comparison, which is not told from a bracket here
    parameters = [split_commas(t) for t in templates]
    # defaults may stand at the first declaration alone
    least = min(sum("=" not in p for p in declared) for declared in parameters)
    most = max(map(len, parameters))
    if not least <= len(arguments) <= most:
        wanted = f"{least} to {most}" if least < most else f"{most}"
        plural = "" if wanted == "1" else "s"
        return f"kernel {base!r} is a {shown} and takes {wanted} argument{plural}, template=({told}) was given"
    for parameter, argument in zip(parameters[0], arguments) if len(parameters) == 1 else ():
        is_type = re.match(r"(?:class|typename)\b", parameter) is not None
        if is_type and re.fullmatch(r"[-+]?\d\w*|true|false", argument):
            return f"kernel {base!r} is a {shown}: {parameter!r} is a type, {argument!r} was given"
        if re.match(r"(?:int|unsigned|long|bool|[ui](?:8|16|32|64))\b", parameter) and argument in SCALARS:
            return f"kernel {base!r} is a {shown}: {parameter!r} is a value, {argument!r} was given"
    return ""
