"""Exchange of one rank's layers: the native engine that selects, sums and updates, the copies from a GPU that feed it,
and the aggregators and turns of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from humanize import naturalsize

from atoll.agent.runtime.agent_link.waiting import waiting
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.staging import CopyStream, CudaCopyStream, PinnedUploads, StagingRing
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.kernels.cuda_device import why_on_cpu
from atoll.kernels.exchange_engine import Exchange, ExchangeEngine, GradientEngine, Selection, UpdateEngine, Values
from atoll.strategies.shared_params.device_selection import DeviceDifference, SelectionRoom
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.layout import Layer, zeros
from atoll.strategies.shared_params.offload import Offload
from atoll.v1.common_pb2 import LEVEL_WARNING

MOST_STALENESS: Final = 15
"""Largest staleness, in sync rounds. It also bounds messages received ahead and proposals that are kept."""
_REMEMBERED: Final = 4
"""Sync rounds whose parts are kept for a checkpoint after a loss, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """Options that are fixed for the whole run."""

    exchange: Exchange
    values: Values
    selection: Selection
    digest_every: int  # sync rounds
    error_feedback: bool = False  # exchanging gradients; of updates it is in the live weights
    aggregators: bool = False
    """True: an island is one replica. It sends each layer's sums to the layer's aggregator, which returns the total."""


@dataclass(frozen=True, slots=True)
class ExchangePace:
    """Amount that is sent in a sync round, how often, and how late it may come. A plan may change it."""

    sparsity: float  # as reported: the share that all ranks together leave out
    sent: float  # the share of its blocks that a rank sends of a layer
    returned: float = 1.0  # the share that a layer's aggregator sends back
    every: int = 1  # a layer is exchanged in each so-many-th sync round
    staleness: int = 1  # sync rounds that a forward pass may begin without
    at_shared_params: bool = False  # exchanging updates: forward and backward passes are at the shared parameters


class _Turns(NamedTuple):
    """Turns in use from sync round `begin` on. turns: of each tensor, by the engine's number."""

    begin: int
    every: int
    turns: Sequence[int]


