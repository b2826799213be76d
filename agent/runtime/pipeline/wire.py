"""The messages between the stages of a pipeline: activations, their gradients, which batch comes, and numbers."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import torch

from atoll.agent.runtime.agent_link.waiting import waiting
from atoll.agent.runtime.data.to_device import moved
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.rounding import BLOCK, FORMS, Form, coarse, fine, is_coarsened
from atoll.agent.runtime.staging import to_cpu
from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost

DTYPES: Final = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.int8,
)  # fmt: skip
MAX_DIMENSIONS: Final = 8
MOST_WAITING: Final = 4096  # messages of one neighbour that nobody took yet
_HEADER: Final = struct.Struct("<BBBB4x")  # purpose, dtype, dimensions, form on the way; then the shape
_SIZE: Final = struct.Struct("<Q")
_NUMBERS: Final = struct.Struct("<B7xd")

FIRST_PURPOSE: Final = 16
"""Smaller ones are messages of others on the same channel."""


NO_BATCH: Final = -1
NO_BATCH_NOW: Final = -2


class StagePurpose(IntEnum):
    FORWARD = 16  # a stage's output, for the next one
    BACKWARD = 17  # the gradient of that, for the one before
    BATCH = 18  # the number of the batch that comes next; NO_BATCH; NO_BATCH_NOW, and another follows
    NORM = 19  # of this stage's gradients, squared
    LOSS = 20  # of the whole round, where this stage knows it


class StageMessage(NamedTuple):
    """Key of a message. batch: of this pipeline in the round, from 0. micro: in the batch."""

    round: int
    batch: int
    purpose: int
    micro: int
    sender: int


class StageMailbox:
    """A FrameReceiver of the pipeline's messages: `deliver` and `fail` run on the transport's thread, the rest on the
    training thread."""

    def __init__(self, place: StagePlace) -> None:
        self._place = place
        self._changed = threading.Condition()
        self._kept: dict[StageMessage, bytearray] = {}
        self._round: int | None = None  # before the first one any may come: others may have begun
        self._broken: PeerLost | None = None

    def begin(self, round_: int) -> None:
        with self._changed:
            self._round = round_
            self._kept = {at: one for at, one in self._kept.items() if at.round >= round_}

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """step: the round. tensor: the batch. count: the micro-batch. Returns why it was refused."""
        if kind != Kind.DIRECT or len(payload) < _HEADER.size or payload[0] not in set(StagePurpose):
            return "malformed"
        if origin not in self._place.mates or not self._expected(StagePurpose(payload[0]), origin):
            return "none of its neighbours"
        at = StageMessage(step, tensor, payload[0], count, origin)
        with self._changed:
            if self._round is not None and step < self._round:
                return "old step"
            if self._round is not None and step > self._round + 1:
                return "step too far ahead"
            if at in self._kept:
                return "twice"
            if len(self._kept) >= MOST_WAITING:
                return "too many"
            self._kept[at] = bytearray(payload)  # its memory is the transport's
            self._changed.notify_all()
        return None

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    def take(self, at: StageMessage, deadline_s: float) -> bytearray:
        """Raises PeerLost where a peer is gone or the sender silent."""
        with self._changed:
            self._changed.wait_for(lambda: at in self._kept or self._broken is not None, deadline_s)
            if at in self._kept:
                return self._kept.pop(at)
            if self._broken is not None:
                raise self._broken
        raise PeerLost(f"rank {at.sender} sent no {StagePurpose(at.purpose).name} of a batch for {deadline_s:.0f} s")

    def _expected(self, purpose: StagePurpose, origin: int) -> bool:
        mine = self._place.rank
        match purpose:
            case StagePurpose.FORWARD:
                return origin == mine - 1
            case StagePurpose.BACKWARD:
                return origin == mine + 1
            case StagePurpose.BATCH:
                return origin == self._place.mates[0] != mine
            case StagePurpose.NORM | StagePurpose.LOSS:
                return origin != mine


class StageLinks:
    """A stage's line to the others of its pipeline. Used by the training thread."""

    def __init__(
        self,
        place: StagePlace,
        send: Callable[[int, int, int, int, bytes | memoryview], None],
        deadline_s: float,
        *,
        form: Form = "float32",
        thin: Collection[int] = (),
    ) -> None:
        """send: to rank, (round, batch, micro, payload). form: that tensors have on the way to the ranks in `thin`."""
        self._form, self._thin = form, thin
        self.place, self.mailbox = place, StageMailbox(place)
        self._send, self._deadline_s = send, deadline_s
        self._round = self.batch = 0
        self._ahead: int | None = None  # what all stages but the last know of the next batch, or NO_BATCH_NOW
        self.waited_s = 0.0
        """For other stages, since the run began."""

    def begin(self, round_: int) -> None:
        self._round, self.batch, self._ahead = round_, -1, None
        self.mailbox.begin(round_)

    def know_ahead(self, claim: Callable[[], int | None]) -> int | None:
        """Agree on this pipeline's next batch before the current one ends, on all stages but the last; None if there
        is none. claim: claims it, on the first stage. `agree_on_batch` returns it again."""
        if self.place.first:
            claimed = claim()
            self._ahead = NO_BATCH_NOW if claimed is None else claimed
            self._tell(StagePurpose.BATCH, self.batch + 1, self._ahead)
        else:
            self._ahead = self._told_batch(ahead=1)
        return self._ahead if self._ahead != NO_BATCH_NOW else None

    def agree_on_batch(
        self, claim: Callable[[Callable[[], None]], int | None], waits: Callable[[], None]
    ) -> int | None:
        """The next batch of this pipeline: the first stage claims it and tells the others. None: there is no other.

        claim: calls what it is given as long as there is none now. waits: called then, on all stages."""
        place, told = self.place, 0
        self.batch += 1
        ahead, self._ahead = self._ahead, None
        if ahead == NO_BATCH_NOW:
            waits()
            told += 1
        elif ahead is not None:
            return ahead
        if not place.first:
            while (number := self._told_batch(told)) == NO_BATCH_NOW:
                waits()
                told += 1
            return number if number != NO_BATCH else None

        def none_now() -> None:
            nonlocal told
            self._tell(StagePurpose.BATCH, self.batch, NO_BATCH_NOW, told)
            told += 1
            waits()

        claimed = claim(none_now)
        self._tell(StagePurpose.BATCH, self.batch, NO_BATCH if claimed is None else claimed, told)
        return claimed

    def _told_batch(self, told: int = 0, ahead: int = 0) -> int:
        return int(self._take_number(StagePurpose.BATCH, self.batch + ahead, self.place.mates[0], told))

    def add_up(self, number: float) -> float:
        """Return the sum over the stages, the same bits on each."""
        return sum(self._each(StagePurpose.NORM, number))

    def last_stages(self, number: float) -> float:
        """The last stage's number, on all, once all stages have come here."""
        self.batch += 1
        return self._each(StagePurpose.LOSS, number)[-1]

    def send(self, purpose: StagePurpose, batch: int, micro: int, tensor: torch.Tensor) -> None:
        """Send a tensor to the stage's neighbour. Raises PeerLost, BadInput for a tensor that cannot be sent."""
        to = self.place.rank + (1 if purpose == StagePurpose.FORWARD else -1)
        form = self._form if to in self._thin else "float32"
        self._send(to, self._round, batch, micro, memoryview(packed(purpose, tensor, form)))

    def receive(self, purpose: StagePurpose, batch: int, micro: int, device: torch.device) -> torch.Tensor:
        """Receive a tensor from the stage's neighbour. Raises PeerLost."""
        sender = self.place.rank + (-1 if purpose == StagePurpose.FORWARD else 1)
        received: torch.Tensor = moved(unpacked(self._take(purpose, batch, micro, sender)), device)
        return received

    def _take(self, purpose: StagePurpose, batch: int, micro: int, sender: int) -> bytearray:
        begun_s = time.monotonic()
        with waiting:
            payload = self.mailbox.take(StageMessage(self._round, batch, purpose, micro, sender), self._deadline_s)
        self.waited_s += time.monotonic() - begun_s
        return payload

    def _each(self, purpose: StagePurpose, number: float) -> list[float]:
        """Every stage's, in their order."""
        self._tell(purpose, self.batch, number)
        mine = self.place.rank
        return [number if one == mine else self._take_number(purpose, self.batch, one) for one in self.place.mates]

    def _take_number(self, purpose: StagePurpose, batch: int, sender: int, micro: int = 0) -> float:
        payload = self._take(purpose, batch, micro, sender)
        if len(payload) != _NUMBERS.size:
            raise PeerLost(f"rank {sender} sent {len(payload)} bytes for one number")
        return float(_NUMBERS.unpack(payload)[1])

    def _tell(self, purpose: StagePurpose, batch: int, number: float, micro: int = 0) -> None:
        for one in self.place.mates:
            if one != self.place.rank:
                self._send(one, self._round, batch, micro, _NUMBERS.pack(purpose, number))


