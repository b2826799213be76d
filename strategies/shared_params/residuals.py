"""Residuals on disk, over the end of a run: DIRECTORY/residuals/rank-N, in the format of checkpoints.

Every rank writes its own residual on its own machine: it is as large as the model, too large for a thin link. The
next run's ranks restore the residuals that they find, each rank's exactly once. After a loss ranks may have been in
different sync rounds. Parts that the chosen checkpoint lacks return to the residual of the rank that sent them.

Each aggregator also writes its sums there, and the totals that it sent last. A part that is in its aggregator's sum
does not return to the residual, even if the shared parameters lack it. A total that they lack returns to the sum.

A flush sends everything at once, and ranks may be lost in the middle of one. So each rank counts its flushes, as the
checkpoint does, and stores what it gave into the last one until all ranks are known to have it.

State of one rank, as `SharedParamsState` builds it for a checkpoint or a survivor; strategy `compressed` has the first
three keys. N entries of a layer, k blocks of a part:

| key               | type                   | meaning                                                             |
| ----------------- | ---------------------- | ------------------------------------------------------------------- |
| `residuals`       | {layer: float32 [N]}   | residual r; empty where another rank sends for this one             |
| `parts`           | [row], as of `as_rows` | newest parts sent: `pass` (sync round), `name`, `index` int32 [k],  |
|                   |                        | `values` float32 [k, 16], `total` (True: sent by the aggregator)    |
| `optimizer`       | state_dict or None     | optimizer of a rank whose residual is in its live weights; None for |
|                   |                        | a survivor, whose optimizer is in memory                            |
| `aggregator_sums` | {layer: float32 [N]}   | s, the ranks' sums less the shared parameters; aggregator alone     |
| `versions`        | {layer: int}           | newest sync round in s                                              |
| `following`       | {layer: int}           | next sync round in which the layer is exchanged                     |
| `flushes`         | {layer: int}           | flushes since the run began; `FlushLog.flushing` counts them        |
| `given`           | {layer: float32 [N]}   | r + s at the last flush; `FlushLog.everywhere` drops it             |

`as_of` computes, for each layer of each state. The checkpoint has round V and F flushes of the layer. S is the largest
of V and all ranks' `versions`, f the state's `flushes`:

    F > f:                        r <- 0, s <- 0         another rank finished the flush
    F < f:                        r <- r + given         the flush is not in the checkpoint
    F = f and following <= V:     s <- 0                 the shared parameters may have taken some of it
    part of a rank, pass > S:     r <- r + part
    total, pass > V:              s <- s + total"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.listing import CheckpointFolder
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.frames import Kind
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import CheckpointError
from atoll.kernels.compress import BLOCK_ENTRIES
from atoll.kernels.exchange_engine import RecentPart
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.layout import add_blocks
from atoll.v1.common_pb2 import LEVEL_WARNING

FOLDER: Final = "residuals"
KEPT: Final = 2


Packed = tuple[Mapping[str, torch.Tensor], Any]


class FlushLog:
    """Log of a rank's flushes, by layer.

    counts: flushes since the run began. given: what this rank gave into the last flush, while other ranks may lack it;
    float32 [N]."""

    def __init__(self, layers: Iterable[str]) -> None:
        self.counts = dict.fromkeys(layers, 0)
        self.given: dict[str, torch.Tensor] = {}
        self._between = threading.Lock()  # a layer is between two flushes
        self._frozen = False

    @contextmanager
    def flushing(self, given: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Count a flush of these layers. Inside, their shared parameters and weights change."""
        with self._between:
            self.given.update(given)
            for layer in given:
                self.counts[layer] += 1
            yield

    def everywhere(self) -> None:
        """Drop what was given: all ranks are known to have every flush."""
        self.given.clear()

    def freeze(self, deadline_s: float) -> None:
        """Forbid flushes from now on, for good. Any thread may call it."""
        if not self._frozen:
            self._between.acquire(timeout=deadline_s)
            self._frozen = True


