"""A worker of the conformance suite: python case_worker.py SOCKET RANK.

It trains one case after the other, each in a run of its own, and sends each outcome over the socket. Importing torch is
most of what a case would cost alone."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import engines
import torch
import torch.distributed as dist
import trainers
from cases import JOINED_STEP, STRATEGIES, TRAINERS, Case, Refused, expected
from models import Batch, Samples, Stream
from program import MAX_NORM, Outcome, train
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.agent.runtime.agent_link.exits import WorkerExit
from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.strategies import registry

STOPPED_STEP = 2
"""The first run of a case that resumes ends once it has come so far."""
TURN_S = 30.0
"""The longest wait of a rank for a pass of its volunteer."""
STUCK_S = 45.0
"""A case that takes this long has its threads' stacks written to the worker's log. The pool waits a little longer."""


class Order(torch.utils.data.Sampler[int]):
    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Atoll:
    """Trains a program through Atoll's public calls."""

    seed = 1

    def __init__(self, case: Case, number: int, arrived: Path) -> None:
        """arrived: file that this worker creates where it waits for what the pool's agent does."""
        name, settings = STRATEGIES[case.strategy]
        self._case, self._number, self._arrived = case, number, arrived
        self._passes = arrived.with_name(f"passes-{number}")
        self._helped = 0
        self.adapter: Any = None
        join = atoll.init
        if case.wrapper in TRAINERS:
            trainers.forget_accelerates_state()
            self.adapter = import_module(f"atoll.adapters.{case.wrapper}")
            join = self.adapter.join
        self.run = join(seed=1, strategy=registry.find(name).settings(**settings))

    def prepare(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Any]
    ) -> Iterable[Batch]:
        case = self._case
        for name, one in tracked.items():
            self.run.track(name, one)
        given: Any = optimizers[0] if len(optimizers) == 1 else tuple(optimizers)
        samples = Stream(case.samples) if case.wrapper == "stream" else Samples(case.samples)
        sampler = Order(case.order) if case.wrapper == "sampler" else None
        data = DataLoader(
            samples, case.batch, sampler=sampler, num_workers=2 if case.wrapper == "loader-workers" else 0
        )
        _, _, loader = self.run.prepare(model, given, data)
        return loader

    @property
    def device(self) -> torch.device:
        return self.run.device

    def track(self, name: str, one: Any) -> None:
        self.run.track(name, one)

    def epochs(self, total: int) -> Iterator[int]:
        return self.run.epochs(total)

    def slices(self, batch: Batch) -> Iterable[tuple[Batch, float]]:
        return [(batch, 1.0)]

    def pass_begins(self) -> None:
        """Die or raise in a pass, where this case loses this rank; let the volunteer make one, where it has one."""
        if self._case.event == "helped" and not isinstance(expected(self._case), Refused):
            self._take_turns()
        if self._case.event == "lost" and self.run.rank == 2 and self.step == self._case.lost_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._case.event == "raises" and self.run.rank == 1 and self.step == STOPPED_STEP:
            raise ValueError("the loss cannot be computed")

    def _take_turns(self) -> None:
        """Let the first rank wait in each step until the volunteer makes a pass of it, which that counts in a file."""
        if self.run._session.helping is not None:
            with self._passes.open("a") as count:
                count.write(".")
        elif self.run.rank == 0:
            deadline = time.monotonic() + TURN_S
            while self._counted() <= self._helped:
                assert time.monotonic() < deadline, "the volunteer makes no pass"
                time.sleep(0.001)

    def _counted(self) -> int:
        """Return how many passes the volunteer has made."""
        return self._passes.stat().st_size if self._passes.exists() else 0

    def backward(self, loss: torch.Tensor) -> None:
        self.pass_begins()
        if self._case.wrapper == "own-backward":
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.run.backward(loss)

    def local_pass(self) -> AbstractContextManager[None]:
        return self.run.no_sync()

    def clip(self, model: nn.Module) -> None:
        if self._case.wrapper == "clip":
            self.run.clip_grad_norm(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def begin_step(self, step: int) -> None:
        case, link = self._case, self.run._link
        assert link is not None
        self._helped = self._counted()
        if case.by_rounds:  # in a round this rank may find no batch
            self.pass_begins()
        if case.event == "resume" and self._number == 1 and step == STOPPED_STEP:
            self._wait(link, lambda: link.stop is not None)
        joins_next = case.event == "join" and step == JOINED_STEP - 1
        lost_before = case.event == "lost" and case.by_rounds and step == case.lost_step + 1
        if joins_next or lost_before:
            self._wait(link, lambda: link.newest_view is not None and link.newest_view.view >= 2)

    def _wait(self, link: AgentLink, condition: Callable[[], bool]) -> None:
        """Wait for what the pool's agent does once all have come here."""
        self._arrived.touch()
        assert link.wait_for(condition, 30.0), "the pool's agent was silent"

    @property
    def step(self) -> int:
        return self.run.step

    @property
    def last_batch(self) -> bool:
        return self.run.last_batch


def trained(case: Case, number: int, arrived: Path) -> Outcome | None:
    """Train the case. Returns None where the run was stopped."""
    driver = Atoll(case, number, arrived)
    try:
        if driver.adapter is not None:
            return trainers.train(case, driver, trainers.Joined(driver.run, driver.adapter))
        if case.by_engine:
            return engines.train(case, driver, driver.run)
        return train(case, driver)
    except WorkerExit:
        return None
    finally:
        driver.run.close()
        if dist.is_initialized():  # a worker that stops leaves it to the end of its process
            dist.destroy_process_group()


def main() -> None:
    socket, rank = sys.argv[1:]
    with Client(socket, family="AF_UNIX") as connection:
        connection.send_bytes(rank.encode())
        while asked := connection.recv_bytes():
            case, number, environment, arrived = pickle.loads(asked)  # noqa: S301 - what the test itself sent
            os.environ.pop("ATOLL_RANK", None)  # of another case: only a worker that joins has it
            os.environ.update(environment)
            faulthandler.dump_traceback_later(STUCK_S)
            try:
                answer: Any = trained(case, number, arrived)
            except Exception as error:  # noqa: BLE001 - whatever a case raises is its outcome
                answer = (type(error).__name__, str(error), traceback.format_exc())
            finally:
                faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(pickle.dumps(answer))  # not `send`, which would share tensors' memory


if __name__ == "__main__":
    main()
