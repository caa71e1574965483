"""``cukern bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cukern.cli import app

PARTS = ("ops", "portable", "model", "prefill", "decode", "startup", "exactness")


def _check_parts(parts: list[str] | None) -> list[str] | None:
    for part in parts or ():
        if part not in PARTS:
            raise typer.BadParameter(f"no part {part!r}; there are {', '.join(PARTS)}")
    return parts


def _check_samplings(samplings: list[str] | None) -> list[str] | None:
    for name in samplings or ():
        if name not in ("greedy", "sampled"):
            raise typer.BadParameter(f"must be greedy or sampled, got {name!r}")
    return samplings


def _check_dtype(value: str) -> str:
    if value not in ("float16", "bfloat16"):
        raise typer.BadParameter(f"must be float16 or bfloat16, got {value!r}")
    return value


@app.command(
    short_help="Time each operator and the model on this GPU, beside peers.",
    epilog="Example: cukern bench ops --op rms_norm --op linear --csv results.csv",
)
def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="ops, portable, model, prefill, decode, startup, exactness. Default: all.",
            callback=_check_parts,
            show_default=False,
        ),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operator, in 'ops' (may be repeated).", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option(help="Published shape with random weights (0.6B to 32B), or a folder.")
    ] = "0.6B",
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.", callback=_check_dtype)] = "float16",
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Batch size, in 'decode' (may be repeated). Default: 1, 64 and 256 at several contexts.",
            min=1,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Context, in 'decode' (may be repeated).", min=1, show_default=False),
    ] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            help="greedy or sampled (top-k 20, top-p 0.95, temperature 0.6), in 'decode'. Default: both.",
            callback=_check_samplings,
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt, in 'prefill' (may be repeated). Default: 512, 2048, 8192.", min=1, show_default=False
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time torch and transformers if there.")] = True,
    compiled_peer: Annotated[
        bool, typer.Option("--compiled-peer", help="Let the peers of 'decode' compile their step (minutes).")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Append the rows to this file.", dir_okay=False, show_default=False)
    ] = None,
) -> None:
    """Measure each operator and the model on this GPU: time, share of the floor, ratio to peers, error."""
    from cukern.bench.run import Options, run, select

    if op:
        try:
            select(op)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    chosen = parts or (("ops",) if op else PARTS)
    given = {
        "--op": ("ops", op),
        "--batch": ("decode", batch),
        "--context": ("decode", context),
        "--sampling": ("decode", sampling),
        "--compiled-peer": ("decode", compiled_peer),
        "--length": ("prefill", length),
    }
    for name, (part, value) in given.items():
        if value and part not in chosen:
            raise typer.BadParameter(
                f"{name} is of the part {part!r}, which is not run; leave it out, or name that part"
            )
    if compiled_peer and not peers:
        raise typer.BadParameter("--compiled-peer contradicts --no-peers")
    if csv is not None and not csv.absolute().parent.is_dir():
        raise typer.BadParameter(f"--csv {csv}: there is no folder {csv.parent}")
    options = Options(
        parts=chosen,
        operators=op or (),
        model=model,
        dtype=dtype,
        peers=peers,
        compiled_peer=compiled_peer,
        csv=csv,
        echo=typer.echo,
    )
    options.samplings = sampling or options.samplings
    options.batches = batch or options.batches
    options.contexts = context or options.contexts
    options.lengths = length or options.lengths
    if run(options):
        raise typer.Exit(1)