class _Contained(NamedTuple):
    """Contents of the checkpoint that a run resumes from, by layer of the previous run.

    versions: the last sync round. flushes: their number. summed: the last sync round that is there or in its
    aggregator's sum: later parts are residuals again."""

    versions: Mapping[str, int]
    flushes: Mapping[str, int]
    summed: Mapping[str, int]


def as_rows(tensors: Sequence[EngineTensor], parts: Sequence[RecentPart]) -> list[dict[str, Any]]:
    """Return the parts that were sent in the form of a checkpoint: by layer."""
    layers = {tensor.number: tensor.layers for tensor in tensors}
    rows = []
    for part in parts:
        for layer in layers[part.tensor]:
            first = layer.at // BLOCK_ENTRIES
            begin, end = np.searchsorted(part.index, (first, first + layer.blocks))
            if begin == end:
                continue
            row = {
                "total": part.kind == Kind.FROM_AGGREGATOR,
                "pass": part.sync_round,
                "name": layer.name,
                "index": torch.from_numpy((part.index[begin:end] - first).astype(np.int32)),
                "values": torch.from_numpy(part.values[begin:end]),
            }
            rows.append(row)
    return rows


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a rank's state that `as_of` may change."""
    return {
        **state,
        **{what: {name: one.clone() for name, one in state[what].items()} for what in ("residuals", "aggregator_sums")},
    }


