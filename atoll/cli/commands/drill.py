"""atoll drill: kill parts of a private cluster at random while it trains, and check what must hold."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.cli.commands.daemons import innermost, need, need_linux, stop_signals
from atoll.cli.commands.jobs import Json
from atoll.cli.render import terminal
from atoll.errors import AtollError, BadInput

if TYPE_CHECKING:
    from atoll.drill.conduct import DrillOutcome
    from atoll.drill.settings import Settings

# atoll.drill.schedule.KINDS
_ALL: Final = "workers,everyone,agents,machines,pairs,stops,leader,recovery,etcd,saving,overflow,crowd"
_MAX_MACHINES: Final = 16


def drill(
    *,
    minutes: Annotated[float, typer.Option(help="How long strikes come.")] = 5.0,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="One strike in each such span, at random.")] = 20.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of who is struck when.", show_default="random")] = None,
    nodes: Annotated[int, typer.Option(min=2, max=_MAX_MACHINES, help="Agents; each plays a machine.")] = 4,
    workers: Annotated[
        int | None, typer.Option(min=2, help="Of the job; machines beyond stand by.", show_default="nodes - 1")
    ] = None,
    controllers: Annotated[int, typer.Option(min=1, max=5, help="One leads.")] = 2,
    kinds: Annotated[str, typer.Option(metavar="KIND[,...]", help="What is struck.")] = _ALL,
    strategy: Annotated[str, typer.Option(help="dense or stale-sparse.")] = "dense",
    step: Annotated[float, typer.Option(metavar="SECONDS", help="How long a step pretends to take.")] = 0.1,
    script: Annotated[Path | None, typer.Option(help="Train this, which writes evidence; see the manual.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of --script: enough to outlast the drill.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and evidence, also where all holds.")] = False,
    as_json: Json = False,
) -> None:
    """Train on a private cluster of this machine, kill parts of it at random, and check that no step, sample or bit
    of the training was lost to it. Exit code 1 where an invariant does not hold.

    atoll drill --minutes 30 --every 20 --seed 7
    """
    need_linux()
    need("atoll.controller.daemon", "controller")
    need("atoll.agent.daemon", "agent")
    try:
        from atoll.drill.cluster import fresh_folder
        from atoll.drill.settings import Settings
    except ModuleNotFoundError as error:
        raise BadInput(
            "wheels are without drills, which try Atoll itself. `make setup` in a clone of the project brings them"
        ) from error

    if strategy not in ("dense", "stale-sparse"):
        raise BadInput(f"--strategy {strategy!r} is neither dense nor stale-sparse")
    if not 0 <= step <= 60:  # NaN too
        raise BadInput(f"--step {step:g}: from 0 to 60 seconds")
    if (script is None) != (epochs is None):
        raise BadInput("--script and --epochs belong together: the script must train for longer than the drill")
    count = workers or max(2, nodes - 1)
    if count > nodes:
        raise BadInput(f"--workers {count} on {nodes} machines: at most one each")
    settings = Settings(
        length_s=60 * minutes,
        every_s=every,
        seed=random.randrange(2**31) if seed is None else seed,
        machines=nodes,
        workers=count,
        controllers=controllers,
        kinds=tuple(part.strip() for part in kinds.split(",")),
        strategy="dense" if strategy == "dense" else "stale-sparse",
        step_s=step,
        script=script,
        epochs=epochs,
    )
    folder = fresh_folder()
    keeps = keep
    try:
        outcome = _conducted(settings, folder)
        keeps = keep or not outcome.holds
        if keeps:
            (folder / "events.txt").write_text("\n".join(outcome.story) + "\n")
        _show(settings, outcome, folder if keeps else None, as_json)
    finally:
        if not keeps:
            shutil.rmtree(folder)
    if not outcome.holds:
        raise typer.Exit(1)


def _conducted(settings: Settings, folder: Path) -> DrillOutcome:
    """Raises typer.Exit where a signal ends the drill; nothing is left then either."""
    from atoll.drill.conduct import conduct

    received: list[signal.Signals] = []

    async def running() -> DrillOutcome:
        task = asyncio.create_task(conduct(settings, folder, terminal.note), name="drill")

        def told(number: signal.Signals) -> None:
            if not received:
                terminal.note("stopping")
                task.cancel()
            received.append(number)

        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, told, number)
        return await task

    try:
        try:
            return asyncio.run(running())
        except* AtollError as errors:
            raise innermost(errors) from errors
    except asyncio.CancelledError:
        raise typer.Exit(128 + received[0]) from None


def _show(settings: Settings, outcome: DrillOutcome, folder: Path | None, as_json: bool) -> None:
    from atoll.drill import report

    if as_json:
        terminal.print_json({"seed": settings.seed, "folder": str(folder or ""), **report.document(outcome)})
        return
    terminal.print_table(report.COLUMNS, report.rows(outcome.recoveries), right=report.NUMBERS)
    print(f"\nseed {settings.seed}: {report.summary(outcome)}\n")
    terminal.print_table(("INVARIANT", "", "EVIDENCE"), report.verdict_rows(outcome))
    if folder is not None:
        terminal.note(f"logs, events and evidence: {folder}")
