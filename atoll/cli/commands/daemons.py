"""atoll controller, agent, relay, dashboard: in the foreground, until SIGTERM, SIGINT or SIGHUP."""

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
import webbrowser
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from atoll.cli.cluster import connection
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import AtollError, BadInput
from atoll.host.ports import DEFAULT_ADDRESS
from atoll.network.message_limits import MAX_SHARERS

if TYPE_CHECKING:
    from atoll.network.rpc import Tls


DATA_DIR: Final = Path("~/.atoll/controller")
STATE_DIR: Final = Path("~/.atoll/agent")
YOUNG: Final = 50_000
"""New objects that are held at one moment before the youngest are looked through. With the default of 700 every pass of
the controller over 8,000 workers set off dozens of collections, a third of its time: all that it makes it lets go of
again, without cycles."""


def controller(
    context: typer.Context,
    *,
    listen: Annotated[str, option("HOST:PORT", "Listen at this address.")] = DEFAULT_ADDRESS,
    advertise: Annotated[str | None, option("HOST:PORT", "Tell others this address.", show_default="--listen")] = None,
    etcd: Annotated[
        str | None, option("HOST:PORT[,...]", "Keep state in this etcd cluster.", show_default="a private etcd")
    ] = None,
    etcd_ca: Annotated[Path | None, option("FILE", "Trust this authority of the etcd cluster (PEM).")] = None,
    etcd_cert: Annotated[Path | None, option("FILE", "Connect to etcd with this certificate (PEM).")] = None,
    etcd_key: Annotated[Path | None, option("FILE", "Use this private key of the certificate (PEM).")] = None,
    data_dir: Annotated[Path, option("DIR", "Keep the private etcd and workers' logs in this folder.")] = DATA_DIR,
    token_file: Annotated[
        Path | None, option("FILE", "Require this join token of agents; `atoll certs init` makes it.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other machines, and use etcd, without certificates. Anyone may run code."
        ),
    ] = False,
    relay: Annotated[
        str | None, option("HOST:PORT", "Send nodes behind NAT to this relay.", show_default="its own")
    ] = None,
    relay_secret_file: Annotated[Path | None, option("FILE", "Read the secret of that relay from this file.")] = None,
    metrics: Annotated[str | None, option("HOST:PORT", "Serve /metrics for Prometheus at this address.")] = None,
    dashboard: Annotated[
        str | None, option("HOST:PORT", "Serve the page of `atoll dashboard` at this address.")
    ] = None,
    dashboard_identity: Annotated[
        Path | None, option("DIR", "Give the page the client's certificate in this folder.")
    ] = None,
) -> None:
    """Run a controller, the daemon on the head node.

    Several controllers may share one etcd; one of them leads.
    """
    need_linux()
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
        relay=relay,
        relay_secret_file=relay_secret_file.expanduser().absolute() if relay_secret_file else None,
        metrics=metrics,
    )
    if dashboard is None:
        run_until_told(lambda stop: daemon.serve(chosen, stop))
        return
    server = need("atoll.dashboard.serve", "dashboard")
    identity = _page_identity(dashboard_identity, reached.tls)
    page = server.listening(dashboard, "--dashboard", reached.tls)
    beside = partial(server.beside_controller, page, identity, chosen.data_dir)
    run_until_told(lambda stop: daemon.serve(chosen, stop, beside))


def agent(
    context: typer.Context,
    *,
    name: Annotated[str | None, option("NAME", "Name this node.", show_default="the host's name")] = None,
    island: Annotated[str, option("NAME", "Put this node into the island of this name.", show_default="measured")] = "",
    rack: Annotated[str, option("NAME", "Name the rack, whose machines fail together.")] = "",
    address: Annotated[
        str | None, option("HOST", "Let other nodes reach this one here.", show_default="found out")
    ] = None,
    state_dir: Annotated[Path, option("DIR", "Keep code, logs and sockets of workers in this folder.")] = STATE_DIR,
    jobs_dir: Annotated[
        Path | None,
        option(
            "DIR",
            "Keep checkpoints in this folder. If all nodes share it, any of them can continue a job.",
            show_default="in --state-dir",
        ),
    ] = None,
    token_file: Annotated[Path | None, option("FILE", "Join with this token, the cluster's or a volunteer's.")] = None,
    behind_nat: Annotated[
        bool,
        typer.Option("--behind-nat", help="Link to other islands through the relay, since they cannot dial this node."),
    ] = False,
    volunteer: Annotated[
        bool,
        typer.Option(
            "--volunteer", help="Help jobs of strategy volunteer, and no others; this node may leave at any moment."
        ),
    ] = False,
    hours: Annotated[
        list[str] | None,
        option("HH:MM-HH:MM", "Help only in these hours of this machine's clock, as a volunteer; repeatable."),
    ] = None,
    pause: Annotated[
        str, option("COMMAND", "Pause while this command succeeds, as a volunteer; it runs every 2 s.")
    ] = "",
    uplink_mbps: Annotated[
        float | None, option("MBIT/S", "Answer with at most this bandwidth, as a volunteer.", show_default="all")
    ] = None,
    speed: Annotated[float, option("PART", "Use this part of the devices, above 0 and at most 1.")] = 1.0,
    share_gpu: Annotated[int | None, option("N", "Share each GPU among N agents.", min=2, max=MAX_SHARERS)] = None,
    threads: Annotated[
        int | None, option("N", "Give each worker N CPU threads.", min=1, show_default="cores / devices")
    ] = None,
    metrics: Annotated[str | None, option("HOST:PORT", "Serve /metrics for Prometheus at this address.")] = None,
) -> None:
    """Run an agent, the daemon on each machine with devices.

    It connects to the controller, and again after every interruption.
    """
    need_linux()
    reached = connection.of(context)
    token = read_token(token_file) if token_file else ""
    settings = need("atoll.agent.supervisor.settings", "agent")
    daemon = need("atoll.agent.daemon", "agent")
    owner = need("atoll.agent.supervisor.owner", "agent")
    name = name or socket.gethostname().partition(".")[0]
    chosen = settings.AgentSettings(
        controllers=reached.controllers,
        name=name,
        island=island,
        rack=rack,
        address=address,
        state_dir=state_dir.expanduser().absolute(),
        jobs_dir=jobs_dir.expanduser().absolute() if jobs_dir else None,
        tls=reached.tls,
        token=token,
        behind_nat=behind_nat,
        volunteer=volunteer,
        owner=owner.OwnersLimits(tuple(map(owner.Hours.parse, hours or ())), pause),
        uplink_bps=uplink_mbps * 1e6 if uplink_mbps is not None else None,
        speed=speed,
        share_gpu=share_gpu or 1,
        threads=threads,
        metrics=metrics,
    )
    run_until_told(lambda stop: daemon.serve(chosen, stop))


