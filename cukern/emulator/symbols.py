"""From an address in a kernel's shared object to lines of its source.

A small reader of ELF and DWARF 4, which is what the kernels are built with: line tables, and the inlined calls around
an address. So a fault names its line on machines without binutils too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Position = tuple[str, int]


def positions(path: Path, address: int) -> list[Position]:
    """Source lines of an address (relative to the load address): where it is, then the callers it was inlined into."""
    try:
        return _Image(path.read_bytes()).positions(address)
    except (OSError, struct.error, IndexError, KeyError, ValueError):
        # gone from the cache meanwhile, or a debug format that this reader does not know: a fault without a line
        return []


@dataclass(frozen=True)
class SharedVariable:
    """A static __shared__ variable: its place in the block's static shared memory. `guard`: the compiler's own."""

    name: str
    offset: int
    size: int
    guard: bool


def shared_variables(path: Path) -> list[SharedVariable]:
    """The static shared memory of a kernel's shared object, which is its thread-local storage."""
    try:
        image = _Image(path.read_bytes())
    except (struct.error, IndexError, ValueError):
        return []
    table, names = image.sections.get(".symtab", b""), _Reader(image.sections.get(".strtab", b""))
    out = []
    for at in range(0, len(table) - 23, 24):
        name, info, _, section, value, size = struct.unpack_from("<IBBHQQ", table, at)
        if info & 15 != 6 or section == 0:  # STT_TLS, defined here
            continue
        names.at = name
        mangled = names.string()
        if "emu_tls_anchor" not in mangled:
            out.append(SharedVariable(_plain(mangled), value, size, mangled.startswith("_ZGV")))
    return out