def write(directory: Path, header: Header, rank: int, packed: Packed) -> None:
    """Publish a packed state as it was with the checkpoint of `header`. Raises CheckpointError."""
    folder = directory / FOLDER / f"rank-{rank}"
    with disk_errors(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    files.write(folder, header, *packed)
    listing.keep_newest(folder, KEPT)


def take_over(session: Session, origin: Origin, sizes: Mapping[str, int]) -> list[OwnState]:
    """Restore every readable residual of the previous run, each on one rank of this run. Collective.

    sizes: entries by layer, in the order of layers. Raises PeerLost."""
    rank, directory, skipped = session.place.rank, session.checkpoint.directory, _warning(session)
    assert directory is not None  # a checkpoint was read from it
    found = _find(directory, origin, skipped)
    mine = [int(old in found) for old in range(origin.world_size)]
    rows = gathered_rows(session.group, mine)
    held = [[old for old, there in enumerate(row) if there] for row in rows]
    whole: list[tuple[int, dict[str, Any]]] = []
    for old, aggregator in enumerate(_shared_out(held, origin.world_size)):
        if aggregator == rank:
            state = _whole(old, found[old], sizes, skipped)
            whole += [(old, state)] if state is not None else []
        elif aggregator is None and session.place.is_main:
            text = f"the residual of rank {old} of run {origin.run} is lost with its machine; training continues"
            session.notice(LEVEL_WARNING, text)
    return as_of(session, origin.shared, whole, sizes)


def as_of(
    session: Session,
    shared: Mapping[str, torch.Tensor],
    whole: Sequence[tuple[int, dict[str, Any]]],
    sizes: Mapping[str, int],
) -> list[OwnState]:
    """Reconcile states with the shared parameters that `shared` describes. Collective; raises PeerLost.

    whole: states, with the rank that each is from; they are changed. sizes: entries by
    layer, in the order of layers."""
    none = torch.zeros(len(sizes), dtype=torch.int64)  # of strategy `compressed`
    versions, flushes = (
        dict(zip(sizes, shared.get(what, none).tolist(), strict=True)) for what in ("versions", "flushes")
    )
    summed = [max((state["versions"].get(name, -1) for _, state in whole), default=-1) for name in sizes]
    rows = gathered_rows(session.group, summed)
    newest = {name: max(versions[name], *seen) for name, *seen in zip(sizes, *rows, strict=True)}
    contained = _Contained(versions, flushes, newest)
    return [_read(old, state, contained, _warning(session)) for old, state in whole]


def _warning(session: Session) -> Callable[[str], None]:
    """Return what warns of a residual that is left out."""
    return lambda why: session.notice(LEVEL_WARNING, f"rank {session.place.rank}: {why}")


def _find(directory: Path, origin: Origin, on_skip: Callable[[str], None]) -> dict[int, Path]:
    """Find the residuals here that belong to the checkpoint this run resumes from, one per rank, by rank."""

    def apart(candidate: CheckpointFolder) -> int:
        return abs(candidate.step - origin.step)

    spread = int(origin.shared.get("staleness", 1)) + 1  # ranks may be so far apart when one is lost

    def belongs(candidate: CheckpointFolder) -> bool:
        """Accept this view alone: the residual of an older view was taken over by other ranks."""
        written = candidate.header
        return (written.run, written.view) == (origin.run, origin.view) and apart(candidate) <= spread

    nearest: dict[int, Path] = {}
    for rank in range(origin.world_size):
        folder = directory / FOLDER / f"rank-{rank}"
        near = [one for one in listing.newest(folder, on_skip) if belongs(one)] if folder.is_dir() else []
        if near:
            nearest[rank] = min(near, key=apart).path
    return nearest


def _shared_out(held: Sequence[Sequence[int]], ranks: int) -> list[int | None]:
    """Assign each old rank's residual to a new rank. Pure.

    held: per new rank, the old ranks whose residual it can read. Returns, per old rank, the new rank that restores it:
    the same number where it can, else the lowest that can. None: the residual is lost."""
    aggregators: list[int | None] = []
    for old in range(ranks):
        able = [new for new, readable in enumerate(held) if old in readable]
        aggregators.append(old if old in able else min(able, default=None))
    return aggregators


def _whole(rank: int, path: Path, sizes: Mapping[str, int], on_skip: Callable[[str], None]) -> dict[str, Any] | None:
    """Read and check the state of a rank of the previous run.

    sizes: entries by layer. Returns None where it cannot be used, and reports why through on_skip."""
    try:
        checkpoint: LoadedCheckpoint = files.read(path)
        state: dict[str, Any] = {"flushes": {}, "given": {}, "aggregator_sums": {}, "versions": {}}
        state |= unpack_state(checkpoint.tensors, checkpoint.scalars)
        shapes = _shapes(state["residuals"])  # nothing of a rank that another sent for
        if (shapes and shapes != {name: (size,) for name, size in sizes.items()}) or any(
            part["name"] not in sizes for part in state["parts"]
        ):
            raise CheckpointError("it is of another model")
        if _shapes(state["aggregator_sums"]) != {name: (sizes[name],) for name in state["versions"]}:
            raise CheckpointError("its aggregator's sums are of another model")
        return state
    except (CheckpointError, KeyError) as error:
        on_skip(f"the residual of rank {rank} cannot be read from {path}: {error}")
        return None


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _read(old: int, state: Mapping[str, Any], contained: _Contained, on_skip: Callable[[str], None]) -> OwnState:
    """Return the state of a rank of the previous run, as of the checkpoint that the run resumes from."""
    residual: dict[str, torch.Tensor] = state["residuals"]
    sums: dict[str, torch.Tensor] = state["aggregator_sums"]
    for name, missed in residual.items():
        behind = contained.flushes[name] - state["flushes"].get(name, 0)
        if behind > 0:
            missed.zero_()  # another rank finished the flush that this one was lost in, and so has all of it
            if name in sums:
                sums[name].zero_()
        elif behind < 0:
            missed.add_(state["given"][name])
        elif name in sums and state["following"][name] <= contained.versions[name]:
            sums[name].zero_()  # it is not known which of it the shared parameters took since
            on_skip(f"what rank {old} had summed of {name} is of an earlier step than the checkpoint, and lost")
    for part in state["parts"]:
        name, is_total = part["name"], part["total"]
        if part["pass"] > (contained.versions if is_total else contained.summed)[name]:
            into = sums if is_total else residual
            add_blocks(into[name], part["index"].numpy(), part["values"].numpy())
    return OwnState(old, residual, state["optimizer"], sums)
