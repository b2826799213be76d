"""The `atoll` command: what it offers, and the options that all of it shares."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.core import TyperCommand

from atoll.cli.cluster import connection
from atoll.cli.commands import (
    advise,
    certs,
    checkpoints,
    daemons,
    doctor,
    jobs,
    options,
    profile,
    records,
    run,
    simulate,
    submit,
    up,
)
from atoll.cli.group import AtollGroup
from atoll.cli.render.help import TidyCommand, option
from atoll.host.ports import DEFAULT_ADDRESS

app = typer.Typer(
    name="atoll",
    cls=AtollGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


_HELP: Final = (
    "Train one PyTorch model across islands of unequal devices.\n\n"
    "Begin with `atoll run train.py`: it trains your script on all devices there are, and starts a cluster on this "
    "machine if there is none.\n\n"
    "Exit codes: 0 ok, 1 job failed, 2 bad input, 3 controller unreachable, 4 not allowed, 5 no feasible plan, "
    "6 job cancelled, 124 timeout, 130 interrupted."
)


@app.callback(invoke_without_command=True, help=_HELP)
def root(
    context: typer.Context,
    *,
    controller: Annotated[
        str,
        typer.Option(
            envvar="ATOLL_CONTROLLER",
            metavar="HOST:PORT[,...]",
            help="Connect to this controller; of several, to the one that leads.",
        ),
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[
        Path | None,
        option(
            "FILE",
            "Trust this authority of the cluster. ATOLL_TLS_DIR names a folder with ca.pem, cert.pem and key.pem.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, option("FILE", "Connect with this certificate.")] = None,
    tls_key: Annotated[Path | None, option("FILE", "Use this private key of the certificate.")] = None,
    timeout: Annotated[float, option("SECONDS", "Give up after this time without a leading controller.")] = 10.0,
    show_version: Annotated[bool, typer.Option("--version", help="Print Atoll's version.")] = False,
) -> None:
    """Keep the global options for the command that follows."""
    if show_version:
        doctor.version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit
    context.obj = connection.Options(controller, tls_ca, tls_cert, tls_key, timeout)


_GROUPS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Start": (run.run, submit.submit, advise.advise, up.up, up.down, doctor.doctor),
    "Jobs": (
        *(jobs.adjust, jobs.cancel, submit.resume, submit.restore),
        *(checkpoints.checkpoints, checkpoints.export, jobs.rm),
    ),
    "Watch": (
        *(jobs.jobs, jobs.status, records.logs, jobs.top, daemons.dashboard),
        *(records.events, jobs.plans, records.metrics, records.trace),
    ),
    "Cluster": (jobs.nodes, daemons.controller, daemons.agent, daemons.relay, doctor.install_etcd, doctor.version),
    "Research": (profile.profile, simulate.simulate, simulate.decide),
}
"""The commands by their panel in the help text; those that a new user meets first stand first."""
_WITH_MADE_OPTIONS: Final[dict[Callable[..., None], type[TyperCommand]]] = {
    run.run: options.RunCommand,
    submit.submit: options.JobCommand,
    submit.restore: options.RestoreCommand,
    jobs.adjust: options.AdjustCommand,
}
_CONNECTS: Final = "--controller, --timeout and the --tls options of `atoll --help` may follow this command too."
for group, commands in _GROUPS.items():
    for command in commands:
        epilog = _CONNECTS if "context" in inspect.signature(command).parameters else None
        # Typer keeps the breaks inside a paragraph.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
        made = _WITH_MADE_OPTIONS.get(command, TidyCommand)
        app.command(rich_help_panel=group, cls=made, help=text, epilog=epilog)(command)
app.add_typer(certs.app, name="certs", rich_help_panel="Cluster")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `atoll` and `python -m atoll.cli.main`.

    A shell without job control starts what has an `&` with SIGINT ignored, as many CI systems do. Restore it, so that
    `kill -INT` and Ctrl-C end the command, and children do not inherit the ignored signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app(args)


if __name__ == "__main__":
    main()
