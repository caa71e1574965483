"""The parameters of a kernel, read from its source.

The compiler's own record (PTX) gives each parameter's size and alignment; only the source says whether four bytes
are an ``int`` or a ``float`` and what a pointer points to. This is a reader of declarations, not a C++ parser: a
type that it does not know (a dependent type, a struct) is kept by name and checked by size alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# canonical C type -> (NumPy dtype name, size in bytes); 'bfloat16' is ml_dtypes'
SCALARS: dict[str, tuple[str, int]] = {
    "bool": ("bool", 1),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "short": ("int16", 2),
    "unsigned short": ("uint16", 2),
    "int": ("int32", 4),
    "unsigned int": ("uint32", 4),
    "long": ("int64", 8),
    "unsigned long": ("uint64", 8),
    "long long": ("int64", 8),
    "unsigned long long": ("uint64", 8),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "__nv_fp8_e4m3": ("float8_e4m3fn", 1),
    "__nv_fp8_e5m2": ("float8_e5m2", 1),
}
_KNOWN_ALIASES = {
    "__half": "half",
    "__nv_bfloat16": "bf16",
    "nv_bfloat16": "bf16",
    "nv_half": "half",
    "size_t": "unsigned long",
    "ptrdiff_t": "long",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long long",
    "uint64_t": "unsigned long long",
}
_NOISE = {
    "const",
    "volatile",
    "restrict",
    "__restrict__",
    "__restrict",
    "__grid_constant__",
    "struct",
    "class",
    "typename",
    "enum",
}
_INT_WORDS = {"unsigned", "signed", "long", "short", "int", "char"}

_CUDA_NAMES = {  # NumPy dtype name -> the C++ spelling for a template argument
    "float16": "half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "bool": "bool",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter.

    ``kind`` is "pointer", "scalar" or "opaque" (by-value struct or a type not understood); ``dtype`` the NumPy dtype
    name of the scalar or of what the pointer points to ("" if unknown); ``c_type`` as written, for messages.
    """

    name: str
    c_type: str
    kind: str
    dtype: str = ""


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters. ``parameters`` is None where the source could not be understood."""

    kernel: str
    parameters: tuple[Parameter, ...] | None


def template_argument(value: object) -> str:
    """A template argument as C++ text: str as is, bool, int, or a NumPy dtype (class)."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    try:
        name = "" if value is None else np.dtype(value).name  # type: ignore[call-overload]
    except (TypeError, ValueError):
        name = ""
    if name in _CUDA_NAMES:
        return _CUDA_NAMES[name]
    raise TypeError(
        f"template argument {value!r}: expected a C++ type or value as str, an int, a bool or a NumPy dtype"
    )


def name_expression(name: str, template: Sequence[object] | None) -> str:
    """``name`` with its template arguments: ("f", ("half", 128)) gives "f<half, 128>"."""
    if template is not None and (isinstance(template, str) or not isinstance(template, Sequence)):
        raise TypeError(f"template={template!r}: expected a tuple, for example ({template!r},)")
    if not template:
        return name.strip()
    if "<" in name:
        raise ValueError(f"name {name!r} already has template arguments; give either those or template=")
    return f"{name.strip()}<{', '.join(template_argument(t) for t in template)}>"


def split_name(expression: str) -> tuple[str, list[str]]:
    """The kernel's base name without namespaces, and its template arguments."""
    head, _, rest = expression.lstrip("&").partition("<")
    arguments = split_commas(rest.rsplit(">", 1)[0]) if rest else []
    return head.strip().rsplit("::", 1)[-1], arguments


