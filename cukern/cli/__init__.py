"""The command line: ``cukern generate``, ``score``, ``demo``, ``info``, ``compile``, ``cache`` and ``bench``.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader of the output went away. An error is one
line on stderr; ``--debug`` (or CUKERN_DEBUG=1) shows the traceback. Heavy imports happen inside the commands, so that
help is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import cukern

__all__ = ["app", "main"]

app = typer.Typer(
    name="cukern",
    help="CUDA kernels as source text, compiled at first use, and a Qwen3 that needs no PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer has its own copy of click in some versions and depends on click in others: take the classes from what it
# exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"cukern {cukern.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (may also stand after the command).")] = False,
) -> None:
    """Options of every command; ``--debug`` has been taken out by `main` already."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.

    Returns
    -------
    int
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end] or os.environ.get("CUKERN_DEBUG", "") not in ("", "0")
    arguments = [a for i, a in enumerate(arguments) if a != "--debug" or i >= end]
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell: as if it were the null device
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?" instead of failing
            stream.reconfigure(errors="replace")
    try:
        command: Any = typer.main.get_command(app)
        with command.make_context("cukern", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Python flushes stdout at exit; give it a place to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted", arguments)
        return 130
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        return _usage(error)
    except Exception as error:
        if debug:
            raise
        _say(f"error: {_one_line(error)}", arguments)
        return 1


def _usage(error: Any) -> int:
    """Report wrong usage in one line; help itself where a command was given nothing."""
    path = error.ctx.command_path if error.ctx is not None else "cukern"
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
    else:
        typer.echo(f"{path}: {_collapse(error.format_message())} (see '{path} --help')", err=True)
    return 2


def _say(text: str, arguments: Sequence[str]) -> None:
    command = next((a for a in arguments if not a.startswith("-")), "")
    typer.echo(f"cukern {command}: {text}" if command else f"cukern: {text}", err=True)


def _one_line(error: Exception) -> str:
    """The error's message without its line breaks; the type too where the message alone would not tell."""
    lines = str(error).splitlines() or [""]
    text = _collapse(lines[0])
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__} {text}".rstrip()
    elif not isinstance(error, (ValueError, TypeError, OSError, RuntimeError)):
        text = f"{type(error).__name__}: {text}"
    return text if len(lines) == 1 else f"{text} (--debug shows the rest)"


def _collapse(text: str) -> str:
    return " ".join(text.split())


# The commands register themselves on `app`.
from cukern.cli import bench, generate, score, tools  # noqa: E402, F401
