"""A volunteer's side: dials the rank that it helps, has tasks, answers them. It holds no optimizer, writes no
checkpoint, and may be killed at any moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import zmq
from torch import nn
from zmq.utils.monitor import recv_monitor_message

from atoll.agent.runtime.agent_link.exits import say
from atoll.agent.runtime.pipeline.layers import Layers, MakesLayer
from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.pipeline.wire import DTYPES
from atoll.agent.runtime.rounding import FORMS, Form, coarse, fine
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.errors import BadInput, exit_codes
from atoll.host.ports import host_and_port
from atoll.strategies.volunteer.checks import Wanted
from atoll.strategies.volunteer.dialling import measuring, prepare
from atoll.strategies.volunteer.messages import number, read, written
from atoll.strategies.volunteer.stage_passes import StagePass, StagePasses, device_kind
from atoll.strategies.volunteer.task_pool import MOST_OPEN
from atoll.strategies.volunteer.weights_line import applied

TURN_MS: Final = 200
SILENCE_S: Final = 2.0
"""Seconds of the server's silence before a new greeting: it may have sent a pause, or have been busy."""
GONE_S: Final = 5.0
"""Seconds without a connection after which this process ends; the controller then chooses a rank to help."""
SHUT_OUT: Final = 1
MOST_BYTES: Final = 1 << 34
"""Limit on a tensor from the server, whose key the controller gave, and whose code runs here."""


def help_out(session: Session, model: nn.Module | Sequence[nn.Module | MakesLayer], parts: EngineParts) -> int:
    """Compute tasks until the server needs no more, is gone, or shuts this volunteer out, or its agent wants it to
    stop. Returns the exit code. Raises BadInput for what cannot be computed."""
    assert session.link is not None
    assert session.helping is not None
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as line,
        measuring(context, session.helping, session.link.outbox.links),
    ):
        return Helper(session, StagesHere(session, model, parts), line).run()


class StagesHere:
    """The stage that this volunteer helps, made when the server says which: its layers alone, where the script gives
    them without memory."""

    def __init__(self, session: Session, model: nn.Module | Sequence[nn.Module | MakesLayer], parts: EngineParts):
        self._session, self._model, self._parts = session, model, parts
        self._told: tuple[int, ...] = ()
        self._passes: StagePasses | None = None

    def of(self, header: dict[str, Any]) -> StagePasses:
        """Raises BadInput where the model has no such stage here."""
        told = _numbers(header, "stage", 4)
        if self._passes is None or told != self._told:
            stage, stages, begin, end = self._told = told
            whole = isinstance(self._model, nn.Module) and not any(one.is_meta for one in self._model.parameters())
            if stages == 1 and isinstance(self._model, nn.Module) and whole:
                module: nn.Module = self._model
            else:
                layers = Layers.of(self._model)
                end = end or len(layers)
                if not begin < end <= len(layers):
                    raise BadInput(
                        f"the server's stage has layers {begin} to {end - 1}, this model {len(layers)}. The script has "
                        "to make the same model wherever it runs"
                    )
                module = layers.stage(begin, end, self._session.seed)
            self._passes = StagePasses(
                self._session,
                module.to(self._session.device),
                self._parts,
                first=stage == 0,
                last=stage == stages - 1,
            )
        return self._passes