def _plain(mangled: str) -> str:
    """The last identifier of a mangled name: ``_ZZ1kE4part`` is ``part``."""
    for m in reversed(list(re.finditer(r"(?<!\d)(\d+)(?=[A-Za-z_])", mangled))):
        name = mangled[m.end() : m.end() + int(m[1])]
        if len(name) == int(m[1]) and re.fullmatch(r"(?:_\d+|E|L|v)*", mangled[m.end() + int(m[1]) :]):
            return name
    return mangled


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def number(self, size: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at += size
        return value

    def signed(self, size: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little", signed=True)
        self.at += size
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


@dataclass(frozen=True)
class _Inlined:
    depth: int
    file: int
    line: int


class _Image:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        offset = struct.unpack_from("<Q", data, 40)[0]
        size, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
        strings = _Reader(data)
        self.sections: dict[str, bytes] = {}
        for h in headers:
            strings.at = headers[names][4] + h[0]
            self.sections[strings.string()] = data[h[4] : h[4] + h[5]] if h[1] != 8 else b""

    def positions(self, address: int) -> list[Position]:
        info = _Reader(self.sections.get(".debug_info", b""))
        while info.at < len(info.data):
            start = info.at
            length = info.number(4)
            end = info.at + length
            version = info.number(2)
            if version not in (2, 3, 4):
                raise ValueError(f"DWARF {version}")
            found = self._unit(info, start, end, address)
            if found:
                return found
            info.at = end
        return []

    def _unit(self, info: _Reader, start: int, end: int, address: int) -> list[Position]:
        abbreviations = _abbreviations(self.sections[".debug_abbrev"], info.number(4))
        address_size = info.number(1)
        statement_list, base = None, 0
        chain: list[_Inlined] = []
        depth = 0
        while info.at < end:
            code = info.uleb()
            if code == 0:
                depth -= 1
                continue
            tag, children, attributes = abbreviations[code]
            values = {a: _form(info, f, address_size) for a, f in attributes}
            if tag == 0x11:  # compile unit
                statement_list, base = values.get(0x10), values.get(0x11) or 0
            elif tag == 0x1D and self._covers(values, dict(attributes), base, address):  # inlined subroutine
                chain = [c for c in chain if c.depth < depth]
                chain.append(_Inlined(depth, values.get(0x58) or 0, values.get(0x59) or 0))
            if children:
                depth += 1
        if statement_list is None:
            return []
        files, line = _line_program(self.sections[".debug_line"], statement_list, address)
        if line is None:
            return []
        calls = [(files.get(c.file, "?"), c.line) for c in reversed(chain)]
        return [(files.get(line[0], "?"), line[1]), *calls]

    def _covers(self, values: dict[int, int], forms: dict[int, int], base: int, address: int) -> bool:
        if 0x55 in values:  # ranges
            ranges = _Reader(self.sections[".debug_ranges"], values[0x55])
            while True:
                lo, hi = ranges.number(8), ranges.number(8)
                if lo == hi == 0:
                    return False
                if lo == (1 << 64) - 1:
                    base = hi
                elif base + lo <= address < base + hi:
                    return True
        if 0x11 not in values:
            return False
        lo, hi = values[0x11], values.get(0x12, 0)
        return lo <= address < (hi if forms.get(0x12) == 0x01 else lo + hi)


def _abbreviations(data: bytes, offset: int) -> dict[int, tuple[int, bool, list[tuple[int, int]]]]:
    r = _Reader(data, offset)
    out: dict[int, tuple[int, bool, list[tuple[int, int]]]] = {}
    while code := r.uleb():
        tag, children = r.uleb(), bool(r.number(1))
        attributes = []
        while True:
            name, form = r.uleb(), r.uleb()
            if not name and not form:
                break
            attributes.append((name, form))
        out[code] = (tag, children, attributes)
    return out


# forms of fixed size
_FIXED = {0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0E: 4, 0x10: 4, 0x11: 1}
_FIXED |= {0x12: 2, 0x13: 4, 0x14: 8, 0x17: 4, 0x20: 8}


def _form(r: _Reader, form: int, address_size: int) -> int:
    """Value of an attribute as a number (0 for strings and blocks, which are skipped)."""
    if form == 0x01:
        return r.number(address_size)
    if form in _FIXED:
        return r.number(_FIXED[form])
    if form == 0x0D:
        return r.sleb()
    if form in (0x0F, 0x15):
        return r.uleb()
    if form == 0x19:
        return 1
    if form == 0x08:
        r.string()
        return 0
    if form in (0x09, 0x18):
        length = r.uleb()
    elif form in (0x0A, 0x03, 0x04):
        length = r.number({0x0A: 1, 0x03: 2, 0x04: 4}[form])
    else:
        raise ValueError(f"DWARF form {form:#x}")
    r.at += length
    return 0


def _line_program(data: bytes, offset: int, address: int) -> tuple[dict[int, str], tuple[int, int] | None]:
    """The file table, and file number and line of an address."""
    r = _Reader(data, offset)
    end = r.number(4) + r.at
    version = r.number(2)
    program = r.number(4) + r.at
    minimum = r.number(1)
    if version >= 4:
        r.number(1)
    r.number(1)
    line_base, line_range, opcode_base = r.signed(1), r.number(1), r.number(1)
    lengths = [r.number(1) for _ in range(opcode_base - 1)]
    folders = [""]
    while folder := r.string():
        folders.append(folder + "/")
    files: dict[int, str] = {}
    while name := r.string():
        files[len(files) + 1] = folders[r.uleb()] + name
        r.uleb(), r.uleb()  # time, length
    r.at = program
    previous: tuple[int, int, int] | None = None
    best: tuple[int, tuple[int, int]] | None = None
    for at, file, line, last in _rows(r, end, minimum, line_base, line_range, opcode_base, lengths):
        if previous is not None and previous[0] <= address < at and (best is None or previous[0] >= best[0]):
            best = (previous[0], (previous[1], previous[2]))
        previous = None if last else (at, file, line)
    return files, best[1] if best else None


def _rows(
    r: _Reader, end: int, minimum: int, line_base: int, line_range: int, opcode_base: int, lengths: list[int]
) -> Iterator[tuple[int, int, int, bool]]:
    """Address, file, line and end-of-sequence of every row of a line program."""
    at, file, line = 0, 1, 1
    while r.at < end:
        op = r.number(1)
        if op >= opcode_base:
            op -= opcode_base
            at += minimum * (op // line_range)
            line += line_base + op % line_range
            yield at, file, line, False
        elif op == 0:
            length = r.uleb()
            following = r.at + length
            kind = r.number(1)
            if kind == 1:
                yield at, file, line, True
                at, file, line = 0, 1, 1
            elif kind == 2:
                at = r.number(8)
            r.at = following
        elif op == 1:
            yield at, file, line, False
        elif op == 2:
            at += minimum * r.uleb()
        elif op == 3:
            line += r.sleb()
        elif op == 4:
            file = r.uleb()
        elif op == 8:
            at += minimum * ((255 - opcode_base) // line_range)
        elif op == 9:
            at += r.number(2)
        else:  # column, statement and block flags, and whatever else takes LEB arguments
            for _ in range(lengths[op - 1]):
                r.uleb()
