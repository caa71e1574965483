"""From a .cu file or a string to one self-contained text.

Quoted includes (``#include "common/types.cuh"``) are expanded in place, once each, with ``#line`` markers; includes in
angle brackets are CUDA's own and are left to the compiler. The text therefore holds everything of ours that decides the
binary, and the cache may use it as its key. File names in the markers are relative, so a moved checkout gives the
same text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .signature import template_argument

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
_OPEN = re.compile(r"^\s*#\s*if(?:def|ndef)?\b")
_CLOSE = re.compile(r"^\s*#\s*endif\b")
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_OURS = ("common/", "ptx/")


def kernels_src() -> Path:
    """The folder of CUDA sources: ``$CUKERN_KERNELS_SRC``, the one inside the installed package, or the checkout's.

    Raises
    ------
    FileNotFoundError
        If no such folder exists; the message names the places looked at.
    """
    override = os.environ.get("CUKERN_KERNELS_SRC")
    if override:
        path = Path(override).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"CUKERN_KERNELS_SRC={override!r} is not a folder")
        return path
    package = Path(__file__).resolve().parent.parent
    places = (package / "kernels_src", package.parent / "kernels_src")
    for path in places:
        if (path / "common" / "types.cuh").is_file():
            return path
    raise FileNotFoundError(
        f"the CUDA sources are not at {places[0]} nor {places[1]}: reinstall cukern, or set CUKERN_KERNELS_SRC"
    )


@dataclass(frozen=True)
class Source:
    """One assembled text. ``files`` maps each name used in ``#line`` markers to its own text, for error messages."""

    text: str
    filename: str
    files: Mapping[str, str] = field(default_factory=dict)

    def line(self, file: str, number: int) -> str:
        """The text of a line as the user wrote it, or an empty string."""
        lines = split_lines(self.files.get(file, ""))
        return lines[number - 1] if 0 < number <= len(lines) else ""


def assemble(
    source: str | os.PathLike[str],
    defines: Mapping[str, object] | None = None,
    *,
    filename: str = "<source>",
) -> Source:
    """Expand our includes in a text, or in a .cu file given as a path, behind a block of defines.

    Parameters
    ----------
    source : str or path
        CUDA C++ text, or the path of a file (a path object, or a string in one line that ends in .cu or .cuh).
    defines : mapping, optional
        Macro name to value: None gives an empty macro, a bool 1 or 0, a NumPy dtype its C++ type, anything else its
        text.
    filename : str
        The name that compiler messages show when `source` is a text.

    Raises
    ------
    FileNotFoundError
        For a missing file, or an include of ours that does not exist (with file, line and the folders searched).
    ValueError
        For a file that is not UTF-8, a text with a NUL character, a define whose name is no identifier or whose value
        spans lines.
    TypeError
        For a source that is neither text nor a path, defines that are no mapping.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source: expected CUDA C++ text or the path of a file, got {type(source).__name__}")
    opened: Path | None = None
    if is_path(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"no CUDA source file {str(source)!r}")
        opened = path.resolve()
        text, filename, folder = read_source(path), path.name, opened.parent
        root = kernels_src()
        if folder == root.resolve():
            folder = root
    else:
        text, folder = str(source), None
    _check_text(text, filename)
    expander = _Expander(kernels_src())
    if opened is not None:
        expander.active.append(opened)
    expander.expand(text, filename, folder, conditional=False)
    head = define_block(defines)
    return Source(head + "".join(expander.out), filename, expander.files)


def is_path(source: str | os.PathLike[str]) -> bool:
    """Whether `source` names a file rather than being CUDA text."""
    if isinstance(source, os.PathLike):
        return True
    return "\n" not in source and source.strip().endswith((".cu", ".cuh"))


def read_source(path: Path) -> str:
    """The text of a source file: UTF-8 with or without a byte order mark, any line ends.

    Raises
    ------
    ValueError
        Naming the file, if it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def split_lines(text: str) -> list[str]:
    """Lines as a compiler counts them: str.splitlines also cuts at form feeds and Unicode's separators."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _check_text(text: str, name: str) -> None:
    if "\0" in text:  # the compiler would end there without a word
        raise ValueError(f"{name}: the source has a NUL character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: the source has a lone surrogate at character {error.start}") from None


def define_block(defines: Mapping[str, object] | None) -> str:
    """``#define`` lines in sorted order, so that equal defines give equal text."""
    if defines is not None and not isinstance(defines, Mapping):
        raise TypeError(f"defines: expected a mapping of macro names to values, got {type(defines).__name__}")
    for name in defines or {}:
        if not isinstance(name, str) or not _IDENTIFIER.match(name):
            raise ValueError(f"defines: {name!r} is not a macro name")
    out = []
    for name, value in sorted((defines or {}).items()):
        text = _define_value(value)
        if len(split_lines(text)) > 1 or text.endswith(("\n", "\r", "\\")):
            raise ValueError(f"defines: the value of {name} spans several lines")
        _check_text(text, f"defines: {name}")
        out.append(f"#define {name} {text}".rstrip() + "\n")
    return "".join(out)


