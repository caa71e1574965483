"""From tokens to text while tokens still arrive: whole characters only, and stop strings that cross tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["ByteDetokenizer", "StopMatcher", "WindowDetokenizer", "byte_level_bytes"]


def _byte_level_table() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet: printable Latin-1 stands for itself, the other 68 bytes for
    U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


_BYTES = _byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level BPE token stands for; a token outside that alphabet (an added one) is its own
    UTF-8."""
    if all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token)
    return token.encode("utf-8", "replace")


class ByteDetokenizer:
    """Incremental detokenisation of a byte-level vocabulary.

    Bytes are decoded as UTF-8 as they come. A character is given out when its last byte is there; bytes that can never
    become one give U+FFFD at once. The pieces joined equal the decoding of all tokens.

    Parameters
    ----------
    token_bytes : callable
        Token id -> its bytes (empty for a special token).
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Text that this token completes, maybe empty."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else empty."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Incremental detokenisation of any other vocabulary, by decoding a short window of tokens again.

    The window starts at the last token boundary at which the text was whole, so that the cost stays constant for
    ordinary text. Text that ends in U+FFFD is held back until it resolves or ``HOLD`` tokens went by.
    """

    HOLD = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # tokens at the start that only give context (a decoder may strip a leading space)

    def add(self, token: int) -> str:
        """Text that this token completes, maybe empty."""
        self._tokens.append(token)
        return self._emit(final=False)

    def finish(self) -> str:
        """What is left."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._context])
        text = self._decode(self._tokens)
        pending = len(self._tokens) - self._context
        if not final and (len(text) <= len(before) or (text.endswith("\ufffd") and pending < self.HOLD)):
            return ""
        self._tokens = self._tokens[self._context :]
        self._context = len(self._tokens)
        return text[len(before) :]


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    Text is held back while its end might be the start of a stop string, so that nothing behind or inside one is ever
    given out. The stop string that is complete first wins (of several that end together, the longest): the result
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Text now certain to lie before any stop string. ``matched`` is set when one is complete."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        buffer = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if hits:
            _, start, self.matched = min(hits)
            self._held = ""
            return buffer[:start]
        keep = self._pending(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _pending(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        longest = min(len(buffer), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0
