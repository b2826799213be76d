"""Where strategy `stale-sparse` meets the training thread: hooks in, engine and transport behind.

What both kinds of exchange share. A round is what all ranks exchange once, numbered from 1 within a run. A layer's
forward pre-hook waits until round n - staleness is in its weights and takes a newer one if it is there."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.data.loader import Position
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.synchronisation import Callbacks, Norms, Origin, OwnState, Pass, StepNumbers
from atoll.agent.runtime.transport import topology
from atoll.agent.runtime.transport.agreement import Agreement
from atoll.agent.runtime.transport.digests import Digests
from atoll.agent.runtime.transport.traffic import Traffic
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.kernels.exchange_engine import ExchangeEngine
from atoll.strategies.stale_sparse import residuals
from atoll.strategies.stale_sparse.layout import Layer, own_module_layers
from atoll.strategies.stale_sparse.offload import Offload
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.rounds import Owing, Rounds
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.tally import Tally
from atoll.v1.common_pb2 import LinkSample

FREEZE_DEADLINE_S: Final = 5.0


class StaleSynchroniser(ABC):
    """All methods run on the training thread, but for `freeze` and `masters`."""

    survives_update = True
    finish_changes: bool  # of the exchange

    def __init__(
        self,
        session: Session,
        settings: StaleSparse,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        callbacks: Callbacks,
        agreed: Agreed,
    ) -> None:
        """agreed: what holds until all ranks said more. Raises BadInput for what cannot be trained so."""
        self._session, self._settings, self._callbacks = session, settings, callbacks
        self._model, self._optimizer = model, optimizer
        self._world_size = session.place.world_size
        self._layers: list[Layer] = self._lay_out()
        self._deadline_s = session.collective_timeout_s
        self._agreed = agreed
        self._passes = self._acted_on = 0  # passes begun in this run; the one whose words `_agreed` is
        self._round = 0  # rounds that this rank put everything into
        self._made = 0  # updates since the job began
        self._first_step = 0
        self._muted = False  # a rehearsal: nothing of it is exchanged
        self._sparsity = settings.sparsity
        self._k_blocks: list[int] = []
        self.open = False
        self._fetched: set[int] = set()  # layers whose weights were brought up to date since the boundary
        self._unhooked: set[int] = set()  # layers used without their own module's forward: fetched at the boundary
        self._tally = Tally([layer.name for layer in self._layers])
        self._flushes = dict.fromkeys((layer.name for layer in self._layers), 0)
        self._given: dict[str, torch.Tensor] = {}  # into a flush that other ranks may not have finished
        self._flushing = threading.Lock()  # a layer is between two flushes
        self._traffic: Traffic | None = None
        self._offload: Offload | None = None
        self._engine: ExchangeEngine
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(partial(self._before_forward, held))
            for module, held in own_module_layers(model, self._layers)
        ]
        self._rounds = Rounds(self._layers, lambda: self._ordered, session.collective_timeout_s, self._owing())

    # --- what the kinds of exchange differ in

    @abstractmethod
    def _lay_out(self) -> list[Layer]:
        """The parameters that are exchanged. Raises BadInput for what cannot be."""

    @abstractmethod
    def _adopt(self, saved: Mapping[str, torch.Tensor]) -> int:
        """Take over the optimizer's state; masters are set. Returns how many updates were made before."""

    @abstractmethod
    def _put_back(self, states: Sequence[OwnState]) -> None:
        """What ranks of the run before had held back, and this one took over, counts again."""

    # --- the run

    def start(self, position: Position, origin: Origin | None) -> None:
        saved = origin.extra if origin is not None else {}
        self._first_step = position.step
        for layer in self._layers:
            layer.master.copy_(saved.get(f"master.{layer.name}", layer.live))
        self._made = max(self._adopt(saved), int(saved.get("updates", 0)))
        if origin is not None and "versions" in saved:
            sizes = {layer.name: layer.master.numel() for layer in self._layers}
            self._put_back(residuals.take_over(self._session, origin, sizes) if origin.own is None else origin.own)
        members = topology.members(self._session)
        self._engine = self._make_engine(topology.islands(members))
        if self._session.device.type == "cuda":
            self._offload = Offload(self._session.device)
        self._rounds.begin(self._engine, self._offload)
        self._agreement = Agreement(self._session.place.rank, self._world_size, self._tell_agreement)
        names = [layer.name for layer in self._layers]
        self._digests = Digests(self._session.place.rank, names, self._tell_digests)
        if self._session.group is not None:
            self._traffic = Traffic(
                self._session,
                members,
                engine=self._engine,
                agreement=self._agreement,
                digests=self._digests,
                settings=self._settings,
                waits=lambda waits: self._callbacks.busy() if waits else self._callbacks.idle(),
            )
        self._set_sparsity(self._settings.sparsity)

    def _make_engine(self, islands: Sequence[Sequence[int]]) -> ExchangeEngine:
        settings, session = self._settings, self._session
        engine = ExchangeEngine(
            rank=session.place.rank,
            islands=islands,
            threads=max(1, torch.get_num_threads()),
            values=settings.values,
            selection=settings.selection,
            # Of updates it is in the live weights.
            error_feedback=settings.error_feedback and settings.exchange == "gradients",
            digest_every=settings.digest_every if self._world_size > 1 else 0,
            seed=session.seed % 2**63,
            first_round=1,
            exchange=settings.exchange,
        )
        for layer in self._layers:
            layer.number = engine.add_tensor(
                order=layer.order,
                rule=layer.rule,
                master=layer.master,
                residual=layer.residual,
                first=layer.first,
                second=layer.second,
                last_step=layer.last_step,
                live=layer.live if layer.on_cpu else None,
                group=layer.group,
            )
        return engine

    @abstractmethod
    def finish(self) -> None: ...

    def leave(self) -> None:
        if self._traffic is not None:
            self._traffic.leave()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._offload is not None:
            self._offload.close()
        if self._traffic is not None:
            self._traffic.close()
        if hasattr(self, "_engine"):
            self._engine.close()

    # --- the pass

    def begin(self, opened: Pass) -> None:
        self._muted = opened.muted or opened.batch_slice.step < self._first_step
        self.open = True
        if self._muted:
            return
        self._passes += 1
        planned = opened.params.sparsity if isinstance(opened.params, StaleSparsePlan) else None
        self._set_sparsity(self._settings.sparsity if planned is None else planned)
        self._unhooked.update(layer.number for layer in self._layers if layer.number not in self._fetched)
        self._agreement.propose(self._passes, opened.batch_slice, opened.own)

    @abstractmethod
    def end(self) -> Norms: ...

    @abstractmethod
    def before_update(self) -> None: ...

    @abstractmethod
    def after_update(self) -> None: ...

    @abstractmethod
    def clip(self, max_norm: float) -> bool: ...

    # --- the boundary

    def agreed(self, own: Agreed) -> Agreed:
        if self._session.group is None:
            return own
        number = self._passes - self._settings.staleness
        if number > self._acted_on:
            self._agreed, waited_s = self._agreement.act_on(number, self._deadline_s)
            self._acted_on = number
            self._tally.waited_for_all(waited_s)
        return self._agreed

    def boundary(self, *, settle: bool) -> None:
        self._fetched.clear()
        self._digests.take(self._engine.digests())
        self._digests.check()
        if self._traffic is not None and self._session.probe is not None:
            self._traffic.deliver_up_to(self._ordered if settle else self._required)
        if settle:
            self._fetch(self._layers, self._ordered)
        elif self._unhooked:
            self._fetch([layer for layer in self._layers if layer.number in self._unhooked], self._required)

    def waited(self) -> float:
        return self._tally.take_waited()

    # --- the state

    def freeze(self) -> None:
        self._flushing.acquire(timeout=FREEZE_DEADLINE_S)  # for good: nothing may be flushed from now on
        if hasattr(self, "_engine"):
            self._engine.quiesce(FREEZE_DEADLINE_S)

    def masters(self) -> Mapping[int, torch.Tensor]:
        return {id(layer.parameter): layer.shaped(layer.master) for layer in self._layers}

    def extra(self) -> Mapping[str, torch.Tensor]:
        extra = {
            "updates": torch.tensor(self._made),
            "versions": torch.tensor(self._engine.versions()),
            "flushes": torch.tensor(list(self._flushes.values())),
        }
        for layer in self._layers:
            if layer.parameter.dtype != torch.float32:
                extra[f"master.{layer.name}"] = layer.master
        return extra

    def aside(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        directory = self._session.checkpoint.directory
        if directory is None or not self._settings.error_feedback:
            return None
        parts = residuals.as_rows(self._layers, self._engine.recent_parts())
        flushed = residuals.Flushed(self._flushes, self._given)
        packed = residuals.pack(self._held_back(), parts, self._own_optimizer_state(), flushed, copy=copy)
        return partial(residuals.write, directory, header, self._session.place.rank, packed)

    def rounds(self) -> Rounds:
        return self._rounds

    @abstractmethod
    def _owing(self) -> Owing:
        """How what this rank owes is kept."""

    @abstractmethod
    def _held_back(self) -> Mapping[str, torch.Tensor]:
        """What compression held back on this rank, by layer; flat."""

    def _own_optimizer_state(self) -> Mapping[str, Any] | None:
        """The optimizer's state where it is another on each rank."""
        return None

    # --- numbers

    def statistics(self) -> Mapping[str, float]:
        self._tally.add(self._engine.take_stats()._asdict())
        return {**self._tally.statistics(), "sparsity": self._sparsity, "sent_bytes": float(self._sent_bytes())}

    def step_numbers(self) -> StepNumbers:
        return self._tally.take_step(self._sparsity, self._sent_bytes())

    def _sent_bytes(self) -> int:
        return self._traffic.sent_bytes() if self._traffic is not None else 0

    def links(self) -> list[LinkSample]:
        return self._traffic.link_samples() if self._traffic is not None else []

    # --- the weights

    @property
    def _ordered(self) -> int:
        """The newest round whose update was ordered."""
        return self._round

    @property
    def _required(self) -> int:
        """The round that the next forward must have (StellaTrain, section 3.3: never older)."""
        return max(0, min(self._round - self._settings.staleness, self._ordered))

    def _before_forward(self, held: list[Layer], module: nn.Module, inputs: Any) -> None:
        missing = [layer for layer in held if layer.number not in self._fetched]
        if missing:
            try:
                self._fetch(missing, self._required)
            except PeerLost as error:
                self._callbacks.lost(error)

    def _fetch(self, layers: Sequence[Layer], number: int) -> None:
        """Bring these layers' weights to round `number` at least. Raises PeerLost."""
        if self._offload is not None:
            self._offload.check()
        try:
            on_cpu = [layer.number for layer in layers if layer.on_cpu]
            if on_cpu:
                _, fresh, waited_s = self._engine.fetch(on_cpu, number, self._deadline_s)
                self._tally.looked([layer.name for layer in layers if layer.on_cpu], fresh, waited_s)
            if off_cpu := [layer for layer in layers if not layer.on_cpu]:
                self._take_changes(off_cpu, number)
        except DeadlineExceeded as error:
            raise PeerLost(str(error)) from error
        self._fetched.update(layer.number for layer in layers)

    def _take_changes(self, layers: Sequence[Layer], number: int) -> None:
        waited_s, changes = self._engine.changes([layer.number for layer in layers], number, self._deadline_s)
        fresh = sum(change.version > number for change in changes)
        self._tally.looked([layer.name for layer in layers], fresh, waited_s)
        for layer, change in zip(layers, changes, strict=True):
            self._publish(layer.live, change.index, change.values)

    @abstractmethod
    def _publish(self, live: torch.Tensor, index: Any, values: Any) -> None:
        """Bring changed blocks into weights that are not in the CPU's memory."""

    def _set_sparsity(self, sparsity: float) -> None:
        if not self._k_blocks or sparsity != self._sparsity:
            self._sparsity = sparsity
            self._k_blocks = [layer.k_blocks(sparsity, self._world_size) for layer in self._layers]

    # --- others

    def _tell_agreement(self, number: int, payload: bytes) -> None:
        if self._traffic is not None:
            self._traffic.tell_agreement(number, payload)

    def _tell_digests(self, number: int, payload: bytes) -> None:
        if self._traffic is not None:
            self._traffic.tell_digests(number, payload)


def build(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, agreed: Agreed
) -> StaleSynchroniser:
    """agreed: what holds before the first pass. Raises BadInput for what cannot be trained so."""
    from atoll.strategies.stale_sparse.gradient_exchange import GradientExchange
    from atoll.strategies.stale_sparse.update_exchange import UpdateExchange

    settings = session.strategy
    assert isinstance(settings, StaleSparse)
    exchange = UpdateExchange if settings.exchange == "updates" else GradientExchange
    return exchange(session, settings, model, optimizer, callbacks=callbacks, agreed=agreed)
