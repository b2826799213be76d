"""Durable state of ranks with shared parameters: these, each rank's own residuals, and aggregators' sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.durable import Origin, OwnState, SurvivorState, Tensors
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.frames import Kind
from atoll.kernels.exchange_engine import RecentPart
from atoll.strategies.shared_params import residuals
from atoll.strategies.shared_params.exchange import LayerExchange
from atoll.strategies.shared_params.residuals import FlushLog
from atoll.strategies.shared_params.rolling import ResidualPlace, RollingSharedParams

FREEZE_DEADLINE_S: Final = 5.0


class SharedParamsState:
    """A Durable for both kinds of exchange."""

    survives_update = True

    def __init__(
        self,
        session: Session,
        exchange: LayerExchange,
        optimizer: OptimizerState,
        place: ResidualPlace,
        newest: Callable[[], int],
    ) -> None:
        """newest: the sync round that this rank put everything into."""
        self._session, self._exchange, self._optimizer, self._place = session, exchange, optimizer, place
        self._rolling = RollingSharedParams(exchange, newest, place)
        self.flushes = FlushLog([layer.name for layer in exchange.layers])
        self.adopted = False
        """True once residuals are this view's. Earlier ones are meaningless."""
        self.updates = 0
        """Updates made since the job began."""
        self.telling: Sequence[int] = ()
        """Update after which the ranks began to sum second moments, and the island of each; empty: they do not."""
        self.staleness = 1
        """Sync rounds that a forward pass may begin without."""

    def freeze(self) -> None:
        self.flushes.freeze(FREEZE_DEADLINE_S)
        if self._exchange.started:
            self._exchange.engine.quiesce(FREEZE_DEADLINE_S)

    def shared_params(self) -> Mapping[int, torch.Tensor]:
        for layer in self._exchange.layers:
            if layer.rule in ("adam", "adamw"):
                self._optimizer.state[layer.parameter]["step"].fill_(float(self.updates))
        return {id(layer.parameter): layer.shaped(layer.shared_param) for layer in self._exchange.layers}

    def shared(self) -> Mapping[str, torch.Tensor]:
        shared = {
            "updates": torch.tensor(self.updates),
            "staleness": torch.tensor(self.staleness),
            "versions": torch.tensor(list(self._versions().values())),
            "flushes": torch.tensor(list(self.flushes.counts.values())),
        }
        if self.telling:
            shared["telling"] = torch.tensor(self.telling)
        for layer in self._exchange.layers:
            if layer.parameter.dtype != torch.float32:
                shared[f"shared_param.{layer.name}"] = layer.shared_param
            if layer.last_step is not None:
                shared[f"last_step.{layer.name}"] = layer.last_step
        return shared

    def own_writer(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        directory = self._session.checkpoint.directory
        if directory is None or self._place == "none" or not self.adopted:
            return None
        optimizer = self._optimizer.state_dict() if self._place == "live" else None
        packed = pack_state(self._own(optimizer), copy=copy)
        return partial(residuals.write, directory, header, self._session.place.rank, packed)

    def _own(self, optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return this rank's state as residuals.py lists it."""
        recent = self._exchange.engine.recent_parts()
        summed = self._summed(recent)
        aggregated = [layer for layer in self._exchange.layers if layer.aggregator_sum is not None]
        return {
            "residuals": dict(self.residuals()),
            "parts": residuals.as_rows(self._exchange.tensors, recent),
            "optimizer": optimizer,
            "aggregator_sums": dict(self.aggregator_sums()),
            "versions": {layer.name: summed[layer.name] for layer in aggregated},
            "following": {
                layer.name: self._exchange.exchanged_after(layer, summed[layer.name]) for layer in aggregated
            },
            "flushes": dict(self.flushes.counts),
            "given": dict(self.flushes.given),
        }

    def survivor_state(self) -> SurvivorState | None:
        if self._place != "live" or not self.adopted:
            return None
        state = self._own(None)
        state["aggregator_sums"] = {name: one.clone() for name, one in state["aggregator_sums"].items()}
        sizes = {layer.name: layer.shared_param.numel() for layer in self._exchange.layers}
        return _LiveResiduals(self._session, state, sizes)

    def own_at_boundary(self) -> Tensors:
        return {}

    def own_after_flush(self) -> Tensors:
        return self.residuals() if self._place == "engine" else {}

    def without_flush(self) -> tuple[Tensors, OwnState]:
        shared_params = {f"shared_param.{layer.name}": layer.shared_param for layer in self._exchange.layers}
        residual = {name: one.clone() for name, one in self.residuals().items()}
        sums = {name: one.clone() for name, one in self.aggregator_sums().items()}
        own = OwnState(self._session.place.rank, residual, None, sums)
        return {**self.shared(), **shared_params}, own

    def rolling(self) -> RollingSharedParams:
        return self._rolling

    def residuals(self) -> Mapping[str, torch.Tensor]:
        """Return what this rank has not sent yet, by layer; float32 [N].

        They are copies where residuals are in the live weights. Empty where another rank sends for this one."""
        if not self._exchange.leads:
            return {}
        if self._place == "live":
            found: dict[str, torch.Tensor] = {}
            for tensor in self._exchange.tensors:
                parts = tensor.parts(self._exchange.read_residual(tensor))
                found |= {layer.name: part for layer, part in parts}
            return found
        self._exchange.await_copies()  # copies change residuals on devices
        return {layer.name: layer.kept() for layer in self._exchange.layers if layer.residual is not None}

    def aggregator_sums(self) -> Mapping[str, torch.Tensor]:
        """Return the ranks' sums less the shared parameters, float32 [N], by the layers that this rank aggregates."""
        return {layer.name: layer.aggregator_sum for layer in self._exchange.layers if layer.aggregator_sum is not None}

    def _versions(self) -> Mapping[str, int]:
        """Return the last sync round of each layer's shared parameter."""
        versions = self._exchange.engine.versions()
        return {layer.name: versions[layer.number] for layer in self._exchange.layers}

    def _summed(self, recent: Sequence[RecentPart]) -> Mapping[str, int]:
        """Return the newest sync round in each layer's aggregator sum.

        An aggregator adds a round to its sum and makes the total in one task, and its own shared parameter takes the
        total in the next. A freeze may come between the two: the sum is then one round ahead of the shared parameter's
        version."""
        summed = self._exchange.engine.versions()
        for part in recent:
            if part.kind == Kind.FROM_AGGREGATOR:
                summed[part.tensor] = max(summed[part.tensor], part.sync_round)
        return {layer.name: summed[layer.number] for layer in self._exchange.layers}

    def take_over_shared_params(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Restore the shared parameters. shared: a checkpoint's, or empty: they begin as copies of the live weights."""
        for layer in self._exchange.layers:
            layer.shared_param.copy_(shared.get(f"shared_param.{layer.name}", layer.live))
            if layer.last_step is not None and f"last_step.{layer.name}" in shared:
                layer.last_step.copy_(shared[f"last_step.{layer.name}"])

    def take_over_residuals(self, origin: Origin) -> Sequence[OwnState]:
        """Restore residuals of the previous run's ranks. Collective where they are on disks; raises PeerLost."""
        if origin.own is not None:
            return origin.own
        sizes = {layer.name: layer.shared_param.numel() for layer in self._exchange.layers}
        return residuals.take_over(self._session, origin, sizes)


class _LiveResiduals:
    """A SurvivorState of residuals in the live weights, as they were when the view ended."""

    def __init__(self, session: Session, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """state: as residuals.py lists it. sizes: entries by layer."""
        self._session, self._state, self._sizes = session, state, sizes

    def relative_to(self, shared: Tensors) -> OwnState:
        rank, copied = self._session.place.rank, residuals.copied(self._state)
        (own,) = residuals.as_of(self._session, shared, [(rank, copied)], self._sizes)
        return own
