"""Writes one rank's shard of a generation into its file, where all of the state stands still after a boundary, and
where a part of it goes on changing in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import DTYPE_NAMES
from atoll.agent.runtime.checkpoints.memory.shards.live_state import (
    Layout,
    LiveState,
    Piece,
    Sources,
    laid_out,
    listed,
    size_of,
)
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import (
    CHUNK_BYTES,
    Bytes,
    SlotFile,
    bounds,
    hashed,
    hashes,
)
from atoll.agent.runtime.model.durable import Part, RollingState
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.staging import StagingRing

RESIDUAL: Final = "residual."
"""Begins the name of a residual among a rank's own tensors."""

Hashes = tuple[Sequence[str], Sequence[str]]  # of the shared bytes, of the own


class ShardState:
    """State of one rank's shard: what all ranks share of it (`layout`), and the entries `moving` and `own` of its tail.

    `look` and `begin` at a boundary, on the training thread; then on any one thread `read`, which is done before the
    next optimizer.step(), and `complete`. They raise CheckpointError."""

    apart = False
    """True if, after `begin`, `read` takes nothing that the next update changes, so that no update waits for it."""

    def __init__(self, snapshot: Snapshot, shard: int, shards: int, ring: StagingRing | None, *, view: int = 1) -> None:
        """ring: of the device that has the state, None: the CPU. view: of the run."""
        self._snapshot, self._shard, self._shards, self._view = snapshot, shard, shards, view
        self._ring, self._sources = ring, Sources(ring)
        self._data: Bytes = np.empty(0, np.uint8)
        self._own_bytes = 0
        self.layout = Layout(b"", b"", ())
        self.moving: Any = None
        self.own: Any = None

    def look(self) -> None:
        """Look at the state that there is to write."""
        raise NotImplementedError

    def begin(self, file: SlotFile) -> None:
        raise NotImplementedError

    def read(self) -> None:
        """Take what the next update changes, or clones of it."""
        raise NotImplementedError

    def complete(self, stopped: Callable[[], bool]) -> Hashes | None:
        """Take the rest. None where it is not to be had any more, or `stopped` says so."""
        return hashes(self._data[self._own_bytes :]), hashes(self._data[: self._own_bytes])

    @property
    def _bounds(self) -> tuple[int, int]:
        return bounds(self.layout.total, self._shard, self._shards)

    def _room(self, file: SlotFile) -> Bytes:
        begin, end = self._bounds
        return file.begin(self.layout.raw, self.layout.digest, end - begin, self._own_bytes)


class BoundaryShard(ShardState):
    """Shard of a state that only optimizer.step() changes, with this rank's own state, which a pass may change
    before."""

    def __init__(self, snapshot: Snapshot, shard: int, shards: int, ring: StagingRing | None, *, view: int = 1) -> None:
        super().__init__(snapshot, shard, shards, ring, view=view)
        self._live = LiveState(snapshot, view=view)
        self._laid_out: tuple[bytes, list[list[Piece]]] = (b"", [])
        self._file: SlotFile
        self._residuals: Mapping[str, torch.Tensor] = {}
        self._hashes: list[str] = []
        self._clones: Mapping[int, torch.Tensor] | None = None  # of the shard's tensors

    def look(self) -> None:
        self._live.look()
        self.layout, self.moving = self._live.layout, self._live.moving
        if self._laid_out[0] != self.layout.digest:
            self._laid_out = (self.layout.digest, self.layout.chunks(*self._bounds))
        self._residuals = residuals = self._snapshot.durable.own_at_boundary()
        entries = [(f"{RESIDUAL}{name}", DTYPE_NAMES[torch.float32], [len(one)]) for name, one in residuals.items()]
        self.own = {"tensors": entries} if residuals else None
        self._own_bytes = 4 * sum(map(len, residuals.values()))

    def begin(self, file: SlotFile) -> None:
        self._file = file
        if self._ring is not None:
            self._ring.follow()
            self._clones = self._cloned(self._ring)
        self.apart = self._clones is not None
        if self._residuals:
            self._data = self._room(self._file)
        at = 0
        for one in self._residuals.values():
            torch.from_numpy(self._data[at : at + 4 * len(one)].view(np.float32)).copy_(one)
            at += 4 * len(one)
        self._residuals = {}

    def _cloned(self, ring: StagingRing) -> Mapping[int, torch.Tensor] | None:
        """None where the device has no room for them."""
        wanted = list(dict.fromkeys(piece.tensor for chunk in self._laid_out[1] for piece in chunk))
        clones = ring.clones([self._live.tensors[index] for index in wanted])
        return dict(zip(wanted, clones, strict=True)) if clones is not None else None

    def read(self) -> None:
        """Also hashes, chunk by chunk while each is in the cache."""
        tensors = dict(enumerate(self._live.tensors)) if self._clones is None else self._clones
        if self.own is None:
            self._data = self._room(self._file)
        data = self._data[self._own_bytes :]
        self._hashes = []
        chunks = self._laid_out[1]
        copies = self._sources.copies(((tensors[piece.tensor], piece) for chunk in chunks for piece in chunk), data)
        for index, chunk in enumerate(chunks):
            for _ in chunk:  # each of them is of one chunk, and so of one copy
                next(copies)
            at = index * CHUNK_BYTES
            self._hashes.append(hashed(data[at : at + CHUNK_BYTES]))
        self._clones = None

    def complete(self, stopped: Callable[[], bool]) -> Hashes | None:
        return self._hashes, hashes(self._data[: self._own_bytes])