def split_commas(text: str) -> list[str]:
    """Split at commas outside any bracket."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "(<[{":
            depth += 1
        elif c in ")>]}":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last or out else []


def strip_comments(text: str) -> str:
    """Comments and preprocessor lines replaced by spaces."""
    text = re.sub(
        r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', lambda m: m[0] if m[0][0] == '"' else " ", text, flags=re.S
    )
    return re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", " ", text, flags=re.M)


_GLOBAL = re.compile(r"__global__\b")
_PREFIX = re.compile(
    r"\s*(?:(?:static|inline|void|__forceinline__|__noinline__|auto)\b|"
    r"(?:__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__)\s*(?=\()|\[\[.*?\]\])",
    re.S,
)


def _balanced(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`, or -1."""
    pairs = {"(": ")", "<": ">", "[": "]", "{": "}"}
    close, depth = pairs[text[start]], 0
    for i in range(start, len(text)):
        if text[i] == text[start]:
            depth += 1
        elif text[i] == close:
            depth -= 1
            if depth == 0:
                return i + 1
    return -1


def _declarations(code: str) -> list[tuple[str, str, int]]:
    """Every ``__global__`` function: its name, its parameter text and where its ``__global__`` stands."""
    out = []
    for m in _GLOBAL.finditer(code):
        i = m.end()
        while True:
            p = _PREFIX.match(code, i)
            if not p:
                break
            i = p.end()
            if i < len(code) and code[i] == "(":
                i = _balanced(code, i)
                if i < 0:
                    break
        named = re.compile(r"\s*([A-Za-z_]\w*)\s*\(").match(code, i) if i >= 0 else None
        if not named:
            continue
        end = _balanced(code, named.end() - 1)
        if end > 0:
            out.append((named[1], code[named.end() : end - 1], m.start()))
    return out


def kernel_names(text: str) -> list[str]:
    """The names of all kernels in a source, in order, once each."""
    return list(dict.fromkeys(name for name, _, _ in _declarations(strip_comments(text))))


def parse(text: str, expression: str) -> Signature:
    """The signature of the kernel that a name expression means, with template arguments put in."""
    code = strip_comments(text)
    base, arguments = split_name(expression)
    candidates = [d for d in _declarations(code) if d[0] == base]
    macros = _macros(text) if candidates else {}
    read = [_parameters(code, _expand(params, macros), start, arguments) for _, params, start in candidates]
    if len({tuple((p.kind, p.dtype) for p in parameters) for parameters in read}) != 1:
        return Signature(base, None)  # unknown here, or overloaded: the compiler decides
    return Signature(base, read[-1])


def _parameters(code: str, params: str, start: int, arguments: list[str]) -> tuple[Parameter, ...]:
    aliases = _aliases(code)
    aliases.update(_template_bindings(code, start, arguments))
    parts = split_commas(params)
    return () if parts == ["void"] else tuple(_parameter(part, i, aliases) for i, part in enumerate(parts))


_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?!\()(?:[ \t]+((?:[^\n\\]|\\\n|\\.)*))?$", re.M)


def _macros(text: str) -> dict[str, str]:
    """Macros without arguments that have one meaning in the text, whatever its ``#if``s say."""
    found: dict[str, set[str]] = {}
    # comments go first; a comment inside a definition would else be taken for its value
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    for name, value in _DEFINE.findall(plain):
        found.setdefault(name, set()).add(" ".join(value.replace("\\\n", " ").split()))
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _expand(params: str, macros: dict[str, str]) -> str:
    """The parameters with macros replaced, as in ``#define T float`` or ``#define PARAMETERS float *x, int n``."""
    for _ in range(8):  # a macro may stand for another; a cycle must not hang
        expanded = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: macros.get(m[0], m[0]), params)
        if expanded == params:
            break
        params = expanded
    return params


def _normalise(params: str) -> str:
    return re.sub(r"\s+", " ", params).strip()


def _aliases(code: str) -> dict[str, str]:
    out = dict(_KNOWN_ALIASES)
    for m in re.finditer(r"\btypedef\s+([\w\s:]*[\s*])(\w+)\s*;", code):
        out[m[2]] = m[1].strip()
    for m in re.finditer(r"\busing\s+(\w+)\s*=\s*([\w\s:]+\**)\s*;", code):
        if not code[: m.start()].rstrip().endswith(">"):  # an alias template is no alias
            out[m[1]] = m[2].strip()
    return out


