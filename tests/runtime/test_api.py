"""The training API alone and as the only worker of an agent, in this process."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from held_ports import free_port
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from zmq_agent import FakeAgent, Start

import atoll
from atoll.adapters.environment import show_own_gpu_alone
from atoll.agent.runtime.agent_link.place import AgentEndpoint, WorkerPlace
from atoll.agent.runtime.api.joining import _choose_device
from atoll.agent.runtime.checkpoints.disk import listing
from atoll.errors import BadInput, CheckpointError

Step = Callable[[int], None]
DATA = TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20.0).view(20, 1) / 20)


@pytest.fixture(autouse=True)
def runs() -> Iterator[list[atoll.Run]]:
    """Runs to close, also those of tests that fail."""
    opened: list[atoll.Run] = []
    yield opened
    for run in opened:
        run.close()


class Job:
    """A model with dropout, a schedule and an average of weights, trained alone."""

    def __init__(self, runs: list[atoll.Run], directory: Path | None = None, every: int = 0, width: int = 8) -> None:
        self.run = atoll.init(seed=5, checkpoint_directory=directory, checkpoint_every=every)
        runs.append(self.run)
        model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        self.average = AveragedModel(model)
        self.run.track("average", self.average)
        self.model, self.optimizer, self.loader = self.run.prepare(
            model, optimizer, DATA, batch_size=6, scheduler=self.scheduler
        )
        assert self.model is model
        assert self.optimizer is optimizer

    def train(self, epochs: int, before: Step = lambda step: None, accumulate: int = 1) -> dict[int, str]:
        """Losses by step, to the bit."""
        losses = {}
        for _ in self.run.epochs(epochs):
            for inputs, labels in self.loader:
                step = self.run.step
                before(step)
                loss = nn.functional.mse_loss(self.model(inputs), labels)
                self.run.backward(loss)
                if step % accumulate == accumulate - 1:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.average.update_parameters(self.model)
                losses[step] = loss.item().hex()
            self.scheduler.step()
        return losses

    def weights(self) -> list[Any]:
        return [tensor.tolist() for model in (self.model, self.average) for tensor in model.state_dict().values()]


def test_alone_it_trains_saves_at_the_end_and_goes_on_when_there_is_more_to_do(
    runs: list[atoll.Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(runs, tmp_path)
    run = job.run
    assert (run.rank, run.world_size, run.local_rank, run.is_main, run.device.type) == (0, 1, 0, True, "cpu")
    losses = job.train(3)
    assert list(losses) == list(range(12))  # 20 samples in batches of 6: 4 a epoch
    assert (run.step, run.epoch) == (12, 3)
    run.report(loss=0.25, accuracy=torch.tensor(1.0))  # type: ignore[arg-type]
    assert "epoch 3 step 12 loss 0.25 accuracy 1\n" in capsys.readouterr().err
    assert [found.step for found in listing.newest(tmp_path)] == [12]
    run.close()

    assert Job(runs, tmp_path).train(3) == {}
    runs[-1].close()
    assert list(Job(runs, tmp_path).train(4)) == [12, 13, 14, 15]


def test_interrupted_job_ends_with_the_bits_of_an_undisturbed_one(runs: list[atoll.Run], tmp_path: Path) -> None:
    """1. Steps 0 to 19 undisturbed. 2. The same with a checkpoint every 3 steps, interrupted in step 14. 3. It goes on
    from step 12, the end of an epoch, whose schedule's step runs again, and 4. from step 15 after another."""
    job = Job(runs)
    expected, weights = job.train(5), job.weights()
    job.run.close()

    def interrupt(at: int) -> Step:
        def before(step: int) -> None:
            if step == at:
                raise KeyboardInterrupt

        return before

    losses: dict[int, str] = {}
    for at in (14, 17):
        job = Job(runs, tmp_path, every=3)
        with pytest.raises(KeyboardInterrupt):
            job.train(5, interrupt(at))
        job.run.close()
        assert listing.newest(tmp_path)[0].step == (at // 3) * 3
    job = Job(runs, tmp_path, every=3)
    losses = job.train(5)
    assert list(losses) == [15, 16, 17, 18, 19]
    assert losses == {step: expected[step] for step in losses}
    assert job.weights() == weights
    assert [found.step for found in listing.newest(tmp_path)] == [20, 18]


def test_a_batch_shown_again_leaves_nothing_behind(runs: list[atoll.Run], tmp_path: Path) -> None:
    """The script updates after every second batch of the loop, as it counts them itself. It goes on at the end of an
    epoch; the one batch shown again is its first, so no update follows. Its gradient must not reach the next epoch. An
    average of weights that is tracked as "model" is put back, and so is the model itself."""
    directory = tmp_path / "interrupted"

    def train(to: Path, stop_at: int = -1) -> tuple[list[Any], int]:
        run = atoll.init(seed=5, checkpoint_directory=to, checkpoint_every=4)
        runs.append(run)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        average = AveragedModel(model)
        run.track("model", average)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, loader = run.prepare(model, optimizer, DATA, batch_size=6)
        batches = len(loader)
        for _ in run.epochs(3):
            for index, (inputs, labels) in enumerate(loader):
                if run.step == stop_at:
                    run.close()
                    return [], batches
                run.backward(nn.functional.mse_loss(model(inputs), labels))
                if index % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update_parameters(model)
        run.close()
        return [tensor.tolist() for one in (model, average) for tensor in one.state_dict().values()], batches

    expected = train(tmp_path / "undisturbed")
    train(directory, stop_at=5)
    assert [found.step for found in listing.newest(directory)] == [4]
    assert train(directory) == expected


def test_accumulated_gradients_are_never_cut_by_a_checkpoint(runs: list[atoll.Run], tmp_path: Path) -> None:
    """Updates after steps 1, 3, 5, ...; a checkpoint is due every 3 steps, and written at the next whole update."""
    Job(runs, tmp_path, every=3).train(2, accumulate=2)
    assert [found.step for found in listing.newest(tmp_path)] == [8, 6]  # and 4, which is one too many to keep


def test_an_epoch_that_is_gone_on_with_updates_at_its_last_batch_too(runs: list[atoll.Run], tmp_path: Path) -> None:
    """1. A script updates after every second batch and at the last one: of 7 batches, four updates. It synchronizes
    after each epoch, which it may not with gradients that wait. 2. The same is cut off in the second epoch, after a
    checkpoint there: a count of its own no longer tells the last batch, `run.last_batch` does. Same weights."""

    def train(to: Path, stop_at: int = -1) -> tuple[list[int], list[Any]]:
        run = atoll.init(seed=5, checkpoint_directory=to, checkpoint_every=9)
        runs.append(run)
        model = nn.Linear(4, 1)
        model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), DATA, 3)
        updates = []
        for _ in run.epochs(2):
            for index, (inputs, labels) in enumerate(loader):
                if run.step == stop_at:
                    run.close()
                    return updates, []
                run.backward(nn.functional.mse_loss(model(inputs), labels) / 2)
                if index % 2 or run.last_batch:
                    updates.append(run.step)
                    optimizer.step()
                    optimizer.zero_grad()
            run.synchronize()
        run.close()
        return updates, [tensor.tolist() for tensor in model.state_dict().values()]

    updates, weights = train(tmp_path / "undisturbed")
    assert updates == [1, 3, 5, 6, 8, 10, 12, 13]
    assert train(tmp_path / "cut off", stop_at=10) == ([1, 3, 5, 6, 8], [])
    assert [found.step for found in listing.newest(tmp_path / "cut off")] == [9]
    assert train(tmp_path / "cut off") == ([10, 12, 13], weights)


