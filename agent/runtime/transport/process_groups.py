"""The run's process groups."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial, reduce
from operator import add
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.transport.collectives import Aborted, UnderWay, collective
from atoll.agent.runtime.transport.gloo_sockets import GlooSockets, open_sockets
from atoll.agent.runtime.transport.pieces import Pieces
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.errors import BadInput

# torch's own default is 30 minutes, for which a run with a dead peer would only look busy.
COLLECTIVE_TIMEOUT_S: Final = 300.0


class Group:
    """The workers of this run. `data` carries tensors where they live, `control` small CPU tensors beside them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        nccl: bool = False,
        links: RelayedLinks | None = None,
        island_backend: str | None = None,
        store: object = None,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """nccl: `data` carries tensors of a GPU by it. links: which of its connections are relayed, where any is.
        island_backend: of its parts, where it is another one. store: of torch's, in which its parts meet."""
        self._links, self._island_backend = links, island_backend
        # torch keeps the C++ half of a store alone. Without its Python half, a store written in Python has no methods.
        self._store = store
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        self._nccl, self._once, self._ending = nccl, threading.Lock(), threading.Lock()
        self.data, self.control = data, control
        self._sockets: list[GlooSockets] = []
        self._parts: list[Group] = []
        self._aborted = Aborted()
        self._aborting: threading.Thread | None = None
        self._pieces = Pieces()  # of what all ranks take part in

    def hold_sockets(self, before: Collection[int]) -> None:
        """Collective: from now on `abort` ends what is under way. before: inodes of sockets that are not the group's.
        Raises PeerLost."""
        self._sockets.append(
            GlooSockets(
                before,
                lambda mine: (
                    {int(port) for port in b",".join(self.gather_bytes(_listed(mine))).split(b",") if port}
                    | (self._links.ports if self._links is not None else set())
                ),
            )
        )

    def parted(self, parts: Sequence[Sequence[int]], timeout_s: float) -> Group:
        """Collective, the same on all ranks: the group of those of `parts` that this rank is in, each rank being in
        one. It ends with this one; its ranks are numbered by their place. Raises PeerLost."""
        before = open_sockets()
        with collective("meeting the workers of its island"):
            backend = self._island_backend
            made = [dist.new_group(list(part), timedelta(seconds=timeout_s), backend) for part in parts]
        place = next(place for place, part in enumerate(parts) if self.rank in part)
        part = Group(
            parts[place].index(self.rank),
            len(parts[place]),
            made[place],
            made[place],
            nccl=self._nccl or backend is not None,
            links=self._links,
            timeout_s=timeout_s,
        )
        part._aborted = self._aborted
        self._parts.append(part)
        if self._sockets:
            self.hold_sockets(before)
        part.connect()
        return part

    def connect(self) -> None:
        """Create NCCL's communicator, which torch otherwise does in the first step. Collective. Raises PeerLost."""
        if self._nccl:
            self.begin_sum(torch.zeros(1, device="cuda"), "connecting the GPUs of the run").wait()

    @property
    def aborted(self) -> bool:
        return self._aborted.said

    def abort(self) -> None:
        """Collectives under way fail, here and on the peers, and none succeeds after this. By any thread; it waits for
        nothing."""
        self._aborted.say()
        self.disconnect()
        with self._once:
            if self._nccl and self._aborting is None and hasattr(self, "data"):  # gloo's does nothing
                under_way = [group.data for group in (self, *self._parts)]
                self._aborting = threading.Thread(
                    target=_abort_all, args=(under_way,), name="atoll-group-abort", daemon=True
                )
                self._aborting.start()

    def disconnect(self) -> None:
        """End gloo's connections, so that peers lose this rank. An exception may keep the groups alive."""
        for sockets in self._sockets:
            sockets.end()

    def close_within(self, deadline_s: float) -> bool:
        """`close` after `abort`: whether everything that was under way, and the abort, has come back by then. What gloo
        does not wake is left behind, and counts as back."""
        if not hasattr(self, "data"):
            return True
        self.abort()
        closing = threading.Thread(target=self._close_aborted, args=(deadline_s,), name="atoll-group-end", daemon=True)
        closing.start()
        closing.join(deadline_s)
        return not hasattr(self, "data") and not (self._nccl and closing.is_alive())

    def _close_aborted(self, deadline_s: float) -> None:
        if self._aborting is not None:
            self._aborting.join(deadline_s)
            if self._aborting.is_alive():
                return
        with self._ending:
            self.close()

    def expect_answers_within(self, seconds: float) -> None:
        """Set the timeout of all further collectives."""
        self._timeout_s = seconds
        for group in (self.data, self.control):
            _set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        """End the groups and join their threads. Only where no collective is under way: this waits for those.

        A gloo thread that is left when the interpreter ends can abort the process (it asks for the GIL in vain)."""
        if not hasattr(self, "data"):
            return  # closed already
        self.disconnect()
        for sockets in self._sockets:
            sockets.close()
        ended = [one for group in (*self._parts, self) for one in (group.data, group.control)]
        for group in (*self._parts, self):
            del group.data, group.control
        dist.destroy_process_group()
        ended.clear()  # whose destructors join the threads; torch has let go of them

    def begin_sum(self, tensor: torch.Tensor, doing: str) -> UnderWay:
        """Begin a sum over all ranks, in place. Raises PeerLost, as its `wait` does."""
        return self._begin(doing, tensor, lambda: dist.all_reduce(tensor, group=self.data, async_op=True))

    def begin_least(self, numbers: torch.Tensor, doing: str) -> UnderWay:
        """Begin an elementwise minimum of small CPU tensors, as `begin_sum`."""
        least, group = dist.ReduceOp.MIN, self.control
        return self._begin(doing, numbers, lambda: dist.all_reduce(numbers, op=least, group=group, async_op=True))

    def sum_in_place(self, tensor: torch.Tensor, doing: str) -> None:
        """Sum a contiguous CPU tensor over all ranks. Raises PeerLost."""
        flat = tensor.view(-1)
        for piece in self._in_pieces(flat.numel(), flat.element_size()):
            summed = flat[piece]
            self._begin(doing, summed, partial(dist.all_reduce, summed, group=self.control, async_op=True)).wait()

    def level(self, flat: torch.Tensor, doing: str) -> None:
        """Overwrite it with what the group's first rank has. Raises PeerLost."""
        self._begin(doing, flat, lambda: dist.broadcast(flat, group_src=0, group=self.data, async_op=True)).wait()

    def _begin(self, doing: str, tensor: torch.Tensor, call: Callable[[], dist.Work | None]) -> UnderWay:
        """tensor: one that it carries. Raises PeerLost."""
        with collective(doing):
            work = call()
        assert work is not None  # async_op
        return UnderWay(work, doing, self._aborted, self._timeout_s if self._nccl and tensor.is_cuda else None)

    def gather_rows(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of integers, equally long and each below 2^63, by rank. Raises PeerLost."""
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._gather(rows, mine)
        return [[int(value) for value in row.tolist()] for row in rows]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises PeerLost."""
        lengths = [length for (length,) in self.gather_rows([len(mine)])]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._gather(received, padded)
        return [one[:length].numpy().tobytes() for one, length in zip(received, lengths, strict=True)]

    def _gather(self, into: list[torch.Tensor], mine: torch.Tensor) -> None:
        gather = partial(dist.all_gather, into, mine, group=self.control, async_op=True)
        self._begin("gathering from all ranks", mine, gather).wait()

    def sum_numbers(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Each number's sum over all ranks, equal on all. Raises PeerLost, BadInput where ranks gave unequally many."""
        sent = self.gather_bytes(np.array(numbers, np.float64).tobytes())
        rows = [np.frombuffer(row, np.float64).tolist() for row in sent]
        counts = [len(row) for row in rows]
        if len(set(counts)) > 1:
            raise BadInput(f"ranks would add up {min(counts)} to {max(counts)} numbers; every rank gives as many")
        # One after the other, by rank: the same bits on machines of every kind, and infinity is a sum too.
        return tuple(reduce(add, column) for column in zip(*rows, strict=True))

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """`data` of rank `source` on every rank. Raises PeerLost."""
        length = self.gather_rows([len(data) if data is not None else 0])[source][0]
        buffer = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8)
        for piece in self._in_pieces(length):
            chunk = buffer[piece]
            broadcast = partial(dist.broadcast, chunk, source, group=self.control, async_op=True)
            self._begin(f"receiving from rank {source}", chunk, broadcast).wait()
        return buffer.numpy().tobytes()

    def distribute(
        self, array: npt.NDArray[np.uint8] | None, length: int, routes: Sequence[tuple[int, int]]
    ) -> npt.NDArray[np.uint8]:
        """`array`, uint8 [length], of ranks that have it, along `routes` (from, to) in their order; empty on ranks that
        neither have it nor receive it. Without a copy.

        Collective: all ranks go on together after each piece, so nobody waits for longer than a piece takes. Raises
        PeerLost."""
        receives = any(to == self.rank for _, to in routes)
        buffer = array if array is not None else np.empty(length if receives else 0, np.uint8)
        for piece in self._in_pieces(length if routes else 0):
            for source, to in routes:
                if self.rank in (source, to):
                    self._pass_on(buffer[piece], source, to)
        if length and routes:
            self.barrier()
        return buffer

    def hand_over(self, array: npt.NDArray[np.uint8], source: int, to: int, length: int) -> npt.NDArray[np.uint8]:
        """`array`, uint8 [length], of rank `source` at rank `to`; there without a copy. Called by these two.
        Raises PeerLost."""
        buffer = array if self.rank == source else np.empty(length, np.uint8)
        pieces, at = Pieces(), 0
        while at < length:
            begun_s, piece = time.monotonic(), buffer[at : at + pieces.bytes]
            self._pass_on(piece, source, to)
            at += len(piece)
            progress.handed_bytes += len(piece)
            took_us = np.array([1e6 * (time.monotonic() - begun_s)], np.int64)
            self._pass_on(took_us.view(np.uint8), to, source)
            pieces.took(float(took_us[0]) / 1e6)
        return buffer

    def _in_pieces(self, length: int, entry_bytes: int = 1) -> Iterator[slice]:
        """Collective: of so many entries; each piece is over on all ranks before the next. Raises PeerLost."""
        at = 0
        while at < length:
            begun_s, entries = time.monotonic(), min(self._pieces.bytes // entry_bytes, length - at)
            yield slice(at, at + entries)
            at += entries
            progress.handed_bytes += entries * entry_bytes
            if at < length:
                rows = self.gather_rows([int(1e6 * (time.monotonic() - begun_s))])
                self._pieces.took(max(took_us for (took_us,) in rows) / 1e6)

    def _pass_on(self, piece: npt.NDArray[np.uint8], source: int, to: int) -> None:
        with collective(f"rank {source} hands over to rank {to}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # read-only memory as a tensor: the source's is only read
            tensor = torch.from_numpy(piece)
            if self.rank == source:
                self._aborted.run(lambda: dist.send(tensor, to, group=self.control))
            else:
                self._aborted.run(lambda: dist.recv(tensor, source, group=self.control))

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors` with rank 0's. Raises PeerLost."""
        with torch.no_grad():
            dense = [tensor.detach().contiguous() for tensor in tensors]
            # As bytes: neither gloo nor NCCL sends every dtype that a buffer may have.
            flat = [tensor.reshape(-1).view(torch.uint8) for tensor in dense]
            broadcasts = [partial(dist.broadcast, part, 0, group=self.data, async_op=True) for part in flat]
            doing = "receiving the model from rank 0"
            for under_way in [self._begin(doing, part, call) for part, call in zip(flat, broadcasts, strict=True)]:
                under_way.wait()
            for tensor, received in zip(tensors, dense, strict=True):
                if received.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(received)

    def barrier(self) -> None:
        self.gather_rows([0])


def gathered_rows(group: Group | None, row: Sequence[int]) -> list[list[int]]:
    """Return all ranks' rows, as Group.gather_rows; the own row alone without a group. Collective."""
    return [list(row)] if group is None else group.gather_rows(row)


def _abort_all(groups: Sequence[dist.ProcessGroup]) -> None:
    for one in groups:
        one.abort()


def _listed(ports: Sequence[int]) -> bytes:
    return ",".join(map(str, ports)).encode()
