"""atoll run: train a script on the devices there are, on a cluster that it starts here if none is there."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from atoll.cli.cluster import background, connection
from atoll.cli.cluster.background import ClusterOptions, RunningCluster
from atoll.cli.cluster.connection import Connection
from atoll.cli.cluster.local_cluster import DASHBOARD_ADDRESS, DATA_DIR, dashboard_address, last_line
from atoll.cli.commands import options, submit
from atoll.cli.commands.daemons import need, need_linux
from atoll.cli.commands.submit import Detached, Send
from atoll.cli.commands.up import MAX_AGENTS, start_in_background
from atoll.cli.render import shortage, terminal
from atoll.errors import BadInput, Conflict, ControllerUnreachable
from atoll.host.ports import DEFAULT_ADDRESS, DEFAULT_PORT

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient

_CONNECT_WITHIN_S: Final = 2.0
_PAGE_WITHIN_S: Final = 10.0


def run(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Training script. Its own arguments follow after `--`.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    *,
    config: options.Config = None,
) -> None:
    """Train a script on all devices of the cluster, and follow it to its end.

    atoll run train.py

    atoll run train.py --workers 2 -- --lr 0.1

    If no controller answers at the default address, this starts one here in the background, with an agent;
    `atoll down` ends them. Ctrl-C asks whether to detach from the job or to cancel it.
    """
    flags = submit.flags_of(context, script, args)
    spec, bundle = submit.prepare(config, flags)
    is_asked = "workers" in flags or (config is not None and _names_workers(config))
    reached = connection.of(context)
    here = _cluster_here(context, reached, spec.min_workers if is_asked else 1)

    async def send(client: AsyncClient) -> str:
        if not is_asked:
            devices = shortage.usable_devices((await client.nodes()).nodes)
            spec.min_workers, spec.max_workers = 1, max(1, devices)
        return await client.submit(spec, bundle.data)

    page = dashboard_address(_data()) if here and reached.controllers == (here.listen,) else ""
    try:
        reached.run(lambda client: _train(client, send, page))
    except Detached as detached:
        _detach_or_cancel(reached, detached)
    except ControllerUnreachable as error:
        if here is not None and background.running(_data()) is None:
            log = background.log_of(_data())
            raise ControllerUnreachable(
                f"this machine's cluster has ended: {last_line(log)}. Its log: {log}"
            ) from error
        raise


def _names_workers(config: Path) -> bool:
    from atoll.client import job_file

    return "workers" in job_file.load(config).model_fields_set


def _data() -> Path:
    return DATA_DIR.expanduser().absolute()


def _is_named(context: typer.Context) -> bool:
    """Return True if the user named the controller, by option or by variable."""
    source = context.find_root().get_parameter_source("controller")
    return source is not None and source.name != "DEFAULT"


def _cluster_here(context: typer.Context, reached: Connection, workers: int) -> RunningCluster | None:
    """Return this machine's own cluster, if it has one. Start it if the user named no controller and none is there.

    workers: what the job asks for at least; on a machine without GPUs, that many agents are started. Raises
    Conflict if the machine's cluster has another address, ControllerUnreachable if another program has the default
    one, and what starting a cluster raises."""
    if sys.platform != "linux":
        if not _is_named(context):
            need_linux()
        return None
    found = background.running(_data())
    if not _is_named(context):
        if found is not None and found.listen != DEFAULT_ADDRESS:
            raise Conflict(
                f"this machine's cluster is at {found.listen}, not at {DEFAULT_ADDRESS}. "
                f"Name it with --controller {found.listen}"
            )
        if found is None and _listens(DEFAULT_ADDRESS):
            _check_controller(reached)
            return None
        agents = len(found.speeds) if found else 1 if _has_gpu() else min(workers, MAX_AGENTS)
        if found is None:
            terminal.note(
                f"no controller at {DEFAULT_ADDRESS}: starting one here, with {agents} agent{'s' * (agents > 1)}. "
                "They stay in the background; `atoll down` ends them"
            )
        start_in_background(_data(), ClusterOptions(DEFAULT_ADDRESS, (1.0,) * agents), exact=False)
        found = background.running(_data())
    return found


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_WITHIN_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # something is there, and says in what follows what is wrong with it
    return True


def _check_controller(reached: Connection) -> None:
    """Raises ControllerUnreachable if what listens at the default address is no controller."""
    try:
        reached.run(lambda client: client.nodes())
    except ControllerUnreachable as error:
        other = f"127.0.0.1:{DEFAULT_PORT + 1}"
        raise ControllerUnreachable(
            f"the program that listens on {DEFAULT_ADDRESS} does not answer as a controller. End it, or use another "
            f"port: `atoll up --detach --listen {other}`, then `atoll run` with --controller {other}"
        ) from error


def _has_gpu() -> bool:
    need("atoll.agent.daemon", "agent")
    from atoll.agent.telemetry.devices import find_devices

    return any(device.kind == "cuda" for device in find_devices())


async def _train(client: AsyncClient, send: Send, page: str) -> None:
    """Submit and follow; print the page's address. page: of the cluster's own page; empty: serve one meanwhile."""
    async with _served(client, page) as address:

        async def send_and_name_page(client: AsyncClient) -> str:
            job_id = await send(client)
            if address:
                terminal.note(f"dashboard: {address}")
            return job_id

        await submit.submit_and_follow(client, send_and_name_page, on_ctrl_c=_ON_CTRL_C)


_ON_CTRL_C: Final = "Ctrl-C: detach from the job, or cancel it"


@asynccontextmanager
async def _served(client: AsyncClient, page: str) -> AsyncIterator[str]:
    """Yield the address of a page of this cluster; empty if the page is not installed here.

    Without `page` this process serves one for as long as it is inside, with the rights of its user."""
    if page:
        yield page
        return
    try:
        server = need("atoll.dashboard.serve", "dashboard")
        try:
            bound = server.listening(DASHBOARD_ADDRESS)
        except BadInput:  # the port is taken
            bound = server.listening(DASHBOARD_ADDRESS.rpartition(":")[0] + ":0")
    except BadInput:
        yield ""
        return
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(client, bound, ready.set_result, stop), name="dashboard")
    try:
        yield await asyncio.wait_for(ready, _PAGE_WITHIN_S)
    finally:
        stop.set()
        await asyncio.gather(serving, return_exceptions=True)


def _detach_or_cancel(reached: Connection, detached: Detached) -> NoReturn:
    """End this command as its user wants after Ctrl-C. Raises what ends it: typer.Exit, JobCancelled, JobFailed."""
    if _wants_to_cancel(str(detached)):
        with suppress(Detached):
            reached.run(lambda client: _cancel(client, str(detached)))
            raise typer.Exit  # it was done before it could be cancelled
    raise submit.left_alone(detached)


def _wants_to_cancel(job: str) -> bool:
    """Ask at a terminal whether to cancel a job. Ctrl-C, the end of input, and no terminal mean to detach."""
    if not (sys.stdin.isatty() and terminal.is_watched(sys.stderr)):
        return False
    with suppress(KeyboardInterrupt):
        while True:
            print(f"[d]etach from {job}, which goes on, or [c]ancel it? ", end="", file=sys.stderr)
            sys.stderr.flush()
            answer = sys.stdin.readline()
            if answer.strip().lower() in ("c", "cancel"):
                return True
            if not answer.endswith("\n") or answer.strip().lower() in ("", "d", "detach"):
                break
    if not answer.endswith("\n"):
        terminal.note("")
    return False


async def _cancel(client: AsyncClient, job: str) -> None:
    """Cancel a job and follow it to its end. Raises JobCancelled once it is over, Detached on Ctrl-C."""
    with suppress(Conflict):  # it has just ended
        await client.cancel(job)
    await submit.follow_to_its_end(client, job, None, as_json=False, on_ctrl_c="Ctrl-C detaches; the job is cancelled")
