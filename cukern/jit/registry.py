"""cukern's own kernels: by file and name at run time, and all their variants for ahead-of-time compilation.

An operator module ``cukern/ops/x.py`` (and ``cukern/models/decode_step.py``) says which kernels it may launch by a
function

    def kernel_variants() -> list[tuple[str, str, tuple, dict | None]]

whose items are the arguments of :func:`kernel`: (file, name, template, defines). A fifth item, a tuple of
architectures such as ``("sm_90a",)``, limits a variant to those.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import arch as architectures
from . import toolchain
from .kernels import Kernel
from .resources import Resources
from .signature import name_expression
from .source import kernels_src

_memo: dict[tuple[Any, ...], Kernel] = {}
at_reload: list[Callable[[], None]] = []
"""Called by :func:`reload`: to forget what holds kernels elsewhere."""


def kernel(
    file: str,
    name: str,
    template: tuple[object, ...] = (),
    defines: Mapping[str, object] | None = None,
    *,
    cooperative: bool = False,
) -> Kernel:
    """A kernel of ``kernels_src/<file>``: made once in a process, then a dictionary lookup. Compiles at its first
    launch.

    Parameters
    ----------
    file : str
        File name under the kernel sources, for example "rms_norm.cu".
    name, template, defines, cooperative
        As for :class:`Kernel`.
    """
    key = (file, name, template, tuple(sorted(defines.items())) if defines else None, cooperative)
    known = _memo.get(key)
    if known is None:
        path = kernels_src() / file
        made = Kernel(path, name, template=template, defines=defines, cooperative=cooperative, _lazy=True)
        known = _memo.setdefault(key, made)
    return known


def reload() -> None:
    """Forget the kernels made by :func:`kernel`, so that edited sources are read again."""
    _memo.clear()
    for clear in at_reload:
        clear()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel that an operator may launch; ``archs`` empty means every architecture."""

    file: str
    name: str
    template: tuple[object, ...] = ()
    defines: tuple[tuple[str, object], ...] = ()
    archs: tuple[str, ...] = ()

    def kernel(self) -> Kernel:
        """The Kernel of this variant."""
        return kernel(self.file, self.name, self.template, dict(self.defines) or None)

    def __str__(self) -> str:
        return f"{self.file}: {name_expression(self.name, self.template)}" + "".join(
            f" {k}={v}" for k, v in self.defines
        )


def variants(modules: Iterable[str] | None = None) -> list[KernelSpec]:
    """Every variant that the modules declare, without repeats; default: all of ``cukern.ops`` and the decoding step.

    Raises
    ------
    TypeError
        For a declaration of another form, naming the module.
    """
    if modules is None:
        package = importlib.import_module("cukern.ops")
        modules = [f"cukern.ops.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
        modules.append("cukern.models.decode_step")
    found: dict[KernelSpec, None] = {}
    for module in modules:
        declare = getattr(importlib.import_module(module), "kernel_variants", None)
        for item in declare() if declare is not None else ():
            found[_spec(item, module)] = None
    return list(found)


def _spec(item: Any, module: str) -> KernelSpec:
    if isinstance(item, KernelSpec):
        return item
    try:
        file, name, template, defines, *rest = item
        return KernelSpec(file, name, tuple(template), tuple(sorted((defines or {}).items())), tuple(*rest))
    except (TypeError, ValueError, AttributeError):
        raise TypeError(
            f"{module}.kernel_variants(): {item!r} is not (file, name, template, defines) or that with archs"
        ) from None


@dataclass(frozen=True)
class Built:
    """One variant compiled for one architecture; ``error`` is empty where it compiled.

    ``resources`` is None after an error, and for a "compute" target.
    """

    spec: KernelSpec
    arch: str
    resources: Resources | None
    error: str = ""


def compile_all(
    archs: Sequence[str] = architectures.ARCHITECTURES,
    jobs: int | None = None,
    progress: Callable[[Built, int, int], None] | None = None,
    specs: Sequence[KernelSpec] | None = None,
) -> list[Built]:
    """Compile every kernel variant for every architecture, into the cache. Needs no GPU.

    Parameters
    ----------
    archs : sequence of str
        Targets, for example ("sm_80", "sm_90a").
    jobs : int, optional
        Threads (NVRTC runs outside Python's lock). Default: the number of processors.
    progress : callable, optional
        ``progress(built, done, total)`` after each, from the calling thread.
    specs : sequence of KernelSpec, optional
        Default: :func:`variants`.

    Returns
    -------
    list of Built
        In the order of `specs`, then `archs`. A failure is recorded in ``error`` and does not stop the others.

    Raises
    ------
    ValueError
        For another spelling of an architecture.
    CudaUnavailableError
        Without CuPy, NVRTC or CUDA's headers; nothing has been compiled then.
    """
    names = [architectures.parse(a).name for a in archs]
    toolchain.nvrtc()  # missing for one kernel is missing for all: one error, not one each
    toolchain.headers()
    work = [
        (spec, name)
        for spec in (variants() if specs is None else specs)
        for name in names
        if not spec.archs or name in spec.archs
    ]
    results: dict[int, Built] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(_build, spec, name): i for i, (spec, name) in enumerate(work)}
        for future in concurrent.futures.as_completed(futures):
            results[futures[future]] = built = future.result()
            if progress is not None:
                progress(built, len(results), len(work))
    return [results[i] for i in range(len(work))]


def _build(spec: KernelSpec, arch: str) -> Built:
    try:
        return Built(spec, arch, spec.kernel().compile(arch))
    except (RuntimeError, OSError, ValueError) as error:
        return Built(spec, arch, None, str(error))