def need_linux() -> None:
    """Raises BadInput elsewhere, where an installation is a client's."""
    if sys.platform != "linux":
        raise BadInput("this runs on Linux alone. Here `atoll` is a client: name a cluster with --controller HOST:PORT")


def need(module: str, extra: str) -> ModuleType:
    """Import a part of Atoll that not every installation has. Raises BadInput with what brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "atoll.kernels._native":
            raise BadInput("this installation is a client without kernels. Install this platform's wheel") from error
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
    """Serve until one of stop_signals; a second one ends the process at once."""
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

        for number in stop_signals():
            loop.add_signal_handler(number, told, number)
        await serve(stop)

    tune_collector()
    try:
        asyncio.run(running())
    except* AtollError as errors:
        raise terminal.innermost(errors) from errors


def tune_collector() -> None:
    """Call once, when everything is imported: that stays, and full collections (tens of milliseconds) leave it out."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a command in order: SIGHUP only where it is not ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _page_identity(folder: Path | None, own: Tls | None) -> Tls | None:
    """Return the identity whose rights the page has. Raises BadInput if a controller with certificates would refuse
    it."""
    if own is None:
        return None
    if folder is None:
        raise BadInput(
            "--dashboard asks as a client, which needs a certificate: `atoll certs client DIR dashboard` makes one. "
            "Name its folder with --dashboard-identity"
        )
    from atoll.security.certificates import identity

    found = identity(folder.expanduser())
    found.check()
    return found


def _etcd_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> object:
    from atoll.network.rpc import Tls

    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise BadInput("--etcd-ca, --etcd-cert and --etcd-key belong together. Give all three")
    return Tls(ca, certificate, key)


def relay(
    *,
    listen: Annotated[str, option("HOST:PORT", "Listen for agents at this address.")] = "0.0.0.0:7701",
    secret_file: Annotated[
        Path,
        option("FILE", "Read the secret, at least 32 characters, from this file. The controller has the same secret."),
    ],
    metrics: Annotated[str | None, option("HOST:PORT", "Serve /metrics for Prometheus at this address.")] = None,
) -> None:
    """Run a relay, which joins links to nodes behind NAT.

    A controller starts a relay of its own; this command starts one on another machine.
    """
    need_linux()
    server = need("atoll.relay.server", "controller")
    exposition = need("atoll.telemetry.prometheus", "controller")
    if metrics is not None:
        exposition.check_address("metrics", metrics)
    chosen = server.Relay(server.read_secret(read_token(secret_file)))
    address = chosen.listen(listen)

    async def serve(stop: asyncio.Event) -> None:
        running = asyncio.create_task(chosen.run(), name="relay")
        running.add_done_callback(lambda _: stop.set())
        async with exposition.exposed(metrics, chosen.measures) as url:
            print(address, flush=True)
            logging.getLogger(__name__).info("relaying on %s%s", address, url and f", measurements on {url}")
            await stop.wait()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    run_until_told(serve)


def dashboard(
    context: typer.Context,
    *,
    listen: Annotated[
        str, option("HOST:PORT", "Serve the page at this address of this machine; port 0 takes any free one.")
    ] = "127.0.0.1:8265",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show jobs, curves, plans, nodes and links in a browser, until Ctrl-C.

    The page has the rights of your certificate. Keep the printed address to yourself: it holds a token.
    """
    reached = connection.of(context)
    server = need("atoll.dashboard.serve", "dashboard")
    page = server.listening(listen)

    def ready(address: str) -> None:
        print(address, flush=True)
        terminal.note("open this address in a browser; Ctrl-C ends it")
        if browser:
            webbrowser.open(address)

    async def serve(stop: asyncio.Event) -> None:
        async with reached.client() as client:
            await server.serve(client, page, ready, stop)

    run_until_told(serve)