def test_training_that_ends_early_leaves_its_checkpoint(runs: list[atoll.Run], tmp_path: Path) -> None:
    """The script has seen enough after the second of five epochs. What is saved is that epoch's end, and started again
    it goes on from there."""

    def train(enough_after: int) -> list[int]:
        run = atoll.init(seed=5, checkpoint_directory=tmp_path)
        runs.append(run)
        model = nn.Linear(4, 1)
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, 5)
        seen = []
        for epoch in run.epochs(5):
            for inputs, labels in loader:
                run.backward(nn.functional.mse_loss(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(epoch)
            if epoch == enough_after:
                run.end_training()
        run.close()
        return seen

    assert train(1) == [0, 1]
    assert [(found.step, found.header.epoch) for found in listing.newest(tmp_path)] == [(8, 1)]
    assert train(3) == [1, 2, 3]  # of epoch 1 what follows its batches, which had not been saved
    assert [found.step for found in listing.newest(tmp_path)] == [16, 8]


@pytest.mark.parametrize(("leave", "told"), [("break", True), ("raise ValueError", False)])
def test_a_break_is_told_what_it_left_out(tmp_path: Path, start: Start, leave: str, told: bool) -> None:
    """An exception is not: it says more itself."""
    script = f"""
import sys, torch, atoll
run = atoll.init(checkpoint_directory=sys.argv[1])
model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 1))
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=2)
for epoch in run.epochs(3):
    for (inputs,) in loader:
        run.backward(model(inputs).mean())
        optimizer.step()
    {leave}
"""
    (tmp_path / "train.py").write_text(script)
    with (tmp_path / "log").open("wb") as log:
        worker = start([sys.executable, str(tmp_path / "train.py"), str(tmp_path)], os.environ, log)
    code, said = worker.wait(110), (tmp_path / "log").read_text()
    assert code == (0 if told else 1), said
    assert ("run.end_training() in place of break leaves one" in said) is told
    assert listing.newest(tmp_path) == []


def test_disk_that_is_full_costs_a_checkpoint_not_the_job(
    runs: list[atoll.Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(runs, tmp_path, every=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if 1 <= step < 6 else soft, hard))

    try:
        assert len(job.train(2, fill)) == 8
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert "checkpoint at step 2 failed: writing checkpoint" in said
    assert "training continues. Free space or choose another directory" in said
    assert listing.newest(tmp_path)[0].step == 8


def test_going_on_with_another_seed_is_said(
    runs: list[atoll.Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of an epoch, whose order of samples would be another one from here on."""

    def leave(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Job(runs, tmp_path, every=5).train(2, leave)
    runs[-1].close()
    runs.append(atoll.init(seed=6, checkpoint_directory=tmp_path))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
    runs[-1].prepare(model, torch.optim.AdamW(model.parameters()), DATA, batch_size=6)
    assert "the checkpoint is of seed 5, this run has 6" in capsys.readouterr().err


def test_checkpoint_of_another_model_is_refused_and_left_alone(runs: list[atoll.Run], tmp_path: Path) -> None:
    Job(runs, tmp_path).train(1)
    runs[-1].close()
    with pytest.raises(CheckpointError, match=r"another model: tensor 0\.bias is float32 \[8\] in the checkpoint"):
        Job(runs, tmp_path, width=16)
    assert [found.step for found in listing.newest(tmp_path)] == [4]


def test_dataloader_may_stand_in_for_the_dataset(runs: list[atoll.Run]) -> None:
    run = atoll.init()
    runs.append(run)
    model = nn.Linear(4, 1)
    given = DataLoader(DATA, batch_size=5, shuffle=False)
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
    assert len(loader) == 4
    for _ in run.epochs(1):
        assert [labels[0].item() for _, labels in loader] == [0.0, 0.25, 0.5, 0.75]


class Wrapper(torch.optim.Optimizer):
    """Moves by another optimizer, as Lookahead or SAM do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        if closure is not None:
            closure()


def test_an_optimizer_that_was_not_prepared_may_not_move_the_model(runs: list[atoll.Run]) -> None:
    """1. A wrapper moves the model by the optimizer inside it, which is its own business. 2. The script makes the inner
    one anew, and steps that: nothing would save its moments, so it is refused. 3. So it is where
    the wrapper's own step raised before, which had left the door open. 4. One of other parameters is nobody's business.
    """
    run = atoll.init()
    runs.append(run)
    model, other = nn.Linear(4, 1), nn.Linear(1, 1)
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    model, _, loader = run.prepare(model, wrapper, DATA, batch_size=10)
    anew = torch.optim.Adam(model.parameters())
    for _ in run.epochs(1):
        for inputs, _ in loader:
            run.backward(model(inputs).mean())
            before = model.bias.item()
            wrapper.step()
            moved = model.bias.item()
            assert moved != before
            with pytest.raises(ZeroDivisionError):
                wrapper.step(lambda: 1 // 0)
            moved = model.bias.item()
            with pytest.raises(
                BadInput, match=r"a Adam that run\.prepare was not given is about to move parameter weight"
            ):
                anew.step()
            assert model.bias.item() == moved
            torch.optim.SGD(other.parameters()).step()
    run.close()
    anew.step()  # nobody watches any more


def test_misuse_is_named(runs: list[atoll.Run], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="checkpoint_every = 5 needs checkpoint_directory"):
        atoll.init(checkpoint_every=5)
    with pytest.raises(BadInput, match="seed"):
        atoll.init(seed=-1)
    run = atoll.init()
    runs.append(run)
    with pytest.raises(BadInput, match=r"atoll\.init was called already"):
        atoll.init()
    with pytest.raises(BadInput, match=r"run\.epochs before run\.prepare"):
        next(iter(run.epochs(1)))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="needs batch_size"):
        run.prepare(model, optimizer, DATA)
    with pytest.raises(BadInput, match="batch_size = 0"):
        run.prepare(model, optimizer, DATA, batch_size=0)
    run.prepare(model, optimizer, DATA, batch_size=4)
    with pytest.raises(BadInput, match=r"run\.prepare was called already"):
        run.prepare(model, optimizer, DATA, batch_size=4)
    with pytest.raises(BadInput, match="outside the loop over the loader"):
        run.backward(model(DATA[0][0]).sum())
    with pytest.raises(BadInput, match="lacks state_dict"):
        run.track("thing", object())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="Python identifier"):
        run.track("no name", optimizer)
    with pytest.raises(BadInput, match="takes single numbers"):
        run.report(loss="low")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="got 65 numbers"):
        run.report(**{f"m{index}": 0.0 for index in range(65)})
    with pytest.raises(BadInput, match=r"run\.sum takes single numbers"):
        run.sum("low")  # type: ignore[arg-type]
    assert run.sum(2, torch.tensor(0.5)) == (2.0, 0.5)  # type: ignore[arg-type]


def test_only_worker_of_an_agent_obeys_its_stop(
    runs: list[atoll.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint policy, directory and seed come from the job; after Stop it saves at the next boundary and leaves
    through the script with exit code 85."""
    with FakeAgent(tmp_path) as agent:
        for name, value in agent.environment(0, free_port()).items():
            monkeypatch.setenv(name, value)
        job = Job(runs)

        def stop_at_5(step: int) -> None:
            if step == 5:
                agent.send_stop(0)
                link = job.run._link
                assert link is not None
                agent.wait_until(lambda: link.stop is not None)

        with pytest.raises(SystemExit) as ended:
            job.train(5, stop_at_5)
        assert ended.value.code == 85
        assert "rank 0 stops after step 6: the test asked; checkpoint" in capsys.readouterr().err
        assert [(found.run, found.step, found.header.seed) for found in listing.newest(agent.job_directory)] == [
            (1, 6, 7)
        ]
        job.run.close()
        agent.wait_until(lambda: agent.checkpoint_step == 6)  # told with the last step, or after it
        assert [sample.step for sample in agent.steps[0]] == list(range(6))


def test_a_batch_that_changed_between_two_runs_is_that_of_an_undisturbed_run(
    runs: list[atoll.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Batches of 8 with a factor of 2 in the first epoch, of 5 with 1.25 after it. 2. The same job again, stopped at
    the end of the first epoch: the run that goes on has the second plan from its start, shows another batch again than
    the first run trained last, and comes to the same losses and weights. 3. Scripts can see what holds; their schedule
    has the rates of the script's own batch."""

    def train(directory: Path, run: int, first: tuple[int, float], then: int = 0, stop_at: int = -1) -> dict[int, str]:
        with FakeAgent(directory, run=run) as agent:
            agent.total_batch, agent.learning_rate_factor = first
            if then:
                agent.later_plans = [agent.plan(2, then, [1.0], total_batch=5, learning_rate_factor=1.25)]
            for name, value in agent.environment(0, free_port()).items():
                monkeypatch.setenv(name, value)
            job = Job(runs)
            losses: dict[int, str] = {}

            def look(step: int) -> None:
                expected = (8, 2.0) if step < 3 else (5, 1.25)
                if step != 2 or run == 1:  # run 2 shows a batch of its own plan
                    assert (job.run.total_batch, job.run.learning_rate_factor) == expected
                    assert job.run.statistics()["total_batch"] == expected[0]
                assert job.optimizer.param_groups[0]["lr"] == job.scheduler.get_last_lr()[0]
                if step == stop_at:
                    agent.send_stop(0)
                    link = job.run._link
                    assert link is not None
                    agent.wait_until(lambda: link.stop is not None)

            try:
                losses = job.train(3, look)
                weights.append(job.weights())
            except SystemExit as ended:
                assert ended.code == 85  # noqa: PT017 - of the run that is stopped
            job.run.close()
            assert len(job.loader) == 4
            return losses

    weights: list[Any] = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole", 1, (8, 2.0), then=3)
    assert list(whole) == list(range(3 + 4 + 4))
    assert train(tmp_path / "stopped", 1, (8, 2.0), stop_at=2) == {}
    resumed = train(tmp_path / "stopped", 2, (5, 1.25))
    del resumed[2]
    assert resumed == {step: whole[step] for step in range(3, 11)}
    assert weights[0] == weights[1]


def test_adapters_see_a_workers_own_gpu_alone() -> None:
    """transformers takes cuda:0 and counts the visible GPUs, where torchrun's scripts take cuda:LOCAL_RANK."""
    environ = {"ATOLL_AGENT_SOCKET": "/run/a", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-00aa,GPU-33dd"}
    show_own_gpu_alone(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-33dd"
    alone = {"CUDA_VISIBLE_DEVICES": "0,1"}  # no agent: the user's own choice
    show_own_gpu_alone(alone)
    assert alone == {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(("total_gib", "sharers", "own_gib"), [(24, 1, None), (24, 3, 8 - 0.625), (2, 2, 0.5)])
def test_a_worker_takes_no_more_than_its_part_of_a_shared_gpu(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, sharers: int, own_gib: float | None
) -> None:
    """Its CUDA context comes out of its part too: three allocators of a third each filled the GPU before the third
    context was there."""
    fractions: list[float] = []
    properties = SimpleNamespace(total_memory=total_gib << 30)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    endpoint = AgentEndpoint("ipc://a", "j", 1, 0, "s", has_gpu=True, gpu_sharers=sharers)
    assert _choose_device(WorkerPlace(0, 1, 0, 1, "127.0.0.1", endpoint)) == torch.device("cuda", 0)
    assert [part * total_gib for part in fractions] == ([] if own_gib is None else [pytest.approx(own_gib)])


def test_a_worker_that_was_placed_on_a_gpu_does_not_fall_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. torch cannot use the GPU that the agent announced: a build without CUDA, or an old driver. 2. The worker
    trained on the CPU, without a word, under a plan for a GPU. 3. It refuses with torch's reason."""

    def old_driver() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    alone = WorkerPlace(0, 1, 0, 1, "127.0.0.1", AgentEndpoint("ipc://a", "j", 1, 0, "s"))
    assert _choose_device(alone) == torch.device("cpu")
    placed = replace(alone, agent=AgentEndpoint("ipc://a", "j", 1, 0, "s", has_gpu=True))
    if torch.version.cuda is None:
        with pytest.raises(BadInput, match=r"cannot use: Torch not compiled with CUDA.*Install a build of torch"):
            _choose_device(placed)
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    with pytest.raises(BadInput, match="cannot use: The NVIDIA driver on your system is too old"):
        _choose_device(placed)
