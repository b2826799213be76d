"""The help of every command: groups, panels, sentences, defaults; and the options of strategies, which come from the
chosen one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from atoll.cli.commands.options import PANELS
from atoll.cli.main import app
from atoll.jobs.job_spec import JobSpec
from atoll.strategies import registry

ROOT = typer.main.get_command(app)
GROUPS = ("Start", "Jobs", "Watch", "Cluster", "Research")
OF_A_JOB = ("run", "submit", "restore")
"""Commands with the options of a job."""

FRAGMENT = re.compile(
    r"(At|As|Also|Else|For|From|How|In|Of|On|Only|Those|To|What|Where|Whether|Which|Who|Whom|Whose|With|Without)\b"
    r"|(Choose|Let the controller choose) the (every|staleness|gradients)\b"
)
"""Beginnings of help texts that are no sentences. `Of a step` is one of a noun that is elsewhere."""


def commands(group: Any = ROOT, path: str = "atoll") -> Iterator[tuple[str, Any]]:
    """Yield every command below a group, with what one types for it."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


def params_of(command: Any, *args: str) -> list[Any]:
    return [p for p in command.get_params(context_of(command, *args)) if not getattr(p, "hidden", False)]


def context_of(command: Any, *args: str) -> Any:
    return command.make_context(command.name, list(args), resilient_parsing=True)


def helps(runner: CliRunner) -> Iterator[tuple[str, str]]:
    yield "atoll", runner.invoke(app, ["--help"], terminal_width=100).stdout
    for path, _ in commands():
        result = runner.invoke(app, [*path.split()[1:], "--help"], terminal_width=100)
        assert result.exit_code == 0, path
        yield path, result.stdout


COMMANDS = dict(commands())
ALL = {"atoll": ROOT, **COMMANDS}


def test_help_of_every_command_is_shown_without_types(runner: CliRunner) -> None:
    """Flags have no type beside them, values a name of what to give."""
    for path, text in helps(runner):
        assert path in text
        assert re.findall(r"<[a-z\[\]]+>|BOOLEAN|TEXT\b", text) == [], path
        assert "(dynamic)" not in text, path


@pytest.mark.parametrize("path", ALL)
def test_every_help_text_is_a_sentence(path: str) -> None:
    """Capital, full stop, no fragment; the first line of a command is one short sentence."""
    texts = {param.opts[0]: param.help or "" for param in params_of(ALL[path])}
    if path == "atoll adjust":
        assert set(texts) > {"--density", "--sparsity", "--gradients"}
    summary = (ALL[path].help or "").partition("\n\n")[0]
    for what, text in {**texts, "the command": summary}.items():
        assert re.fullmatch(r"[A-Z0-9`].*\.", " ".join(text.split())), f"{path}: {what}: {text!r}"
        assert not FRAGMENT.match(text), f"{path}: {what}: {text!r}"
    assert "\n" not in summary, f"{path}: its summary has two lines"
    assert summary.count(". ") == 0, f"{path}: its summary has two sentences"


@pytest.mark.parametrize("strategy", registry.strategies())
def test_settings_of_a_strategy_are_options_with_sentences_and_defaults(strategy: str) -> None:
    """`atoll submit --strategy NAME --help` has every setting of NAME, and none of another strategy."""
    command, settings = COMMANDS["atoll submit"], registry.find(strategy).settings.model_fields
    common = {param.opts[0] for param in params_of(command)}
    made = {param.opts[0]: param for param in params_of(command, "--strategy", strategy) if param.opts[0] not in common}
    own = {f"--{name.replace('_', '-')}": field for name, field in settings.items()}
    adapted = {f"--adapt-{name}" for name in registry.find(strategy).plan_parameters.adjustable()}
    assert set(made) == set(own) | adapted
    for name, field in own.items():
        assert made[name].rich_help_panel == "Strategy"
        assert re.fullmatch(r"[A-Z].*\.", made[name].help), made[name].help
        assert not FRAGMENT.match(made[name].help)
        assert made[name].default == (str(field.default).lower() if field.annotation is bool else field.default)
    assert {made[name].rich_help_panel for name in adapted} <= {"Adapt"}


def test_the_shown_options_follow_the_chosen_strategy(runner: CliRunner) -> None:
    plain = runner.invoke(app, ["submit", "--help"]).stdout
    assert "--strategy NAME --help" in " ".join(re.sub(r"[│\n]", " ", plain).split())
    for args in (["--strategy", "local-steps", "--help"], ["--help", "--strategy=local-steps"]):
        shown = runner.invoke(app, ["submit", "train.py", *args]).stdout
        assert "--density" in shown
        assert "--sparsity" not in shown
        assert "[default: 0.2]" in shown
    assert not {"--density", "--sparsity"} & set(re.findall(r"--[a-z-]+", plain))
    after_the_script = runner.invoke(app, ["submit", "--help", "train.py", "--", "--strategy", "local-steps"]).stdout
    assert "--density" not in after_the_script


def test_adjust_shows_the_settings_of_each_strategy_in_its_panel(runner: CliRunner) -> None:
    shown = runner.invoke(app, ["adjust", "--help"]).stdout
    assert re.search(r"Strategy local-steps ─.*--density.*--every.*--staleness.*--gradients", shown, re.DOTALL)
    assert re.search(r"Strategy stale-sparse ─.*--sparsity", shown, re.DOTALL)