class LayerExchange:
    """One rank's exchange. Call `start` once, then anything else; `close` at any time."""

    def __init__(self, tensors: Sequence[EngineTensor], deadline_s: float) -> None:
        self.tensors, self.deadline_s = tensors, deadline_s
        self.layers = sorted((layer for one in tensors for layer in one.layers), key=lambda layer: layer.order)
        self._engine: ExchangeEngine | None = None
        self._offload: Offload | None = None
        self._stream: CopyStream | None = None
        self._uploads: PinnedUploads | None = None
        self._differences: dict[int, DeviceDifference] = {}  # by number
        self.leads = True
        """Whether this rank exchanges: alone in its island, or the first of a replica's."""

    @property
    def started(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> ExchangeEngine:
        assert self._engine is not None  # start came first
        return self._engine

    @property
    def gradients(self) -> GradientEngine:
        """Return the engine where gradients are exchanged."""
        assert isinstance(self._engine, GradientEngine)
        return self._engine

    @property
    def updates(self) -> UpdateEngine:
        """Return the engine where updates are exchanged."""
        assert isinstance(self._engine, UpdateEngine)
        return self._engine

    def start(
        self,
        session: Session,
        options: ExchangeOptions,
        islands: Sequence[Sequence[int]],
        pace: ExchangePace,
        aggregators_before: Sequence[int | None] = (),
    ) -> None:
        """Start the engine and give tensors their numbers, turns and aggregators.

        islands: ranks, each once. pace: of the first sync rounds. aggregators_before: of each tensor, as
        aggregators_of takes them."""
        rank = session.place.rank
        settings: dict[str, Any] = {
            "rank": rank,
            "islands": islands,
            "threads": max(1, torch.get_num_threads()),
            "values": options.values,
            "selection": options.selection,
            "digest_every": options.digest_every if session.place.world_size > 1 else 0,
            "seed": session.seed % 2**63,
            "first_round": 1,
        }
        engine: ExchangeEngine
        if options.exchange == "updates":
            engine = UpdateEngine(**settings, every=pace.every, replicas=options.aggregators)
        else:
            engine = GradientEngine(**settings, error_feedback=options.error_feedback)
        self._engine = engine
        self.leads = not options.aggregators or any(ranks[0] == rank for ranks in islands)
        owned = options.aggregators and session.place.world_size > 1
        entries = [tensor.shared_param.numel() for tensor in self.tensors]
        self._aggregators = aggregators_of(entries, len(islands), aggregators_before)
        turns = turns_of(entries, self._aggregators, pace.every)
        self._turns = [_Turns(0, pace.every, turns)]
        for tensor, turn, aggregator in zip(self.tensors, turns, self._aggregators, strict=True):
            aggregator_sum = zeros(tensor.shared_param.numel()) if owned and islands[aggregator][0] == rank else None
            layer = tensor.layers[0]  # of several none has a residual or moments here
            live = tensor.live if tensor.on_cpu and self.leads else None
            how: dict[str, Any] = {"order": layer.order, "shared_param": tensor.shared_param, "live": live}
            if isinstance(engine, UpdateEngine):
                owner = aggregator if owned else None
                number = engine.add_tensor(**how, turn=turn, aggregator=owner, aggregator_sum=aggregator_sum)
            else:
                moments: dict[str, Any] = {"first": layer.first, "second": layer.second, "last_step": layer.last_step}
                number = engine.add_tensor(
                    **how, rule=layer.rule, residual=layer.residual, group=layer.group, **moments
                )
            tensor.given(number, aggregator_sum, islands[aggregator][0] if owned else None)
        self.change_pace(1, pace)
        if not all(tensor.on_cpu for tensor in self.tensors):
            self._uploads = PinnedUploads(CudaCopyStream(session.device))
        elsewhere = [tensor for tensor in self.tensors if self.leads and not tensor.on_cpu]
        if elsewhere:
            self._stream = stream = CudaCopyStream(session.device)
            sizes = [tensor.live.nbytes for tensor in elsewhere]
            self._offload = Offload(stream, sizes, lambda one: self._await_engine([one]))
            if options.exchange == "updates":
                self._differences = self._on_devices(session, stream, elsewhere, options.selection)

    def _on_devices(
        self, session: Session, stream: CopyStream, tensors: Sequence[EngineTensor], rule: Selection
    ) -> dict[int, DeviceDifference]:
        """Return, by number, tensors whose blocks are chosen on their device.

        Weights of 16 bits are copied to the CPU, which alone knows the rounding error of adding others' updates to
        them. All weights are copied where this build has no code for the device."""
        wide = [one for one in tensors if one.live.dtype == torch.float32 and why_on_cpu(one.live.device) is None]
        # References; and of the largest tensor the difference, and all its blocks with their numbers.
        takes = sum(one.live.nbytes for one in wide) + 3 * max((one.live.nbytes for one in wide), default=0)
        if not stream.has_room(takes):
            text = (
                f"the device has no {naturalsize(takes)} to choose there what is sent: all weights cross to the CPU in "
                "every sync round. Use a smaller batch, or a device with more memory"
            )
            session.notice(LEVEL_WARNING, text)
            return {}
        rooms = {device: SelectionRoom(device) for device in {one.live.device for one in wide}}
        return {
            one.number: DeviceDifference(self.updates, one.number, one.live, rule, rooms[one.live.device])
            for one in wide
        }

    def exchanged_after(self, layer: Layer, sync_round: int) -> int:
        """Return the first sync round after this one in which it is the layer's turn."""
        return next(number for number in count(sync_round + 1) if self.is_due(layer, number))

    def is_due(self, one: Layer | EngineTensor, sync_round: int) -> bool:
        """Return True if the layer or tensor is exchanged in that round."""
        held = next(turns for turns in reversed(self._turns) if turns.begin <= sync_round)
        return sync_round % held.every == held.turns[one.number]

    def change_pace(self, sync_round: int, pace: ExchangePace) -> None:
        """Change the pace from the next sync round on, on all ranks alike."""
        self.engine.remember(max(_REMEMBERED, pace.staleness + 1))
        every = min(pace.every, len(self.tensors))  # or some turns had nothing
        if self.every in {pace.every, every}:
            return
        entries = [tensor.shared_param.numel() for tensor in self.tensors]
        turns = turns_of(entries, self._aggregators, every)
        self.updates.change_turns(sync_round, every, turns)
        self._turns = [*self._turns[-MOST_STALENESS - 1 :], _Turns(sync_round, every, turns)]

    @property
    def every(self) -> int:
        """Return the sync rounds from one exchange of a layer to the next, from the next round on."""
        return self._turns[-1].every

    def on_cpu(self, one: Layer | EngineTensor) -> bool:
        """Return True if the engine reads the weights in place."""
        return self._offload is None or one.on_cpu

    def send_live(self, tensor: EngineTensor, sync_round: int, weight: float, k_blocks: int) -> None:
        """Choose from the live weights of a tensor that is not `on_cpu`, after all work queued until now.

        Used where updates are exchanged. The weights may be written after `await_selected`."""
        live, difference = tensor.live, self._differences.get(tensor.number)
        if difference is not None:
            self.on_device(tensor, partial(difference.select, sync_round, live, weight, k_blocks))
            return

        def compress(copied: torch.Tensor) -> None:
            self.updates.compress_live(sync_round, tensor.number, copied, weight, k_blocks)

        self.copy_from_gpu(tensor, live, compress)

    def copy_from_gpu(
        self, one: Layer | EngineTensor, flat: torch.Tensor, compress: Callable[[torch.Tensor], None]
    ) -> None:
        """Copy and compress weights that are not `on_cpu`, as Offload.submit does."""
        assert self._offload is not None
        self._offload.submit(one.number, flat, compress)

    def on_device(self, one: Layer | EngineTensor, work: Callable[[], None]) -> None:
        """Call `work` on the thread of copies, with their stream current, after all work queued until now.

        Used for what is not `on_cpu`."""
        assert self._offload is not None
        assert self._stream is not None
        stream = self._stream

        def begin(mark: Any) -> None:
            with stream.after(mark):
                work()

        self._offload.run(one.number, begin)

    def set_live(self, tensor: EngineTensor, residual: torch.Tensor | None, weight: float) -> None:
        """Set own weights to those of a rank that has not sent `residual` yet.

        Used where updates are exchanged, with nothing on its way. residual: float32 [N] on the CPU; None: zeros.
        weight: the factor of the rank's updates in the shared parameters."""
        if not self.leads:
            tensor.live.copy_(tensor.shared_param)  # the leader's weights replace them
        elif tensor.on_cpu:
            self.updates.set_live(tensor.number, residual, weight, None)
        else:
            live = torch.empty_like(tensor.live, device="cpu")
            self.updates.set_live(tensor.number, residual, weight, live)
            tensor.live.copy_(live)
            if tensor.number in self._differences:
                self._differences[tensor.number].set(tensor.shared_param)

    def read_residual(self, tensor: EngineTensor) -> torch.Tensor:
        """Return this rank's difference from the shared parameters that was not sent, float32 [N].

        Used where updates are exchanged. Zeros where another rank sends."""
        residual = torch.zeros_like(tensor.shared_param)
        if self.leads:
            live = None if tensor.on_cpu else self.copied(tensor.live)
            self.updates.read_residual(tensor.number, live, residual)
        return residual

    def copied(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU of flat memory of the device, as the work that this thread has queued leaves it.

        It passes through a pinned ring: a device copies to pageable memory at a fraction of its rate."""
        assert self._stream is not None
        (copy,), fill = StagingRing(self._stream).crossing([flat])
        fill()
        return copy

    def read_shared_param(self, tensor: EngineTensor) -> torch.Tensor:
        """Return a copy of the shared parameter at its present sync round, float32 [N] on the CPU."""
        copy = torch.empty_like(tensor.shared_param)
        self.engine.read_shared_param(tensor.number, copy)
        return copy

    def write_shared_param(self, tensor: EngineTensor, into: torch.Tensor) -> None:
        """Write the shared parameter at its present sync round into memory [N] like that of the live weights.

        On a device, work queued from now on sees it."""
        if self._uploads is not None and not tensor.on_cpu:
            self._uploads.write(partial(self.engine.read_shared_param, tensor.number), into)
        elif into.dtype == torch.float32:
            self.engine.read_shared_param(tensor.number, into)
        else:
            into.copy_(self.read_shared_param(tensor))

    def await_shared_params(self, tensors: Sequence[EngineTensor], number: int) -> None:
        """Wait until these tensors' shared parameters are at sync round `number`. Raises PeerLost.

        Used by a rank that does not lead."""
        try:
            with waiting:
                self.engine.changes([tensor.number for tensor in tensors], number, self.deadline_s)
        except DeadlineExceeded as error:
            raise PeerLost(str(error)) from error

    def check_copies(self) -> None:
        """Raise the error that a copy from the GPU met."""
        if self._offload is not None:
            self._offload.check()

    def await_copies(self, numbers: Sequence[int] = ()) -> None:
        """Wait until everything given to `copy_from_gpu` of these layers was compressed. No numbers: of all layers."""
        if self._offload is not None:
            self._offload.drain(self.deadline_s, numbers)

    def await_selected(self, numbers: Sequence[int] = ()) -> None:
        """Wait until nothing reads live weights of these layers any more. No numbers: of all layers.

        Raises DeadlineExceeded, PeerLost."""
        self.await_copies(numbers)
        self._await_engine(numbers)

    def _await_engine(self, numbers: Sequence[int]) -> None:
        self.engine.await_compressed(self.deadline_s, numbers)

    def close(self, before_engine: Callable[[], None] = lambda: None) -> None:
        """Close the engine. before_engine: stops what takes messages from it."""
        if self._offload is not None:
            self._offload.close()
        before_engine()
        if self._engine is not None:
            self._engine.close()


def aggregators_of(entries: Sequence[int], aggregators: int, before: Sequence[int | None] = ()) -> list[int]:
    """Return the aggregator of each layer, below `aggregators`. Each aggregates about as many entries.

    before: by layer, the aggregator that has its sum; None, or empty: there is none. It stays the aggregator unless
    loads would differ by more than the largest layer."""
    found, loads = [-1] * len(entries), [0] * aggregators
    for layer, aggregator in enumerate(before):
        if aggregator is not None:
            found[layer] = aggregator
            loads[aggregator] += entries[layer]
    for layer in _largest_first(entries):
        if found[layer] < 0:
            found[layer] = aggregator = min(range(aggregators), key=lambda one: (loads[one], one))
            loads[aggregator] += entries[layer]
    while (gap := max(loads, default=0) - min(loads, default=0)) > max(entries, default=0):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        of_most = [layer for layer, aggregator in enumerate(found) if aggregator == most]
        moved = min(of_most, key=lambda layer: (abs(entries[layer] - gap / 2), layer))
        found[moved] = least
        loads[most] -= entries[moved]
        loads[least] += entries[moved]
    return found


def turns_of(entries: Sequence[int], aggregator_of: Sequence[int], every: int) -> list[int]:
    """Return the turn of each layer, below `every`.

    Turns carry about as many entries of each aggregator, and so in all."""
    found, in_all = [0] * len(entries), [0] * every
    of_aggregator: dict[int, list[int]] = {aggregator: [0] * every for aggregator in aggregator_of}
    for layer in _largest_first(entries):
        own = of_aggregator[aggregator_of[layer]]
        turn = min(range(every), key=lambda one: (own[one], in_all[one], one))
        found[layer] = turn
        own[turn] += entries[layer]
        in_all[turn] += entries[layer]
    return found


def _largest_first(entries: Sequence[int]) -> list[int]:
    """Return layers from the largest to the smallest, each for the least loaded aggregator or turn.

    Source: longest processing time first (Graham, 1969)."""
    return sorted(range(len(entries)), key=lambda one: (-entries[one], one))