def _template_bindings(code: str, start: int, arguments: list[str]) -> dict[str, str]:
    """Template parameter name -> argument text, for the ``template <...>`` right before the kernel at `start`."""
    head = code[:start].rstrip()
    head = re.sub(r'(?:\bextern\s*"C"|\bstatic|\binline)\s*$', "", head).rstrip()
    if not head.endswith(">"):
        return {}
    depth, i = 0, len(head) - 1
    while i >= 0:
        if head[i] == ">":
            depth += 1
        elif head[i] == "<":
            depth -= 1
            if depth == 0:
                break
        i -= 1
    if i < 0 or not re.search(r"\btemplate\s*$", head[:i]):
        return {}
    out = {}
    for k, parameter in enumerate(split_commas(head[i + 1 : -1])):
        declared, _, default = parameter.partition("=")
        words = re.findall(r"\w+|\.\.\.", declared)
        if "..." in words or not words:
            break
        value = arguments[k] if k < len(arguments) else default.strip()
        if value:
            out[words[-1]] = value
    return out


def _parameter(text: str, index: int, aliases: dict[str, str]) -> Parameter:
    text = re.sub(r"\[\[.*?\]\]", " ", text).split("=")[0].strip()
    array = re.search(r"(?:\[[^\]]*\]\s*)+$", text)
    if array:
        text = text[: array.start()].strip() + " *"
        name_match = re.search(r"(\w+)\s*\*$", text)
        name = name_match[1] if name_match else f"argument {index}"
        type_text = re.sub(r"\w+\s*\*$", "*", text)
    else:
        words = re.match(r"^(.*?[\s*&>])(\w+)$", text, re.S)
        if words and words[2] not in _NOISE and words[2] not in _INT_WORDS and words[1].strip(" const"):
            type_text, name = words[1].strip(), words[2]
        else:
            type_text, name = text, f"argument {index}"
    written = re.sub(r"\s*\b(?:__restrict__|__restrict|__grid_constant__)\b", "", _normalise(type_text)).strip()
    written = re.sub(r"\s+(?=\*)", "", written)
    canonical, stars = _resolve(type_text, aliases)
    if stars:
        dtype = SCALARS.get(canonical, ("", 0))[0] if stars == 1 else ""
        return Parameter(name, written, "pointer", dtype)
    if canonical in SCALARS:
        return Parameter(name, written, "scalar", SCALARS[canonical][0])
    return Parameter(name, written, "opaque")


def _resolve(text: str, aliases: dict[str, str]) -> tuple[str, int]:
    """A type's canonical spelling without qualifiers, and how many pointers deep it is."""
    stars = 0
    for _ in range(16):  # a chain of aliases is short; a cycle must not hang
        stars += len(re.findall(r"[*]", text)) if "<" not in text else text.rsplit(">", 1)[-1].count("*")
        if "<" in text or "(" in text:
            return re.sub(r"\s+", " ", text).strip(" *&"), stars
        words = [w for w in re.findall(r"[\w:]+", text) if w not in _NOISE]
        if words and all(w in _INT_WORDS for w in words):
            return _integer(words), stars
        name = " ".join(words)
        if name in aliases and aliases[name] != name:
            text = aliases[name]
            continue
        return name, stars
    return text, stars


def _integer(words: list[str]) -> str:
    unsigned = "unsigned" in words
    if "char" in words:
        return "unsigned char" if unsigned else "signed char" if "signed" in words else "char"
    if "short" in words:
        return "unsigned short" if unsigned else "short"
    longs = words.count("long")
    base = "long long" if longs > 1 else "long" if longs else "int"
    return f"unsigned {base}" if unsigned else base