class Uplink:
    """A line of which answers may take so much. bps 0: all. Times are monotonic."""

    def __init__(self, bps: float) -> None:
        self._bps, self._free_at_s = bps, 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Return the wait before so many bytes may be sent, and reserve the line for them."""
        if not self._bps:
            return 0.0
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + 8 * size_bytes / self._bps
        return begin_s - now_s


class Helper:
    """One connection to one server."""

    def __init__(self, session: Session, stages: StagesHere, line: zmq.Socket[bytes]) -> None:
        assert session.link is not None
        assert session.helping is not None
        self._session, self._link, self._helping = session, session.link, session.helping
        self._stages, self._line = stages, line
        prepare(line, self._helping.public_key)
        self._weights_P: torch.Tensor | None = None  # to which changes of a coarse form are added
        self._uplink = Uplink(self._link.welcome.uplink_bps)
        self._monitor = line.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._away_s: float | None = time.monotonic()  # since when there is no connection

    def run(self) -> int:
        self._line.connect(f"tcp://{host_and_port(self._helping.address, self._helping.port)}")
        poller = zmq.Poller()
        poller.register(self._line, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        heard_s = time.monotonic()
        self._greet()
        try:
            while self._link.stop is None:
                ready = dict(poller.poll(TURN_MS))
                if self._monitor in ready:
                    self._watch(recv_monitor_message(self._monitor)["event"])
                if self._line in ready:
                    heard_s = time.monotonic()
                    header, tensors = read(self._line.recv_multipart(), MOST_BYTES)
                    if header.get("kind") == "out":
                        return self._out(header)
                    if header.get("kind") == "again":
                        self._greet()
                    elif header.get("kind") == "wait":
                        say(f"told to wait: {str(header.get('why', ''))[:1000]}")
                    else:
                        self._answer(header, tensors)
                elif time.monotonic() - heard_s > SILENCE_S:
                    heard_s = time.monotonic()
                    self._greet()
                if self._away_s is not None and time.monotonic() - self._away_s > GONE_S:
                    where = host_and_port(self._helping.address, self._helping.port)
                    say(f"the rank that this volunteer helps is gone: {where}")
                    return exit_codes.FINISHED
        finally:
            self._line.disable_monitor()
            self._monitor.close(linger=0)
        return exit_codes.DRAINED

    def _watch(self, event: int) -> None:
        self._away_s = None if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._away_s or time.monotonic()

    def _greet(self) -> None:
        """Greet the server and request tasks, up to the limit in advance."""
        helping, power = self._helping, self._link.welcome.speed
        greeting = {"kind": "hello", "name": helping.name, "ticket": helping.ticket.hex(), "power": power}
        self._send({**greeting, "device": device_kind(self._session.device)})
        for _ in range(MOST_OPEN):
            self._send({"kind": "ask"})

    def _answer(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        passes = self._stages.of(header)
        form = next((one for one in FORMS if one == header.get("form")), FORMS[0])
        asked = StagePass(
            Direction.FORWARD if header.get("direction") == Direction.FORWARD.value else Direction.BACKWARD,
            step=number(header, "step"),
            micro=number(header, "micro"),
            begin=number(header, "begin"),
            end=number(header, "end"),
            draws=number(header, "draws"),
            made_here=bool(header.get("made_here")),
            bfloat16=bool(header.get("bfloat16")),
        )
        passes.begin(asked.step, number(header, "attempt"))
        given = fine(self._load(passes, header, tensors, form), _given(header), form)
        begun_s = time.monotonic()
        computed = passes.compute(asked, given, keep=True)
        computed_s = time.monotonic() - begun_s
        answer = [piece for one in computed for piece in coarse(one, form)]
        self._await_line(sum(one.nbytes for one in answer))
        said = {"kind": "answer", "number": number(header, "number"), "computed_s": computed_s, "drew": passes.drew}
        self._send(said, answer)
        self._send({"kind": "ask"})
        self._link.step += 1

    def _load(
        self, passes: StagePasses, header: dict[str, Any], tensors: list[torch.Tensor], form: Form
    ) -> list[torch.Tensor]:
        """Take over the weights that came with a task, or their changes. Returns the tensors behind them."""
        weights, left = tensors[: number(header, "leading")], tensors[number(header, "leading") :]
        if not weights:
            return left
        if count := number(header, "changes"):
            if self._weights_P is None:
                raise BadInput("changes of weights came, and this volunteer has none. Is the server of this version?")
            applied(self._weights_P, weights, form, count)
        else:
            self._weights_P = weights[0]
        passes.load(self._weights_P)
        return left

    def _await_line(self, size_bytes: int) -> None:
        """Wait until the owner's limit admits so many bytes, or the agent stops this process."""
        now_s = time.monotonic()
        ends_s = now_s + self._uplink.wait_s(size_bytes, now_s)
        while (left_s := ends_s - time.monotonic()) > 0 and self._link.stop is None:
            if self._monitor.poll(min(TURN_MS, int(1000 * left_s) + 1)):
                self._watch(recv_monitor_message(self._monitor)["event"])

    def _out(self, header: dict[str, Any]) -> int:
        if why := str(header.get("why", ""))[:1000]:
            say(f"shut out: {why}")
            return SHUT_OUT
        return exit_codes.FINISHED

    def _send(self, header: dict[str, Any], tensors: list[torch.Tensor] | None = None) -> None:
        self._line.send_multipart(written(header, tensors or []), zmq.NOBLOCK)


def _numbers(header: dict[str, Any], name: str, count: int) -> tuple[int, ...]:
    """Raises BadInput."""
    found = header.get(name)
    if not isinstance(found, list) or len(found) < count:
        raise BadInput(f"a task's {name} = {str(found)[:80]!r} is not {count} numbers. Is the server of this version?")
    return tuple(number({name: one}, name) for one in found)


def _given(header: dict[str, Any]) -> list[Wanted]:
    """Shapes and dtypes of what a task comes with, as they were before they were made coarse."""
    rows = [_numbers({"given": one}, "given", 1) for one in header.get("given") or ()]
    return [(row[1:], DTYPES[min(row[0], len(DTYPES) - 1)]) for row in rows]