def packed(purpose: int, tensor: torch.Tensor, form: Form = "float32") -> bytearray:
    """Return a tensor's bytes with its shape, which each message carries. Raises BadInput."""
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS or tensor.layout != torch.strided:
        raise BadInput(
            f"a stage's output of {tensor.dtype}, {tensor.dim()} dimensions and layout {tensor.layout} cannot be sent "
            f"to the next: dense ones of at most {MAX_DIMENSIONS} dimensions and a usual dtype can"
        )
    pieces = [_bytes_of(one) for one in reversed(coarse(tensor.detach(), form))]  # an int8's scales first: aligned
    begin = _HEADER.size + _SIZE.size * tensor.dim()
    payload = bytearray(begin + sum(len(one) for one in pieces))
    _HEADER.pack_into(payload, 0, purpose, DTYPES.index(tensor.dtype), tensor.dim(), FORMS.index(form))
    for place, size in enumerate(tensor.shape):
        _SIZE.pack_into(payload, _HEADER.size + _SIZE.size * place, size)
    for one in pieces:
        memoryview(payload)[begin : begin + len(one)] = one
        begin += len(one)
    return payload


def unpacked(payload: bytearray) -> torch.Tensor:
    """The tensor, in the payload's memory where it is as it was. Raises PeerLost where it is malformed."""
    _, code, dimensions, form_code = _HEADER.unpack_from(payload)
    begin = _HEADER.size + _SIZE.size * dimensions
    if code >= len(DTYPES) or form_code >= len(FORMS) or dimensions > MAX_DIMENSIONS or len(payload) < begin:
        raise PeerLost("a neighbour's activation is malformed: its header is of no tensor")
    shape = tuple(_SIZE.unpack_from(payload, _HEADER.size + _SIZE.size * place)[0] for place in range(dimensions))
    dtype, form, entries = DTYPES[code], FORMS[form_code], math.prod(shape)
    parts: Sequence[tuple[torch.dtype, int]] = [(dtype, entries)]
    if is_coarsened(form, entries, dtype):
        parts = [(torch.bfloat16, entries)] if form == "bfloat16" else _parts_of_int8(entries)
    if sum(of.itemsize * count for of, count in parts) != len(payload) - begin or max(shape, default=0) >= 2**63:
        raise PeerLost(
            f"a neighbour's activation is malformed: {len(payload) - begin} bytes for {dtype} {list(shape)} as {form}"
        )
    if not entries:
        return torch.empty(shape, dtype=dtype)
    pieces = []
    for of, count in parts:
        pieces.append(torch.frombuffer(payload, dtype=of, count=count, offset=begin))
        begin += of.itemsize * count
    (tensor,) = fine(pieces[::-1], [(shape, dtype)], form)
    return tensor.reshape(shape)


def _parts_of_int8(entries: int) -> list[tuple[torch.dtype, int]]:
    return [(torch.float32, -(-entries // BLOCK)), (torch.int8, entries)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return to_cpu(tensor.contiguous()).reshape(-1).view(torch.uint8).numpy().data
