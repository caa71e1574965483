"""Work that is launched again with other arrays in some places: its launches are recorded once and patched.

The layers of a model make the same launches with other weights. A launch through an operator costs about ten
microseconds of host time; a patched one about three.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import devices
from .launch import Slot
from .tensor_map import TENSOR_MAP_BYTES

if TYPE_CHECKING:
    from .loaded import Repeated

__all__ = ["Replay", "Tape"]

_ADDRESS = struct.Struct("=Q").pack_into
_MAP = struct.Struct(f"={TENSOR_MAP_BYTES}s").pack_into
_lock = threading.Lock()

active: Tape | None = None
"""The tape that records now."""


class Tape:
    """Records the launches of one thread, as far as they are repetitions of checked ones.

    Attributes
    ----------
    whole : bool
        Everything that was launched is on the tape.
    """

    def __init__(self) -> None:
        self.whole = False
        self._thread = 0
        self._launches: list[tuple[Repeated, tuple[Any, ...]]] = []
        self._kept: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread launches in the block; nothing where another tape records."""
        global active
        if not _lock.acquire(blocking=False):
            yield
            return
        try:
            self.whole, self._thread = True, threading.get_ident()
            active = self
            yield
        finally:
            active = None
            _lock.release()

    def add(self, launch: Repeated, lead: tuple[Any, ...]) -> None:
        """A repeated launch with its leading arguments."""
        if threading.get_ident() == self._thread:
            self._launches.append((launch, lead))

    def miss(self) -> None:
        """A launch that cannot be recorded."""
        if threading.get_ident() == self._thread:
            self.whole = False

    def keep(self, array: Any) -> None:
        """Memory that the launches use, which must not be used otherwise while they are replayed."""
        if threading.get_ident() == self._thread:
            self._kept.append(array)

    def bind(self, addresses: Sequence[int], same: Iterable[int]) -> Replay | None:
        """The launches, to be made again with other arrays.

        Parameters
        ----------
        addresses : sequence of int
            Of the arrays that will be others, as they were in the recording; 0 where there is none.
        same : iterable of int
            Of the arrays that will be the same.

        Returns
        -------
        Replay or None
            None where the tape is not whole, where two of `addresses` are equal (which of them occurs cannot be
            told), where an array that will be another does not occur in it, and where one occurs that is neither given
            nor the result of a recorded launch: something else has made that.
        """
        if not self.whole or not self._launches:
            return None
        places = {address: i for i, address in enumerate(addresses) if address}
        if len(places) < sum(map(bool, addresses)):
            return None
        known = {0, *same, *places, *(array.data.ptr for array in self._kept)}
        seen = set[int]()
        launches = []
        for launch, lead in self._launches:
            patches = []
            for (offset, *_), value in zip(launch._layout, lead):
                remade = None
                if isinstance(value, bytes):
                    address, remade = getattr(value, "address", None), getattr(value, "remade", None)
                    if address is None or remade is None:
                        return None
                else:
                    address = value
                if address not in known:
                    return None
                if address in places:
                    seen.add(address)
                    patches.append((offset, places[address], remade))
            launches.append((launch, lead, patches))
        return Replay(launches, self._kept) if seen == places.keys() else None


class Replay:
    """Recorded launches, made again by calling it with the addresses of the arrays that are others.

    For one device and its current stream at the time it was made. Use it as a context manager: it holds the memory of
    its launches, which others may use afterwards.
    """

    def __init__(
        self,
        launches: Sequence[tuple[Repeated, tuple[Any, ...], list[tuple[int, int, Callable[[int], bytes] | None]]]],
        kept: list[Any],
    ) -> None:
        self._kept = kept
        self._launches = []
        stream = devices.stream_pointer(None)
        for launch, lead, patches in launches:
            try:
                slot = launch._pool.pop()
            except IndexError:
                slot = Slot(launch._layout)
            launch._pack_into(slot.params, 0, *lead, *launch._tail)
            slot.configure(*launch._head, stream, *launch._attributes[1:])
            raw = launch._driver.launch_raw
            arguments = (slot.config_address, launch._loaded.function, slot.pointers_address, None)
            self._launches.append((raw, arguments, slot.params, patches, slot, launch))

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch everything, with these addresses in the order of `Tape.bind`."""
        for raw, arguments, params, patches, slot, launch in self._launches:
            for offset, which, remade in patches:
                if remade is None:
                    _ADDRESS(params, offset, addresses[which])
                else:
                    _MAP(params, offset, remade(addresses[which]))
            code = raw(*arguments)
            if code:
                launch.again(code, slot)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *error: object) -> None:
        for *_, slot, launch in self._launches:
            launch._pool.append(slot)
        self._launches, self._kept = [], []