class RollingShard(ShardState):
    """Shard of a state with shared parameters that others' updates change at any time. Shared parameters and frozen
    parameters are shared. Everything else is this rank's own: residuals, moments of its own optimizer, buffers."""

    def __init__(
        self,
        snapshot: Snapshot,
        rolling: RollingState,
        shard: int,
        shards: int,
        ring: StagingRing | None,
        *,
        view: int = 1,
    ) -> None:
        super().__init__(snapshot, shard, shards, ring, view=view)
        self._rolling, self._shared_sources = rolling, Sources(ring)
        self._identity: list[Any] | None = None
        self._shared: dict[str, torch.Tensor] = {}
        self._resting: Mapping[str, torch.Tensor] = {}
        self._aliases: dict[str, Any] = {}
        self._tree: Any = None
        self._own_tensors: list[torch.Tensor] = []
        self._own_pieces: list[Piece] = []

    def look(self) -> None:
        identity = self._snapshot.identity()
        if identity != self._identity:
            plain = self._look_at_resting()
            self._identity = identity if plain else None
        packed, self.moving = pack_state(self._snapshot.moving())
        moving, aliases = self._parted(packed)
        own = {**self._resting, **moving}
        residuals = [
            (f"{RESIDUAL}{name}", DTYPE_NAMES[torch.float32], [entries])
            for name, entries in self._rolling.residuals().items()
        ]
        entries = [*residuals, *listed(own)]
        sizes = [size_of(dtype, shape) for _, dtype, shape in entries]
        self.own = {"tensors": entries, "aliases": self._aliases | aliases, "tree": self._tree}
        places = np.cumsum([0, *sizes]).tolist()
        self._own_bytes, self._own_tensors = places[-1], list(own.values())
        self._own_pieces = [
            Piece(index, 0, size, place)
            for index, (size, place) in enumerate(
                zip(sizes[len(residuals) :], places[len(residuals) : -1], strict=True)
            )
        ]

    def begin(self, file: SlotFile) -> None:
        self._data = self._room(file)
        names = list(self._shared)
        rolling = self._rolling.shared()
        parts = [
            Part(names[piece.tensor], piece.begin, piece.end, self._target(piece))
            for piece in self._shared_pieces()
            if names[piece.tensor] in rolling
        ]
        residuals, at = {}, 0
        for name, entries in self._rolling.residuals().items():
            residuals[name] = self._data[at : at + 4 * entries].view(np.float32)
            at += 4 * entries
        self._rolling.capture(parts, residuals)
        if self._ring is not None:
            self._ring.follow()

    def read(self) -> None:
        self._rolling.read()
        own = ((self._own_tensors[piece.tensor], piece) for piece in self._own_pieces)
        for _ in self._sources.copies(own, self._data):
            pass
        rolling, tensors = self._rolling.shared(), list(self._shared.items())
        resting = (
            (tensors[piece.tensor][1], piece)
            for piece in self._shared_pieces()
            if tensors[piece.tensor][0] not in rolling
        )
        for _ in self._shared_sources.copies(resting, self._data[self._own_bytes :]):
            pass

    def complete(self, stopped: Callable[[], bool]) -> Hashes | None:
        return super().complete(stopped) if self._rolling.wait(stopped) else None

    def _look_at_resting(self) -> bool:
        """Look at the state that stays in place. Returns whether all of the model's state are tensors, as its identity
        tells."""
        frozen = {f"frozen.{name}": one for name, one in self._snapshot.frozen().items()}
        self._shared = {**self._rolling.shared(), **frozen}
        model = self._snapshot.states()["model"]
        self.layout = laid_out(listed(self._shared), None, self._snapshot.prepared.to_json(), self._view)
        packed, self._tree = pack_state(self._snapshot.resting(narrow=False))
        self._resting, self._aliases = self._parted(packed)
        return all(isinstance(one, torch.Tensor) for one in model.values())

    def _parted(self, packed: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's own tensors; and which of the others are what shared one in what order of memory."""
        shared = {(one.data_ptr(), one.dtype, one.numel()): name for name, one in self._shared.items()}
        own, aliases = {}, {}
        for name, tensor in packed.items():
            same = shared.get((tensor.data_ptr(), tensor.dtype, tensor.numel())) if tensor.numel() else None
            if same is None:
                own[name] = tensor
            else:
                aliases[name] = [same, list(tensor.shape), list(tensor.stride())]
        return own, aliases

    def _shared_pieces(self) -> list[Piece]:
        """Whole tensors, but where a shard ends."""
        return self.layout.pieces(*self._bounds)

    def _target(self, piece: Piece) -> Bytes:
        at = self._own_bytes + piece.to
        return self._data[at : at + piece.end - piece.begin]
