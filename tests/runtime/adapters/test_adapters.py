"""The examples of the adapters, each trained by two unequal workers."""

from __future__ import annotations

from importlib.util import find_spec
from math import ceil
from pathlib import Path

import pytest
from warm import WarmStock
from zmq_agent import FakeAgent, Start, torchrun_like

EXAMPLES = Path(__file__).parents[3] / "examples"

STEPS = 80

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def libraries(stock: WarmStock) -> None:
    """Import them once: each worker would take 4 s of a processor."""
    modules = ("transformers.trainer", "transformers.models.gpt2", "pytorch_lightning", "accelerate")
    stock.load(*(name for name in modules if find_spec(name.partition(".")[0]) is not None))


def needs(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not here: its adapter was NOT tested (make setup installs it)")


def test_an_unmodified_trainer_trains_by_shares_and_goes_on_with_its_schedule(tmp_path: Path, start: Start) -> None:
    """1. Two workers with 3:1 of the batch; asked to stop in the middle, they save and leave. 2. One goes on where they
    were: the epochs that are behind pass without a batch. 3. Each step is trained once and logged once, and the
    learning rate falls linearly over all of them."""
    needs("transformers")
    script, arguments = str(EXAMPLES / "huggingface_trainer.py"), ("--epochs", "20")
    with FakeAgent(tmp_path, start=start, run=1, world_size=2) as agent:
        agent.shares, agent.speed = (3.0, 1.0), 0.3  # the stop comes before the end
        agent.start_workers(script, *arguments)
        agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= 5, deadline_s=150)
        agent.send_stop(0)
        assert agent.exit_codes(60) == [85, 85], agent.said()
        assert {sample.local_batch for sample in agent.steps[0]} == {9}
        done, logged = agent.checkpoint_step, list(agent.metrics[0])
    assert 5 <= done < STEPS
    with FakeAgent(tmp_path, start=start, run=2) as agent:
        agent.start_workers(script, *arguments)
        assert agent.exit_codes(150) == [0], agent.said()
        assert [(s.step, s.epoch) for s in agent.steps[0]] == [(step, step // 4) for step in range(done, STEPS)]
        logged += agent.metrics[0]
        assert agent.checkpoint_step == STEPS
    rates = [dict(one.values)["learning_rate"] for one in logged if "learning_rate" in one.values]
    assert rates == pytest.approx([3e-3 * (STEPS - step) / STEPS for step in range(STEPS)])
    losses = [dict(one.values)["loss"] for one in logged if "loss" in one.values]
    assert losses[-1] < losses[0] - 0.3


def test_a_trainer_that_goes_on_at_an_epochs_end_logs_no_step_twice(tmp_path: Path, start: Start) -> None:
    """Epochs of one step: wherever the first run is asked to stop, an epoch ends there. The second is shown the batch
    that led there once more, trains nothing with it and does not log it."""
    needs("transformers")
    script, arguments = str(EXAMPLES / "huggingface_trainer.py"), ("--epochs", "60", "--batch", "48")
    with FakeAgent(tmp_path, start=start, run=1) as agent:
        agent.speed = 0.3
        agent.start_workers(script, *arguments)
        agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= 2, deadline_s=150)
        agent.send_stop(0)
        assert agent.exit_codes(60) == [85], agent.said()
        done, logged = agent.checkpoint_step, list(agent.metrics[0])
    assert done < 60
    with FakeAgent(tmp_path, start=start, run=2) as agent:
        agent.start_workers(script, *arguments)
        assert agent.exit_codes(150) == [0], agent.said()
        logged += agent.metrics[0]
    epochs = [dict(one.values)["epoch"] for one in logged if "learning_rate" in one.values]
    assert epochs == pytest.approx(list(range(1, 61)))


@pytest.mark.parametrize(
    ("batch", "accumulated"), [(12, 1), (48, 1), (12, 3)], ids=["mid-epoch", "epoch's end", "updates of three batches"]
)
def test_lightnings_trainer_trains_by_shares_and_goes_on_where_it_was(
    tmp_path: Path, start: Start, batch: int, accumulated: int
) -> None:
    """As the first story. Each batch keeps its index in its epoch, and the schedule steps once an update, of which an
    epoch's last may be of fewer batches."""
    needs("pytorch_lightning")
    script, epoch = str(EXAMPLES / "lightning_trainer.py"), 48 // batch
    arguments = ("--epochs", str(STEPS // epoch), "--batch", str(batch), "--accumulate", str(accumulated))
    updates = ceil(epoch / accumulated) * STEPS // epoch
    with FakeAgent(tmp_path, start=start, run=1, world_size=2) as agent:
        agent.shares, agent.speed = (3.0, 1.0), 0.3
        agent.start_workers(script, *arguments)
        agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= 5, deadline_s=150)
        agent.send_stop(0)
        assert agent.exit_codes(60) == [85, 85], agent.said()
        assert {sample.local_batch for sample in agent.steps[0]} == {batch * 3 // 4}
        done, logged = agent.checkpoint_step, list(agent.metrics[0])
    assert 5 <= done < STEPS
    with FakeAgent(tmp_path, start=start, run=2) as agent:
        agent.start_workers(script, *arguments)
        assert agent.exit_codes(150) == [0], agent.said()
        assert [(s.step, s.epoch) for s in agent.steps[0]] == [(step, step // epoch) for step in range(done, STEPS)]
        logged += agent.metrics[0]
        assert agent.checkpoint_step == STEPS
    of_step = {one.step: dict(one.values) for one in logged}  # what was said after an epoch is said over by its next
    for step in range(STEPS):
        made = step // epoch * ceil(epoch / accumulated) + step % epoch // accumulated
        assert of_step[step]["learning_rate"] == pytest.approx(1e-2 * (updates - made) / updates)
        assert of_step[step]["index"] == step % epoch
    assert of_step[STEPS]["validation_loss"] < 0.5 * of_step[0]["loss"]


def test_a_loop_of_accelerate_trains_by_shares(tmp_path: Path, start: Start) -> None:
    """Gradients, clipping and the loss are those of the whole job's batch of 32, which two workers share 3:1."""
    needs("accelerate")
    with FakeAgent(tmp_path, start=start, world_size=2) as agent:
        agent.shares = (3.0, 1.0)
        agent.start_workers(str(EXAMPLES / "accelerate_loop.py"))
        assert agent.exit_codes(150) == [0, 0], agent.said()
        assert {(s.local_batch, s.total_batch) for s in agent.steps[1]} == {(8, 32)}
        losses = [dict(one.values)["loss"] for one in agent.metrics[0]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("adapter", "library"), [("huggingface", "transformers"), ("lightning", "pytorch_lightning")])
def test_trainers_evaluate_the_weights_that_all_workers_share(
    tmp_path: Path, start: Start, adapter: str, library: str
) -> None:
    """Under local-steps each worker's validation was of its own weights, and the mean of those was shown."""
    needs(library)
    with (tmp_path / "log").open("wb") as log:
        codes = torchrun_like("adapter_evaluations.py", adapter, islands=("west", "east"), start=start, log=log)
    assert codes == [0, 0], (tmp_path / "log").read_text()
