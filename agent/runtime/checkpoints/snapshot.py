"""Captures at a step boundary what changes outside optimizer.step().

Parameters and optimizer moments stand still between a boundary and the next optimizer.step(), so they are read where
they are. Buffers (batch norm), learning rates and what the user tracks may move at any time: copies are kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.pipeline.model_part import ModelPart
from atoll.agent.runtime.step.optimizers.as_one import OptimizerState
from atoll.agent.runtime.step.state.durable import Durable

StateDict = Mapping[str, Any]
SHARED: Final = "strategy"  # the name of what all ranks share beside model and optimizer


@runtime_checkable
class Tracked(Protocol):
    """A scheduler, a gradient scaler, an average of weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Snapshot:
    """The state to go on from: `take` at a boundary, `states` at any moment before the next optimizer.step()."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerState,
        tracked: Mapping[str, Tracked],
        durable: Durable,
        part: ModelPart | None = None,
    ) -> None:
        """part: what of the model this rank has; None: all of it."""
        self._model, self._optimizer, self._tracked, self.durable = model, optimizer, tracked, durable
        self.part = part
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        names = [name for name in model.state_dict() if name in buffers - parameters]
        self._held = [(name, model.get_submodule(name.rpartition(".")[0])._buffers) for name in names]
        self._buffers: dict[str, torch.Tensor] = {}
        self._groups: list[dict[str, Any]] = []
        self._tracked_states: dict[str, StateDict] = {}
        self._taken = torch.cuda.Event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.position: Position | None = None

    def take(self, position: Position) -> None:
        """Keep what may move, as it is now. Costs a copy of the buffers."""
        self._keep_buffers()
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        self._tracked_states = {name: _copied(tracked.state_dict()) for name, tracked in self._tracked.items()}
        self.position = position
        if self._taken is not None:
            self._taken.record()

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        """Every time: batch norm updates its statistics without counting up the tensor's version."""
        live = {name: held[name.rpartition(".")[2]] for name, held in self._held}
        present = {name: buffer for name, buffer in live.items() if buffer is not None}
        kept = [self._buffers.get(name) for name in present]
        into = [old for old, new in zip(kept, present.values(), strict=True) if old is not None and _alike(old, new)]
        if len(into) == len(present) == len(self._buffers):
            if into:
                torch._foreach_copy_(into, list(present.values()))  # one call for all
        else:
            self._buffers = {name: buffer.detach().clone() for name, buffer in present.items()}

    def hold(self) -> None:
        """From now on also large tensors of what is tracked are kept: it may move without a whole update."""
        self._tracked_states = {name: _copied(state, large=True) for name, state in self._tracked_states.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """After `hold`: what `take` kept, as it was; in the memory where it is, for captured graphs know that."""
        for name, held in self._held:
            if (kept := self._buffers.get(name)) is not None:
                _put_into(held, name.rpartition(".")[2], kept)
        for group, kept_group in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in kept_group.items():
                _put_into(group, key, _copied(value))
        for name, tracked in self._tracked.items():
            if name in self._tracked_states:
                tracked.load_state_dict(_copied(self._tracked_states[name], large=True))

    def header(self, session: Session, model: Fingerprint) -> Header:
        """Of the boundary that was taken."""
        assert self.position is not None
        return Header(
            job=session.job,
            run=session.run,
            view=session.view,
            step=self.position.step,
            epoch=self.position.epoch,
            consumed=self.position.consumed,
            loader_step=self.position.step,
            world_size=session.place.world_size,
            seed=session.seed,
            model=model,
        )

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, GPU tensors are read on a stream of their own, after the update before the boundary but not behind
        what came later: that may be a collective whose peer is gone."""
        if self._taken is None:
            yield
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_event(self._taken)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def identity(self) -> list[Any]:
        """Equal to that of an earlier call as long as `resting` would be of the same tensors and values."""
        found: list[Any] = [parameter.data_ptr() for parameter in self._model.parameters()]
        found += [buffer.data_ptr() for buffer in self._buffers.values()]
        for state in self._optimizer.state.values():
            for value in state.values():
                plain = value is None or isinstance(value, (bool, int, float, str))
                found.append(value.data_ptr() if isinstance(value, torch.Tensor) else value if plain else object())
        return found

    def frozen(self) -> dict[str, torch.Tensor]:
        """Parameters without a master, though others have one: they stay as they are."""
        rolling = self.durable.rolling()
        moving = rolling.parameters() if rolling is not None else ()
        found = {name: one.detach() for name, one in self._model.named_parameters() if id(one) not in moving}
        return {name: one for name, one in found.items() if one.is_contiguous()}

    def resting(self, *, narrow: bool = True) -> dict[str, StateDict]:
        """Of `states`, what stays where it is from step to step."""
        states = self.states(narrow=narrow)
        groups = [{"params": group["params"]} for group in states["optimizer"]["param_groups"]]
        return {"model": states["model"], "optimizer": {**states["optimizer"], "param_groups": groups}}

    def moving(self) -> dict[str, Any]:
        """Of `states`, the rest."""
        return {"groups": self._groups, **self._beside()}

    @staticmethod
    def rejoined(resting: dict[str, Any], moving: dict[str, Any]) -> dict[str, Any]:
        """`states` again. Raises KeyError, TypeError or ValueError where the two do not belong together."""
        groups = zip(resting["optimizer"]["param_groups"], moving.pop("groups"), strict=True)
        resting["optimizer"]["param_groups"] = [{**rest, **moved} for rest, moved in groups]
        return {**resting, **moving}

    def states(self, *, narrow: bool = True) -> dict[str, StateDict]:
        """State dicts by name, as of the boundary. Their tensors are live: copy before the next optimizer.step().

        narrow: masters in their parameters' dtype."""
        model = self._model.state_dict()  # not a plain dict: it carries the versions of its modules' layouts
        model.update(self._buffers)
        masters = self.durable.masters()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if id(parameter) in masters and name in model:
                master = masters[id(parameter)]
                model[name] = master.to(parameter.dtype) if narrow else master
        optimizer = self._optimizer.state_dict()
        groups = zip(optimizer["param_groups"], self._groups, strict=True)
        optimizer["param_groups"] = [{**live, **kept} for live, kept in groups]
        return {"model": model, "optimizer": optimizer, **self._beside()}

    def _beside(self) -> dict[str, StateDict]:
        """State that is neither the model's nor the optimizer's."""
        shared = self.durable.shared()
        tracked = {f"tracked.{name}": state for name, state in self._tracked_states.items()}
        return {**({SHARED: shared} if shared else {}), **tracked}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _put_into(place: dict[str, Any], key: str, kept: Any) -> None:
    live = place.get(key)
    if isinstance(live, torch.Tensor) and isinstance(kept, torch.Tensor) and _alike(live, kept):
        live.copy_(kept)
    else:
        place[key] = kept.clone() if isinstance(kept, torch.Tensor) else kept


def _copied(value: Any, *, large: bool = False) -> Any:
    """A deep copy that shares large tensors unless asked: averages of weights move with optimizer.step(), when no copy
    is needed."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if large or value.numel() == 1 else value
    if isinstance(value, dict):
        return {key: _copied(item, large=large) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item, large=large) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)
