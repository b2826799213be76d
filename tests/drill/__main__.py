"""Run a drill: kill parts of a private cluster at random while it trains, and check the invariants.

    make drill ARGS="--minutes 30 --every 20 --seed 7"

Exit code 0: all invariants hold. 1: one does not; logs, events and evidence are kept then. 2: the arguments are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.commands.daemons import stop_signals
from atoll.cli.render import terminal
from atoll.errors import AtollError, BadInput
from drill import report
from drill.cluster import fresh_folder
from drill.conduct import DrillOutcome, conduct
from drill.schedule import KINDS
from drill.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill that the arguments name, print its tables, return the exit code."""
    given = _parser().parse_args(argv)
    try:
        settings = _settings(given)
        folder = fresh_folder()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    keep = given.keep
    received: list[signal.Signals] = []
    try:
        outcome = _conducted(settings, folder, received)
        keep = keep or not outcome.holds
        if keep:
            (folder / "events.txt").write_text("\n".join(outcome.story) + "\n")
        _print(settings, outcome, given, folder if keep else None)
        return 0 if outcome.holds else 1
    except asyncio.CancelledError:
        return 128 + received[0]
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if not keep:
            shutil.rmtree(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make drill", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="time during which strikes come")
    add("--every", type=float, default=20.0, metavar="SECONDS", help="one strike in each span of this length")
    add("--seed", type=int, help="decides which strike comes when; default: random")
    add("--nodes", type=int, default=4, help="agents, from 2 to 16; each plays a machine")
    add("--workers", type=int, help="of the job; the other machines are standbys; default: nodes - 1")
    add("--controllers", type=int, default=2, help="from 1 to 5; one leads")
    add("--kinds", default=",".join(KINDS), metavar="KIND[,...]", help="kinds of strikes; default: %(default)s")
    add("--strategy", default="dense", choices=("dense", "stale-sparse"))
    add("--step", type=float, default=0.1, metavar="SECONDS", help="pretended duration of a step")
    add("--keep", action="store_true", help="keep logs and evidence, also where all invariants hold")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/drills.md")
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    """Check the arguments. Raises BadInput; the schedule is checked where it is planned, before a process starts."""
    workers = given.workers or max(2, given.nodes - 1)
    if not 2 <= given.nodes <= 16:
        raise BadInput(f"--nodes {given.nodes}: from 2 to 16")
    if not 1 <= given.controllers <= 5:
        raise BadInput(f"--controllers {given.controllers}: from 1 to 5")
    if not 2 <= workers <= given.nodes:
        raise BadInput(f"--workers {workers} on {given.nodes} machines: from 2, at most one each")
    if not 0 <= given.step <= 60:  # NaN too
        raise BadInput(f"--step {given.step:g}: from 0 to 60 seconds")
    return Settings(
        length_s=60 * given.minutes,
        every_s=given.every,
        seed=random.randrange(2**31) if given.seed is None else given.seed,
        machines=given.nodes,
        workers=workers,
        controllers=given.controllers,
        kinds=tuple(part.strip() for part in given.kinds.split(",")),
        strategy=given.strategy,
        step_s=given.step,
    )


def _conducted(settings: Settings, folder: Path, received: list[signal.Signals]) -> DrillOutcome:
    """Run the drill. Raises CancelledError when a signal, then in `received`, ends it; its cluster has ended then."""

    async def until_signalled() -> DrillOutcome:
        task = asyncio.create_task(conduct(settings, folder, terminal.note), name="drill")

        def stop(number: signal.Signals) -> None:
            if not received:
                terminal.note("stopping")
                task.cancel()
            received.append(number)

        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(until_signalled())
    except* AtollError as errors:
        raise terminal.innermost(errors) from errors


def _print(settings: Settings, outcome: DrillOutcome, given: argparse.Namespace, folder: Path | None) -> None:
    if given.json:
        print(json.dumps({"seed": settings.seed, "folder": str(folder or ""), **report.document(outcome)}))
        return
    table = report.print_markdown if given.markdown else terminal.print_table
    print(f"{datetime.date.today()}, {platform.platform()}, {os.cpu_count()} cores")  # noqa: DTZ011  # for people
    table(report.COLUMNS, report.rows(outcome.recoveries))
    print(f"\n{settings.strategy}, seed {settings.seed}: {report.summary(outcome)}\n")
    table(("INVARIANT", "", "EVIDENCE"), report.verdict_rows(outcome))
    if folder is not None:
        terminal.note(f"logs, events and evidence: {folder}")


if __name__ == "__main__":
    sys.exit(main())
