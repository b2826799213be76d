"""atoll controller, agent: the daemons in the foreground, until SIGTERM, SIGINT or SIGHUP."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from atoll.cli import connection
from atoll.cli.render import terminal
from atoll.errors import AtollError, BadInput
from atoll.ports import DEFAULT_ADDRESS


def controller(
    context: typer.Context,
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to be reached.")] = DEFAULT_ADDRESS,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="What others are told, where it differs from --listen.")
    ] = None,
    etcd: Annotated[
        str | None, typer.Option(metavar="HOST:PORT[,...]", help="An etcd cluster; a private etcd where left out.")
    ] = None,
    etcd_ca: Annotated[Path | None, typer.Option(help="CA of that etcd, PEM.")] = None,
    etcd_cert: Annotated[Path | None, typer.Option(help="Certificate towards that etcd, PEM.")] = None,
    etcd_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    data_dir: Annotated[Path, typer.Option(help="Private etcd and logs of workers.")] = Path("~/.atoll/controller"),
    token_file: Annotated[
        Path | None, typer.Option(help="What agents must present: `atoll certs init` makes it.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Without certificates beyond this machine, to etcd too: anyone may run code."),
    ] = False,
) -> None:
    """Run a controller: the daemon on the head node. Several may run on one etcd; one leads."""
    reached = connection.of(context)  # before gRPC is imported, which reads its variables then
    settings = need("atoll.controller.settings", "controller")
    daemon = need("atoll.controller.daemon", "controller")
    chosen = settings.ControllerSettings(
        listen=listen,
        advertise=advertise,
        etcd=tuple(part.strip() for part in etcd.split(",")) if etcd else (),
        etcd_tls=_etcd_tls(etcd_ca, etcd_cert, etcd_key),
        data_dir=data_dir.expanduser().absolute(),
        tls=reached.tls,
        insecure=insecure,
        token_file=token_file.expanduser().absolute() if token_file else None,
    )
    run_until_told(lambda stop: daemon.serve(chosen, stop))


def agent(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option(help="Of this node.", show_default="the host's name")] = None,
    island: Annotated[str, typer.Option(help="Nodes with a fast network between them share one.")] = "default",
    rack: Annotated[str, typer.Option(help="What fails together inside the island.", show_default="none")] = "",
    address: Annotated[
        str | None, typer.Option(help="Where other nodes reach this one.", show_default="found out")
    ] = None,
    state_dir: Annotated[Path, typer.Option(help="Code, logs and sockets of workers.")] = Path("~/.atoll/agent"),
    jobs_dir: Annotated[
        Path | None, typer.Option(help="Checkpoints; a folder that all nodes share lets any of them go on.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The cluster's join token.")] = None,
    speed: Annotated[
        float, typer.Option(help="Slow the devices down to this part, (0, 1]: for tests and demos.")
    ] = 1.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each worker.", show_default="cores / devices")
    ] = None,
) -> None:
    """Run an agent: the daemon on each machine with devices. It dials out and comes back for ever."""
    reached = connection.of(context)
    token = read_token(token_file) if token_file else ""
    settings = need("atoll.agent.settings", "agent")
    daemon = need("atoll.agent.daemon", "agent")
    chosen = settings.AgentSettings(
        controllers=reached.controllers,
        name=name or socket.gethostname().partition(".")[0],
        island=island,
        rack=rack,
        address=address,
        state_dir=state_dir.expanduser().absolute(),
        jobs_dir=jobs_dir.expanduser().absolute() if jobs_dir else None,
        tls=reached.tls,
        token=token,
        speed=speed,
        threads=threads,
    )
    run_until_told(lambda stop: daemon.serve(chosen, stop))


def need(module: str, extra: str) -> ModuleType:
    """Import a part of Atoll whose dependencies are optional. Raises BadInput with the command that installs them."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "atoll":
            raise  # a part of Atoll itself is missing: no extra brings that back
        raise BadInput(f"{error.name} is not installed. pip install 'atoll[{extra}]'") from error


def read_token(path: Path) -> str:
    """The join token in `path`. Raises BadInput where it cannot be read or others may read it."""
    try:
        mode = path.expanduser().stat().st_mode
        token = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"token file {path} cannot be read: {error}. `atoll certs init` makes one") from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadInput(f"token file {path} may be read by others. chmod 600 {path}")
    if not token or len(token) > 4096:
        raise BadInput(f"token file {path} holds {len(token)} characters. Copy it from where `atoll certs init` ran")
    return token


def run_until_told(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Serve until SIGTERM, SIGINT or, where nobody asked to ignore it, SIGHUP; a second signal ends the process at
    once."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )

    async def running() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told(number: signal.Signals) -> None:
            if stop.is_set():
                terminal.note(f"second {number.name}: ending at once")
                os._exit(128 + number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
                loop.add_signal_handler(number, told, number)
        await serve(stop)

    gc.freeze()  # what was imported stays: full collections, tens of milliseconds over all of it, leave it out
    try:
        asyncio.run(running())
    except* AtollError as errors:
        raise innermost(errors) from errors


def innermost(errors: BaseExceptionGroup[AtollError]) -> AtollError:
    """The first cause inside what a task group raised."""
    first = errors.exceptions[0]
    return innermost(first) if isinstance(first, BaseExceptionGroup) else first


def _etcd_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> object:
    from atoll.rpc import Tls

    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise BadInput("--etcd-ca, --etcd-cert and --etcd-key belong together. Give all three")
    return Tls(ca, certificate, key)
