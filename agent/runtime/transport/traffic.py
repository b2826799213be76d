"""Between the transport and those who send and hear through it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.transport import topology
from atoll.agent.runtime.transport.agreement import Agreement
from atoll.agent.runtime.transport.digests import Digests
from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame, Kind
from atoll.agent.runtime.transport.members import Member
from atoll.agent.runtime.transport.transport import Transport
from atoll.errors import AtollError
from atoll.kernels.exchange_engine import ExchangeEngine
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.v1.common_pb2 import LinkSample

LINGER_S: Final = 30.0  # the last step's data may still be on a thin link; peers wait for it


class Traffic:
    """Owns the transport of one run."""

    def __init__(
        self,
        session: Session,
        members: Sequence[Member],
        *,
        engine: ExchangeEngine,
        agreement: Agreement,
        digests: Digests,
        settings: StaleSparse,
        waits: Callable[[bool], None],
    ) -> None:
        """Collective: all ranks meet here. waits: as for Transport.connect. Raises PeerLost, DeadlineExceeded."""
        assert session.group is not None
        self._engine, self._agreement, self._digests = engine, agreement, digests
        self._lock = threading.Lock()
        self._up_to: int | None = None if session.probe is None else 0  # rounds that are delivered; None: all
        self._kept: list[Frame] = []  # of later rounds
        self._transport = Transport(
            session.place.rank,
            members,
            run=session.run,
            keys=topology.data_keys(session),
            host=topology.host(session),
        )
        try:
            own = self._transport.bind()
            said = session.group.gather_bytes(str(own).encode())
            endpoints = [Endpoint.parse(one.decode(errors="replace")) for one in said]
            self._transport.connect(endpoints, engine, self._hear, self._lost, waits)
        except BaseException:
            self._transport.close(linger_s=0)
            raise

    def tell_agreement(self, number: int, payload: bytes) -> None:
        self._transport.broadcast(Kind.CONTROL, number, payload)

    def tell_digests(self, number: int, payload: bytes) -> None:
        self._transport.broadcast(Kind.DIGEST, number, payload)

    def deliver_up_to(self, number: int) -> None:
        """For a trial: parts of later rounds are kept until they are asked for. So weights are as stale as they may be,
        as over a thin link, where all ranks are on one machine and every part would come at once."""
        with self._lock:
            self._up_to = number
            due = [frame for frame in self._kept if frame.step <= number]
            self._kept = [frame for frame in self._kept if frame.step > number]
            for frame in due:
                if (flaw := self._deliver(frame)) is not None:
                    raise AtollError(f"a part of round {frame.step} that was kept is refused: {flaw}")

    def link_samples(self) -> list[LinkSample]:
        """What each connection carried since the run began."""
        return [
            LinkSample(
                peer=link.rank,
                sent_bytes=link.bytes_sent,
                received_bytes=link.bytes_received,
                busy_s=link.busy_s,
                goodput_bps=link.goodput_bps,
                dropped={str(reason): count for reason, count in link.dropped.items()},
            )
            for link in self._transport.links()
        ]

    def sent_bytes(self) -> int:
        """On all links since the run began."""
        return sum(link.bytes_sent for link in self._transport.links())

    def leave(self) -> None:
        """This rank is done with the run: its going is no loss."""
        self._transport.goodbye()

    def close(self) -> None:
        self._transport.close(linger_s=LINGER_S)

    def _hear(self, frame: Frame) -> str | None:
        match frame.kind:
            case Kind.PART | Kind.SUM:
                return self._hear_part(frame)
            case Kind.CONTROL:
                return self._agreement.heard(frame.step, frame.origin, frame.payload)
            case Kind.DIGEST:
                return self._digests.heard(frame.step, frame.origin, frame.payload)
            case _:
                return "unknown kind"

    def _hear_part(self, frame: Frame) -> str | None:
        with self._lock:
            if self._up_to is None or frame.step <= self._up_to:
                return self._deliver(frame)
            self._kept.append(replace(frame, payload=bytes(frame.payload)))  # its memory is the transport's
            return None

    def _deliver(self, frame: Frame) -> str | None:
        return self._engine.deliver(int(frame.kind), frame.origin, frame.step, frame.tensor, frame.count, frame.payload)

    def _lost(self, reason: str) -> None:
        self._agreement.fail(reason)
        self._engine.fail(reason)
