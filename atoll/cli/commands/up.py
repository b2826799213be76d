"""atoll up, down: a whole cluster on this machine, as child processes of this command."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.cli.cluster import background
from atoll.cli.cluster.background import ClusterOptions, RunningCluster
from atoll.cli.cluster.local_cluster import DATA_DIR, LocalCluster, all_connected, announce, dealt
from atoll.cli.commands.daemons import need, need_linux, stop_signals
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import AtollError, BadInput
from atoll.errors.exit_codes import INTERRUPTED
from atoll.host import ports
from atoll.host.ports import DEFAULT_ADDRESS

MAX_AGENTS: Final = 64


def up(
    *,
    agents: Annotated[int | None, option("N", "Start N agents.", min=1, max=MAX_AGENTS, show_default="1")] = None,
    speeds: Annotated[
        str | None, option("S[,S...]", "Slow each agent down to this part of its speed, e.g. 1,0.6,0.3.")
    ] = None,
    listen: Annotated[str, option("HOST:PORT", "Let the controller listen at this address.")] = DEFAULT_ADDRESS,
    data_dir: Annotated[
        Path, option("DIR", "Keep state, checkpoints and logs in this folder. Its jobs continue.")
    ] = DATA_DIR,
    threads: Annotated[
        int | None, option("N", "Give each worker N CPU threads.", min=1, show_default="cores / workers")
    ] = None,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let agents share a GPU if there are fewer GPUs than agents.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Continue in the background once all is ready; `atoll down` stops it."),
    ] = False,
) -> None:
    """Start a controller and agents on this machine; Ctrl-C stops them all.

    The machine's GPUs are dealt out to the agents; where there are fewer than agents, all train on the CPU, or share
    the GPUs with --share-gpu.

    atoll up --agents 3 --speeds 1,0.6,0.3
    """
    need_linux()
    parts = parse_speeds(speeds, agents)
    data = data_dir.expanduser().absolute()
    need("atoll.controller.daemon", "controller")
    need("atoll.agent.daemon", "agent")
    gpus = _gpus_of(len(parts), share=share_gpu)
    workers = sum(max(1, len(own)) for own in gpus)
    each = threads or max(1, len(os.sched_getaffinity(0)) // workers)
    if detach:
        asked = agents is not None or speeds is not None
        options = ClusterOptions(listen, tuple(parts), threads, share_gpu=share_gpu)
        found = start_in_background(data, options, exact=asked)
        state, count = ("runs already", len(found.speeds)) if found else ("ready", len(parts))
        announce(state, data, listen, count, background.stop_command(data))
        return
    make_data_folder(data)
    background.clear_killed(data)
    with background.locked(data, listen, parts) as lock:
        check_port(listen)
        received = asyncio.run(_run(LocalCluster(data, listen, parts, gpus, each, lock.fileno())))
    raise typer.Exit(INTERRUPTED if received == signal.SIGINT else 0)


def make_data_folder(data: Path) -> None:
    """Make the folder of a cluster's state and logs. Raises BadInput."""
    try:
        (data / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--data-dir {data}: {error.strerror}. Name a folder that you may write to") from error


def start_in_background(data: Path, options: ClusterOptions, *, exact: bool) -> RunningCluster | None:
    """Start a cluster in the background unless this data directory has one; return when all its agents are connected.

    Return the cluster that ran before; None if this call started one. exact: refuse one with other agents. Raises
    Conflict, and AtollError with the reason if agents are missing."""
    make_data_folder(data)
    found = background.running(data)
    if found is None:
        try:
            background.clear_killed(data)
            check_port(options.listen)
            background.start(data, options)
            return None
        except AtollError:
            found = background.running(data)
            if found is None:
                raise
    # It ran before, or another command has just started it.
    if found.listen != options.listen or (exact and found.speeds != options.speeds):
        raise background.already_up(data, found)
    asyncio.run(all_connected(data, found.listen, len(found.speeds)))
    return found


async def _run(cluster: LocalCluster) -> signal.Signals:
    """Start all, wait for a signal, stop all. Raises AtollError where a child ends before."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    for number in stop_signals():
        loop.add_signal_handler(number, told.put_nowait, number)
    try:
        await cluster.start()
        async with asyncio.TaskGroup() as group:
            signalled = group.create_task(told.get(), name="signals")
            watched = [
                group.create_task(cluster.watch_children(), name="children"),
                group.create_task(cluster.announce_when_ready(), name="readiness"),
            ]
            received = await signalled
            for task in watched:
                task.cancel()
        terminal.note("stopping")
        return received
    except* AtollError as errors:
        raise terminal.innermost(errors) from errors
    finally:
        await cluster.stop()


def _gpus_of(agents: int, *, share: bool) -> list[list[str]]:
    """Return the GPUs of each agent; say so where there are too few. Raises BadInput where there is none to share."""
    from atoll.agent.telemetry.devices import NO_GPU_TO_SHARE, find_devices

    found = [device.visible_as for device in find_devices() if device.kind == "cuda"]
    if share and not found:
        raise BadInput(NO_GPU_TO_SHARE)
    parts = dealt(found, agents, share=share)
    if found and not any(parts):
        count = f"{len(found)} GPU{'s' * (len(found) > 1)}"
        terminal.note(
            f"{count} for {agents} agents: they train on the CPU. `--share-gpu` lets them share, "
            f"`--agents {len(found)}` gives each its own"
        )
    return parts


def parse_speeds(speeds: str | None, agents: int | None) -> list[float]:
    """One speed for each agent. Raises BadInput where the numbers do not fit."""
    if speeds is None:
        return [1.0] * (agents or 1)
    try:
        parts = [float(part) for part in speeds.split(",")]
    except ValueError as error:
        raise BadInput(f"--speeds {speeds!r} are not numbers. Write them like 1,0.6,0.3") from error
    if not all(0 < part <= 1 for part in parts):
        raise BadInput(f"--speeds {speeds!r}: each must be above 0 and at most 1. Write them like 1,0.6,0.3")
    if agents is not None and agents != len(parts):
        raise BadInput(f"--speeds names {len(parts)} agents but --agents {agents}. Leave --agents out")
    if len(parts) > MAX_AGENTS:
        raise BadInput(f"--speeds names {len(parts)} agents. At most {MAX_AGENTS} run on one machine")
    return parts


def check_port(listen: str) -> None:
    """Raises BadInput where the controller could not listen there, or would be reached from other machines."""
    from atoll.network.rpc import is_loopback, split_address

    host, port = split_address(listen)
    if not is_loopback(host) or port == 0:
        raise BadInput(
            f"--listen {listen}: `atoll up` serves this machine only, on a port you name, e.g. {DEFAULT_ADDRESS}. "
            "For several machines run `atoll controller` and `atoll agent`"
        )
    try:
        ports.listening(host, port).close()
    except OSError as error:
        raise BadInput(
            f"cannot listen on {listen}: {error.strerror or error}. "
            "See what runs there with `atoll nodes`, or choose another port with --listen"
        ) from error


def down(
    data_dir: Annotated[Path, option("DIR", "Stop the `atoll up` that keeps its state in this folder.")] = DATA_DIR,
) -> None:
    """Stop what `atoll up` started on this machine.

    Jobs continue with the next `atoll up`. Repeating the command is harmless.
    """
    need_linux()
    data = data_dir.expanduser().absolute()
    if background.stop(data):
        print("stopped")
    else:
        terminal.note(f"no `atoll up` runs with --data-dir {data}")
