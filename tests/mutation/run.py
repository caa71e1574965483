"""Plant each fault in a copy of kernels_src, run the tests of that file under emulation, and see whether one fails.

``python -m tests.mutation.run`` from the root of a checkout; ``--only linear`` for some of them, ``--write`` for
docs/mutation.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .mutants import MUTANTS, TESTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
REPORT = ROOT / "docs" / "mutation.md"
# a test of the compiler's output, or one that takes long and looks at nothing new
LEFT_OUT = "not cuda and not spill and not compile"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "caught", "missed" or "broken" (does not apply, or the run failed otherwise)."""

    mutant: Mutant
    result: str
    by: str
    seconds: float


def apply(mutant: Mutant, folder: Path) -> None:
    """Edit the copy; ValueError if the text is not there (any more)."""
    path = folder / mutant.file
    if mutant.old not in path.read_text(encoding="utf-8"):  # moved to a header, perhaps
        elsewhere = [p for p in sorted(folder.rglob("*.cu*")) if mutant.old in p.read_text(encoding="utf-8")]
        path = next(iter(elsewhere), path)
    text = path.read_text(encoding="utf-8")
    at = -1
    for _ in range(mutant.nth + 1):
        at = text.find(mutant.old, at + 1)
        if at < 0:
            raise ValueError(f"{mutant.file}: {mutant.old!r} is not there (fault {mutant.what!r})")
    path.write_text(text[:at] + mutant.new + text[at + len(mutant.old) :], encoding="utf-8")


def run(mutant: Mutant | None, tests: tuple[str, ...], cache: Path, limit: float) -> tuple[int, str]:
    """Exit status and output of pytest with the mutant in place."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        sources = Path(scratch) / "kernels_src"
        shutil.copytree(ROOT / "kernels_src", sources)
        if mutant is not None:
            apply(mutant, sources)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        env |= {"CUKERN_KERNELS_SRC": str(sources), "CUKERN_CACHE_DIR": str(cache), "CUKERN_EMULATE_TIMEOUT": "20"}
        env["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-k", LEFT_OUT]
        command += [f"tests/{t}" for t in tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return -1, "FAILED no end within the time limit"
        return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, cache: Path, limit: float) -> Outcome:
    """Run one mutant."""
    start = time.monotonic()
    try:
        status, output = run(mutant, TESTS[mutant.file], cache, limit)
    except ValueError as e:
        return Outcome(mutant, "broken", str(e), 0.0)
    seconds = time.monotonic() - start
    failed = re.search(r"^FAILED (?:tests/)?(.*?)(?: - (.*))?$", output, re.M)
    if status in (1, -1) and failed:
        reason = re.search(r"^E +(?:cukern\.emulator\.errors\.)?(\w+)\b", output, re.M)
        return Outcome(mutant, "caught", f"{failed[1].split('[')[0]} ({reason[1] if reason else 'time'})", seconds)
    if status == 0:
        return Outcome(mutant, "missed", "", seconds)
    return Outcome(mutant, "broken", output[-300:], seconds)


def report(outcomes: list[Outcome]) -> str:
    """The table of docs/mutation.md."""
    real = [o for o in outcomes if not o.mutant.equivalent]
    caught = sum(o.result == "caught" for o in real)
    today, percent = datetime.date.today().isoformat(), 100 * caught / max(1, len(real))
    lines = [
        "# Mutation test",
        "",
        "Each line is one fault planted in our kernels (`tests/mutation/mutants.py`), and the first test that failed,",
        "all under emulation in check mode on a CPU. `python -m tests.mutation.run --write` repeats it.",
        "",
        f"{today}: {caught} of {len(real)} faults caught ({percent:.0f} %), "
        f"{len(outcomes) - len(real)} further mutants change no result.",
        "",
        "| file | fault | found by |",
        "|---|---|---|",
    ]
    for o in sorted(outcomes, key=lambda o: (o.mutant.file, o.mutant.what)):
        found = o.by if o.result == "caught" else "**" + o.result + "**"
        if o.mutant.equivalent:
            found = f"equivalent: {o.mutant.equivalent}" + (f" (but {o.by})" if o.result == "caught" else "")
        lines.append(f"| {o.mutant.file} | {o.mutant.what} | {found} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or description contains this")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one mutant")
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a fault")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.file or options.only in m.what]
    cache = Path(tempfile.mkdtemp(prefix="mutation-cache-"))
    outcomes = []
    try:
        if options.baseline:
            tests = tuple(dict.fromkeys(t for m in chosen for t in TESTS[m.file]))
            status, output = run(None, tests, cache, 3600)
            if status:
                print(output[-3000:])
                print("the tests fail without any fault")
                return 2
        for i, mutant in enumerate(chosen, 1):
            o = judge(mutant, cache, options.limit)
            outcomes.append(o)
            result = f"equivalent, {o.result}" if mutant.equivalent else o.result
            what = f"{mutant.file}: {mutant.what}"
            print(f"[{i}/{len(chosen)}] {o.seconds:5.1f} s {result:7s} {what}  {o.by}", flush=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    text = report(outcomes)
    print(text.splitlines()[5])
    if options.write:
        REPORT.write_text(text, encoding="utf-8")
    return int(any(o.result != "caught" and not o.mutant.equivalent for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
