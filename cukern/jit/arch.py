"""Which architecture a kernel is compiled for. Decided per device, never per process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: What the project compiles and tests: A100, RTX 30, RTX 40 / L40S, H100 / H200, B200, RTX 50.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MINIMUM = (8, 0)

_NAME = re.compile(r"^(?:(sm|compute)_)?(\d{2,3})([af]?)$")


@dataclass(frozen=True)
class Target:
    """``sm_90a`` (machine code) or ``compute_90`` (PTX, which the driver translates for a card newer than NVRTC)."""

    name: str

    @property
    def is_ptx(self) -> bool:
        return self.name.startswith("compute_")

    @property
    def number(self) -> int:
        """90 for sm_90a."""
        return int(re.sub(r"\D", "", self.name))

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Machine code runs on its own generation from its minor version up, with an "a" on that version only; PTX on
        all later ones."""
        here = capability[0] * 10 + capability[1]
        if self.name.endswith("a"):
            return self.number == here
        if self.is_ptx:
            return self.number <= here
        return self.number // 10 == here // 10 and self.number <= here


def parse(arch: str | int, supported: Sequence[int] | None = None, *, minimum: int = 0) -> Target:
    """Read an architecture as a user writes it: "sm_90a", "90a", 80, "compute_90".

    Raises
    ------
    ValueError
        For another spelling, one that is not in `supported` (what this NVRTC knows), or one below `minimum`.
    """
    m = _NAME.match(str(arch).strip().lower())
    if not m:
        raise ValueError(f"arch={arch!r}: expected for example 'sm_80' or 'sm_90a'")
    listed = ", ".join(f"sm_{n}" for n in supported or () if n >= minimum)
    if int(m[2]) < minimum:
        raise ValueError(f"arch={arch!r} is below sm_{minimum}, the oldest that cukern's kernels run on; use {listed}")
    if supported is not None and int(m[2]) not in supported:
        raise ValueError(f"arch={arch!r} is not known to this NVRTC, which compiles for {listed}")
    return Target(f"{m[1] or 'sm'}_{m[2]}{m[3]}")


def for_capability(
    capability: tuple[int, int], supported: Sequence[int], card: str = "this card", cuda: str = "this CUDA"
) -> Target:
    """The target for a card of a given compute capability.

    The exact one where NVRTC knows it ("a" variants from 9.0 on, for wgmma and tcgen05). A card that NVRTC does not
    know runs machine code of a lower minor version of its generation (before 9.0), else the newest PTX that NVRTC
    can write.

    Raises
    ------
    RuntimeError
        For a card below compute capability 8.0 or below all that NVRTC knows, naming card and CUDA version.
    """
    major, minor = capability
    number = major * 10 + minor
    if capability < MINIMUM:
        raise RuntimeError(
            f"{card} has compute capability {major}.{minor}; cukern needs {MINIMUM[0]}.{MINIMUM[1]} or newer "
            f"(A100, RTX 30 and later), with {cuda}"
        )
    if number in supported:
        return Target(f"sm_{number}{'a' if number >= 90 else ''}")
    older = [n for n in supported if MINIMUM[0] * 10 <= n < number]
    if not older:
        raise RuntimeError(
            f"{card} (compute capability {major}.{minor}) is not supported by {cuda}: install another CUDA extra"
        )
    same = [n for n in older if n // 10 == major]
    if same and number < 90:
        return Target(f"sm_{max(same)}")
    return Target(f"compute_{max(older)}")