def _define_value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    return template_argument(value) if isinstance(value, (np.dtype, type)) else str(value)


class _Expander:
    """Recursive expansion; a header met outside every ``#if`` is marked done, one met inside is guarded by a macro."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out: list[str] = []
        self.files: dict[str, str] = {}
        self.done: set[Path] = set()
        self.active: list[Path] = []

    def expand(self, text: str, name: str, folder: Path | None, *, conditional: bool) -> None:
        self.files[name] = text
        self.out.append(f'#line 1 "{_quoted(name)}"\n')
        depth, in_comment, continued = 0, False, False
        for number, line in enumerate(split_lines(text), 1):
            code, in_comment = _without_comments(line, in_comment)
            if continued:  # of the line before: no directive begins here
                code = ""
            continued = line.endswith("\\")
            include = _INCLUDE.match(code)
            if include:
                target = self._find(include[1], folder)
                if target is not None:
                    self._include(target, include[1], name, number, conditional=conditional or depth > 0)
                    continue
                if include[1].startswith(_OURS) and not (conditional or depth):  # a dead branch is the compiler's
                    searched = ", ".join(str(p) for p in (folder, self.root) if p is not None)
                    raise FileNotFoundError(f'{name}:{number}: no header "{include[1]}" in {searched}')
            elif _OPEN.match(code):
                depth += 1
            elif _CLOSE.match(code):
                depth -= 1
            elif _PRAGMA_ONCE.match(code):
                line = ""
            self.out.append(line + "\n")

    def _find(self, spelled: str, folder: Path | None) -> Path | None:
        for base in (folder, self.root):
            if base is not None and (base / spelled).is_file():
                return base / spelled
        return None

    def _include(self, path: Path, spelled: str, name: str, number: int, *, conditional: bool) -> None:
        real = path.resolve()
        if real not in self.done and real not in self.active:
            shown = self._shown(path, spelled)
            guard = "CUKERN_SEEN_" + re.sub(r"\W", "_", shown)
            self.active.append(real)
            self.out.append(f"#ifndef {guard}\n#define {guard}\n")
            text = read_source(path)
            _check_text(text, shown)
            self.expand(text, shown, path.parent, conditional=conditional)
            self.out.append("#endif\n")
            self.active.pop()
            if not conditional:
                self.done.add(real)
        self.out.append(f'#line {number + 1} "{_quoted(name)}"\n')

    def _shown(self, path: Path, spelled: str) -> str:
        """A header's name in messages: relative to our folder where it lies there, else as the user spelled it."""
        try:
            return path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            name = path.name if Path(spelled).is_absolute() else Path(spelled).as_posix()
        # two headers of a user's that are spelled alike in different folders stay apart
        while name in self.files and self.files[name] != read_source(path):
            name = f"{path.parent.name}/{name}" if not name.startswith(path.parent.name + "/") else name + "_"
        return name


def _quoted(name: str) -> str:
    """A file name inside the quotes of a ``#line`` marker."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _without_comments(line: str, in_comment: bool) -> tuple[str, bool]:
    """The line without comments, enough to recognise directives; string literals are kept."""
    if not in_comment and "/*" not in line:  # nearly every line
        return (line.split("//")[0], False) if "#" in line else ("", False)
    if in_comment and "*/" not in line:
        return "", True
    out, i, quote = [], 0, ""
    while i < len(line):
        two = line[i : i + 2]
        if in_comment:
            if two == "*/":
                in_comment, i = False, i + 2
            else:
                i += 1
        elif quote:
            out.append(line[i])
            if line[i] == "\\":
                out.append(line[i + 1 : i + 2])
                i += 1
            elif line[i] == quote:
                quote = ""
            i += 1
        elif two == "//":
            break
        elif two == "/*":
            in_comment, i = True, i + 2
        else:
            if line[i] in "\"'":
                quote = line[i]
            out.append(line[i])
            i += 1
    return "".join(out), in_comment
