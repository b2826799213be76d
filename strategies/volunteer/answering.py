"""A volunteer's side: dials the rank that it helps, has tasks, answers them. It holds no optimizer, writes no
checkpoint, and may be killed at any moment."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import zmq
from torch import nn
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from atoll import exit_codes
from atoll.agent.runtime.agent_link.exits import say
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.capabilities import EngineParts
from atoll.errors import BadInput
from atoll.ports import host_and_port
from atoll.strategies.volunteer.messages import MAX_TENSOR_BYTES, number, read, written
from atoll.strategies.volunteer.port import HEARTBEAT_MS, SILENT_MS
from atoll.strategies.volunteer.rounding import FORMS, Form, applied, coarse
from atoll.strategies.volunteer.sample_gradients import SampleGradients
from atoll.strategies.volunteer.task_pool import MOST_OPEN

TURN_MS: Final = 200
SILENCE_S: Final = 2.0
"""Without a word of the server it is greeted again: it may have been told to wait, or have been busy."""
GONE_S: Final = 5.0
"""Without a connection: this process ends, and the controller says whom to help."""
SHUT_OUT: Final = 1


def help_out(session: Session, model: nn.Module, parts: EngineParts) -> int:
    """Compute tasks until the server needs no more, is gone, or shuts this volunteer out, or its agent wants it to
    stop. Returns the exit code. Raises BadInput for what cannot be computed."""
    gradients = SampleGradients(session, model, parts)
    most_bytes = max(MAX_TENSOR_BYTES, 4 * gradients.size + 4096)
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        return Helper(session, gradients, line, most_bytes).run(len(parts.dataset))  # type: ignore[arg-type]


class Uplink:
    """A line of which answers may take so much. bps 0: all. Times are monotonic."""

    def __init__(self, bps: float) -> None:
        self._bps, self._free_at_s = bps, 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """How long to wait before so many bytes are sent, and the line is theirs then."""
        if not self._bps:
            return 0.0
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + 8 * size_bytes / self._bps
        return begin_s - now_s


class Helper:
    """One connection to one server."""

    def __init__(self, session: Session, gradients: SampleGradients, line: zmq.Socket[bytes], most_bytes: int) -> None:
        assert session.link is not None
        assert session.helping is not None
        self._session, self._link, self._helping = session, session.link, session.helping
        self._gradients, self._line, self._most_bytes = gradients, line, most_bytes
        public, secret = zmq.curve_keypair()
        line.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self._helping.public_key))
        line.setsockopt(zmq.CURVE_PUBLICKEY, public)
        line.setsockopt(zmq.CURVE_SECRETKEY, secret)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, most_bytes),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
        ):
            line.setsockopt(option, value)
        self._weights_P: torch.Tensor | None = None  # to which changes of a coarse form are added
        self._uplink = Uplink(self._link.welcome.uplink_bps)
        self._monitor = line.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._away_s: float | None = time.monotonic()  # since when there is no connection

    def run(self, samples: int) -> int:
        """samples: of the dataset."""
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
                    header, tensors = read(self._line.recv_multipart(), self._most_bytes)
                    if header.get("kind") == "out":
                        return self._out(header)
                    if header.get("kind") == "again":
                        self._greet()
                    elif header.get("kind") == "wait":
                        say(f"told to wait: {str(header.get('why', ''))[:1000]}")
                    else:
                        self._answer(header, tensors, samples)
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
        """And ask for as many tasks as it may have ahead."""
        helping, power = self._helping, self._link.welcome.speed
        self._send({"kind": "hello", "name": helping.name, "ticket": helping.ticket.hex(), "power": power})
        for _ in range(MOST_OPEN):
            self._send({"kind": "ask"})

    def _answer(self, header: dict[str, Any], tensors: list[torch.Tensor], samples: int) -> None:
        form = self._load(header, tensors)
        if len(tensors) != 1 or tensors[0].dtype != torch.int64 or tensors[0].dim() != 1 or not tensors[0].numel():
            raise BadInput(f"a task has {len(tensors)} tensors that name no samples. Is the server of this version?")
        indices = tensors[0].tolist()
        if not 0 <= min(indices) <= max(indices) < samples:
            raise BadInput(
                f"a task names sample {max(indices)} of a dataset of {samples} here. The script has to make the same "
                "dataset wherever it runs"
            )
        begun_s = time.monotonic()
        computed = self._gradients.compute(indices, number(header, "step"))
        computed_s = time.monotonic() - begun_s
        answer = [piece for one in computed for piece in coarse(one, form)]
        self._await_line(sum(one.nbytes for one in answer))
        self._send({"kind": "answer", "number": number(header, "number"), "computed_s": computed_s}, answer)
        self._send({"kind": "ask"})
        self._link.step += 1

    def _load(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> Form:
        """The weights that came with a task, or their changes, off the front of its tensors. Returns the form in which
        they came, which the answer has too."""
        form = next((one for one in FORMS if one == header.get("form")), FORMS[0])
        if header.get("weights"):
            self._weights_P = tensors.pop(0)
            self._gradients.load(self._weights_P)
        elif (count := number(header, "changes")) and self._weights_P is not None:
            changes, tensors[:] = tensors[:-1], tensors[-1:]
            applied(self._weights_P, changes, form, count)
            self._gradients.load(self._weights_P)
        return form

    def _await_line(self, size_bytes: int) -> None:
        """Until the owner's limit lets so many bytes go, or its agent wants it to stop."""
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
