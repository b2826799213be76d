"""Adding a strategy is one folder and one line: a toy one is added to a copy of the registry, and all parts know it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from warm import WarmStock
from zmq_agent import FakeAgent

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).parent / "toy"
LINE = 'FOLDERS: Final = ("dense", "stale_sparse", "local_steps", "zen", "groups", "compressed", "volunteer")'
AT_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
import atoll.strategies

atoll.strategies.__path__ = [*atoll.strategies.__path__, {toy!r}]
spec = spec_from_file_location("atoll.strategies.registry", {registry!r})
atoll.strategies.registry = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(atoll.strategies.registry)
"""


@pytest.fixture
def with_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here on find the toy among the strategies."""
    registry = (ROOT / "strategies" / "registry.py").read_text()
    assert LINE in registry
    (tmp_path / "registry.py").write_text(registry.replace(LINE, LINE.replace(")", ', "toy")')))
    (tmp_path / "sitecustomize.py").write_text(
        AT_START.format(registry=str(tmp_path / "registry.py"), toy=str(TOY.parent))
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def python(code: str, *arguments: str) -> str:
    command, environment = [sys.executable, "-c", code, *arguments], {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def atoll(*commands: Sequence[str]) -> list[tuple[int, str]]:
    """Run them in one process. Returns the exit code of each, and what it printed."""
    said = python(
        """if True:
        import json
        import sys
        from typer.testing import CliRunner
        from atoll.cli.main import app
        done = [CliRunner().invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
        print(json.dumps([(one.exit_code, one.output) for one in done]))
        """,
        json.dumps(commands),
    )
    return [(code, output) for code, output in json.loads(said)]


@pytest.mark.usefixtures("with_toy")
def test_command_line_job_file_and_simulator_know_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    files = (
        (
            "strategy = 'toy'\n[toy]\nstrength = 2",
            "line 3: toy.strength = 2 is wrong: it should be less than or equal to 1",
        ),
        ("strategy = 'toy'\n[toy]\nstrenght = 1", "line 3: unknown field 'toy.strenght'. Did you mean 'strength'?"),
        ("[toy]\nstrength = 1", "strategy = 'auto' takes no toy settings. Leave them out, or say strategy = 'toy'"),
        ("[adapt]\nstrength = true", "adapt.strength = true: strategy = 'auto' has no strength to adapt"),
    )
    submits = []
    for number, (text, _) in enumerate(files):
        (job := tmp_path / f"job-{number}.toml").write_text(text)
        submits.append(("submit", str(tmp_path / "train.py"), "--config", str(job)))
    scenario = (ROOT / "examples" / "scenarios" / "cannikin-a.toml").read_text().replace("50_000", "2_000")
    scenario = scenario.replace('name = "cannikin-a"', 'name = "played"\nstrategy = "toy"')
    for strength in ("0.5", "5"):
        (tmp_path / f"{strength}.toml").write_text(f"{scenario}\n[toy]\nstrength = {strength}\n")
    simulations = [("simulate", str(tmp_path / f"{strength}.toml"), "--policy", "even") for strength in ("0.5", "5")]
    (_, submit), (_, adjust), (code, said), (wrong_code, why), *refused = atoll(
        ("submit", "--strategy", "toy", "--help"), ("adjust", "--help"), *simulations, *submits
    )
    assert code == 0, said
    assert (wrong_code, "toy" in why and "strength = 5" in why) == (2, True), why
    assert "volunteer, toy." in submit
    assert "Play so hard, 0 to 1." in submit
    assert "--adapt-strength" in submit
    assert "--strength" in adjust
    for (code, said), (_, wrong) in zip(refused, files, strict=True):
        assert (code, wrong in said) == (2, True), said


@pytest.mark.usefixtures("with_toy")
def test_controller_and_views_know_it() -> None:
    """A spec is checked and filled in, a plan carries its parameter, telemetry its metrics. Its scheduler answers a
    message, but none of an older run, and says something for the events. Its line of `atoll status` shows what came."""
    said = python(
        """if True:
        from types import SimpleNamespace

        from atoll.cli.render.views import strategy_line
        from atoll.controller.deciding.first import pinned_plan
        from atoll.controller.state.records import JobPins
        from atoll.controller.jobs.agents.progress import ProgressBoard
        from atoll.controller.jobs.agents.strategy_relay import StrategyRelay
        from atoll.controller.jobs.model.offline_profile import spec_from_wire
        from atoll.jobs.job_spec import to_wire
        from atoll.strategies import manual
        from atoll.controller.jobs.records.wire import plan_to_wire
        from atoll.controller.services.agents import answer_strategy
        from atoll.controller.services.checks import check_telemetry
        from atoll.controller.state.records import JobRecord, PlanRecord, RunMember, RunRecord
        from atoll.errors import BadInput
        from atoll.client.job_file import JobFile, from_spec, with_flags
        from atoll.v1 import agents_pb2, common_pb2, jobs_pb2

        flags = {"strategy": "toy", "settings.strength": 0.5, "adapt.strength": True}
        wire = with_flags(JobFile(), flags).to_spec("a.py")
        wire.code_sha256 = "ab" * 32
        spec = spec_from_wire(wire)
        print(spec.strategy, dict(spec.strategy_settings), spec.adapt.strategy_params)
        assert from_spec(to_wire(spec)).toy.strength == 0.5
        wire.strategy_settings = '{"strength":2}'
        try:
            spec_from_wire(wire)
        except BadInput as error:
            print(error)

        plan = PlanRecord(
            run=2, id=1, from_step=0, shares=(1.0, 1.0), planner="even", reason="", input="", output="",
            strategy_params={"strength": 0.5},
        )
        print(plan_to_wire(pinned_plan(plan, JobPins(strategy_params={"strength": 0.75}), 7)).strategy_params)

        members = tuple(
            RunMember(rank=r, node="ab"[r], device=0, node_rank=r, local_rank=0, local_world_size=1) for r in (0, 1)
        )
        job = JobRecord(id="toy-1", spec=spec, request_id="r")
        run = RunRecord(job="toy-1", run=2, members=members, master_address="h", master_port=1, began_unix_s=0.0)
        relay = StrategyRelay(lambda job, run, text: print(f"event of {job}, run {run}: {text}"))
        sent = []
        epoch = SimpleNamespace(
            ledger=SimpleNamespace(jobs={"toy-1": SimpleNamespace(job=job, run=run, strategy="toy")}),
            progress=ProgressBoard(),
            relay=relay,
            sessions=SimpleNamespace(send=lambda node, message: sent.append((node, message))),
        )
        session = SimpleNamespace(record=SimpleNamespace(name="b"))
        for number, body in ((1, '{"question":7}'), (2, '{"question":7}'), (2, '{"colour":1}'), (2, "nonsense")):
            asked = common_pb2.StrategyMessage(id=common_pb2.WorkerId(job="toy-1", run=number, rank=1), body=body)
            sent.clear()
            answer_strategy(epoch, session, asked, 0.0)
            print([(node, m.strategy.id.run, m.strategy.id.rank, m.strategy.body) for node, m in sent])

        board = ProgressBoard()
        progress = board.begin(run)
        sample = common_pb2.StepSample(
            step=1, total_batch=4, step_s=1.0, strategy_metrics={"toy_strength": 0.75, "toy_s": 0.25}
        )
        worker = agents_pb2.WorkerTelemetry(id=common_pb2.WorkerId(job="toy-1", run=2), steps=[sample])
        check_telemetry(agents_pb2.Telemetry(workers=[worker]))
        board.observe(worker)
        seen = jobs_pb2.Job(spec=to_wire(spec), progress=progress.to_wire(0.0))
        print(strategy_line(seen))
        print(manual.strategies_table().splitlines()[-1])
        """
    )
    assert said.splitlines() == [
        "toy {'strength': 0.5, 'rounds': 3} ('strength',)",
        "spec.toy.strength = 2 should be less than or equal to 1. Leave it out for 0.25",
        '{"strength":0.75}',
        "[]",
        "event of toy-1, run 2: asked at 0 s",
        """[('b', 2, 1, '{"answer":21}'), ('a', 2, 0, '{"answer":21}')]""",
        "[]",
        "[]",
        "strategy toy: strength 0.75",
        "| `toy` | dense with a strength: shows what a strategy needs |",
    ]


@pytest.mark.usefixtures("with_toy")
def test_it_trains_with_what_a_plan_gives_it_and_its_messages_are_answered(tmp_path: Path) -> None:
    """1. Two workers train under its settings. 2. Each asks its scheduler something, which answers it and the other.
    3. A plan changes its parameter. 4. Both tell its metrics of every step."""

    def answers(rank: int, body: str) -> list[tuple[int, str]]:
        answer = json.dumps({"answer": 3 * json.loads(body)["question"]})
        return [(rank, answer), (1 - rank, answer)]

    with WarmStock() as stock, FakeAgent(tmp_path, world_size=2, start=stock.start) as agent:
        agent.spec.strategy, agent.spec.strategy_settings = "toy", '{"strength":0.5}'
        agent.answers = answers
        agent.start_workers("regression.py", str(tmp_path), "--epochs=20")
        agent.wait_for_step(5)
        agent.send_plan(2, 0, (1.0, 1.0), strength=0.75)
        assert agent.exit_codes() == [0, 0], agent.said()
    assert sorted(agent.asked) == [(0, '{"question":20}'), (1, '{"question":21}')]
    for rank in (0, 1):
        told = {(sample.plan, *sorted(sample.strategy_metrics.items())) for sample in agent.steps[rank]}
        assert told == {(plan, ("toy_s", 0.001), ("toy_strength", share)) for plan, share in ((1, 0.5), (2, 0.75))}
        log = (tmp_path / "job" / f"run-1-rank-{rank}.log").read_text()
        assert sorted(line for line in log.splitlines() if "was answered" in line) == [
            f"rank {rank} was answered 60",
            f"rank {rank} was answered 63",
        ]
