"""The durable state of strategy `compressed`: what each rank left out of its gradients, and DGC's momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.step.state.durable import Origin
from atoll.strategies.compressed.codes.compressors import Compressor
from atoll.strategies.compressed.codes.sparse_codes import WithMomentum
from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.residuals import FlatResiduals
from atoll.strategies.shared_masters import residuals as own_files
from atoll.v1.common_pb2 import LEVEL_WARNING

VELOCITY: Final = "velocity."


class CompressedState:
    """A Durable. What ranks left out adds up: the next run's ranks take over each rank's exactly once, whatever their
    number, and so the sum over ranks stays what it was. So does momentum."""

    survives_update = True

    def __init__(
        self, session: Session, residuals: FlatResiduals, layout: TensorLayout, compressor: Compressor
    ) -> None:
        self._session, self._residuals, self._layout = session, residuals, layout
        self._momentum = compressor if isinstance(compressor, WithMomentum) else None
        self._kept: torch.Tensor | None = None

    def freeze(self) -> None: ...

    def masters(self) -> Mapping[int, torch.Tensor]:
        return {}

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {}

    def own_writer(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        directory = self._session.checkpoint.directory
        if directory is None:
            return None
        held = {name: one.cpu() for name, one in self._own().items()}
        packed = own_files.pack(held, [], own_files.OwnerSums({}, {}, {}), None, own_files.FlushLog(()), copy=copy)
        return partial(own_files.write, directory, header, self._session.place.rank, packed)

    def standing(self) -> Mapping[str, torch.Tensor]:
        return self._own()

    def unsent(self) -> Mapping[str, torch.Tensor]:
        return self._own()

    def rolling(self) -> None: ...

    def keep_momentum(self) -> None:
        """A pass begins that does not count."""
        self._kept = self._momentum.velocity.clone() if self._momentum is not None else None

    def put_momentum_back(self) -> None:
        """That pass is over."""
        if self._momentum is not None and self._kept is not None:
            self._momentum.velocity.copy_(self._kept)
        self._kept = None

    def take_over(self, origin: Origin | None) -> None:
        """Collective, where there is an origin. Raises PeerLost."""
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
            if self._momentum is not None:
                taken = torch.cat([state.residual[f"{VELOCITY}{name}"] for name in self._layout.names])
                self._momentum.velocity.add_(taken.to(self._momentum.velocity.device))

    def _own(self) -> dict[str, torch.Tensor]:
        own = self._residuals.by_name()
        if self._momentum is not None:
            first = self._layout.first
            for index, name in enumerate(self._layout.names):
                own[f"{VELOCITY}{name}"] = self._momentum.velocity[first[index] : first[index + 1]]
        return own
