"""``cukern info``, ``compile`` and ``cache``."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cukern.cli import app

if TYPE_CHECKING:
    from cukern.jit import Built, Info

cache_app = typer.Typer(
    help="The folder of compiled kernels.",
    epilog="Example: cukern cache show",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(cache_app, name="cache")


@app.command(
    short_help="Show GPU, driver, NVRTC and cache; if no GPU is usable, why.", epilog="Example: cukern info --json"
)
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the GPU, driver, CuPy, NVRTC, architecture and cache; if no GPU is usable, why, and what to install."""
    from cukern import jit

    state = jit.info()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state) | {"usable": state.usable}, default=str))
        return
    for name, value in _rows(state):
        typer.echo(f"{name:<14}{value}")
    for problem in state.problems:
        typer.echo(f"problem       {problem}")
    if not state.usable:
        typer.echo("no GPU        --device cpu runs the NumPy reference, --device emulated the CUDA kernels on the CPU")


def _rows(state: Info) -> list[tuple[str, str]]:
    from cukern.jit import arch as architectures

    none = "not found"
    rows = [("cukern", state.cukern)]
    for i, gpu in enumerate(state.gpus):
        kib = gpu.max_shared_mem >> 10
        rows.append(
            (f"GPU {i}", f"{gpu.name}, {gpu.arch}, {gpu.sm_count} multiprocessors, {kib} KiB shared memory a block")
        )
    if not state.gpus:
        rows.append(("GPU", none))
    oldest = 10 * architectures.MINIMUM[0] + architectures.MINIMUM[1]  # that cukern's kernels run on
    targets = [name for name in state.architectures if architectures.Target(name).number >= oldest]
    compiles = f"{targets[0]} to {targets[-1]}" if targets else none
    build = re.search(r"V[\d.]+\d", state.nvrtc_build)
    nvrtc = f"{state.nvrtc} ({build[0]})" if build else state.nvrtc
    headers = f"{state.headers_version} in {state.headers}" if state.headers else none
    cache = state.cache
    access = "" if cache.writable else ", not writable: kernels are compiled again in every process"
    return [
        *rows,
        ("driver", f"supports CUDA {state.driver}" if state.driver else none),
        ("CuPy", state.cupy or none),
        ("NVRTC", nvrtc or none),
        ("compiles for", compiles),
        ("CUDA headers", headers),
        ("kernels", state.kernels_src or none),
        ("cache", f"{cache.folder} ({cache.entries} kernels, {_megabytes(cache.bytes)}{access})"),
    ]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


@app.command(
    "compile",
    short_help="Compile the kernels into the cache ahead of time.",
    epilog="Example: cukern compile --arch sm_80 --arch sm_90a --jobs 16",
)
def compile_(
    files: Annotated[
        list[str] | None, typer.Argument(help="Kernel files such as rms_norm.cu; default: all.", show_default=False)
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Target such as sm_90a (may be repeated). Default: the GPUs here, or without a GPU every one.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", help="Compilations at a time. Default: the processors.", min=1, show_default=False
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only what fails, and the summary.")] = False,
) -> None:
    """Compile the kernels into the cache ahead of time; no GPU is needed."""
    from cukern import jit
    from cukern.jit import arch as architectures
    from cukern.jit import toolchain

    major, minor = architectures.MINIMUM
    targets = sorted({gpu.arch for gpu in jit.info().gpus}) or list(jit.ARCHITECTURES)
    if arch:
        known_here, oldest = toolchain.supported_architectures(), 10 * major + minor
        try:
            asked = [architectures.parse(name, known_here, minimum=oldest).name for name in arch]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        targets = list(dict.fromkeys(asked))
    specs = jit.variants()
    known = {spec.file for spec in specs}
    wanted = {f if f.endswith(".cu") else f"{f}.cu" for f in files or known}
    unknown = sorted(wanted - known)
    if unknown:
        raise typer.BadParameter(f"no kernel file {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for file in sorted(wanted) if files else ():
        of_file = [spec for spec in specs if spec.file == file]
        if all(spec.archs and not set(spec.archs) & set(targets) for spec in of_file):
            exist = sorted({name for spec in of_file for name in spec.archs})
            raise typer.BadParameter(
                f"{file} has no kernel for {', '.join(targets)}; give --arch with one that it has: {', '.join(exist)}"
            )
    cache = _cache()
    for name in targets:
        cache.check_writable(name)
    started = time.perf_counter()

    def show(built: Built, done: int, total: int) -> None:
        if not quiet or built.error:
            typer.echo(f"{done:>{len(str(total))}}/{total}  {_built_line(built)}", err=bool(built.error))

    results = jit.compile_all(targets, jobs, show, [spec for spec in specs if spec.file in wanted])
    failed = sum(bool(b.error) for b in results)
    spilled = sum(bool(b.resources and b.resources.spill_stores + b.resources.spill_loads) for b in results)
    seconds = time.perf_counter() - started
    typer.echo(
        f"{len(results) - failed} kernels compiled in {seconds:.1f} s for {', '.join(targets)}; "
        f"{failed} failed, {spilled} spill registers"
    )
    if cache.num_in_memory:  # a full disk, for example; the warning has said what it was
        raise OSError(
            f"{cache.num_in_memory} kernels could not be written to {cache.folder}: they are lost with this process"
        )
    if failed:
        raise typer.Exit(1)


def _built_line(built: Built) -> str:
    text = f"{built.arch:<8} {built.spec}"
    if built.resources is None:
        return f"{text}  FAIL {' '.join(built.error.split())}"
    r = built.resources
    spill = f", SPILLS {r.spill_stores}+{r.spill_loads} B" if r.spill_stores + r.spill_loads else ""
    return f"{text}  {r.registers} registers, {r.shared} B shared{spill}"


def _cache() -> Any:
    from cukern.jit import cache

    return cache.current()


@cache_app.command("path", epilog="Example: rm -r $(cukern cache path)")
def cache_path() -> None:
    """Print the folder (CUKERN_CACHE_DIR names another)."""
    typer.echo(_cache().folder)


@cache_app.command(
    "show", short_help="Show how many kernels are there, and how large they are.", epilog="Example: cukern cache show"
)
def cache_show(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how many kernels are there for each architecture, and how large they are."""
    state = _cache().info()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state), default=str))
        return
    typer.echo(f"{state.folder}{'' if state.writable else ' (not writable)'}")
    for name, count in sorted(state.per_arch.items()):
        typer.echo(f"{name:<14}{count} kernels")
    typer.echo(
        f"{'total':<14}{state.entries} kernels, {_megabytes(state.bytes)} of at most {_megabytes(state.max_bytes)}"
    )


@cache_app.command("clear", epilog="Example: cukern cache clear --arch sm_90a")
def cache_clear(
    arch: Annotated[str | None, typer.Option(help="Only this architecture.", show_default=False)] = None,
) -> None:
    """Delete compiled kernels; they are compiled again when needed."""
    cache = _cache()
    if arch is not None:
        from cukern.jit import arch as architectures

        try:
            arch = architectures.parse(arch).name
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    folder = Path(cache.folder)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")
    typer.echo(f"deleted {cache.clear(arch)} kernels from {folder}")