def test_every_command_is_in_one_of_the_groups(runner: CliRunner) -> None:
    groups = [command.rich_help_panel for command in ROOT.commands.values()]  # type: ignore[attr-defined]
    assert list(dict.fromkeys(groups)) == list(GROUPS)
    shown = runner.invoke(app, ["--help"]).stdout
    assert re.findall(r"╭─ (\w+) ─", shown) == ["Options", *GROUPS]
    assert COMMANDS["atoll plans"].rich_help_panel == "Watch"


def test_every_listing_can_be_had_as_json() -> None:
    live = {"atoll top", "atoll dashboard"}
    listings = {path for path, command in COMMANDS.items() if command.rich_help_panel == "Watch"} - live
    listings |= {
        f"atoll {name}" for name in ("nodes", "checkpoints", "doctor", "version", "decide", "simulate", "advise")
    }
    assert [path for path in sorted(listings) if "--json" not in {p.opts[0] for p in params_of(COMMANDS[path])}] == []


@pytest.mark.parametrize("name", OF_A_JOB)
def test_every_option_of_a_job_is_in_one_of_the_panels(runner: CliRunner, name: str) -> None:
    for strategy in registry.strategies():
        params = params_of(COMMANDS[f"atoll {name}"], "--strategy", strategy)
        options = [param for param in params if param.param_type_name == "option"]
        assert {param.rich_help_panel for param in options} <= set(PANELS)
    shown = re.findall(r"╭─ (\w+) ─", runner.invoke(app, [name, "--help"]).stdout)
    assert shown == ["Arguments", *PANELS]


def test_defaults_of_a_job_are_shown_but_not_those_of_a_restored_one(runner: CliRunner) -> None:
    shown = {p.opts[0]: p for p in params_of(COMMANDS["atoll submit"]) if p.opts[0].startswith("--")}
    assert shown["--checkpoint-every"].default == 200
    assert shown["--strategy"].default == JobSpec.model_fields["strategy"].default
    assert (shown["--workers"].default, shown["--split"].default) == (1, "auto")
    assert "[default: 1 to all devices]" in runner.invoke(app, ["run", "--help"]).stdout
    assert "[default: 200]" not in runner.invoke(app, ["restore", "--help"]).stdout


def test_no_option_has_two_meanings() -> None:
    """`--timeout` and the other global options stand after every command, so none has one of its own. Settings of
    strategies have other names than the options of a job."""
    globally = {name for param in params_of(ROOT) for name in param.opts} - {"--help", "-h"}
    assert "--timeout" in globally
    for path, command in COMMANDS.items():
        names = [name for param in command.get_params(context_of(command)) for name in param.opts]
        assert not globally.intersection(names), path
        assert len(names) == len(set(names)), path


def test_a_setting_has_the_type_that_its_strategy_gives_it(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`momentum` is a word of stale-sparse and a number of compressed, also where the job file names the strategy."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for strategy, value, wrong in (("compressed", "0.9", "lazy"), ("stale-sparse", "lazy", "0.9")):
        Path("job.toml").write_text(f'script = "train.py"\nstrategy = "{strategy}"\n')
        for named in (("--config", "job.toml"), ("train.py", "--strategy", strategy)):
            call = ("--controller", "127.0.0.1:1", "--timeout", "0.1", "submit", *named, "--momentum")
            assert runner.invoke(app, [*call, value]).exit_code == 3
            assert runner.invoke(app, [*call, wrong]).exit_code == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--strategy", "dense", "--density", "0.1"), "`--density` belongs to strategy local-steps or compressed; you"),
        (
            ("--strategy", "dense", "--sparsity", "0.9"),
            "`--sparsity` belongs to strategy stale-sparse; you chose dense",
        ),
        (("--sparsity", "0.9"), "`--sparsity` belongs to strategy stale-sparse; you chose none. Say --strategy"),
        (("--adapt-every",), "`--adapt-every` belongs to strategy local-steps; you chose none. Say --strategy"),
        (
            ("--strategy", "zen", "--error-feedback", "false"),
            "`--error-feedback` belongs to strategy stale-sparse; you chose",
        ),
        (("--strategy", "local-steps", "--density", "2"), "local_steps.density = 2.0 is wrong: it should be less than"),
        (
            ("--strategy", "local-steps", "--values", "int3"),
            "local_steps.values = 'int3' is wrong: it should be 'int2'",
        ),
        (("--strategy", "ring", "--density", "0.1"), "strategy = 'ring' is not known. Use one of auto"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    runner: CliRunner, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    (script := tmp_path / "train.py").touch()
    result = runner.invoke(app, ["submit", str(script), *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 1


def test_completion_offers_the_settings_of_the_chosen_strategy(runner: CliRunner) -> None:
    def completed(words: str) -> list[str]:
        env = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return runner.invoke(app, [], env={**os.environ, **env}, prog_name="atoll").stdout.split()

    assert completed("atoll submit --strategy local-steps --de") == ["--density"]
    assert completed("atoll submit --de") == []
    assert completed("atoll submit --strategy local") == ["local-steps"]
