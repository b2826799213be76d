"""atoll advise: what each strategy would take for a script, before a run."""

from __future__ import annotations

import ast
import asyncio
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.daemons import need
from atoll.cli.commands.options import Json
from atoll.cli.render import advice as shown
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import BadInput, ControllerUnreachable, NotFound
from atoll.errors.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from atoll.profiling.advice import AdvisedCluster, MeasuredScript
    from atoll.v1.jobs_pb2 import ListNodesReply

MAX_WORKERS: Final = 4096
LOOK_S: Final = 2.0
"""Seconds for a controller that was not named: mostly there is none."""
_UNITS: Final = {"": 1e6, "k": 1e3, "m": 1e6, "g": 1e9}
_BANDWIDTH: Final = re.compile(r"([0-9.]+)\s*([kmg]?)(?:bit/s|bps|bit)?", re.IGNORECASE)
_TIME: Final = re.compile(r"([0-9.]+)\s*(ms|s|us|µs)?", re.IGNORECASE)


def advise(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Training script. Its own arguments follow after `--`.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[
        int | None, option("N", "Compare for a job of N workers.", show_default="all devices of the cluster, else 2")
    ] = None,
    bandwidth: Annotated[
        str | None,
        option("BITS/S", "Assume this bandwidth between islands, e.g. 100M.", show_default="as agents measured"),
    ] = None,
    rtt: Annotated[str, option("TIME", "Assume this round-trip time between islands, with --bandwidth.")] = "20ms",
    islands: Annotated[
        int | None,
        option("N", "Spread the workers over N islands, with --bandwidth.", show_default="the cluster's, else 2"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the strategies that a script allows, before a run.

    atoll advise train.py --workers 4 --bandwidth 100M --rtt 40ms

    The command trains some steps of the script on this machine, for seconds. Links and devices are the cluster's.
    """
    need("atoll.controller.planners.registry", "controller")
    _check_script(script)
    if workers is not None and not 2 <= workers <= MAX_WORKERS:
        raise BadInput(f"--workers {workers} must be 2 to {MAX_WORKERS}: one alone exchanges nothing")
    by_hand = (_bandwidth_bps(bandwidth), _seconds(rtt)) if bandwidth is not None else None
    if islands is not None and by_hand is None:
        raise BadInput("--islands needs the --bandwidth between them, e.g. --bandwidth 100M --rtt 40ms")
    nodes = _nodes(context, by_hand=by_hand is not None)
    count = workers if workers is not None else _devices_of_own_kind(nodes) or 2
    if count < 2:
        raise BadInput("the cluster has one device, and one worker alone exchanges nothing. Give --workers")
    if islands is not None and not 1 <= islands <= count:
        raise BadInput(f"--islands {islands} must be 1 to the number of workers, {count}")
    measured = _measured(script, args or [], count)
    cluster = _cluster(nodes, measured, count, by_hand, islands)
    from atoll.profiling.advice import advise as advised

    advice = advised(measured, cluster)
    if as_json:
        terminal.print_json(shown.document(advice))
    else:
        shown.show(script.name, advice)


def _check_script(script: Path) -> None:
    """Raise NotFound or BadInput for what is no script, or for a script that does not use Atoll."""
    if not script.exists():
        raise NotFound(f"script {script} is not there. Check the path")
    if not script.is_file():
        raise BadInput(f"script {script} is no file. Name the Python file")
    if not any("atoll" in names for names in _imports(script, set())):
        raise BadInput(
            f"{script} does not import atoll, so its gradients are its own matter (DDP's all-reduce, if any) and there "
            "is no strategy to choose. docs/training.md has the few lines that let Atoll train it"
        )


def _imports(path: Path, seen: set[Path]) -> Iterator[set[str]]:
    """Yield the modules that a script imports, and those that its own modules beside it import. A file that cannot be
    read counts as using Atoll: running it says what is wrong with it."""
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        yield {"atoll"}
        return
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    yield {name.partition(".")[0] for name in names}
    for name in names:
        beside = path.parent.joinpath(*name.split("."))
        for own in (beside.with_suffix(".py"), beside / "__init__.py"):
            if own.is_file() and own not in seen:
                yield from _imports(own, seen)


def _nodes(context: typer.Context, *, by_hand: bool) -> ListNodesReply | None:
    """Ask the controller for its nodes; None without one that was named, and for links by hand."""
    root = context.find_root()
    source = root.get_parameter_source("controller")
    named = source is not None and source.name != "DEFAULT"
    if by_hand and not named:
        return None
    options: connection.Options = root.obj
    if not named:
        options = connection.Options(options.controllers, options.ca, options.certificate, options.key, LOOK_S)
    try:
        reply = connection.described(options).run(lambda client: client.nodes())
    except ControllerUnreachable:
        if named:
            raise
        return None
    if not _devices(reply):
        raise BadInput("the controller has no connected device. Start agents first, or give --bandwidth by hand")
    return reply


def _devices(nodes: ListNodesReply | None) -> int:
    return sum(len(node.devices) for node in nodes.nodes if node.connected and not node.volunteer) if nodes else 0


def _devices_of_own_kind(nodes: ListNodesReply | None) -> int:
    """Return how many devices of the cluster are of this machine's kind, on which a job runs; all if none is."""
    from atoll.agent.telemetry.devices import find_devices

    if nodes is None:
        return 0
    kind = find_devices()[0].kind
    devices = [d for node in nodes.nodes if node.connected and not node.volunteer for d in node.devices]
    return sum(device.kind == kind for device in devices) or len(devices)


def _measured(script: Path, args: Sequence[str], workers: int) -> MeasuredScript:
    from atoll.profiling import advice
    from atoll.profiling.trials import Command, ScriptFailed

    terminal.note(f"running some steps of {script} in one worker on this machine")
    with tempfile.TemporaryDirectory(prefix="atoll-advise-") as folder:
        try:
            return advice.measured(Command(script=script, args=tuple(args), env={}, logs=Path(folder)), workers)
        except ScriptFailed as error:
            for line in error.last_lines:
                terminal.note(f"  | {terminal.printable(line)}")
            raise ScriptFailed(str(error).partition(". Its output")[0], ()) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _cluster(
    nodes: ListNodesReply | None,
    script: MeasuredScript,
    workers: int,
    by_hand: tuple[float, float] | None,
    islands: int | None,
) -> AdvisedCluster:
    from atoll.profiling import advised_clusters

    if nodes is None:
        return advised_clusters.by_hand(workers, by_hand, islands or 2)
    rate = asyncio.run(advised_clusters.own_rate(script.device)) if script.timed else 0.0
    return advised_clusters.of_nodes(nodes.nodes, workers, script.device, rate, by_hand)


def _bandwidth_bps(text: str) -> float:
    """Read '100M', '1 Gbit/s' or '250' (Mbit/s)."""
    found = _BANDWIDTH.fullmatch(text.strip())
    value = _number(found.group(1)) * _UNITS[found.group(2).lower()] if found else 0.0
    if not 1 <= value <= 1e15:
        raise BadInput(f"--bandwidth {text!r} is no bandwidth. Give bits a second: 100M, 1G or 250k")
    return value


def _seconds(text: str) -> float:
    """Read '40ms', '0.04s' or '40' (milliseconds)."""
    found = _TIME.fullmatch(text.strip())
    unit = {"s": 1.0, "us": 1e-6, "µs": 1e-6}.get((found.group(2) or "ms").lower(), 1e-3) if found else 0.0
    value = _number(found.group(1)) * unit if found else -1.0
    if not 0 <= value <= 60:
        raise BadInput(f"--rtt {text!r} is no time of at most 60 s. Give 40ms or 0.04s")
    return value


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return -1.0
