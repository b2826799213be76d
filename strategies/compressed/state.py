"""Durable state of strategy `compressed`: the residuals of each rank, and DGC's momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.model.durable import UNSENT_MOMENTUM, Origin, OwnState, Tensors
from atoll.agent.runtime.session.session import Session
from atoll.strategies.compressed.flat_state import FlatState
from atoll.strategies.shared_params import residuals as own_files
from atoll.v1.common_pb2 import LEVEL_WARNING


class CompressedState:
    """A Durable. Residuals add up: the next run's ranks take over each rank's exactly once, whatever their number, so
    the sum over ranks does not change. The same holds for momentum."""

    survives_update = True

    def __init__(self, session: Session, residuals: FlatState, velocity: FlatState | None) -> None:
        """velocity: None if there is no momentum."""
        self._session, self._residuals, self._velocity = session, residuals, velocity

    def freeze(self) -> None: ...

    def shared_params(self) -> Mapping[int, torch.Tensor]:
        return {}

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {}

    def own_writer(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        directory = self._session.checkpoint.directory
        if directory is None:
            return None
        held = {name: one.cpu() for name, one in self._own().items()}
        packed = pack_state({"residuals": held, "parts": [], "optimizer": None}, copy=copy)
        return partial(own_files.write, directory, header, self._session.place.rank, packed)

    def own_at_boundary(self) -> Tensors:
        return self._own()

    def own_after_flush(self) -> Tensors:
        return self._own()

    def without_flush(self) -> tuple[Tensors, OwnState]:
        own = {name: one.cpu().clone() for name, one in self._own().items()}
        return {}, OwnState(self._session.place.rank, own, None)

    def survivor_state(self) -> None: ...

    def rolling(self) -> None: ...

    def take_over(self, origin: Origin | None) -> None:
        """Take over the state of the origin's ranks. Collective if there is an origin. Raises PeerLost."""
        if origin is None:
            return
        sizes = {name: one.numel() for name, one in self._own().items()}
        states = origin.own if origin.own is not None else own_files.take_over(self._session, origin, sizes)
        for state in states:
            if {name: one.numel() for name, one in state.residual.items()} != sizes:
                rank = self._session.place.rank
                text = f"rank {rank}: what rank {state.rank} left out is of another model or algorithm, and is lost"
                self._session.notice(LEVEL_WARNING, text)
                continue
            self._residuals.take_over(state.residual)
            if self._velocity is not None:
                self._velocity.take_over(
                    {
                        name.removeprefix(UNSENT_MOMENTUM): one
                        for name, one in state.residual.items()
                        if name.startswith(UNSENT_MOMENTUM)
                    }
                )

    def _own(self) -> dict[str, torch.Tensor]:
        own = self._residuals.by_name()
        if self._velocity is not None:
            own |= {f"{UNSENT_MOMENTUM}{name}": one for name, one in self._velocity.by_name().items()}
        return own
