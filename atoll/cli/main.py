"""The `atoll` command: what it offers, and the options that all of it shares."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands import (
    certs,
    checkpoints,
    daemons,
    dashboard,
    doctor,
    down,
    export,
    install_etcd,
    job_options,
    jobs,
    metrics,
    plan,
    profile,
    relay,
    remove,
    restore,
    resume,
    simulate,
    strategy_options,
    streams,
    submit,
    top,
    trace,
    up,
)
from atoll.cli.group import AtollGroup
from atoll.cli.render import terminal
from atoll.host.ports import DEFAULT_ADDRESS

app = typer.Typer(
    name="atoll",
    cls=AtollGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: atoll up --agents 3, then atoll submit train.py --workers 3 -f",
)


_HELP: Final = (
    "Train one PyTorch model across islands of unequal devices.\n\n"
    "Exit codes: 0 ok, 1 job failed, 2 bad input, 3 controller unreachable, 4 not allowed, 5 no feasible plan, "
    "6 job cancelled, 124 timeout, 130 interrupted."
)


@app.callback(invoke_without_command=True, help=_HELP)
def root(
    context: typer.Context,
    *,
    controller: Annotated[
        str, typer.Option(envvar="ATOLL_CONTROLLER", metavar="HOST:PORT[,...]", help="Whom to ask; any that leads.")
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[
        Path | None, typer.Option(help="The cluster's CA. ATOLL_TLS_DIR names a folder with ca.pem, cert.pem, key.pem.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to look for a leading controller.")
    ] = 10.0,
    show_version: Annotated[bool, typer.Option("--version", help="Print Atoll's version.")] = False,
) -> None:
    """Keep the global options for the command that follows."""
    if show_version:
        version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit(2)
    context.obj = connection.Options(controller, tls_ca, tls_cert, tls_key, timeout)


def version(as_json: jobs.Json = False) -> None:
    """Print Atoll's version."""
    from importlib.metadata import version as installed

    if as_json:
        terminal.print_json({"version": installed("atoll")})
    else:
        print(installed("atoll"))


_RUN, _SEE, _KEEP = "Run", "See", "Keep"
app.command(rich_help_panel=_RUN)(up.up)
app.command(rich_help_panel=_RUN)(down.down)
app.command(rich_help_panel=_RUN, cls=job_options.JobCommand)(submit.submit)
app.command(rich_help_panel=_RUN)(resume.resume)
app.command(rich_help_panel=_RUN, cls=job_options.JobCommand)(restore.restore)
app.command(rich_help_panel=_RUN)(profile.profile)
app.command(rich_help_panel=_RUN, cls=strategy_options.AdjustCommand)(jobs.adjust)
app.command(rich_help_panel=_RUN)(jobs.plans)
app.command(rich_help_panel=_RUN)(jobs.cancel)
app.command(rich_help_panel=_RUN)(daemons.controller)
app.command(rich_help_panel=_RUN)(daemons.agent)
app.command(rich_help_panel=_RUN)(relay.relay)
app.command(rich_help_panel=_SEE)(jobs.jobs)
app.command(rich_help_panel=_SEE)(top.top)
app.command(rich_help_panel=_SEE)(jobs.status)
app.command(rich_help_panel=_SEE)(streams.logs)
app.command(rich_help_panel=_SEE)(streams.events)
app.command(rich_help_panel=_SEE)(checkpoints.checkpoints)
app.command(rich_help_panel=_SEE)(metrics.metrics)
app.command(rich_help_panel=_SEE)(trace.trace)
app.command(rich_help_panel=_SEE)(jobs.nodes)
app.command(rich_help_panel=_SEE)(dashboard.dashboard)
app.command(rich_help_panel=_SEE)(plan.plan)
app.command(rich_help_panel=_SEE)(simulate.simulate)
app.command(rich_help_panel=_KEEP)(export.export)
app.command(rich_help_panel=_KEEP)(remove.rm)
app.command(rich_help_panel=_KEEP)(doctor.doctor)
app.command(rich_help_panel=_KEEP)(install_etcd.install_etcd)
app.add_typer(certs.app, name="certs", rich_help_panel=_KEEP)
app.command(rich_help_panel=_KEEP)(version)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `atoll` and `python -m atoll.cli.main`.

    A shell without job control starts what has an `&` with SIGINT ignored, as many CI systems do. Restore it, so that
    `kill -INT` and Ctrl-C end the command, and children do not inherit the ignored signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app(args)


if __name__ == "__main__":
    main()
