"""Captures at a step boundary what changes outside optimizer.step().

Parameters that train and optimizer moments are read where they are until the next optimizer.step(). Buffers,
parameters that do not train, learning rates and what the user tracks may move at any time: copies are kept."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header, fingerprint
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.durable import Durable
from atoll.agent.runtime.model.kept_tensors import KeptTensors, size
from atoll.agent.runtime.model.model_part import ModelPart
from atoll.agent.runtime.model.model_state import ModelTensors, alike, module_state, plain_parameters, put_into
from atoll.agent.runtime.session.session import Session
from atoll.strategies import registry

StateDict = Mapping[str, Any]
SHARED: Final = "strategy"  # the name of what all ranks share beside model and optimizer
_TRACKED: Final = "a tensor that run.track keeps"
_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_IMMUTABLE: Final = frozenset({bool, int, float, str, bytes, type(None)})


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
        self._kept = KeptTensors(model, optimizer)
        state, tensors = module_state(model), ModelTensors.of(model)
        self.prepared = part.whole if part is not None else fingerprint(state)
        """The model as it was given to run.prepare. Buffers may change their shape later."""
        self._extra = bool(state.keys() - tensors.parameters.keys() - tensors.buffers.keys())
        self._extras: dict[str, Any] = {}  # of the state dict what is neither parameter nor buffer
        self._copies_tracked = self._owns_tracked = False  # large tensors of what is tracked, from now on and so far
        self._groups: list[dict[str, Any]] = []
        self._live_groups: list[dict[str, Any]] = []  # the optimizer's own at the boundary
        self._tracked_states: dict[str, StateDict] = {}
        self._taken = torch.cuda.Event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.position: Position | None = None

    def take(self, position: Position) -> None:
        """Keep what may move, as it is now. Costs a copy of it."""
        rolling = self.durable.rolling()
        room = self._kept.take(rolling.parameters() if rolling is not None else ())
        if self._extra:
            kept = self._kept.saved.keys() | ModelTensors.of(self._model).parameters.keys()
            state = module_state(self._model)
            self._extras = {name: _copied(value, large=True) for name, value in state.items() if name not in kept}
        self._live_groups = list(self._optimizer.param_groups)
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in self._live_groups
        ]
        tracked = {name: one.state_dict() for name, one in self._tracked.items()}
        large = [one for state in tracked.values() for one in _tensors(state) if one.numel() > 1]
        self._copies_tracked = self._copies_tracked or sum(map(size, large)) <= room
        before = self._tracked_states if self._owns_tracked else {}
        self._owns_tracked = self._copies_tracked
        self._tracked_states = {
            name: _copied(state, large=self._copies_tracked, into=before.get(name)) for name, state in tracked.items()
        }
        if not self._copies_tracked:
            self._kept.watch(_TRACKED, large)
        self.position = position
        if self._taken is not None:
            self._taken.record()

    def note_writes(self) -> None:
        """The update begins: what the script wrote since the boundary is copied from the next one on."""
        self._copies_tracked |= _TRACKED in self._kept.note_writes()

    def reads_begin(self) -> None:
        """A checkpoint of the boundary is about to be read in the background."""
        self._kept.sample()

    def forget(self) -> None:
        """Everything may change from here on; nothing is read before the next `take`."""
        self._kept.forget()

    def check_unmoved(self) -> None:
        """Check after reading. Raises MovedWhileRead if a tensor without a copy was written since the boundary. On any
        thread."""
        self._kept.check()

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return whether `put_back` undoes writes to the tensor."""
        return self._kept.keeps(parameter)

    def hold(self) -> None:
        """Keep large tensors of tracked objects from now on, too: they may move without a whole update."""
        self._tracked_states = {name: _copied(state, large=True) for name, state in self._tracked_states.items()}
        self._owns_tracked = True

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore what `take` kept, in place, because captured graphs know the memory. Call after `hold`."""
        self._kept.put_back()
        modules = ModelTensors.of(self._model).owners
        for name, value in self._extras.items():
            path, _, key = name.rpartition(".")
            if key == "_extra_state" and path in modules:
                modules[path].set_extra_state(_copied(value, large=True))
        for group, kept_group in zip(self._kept_of(self._optimizer.param_groups), self._groups, strict=True):
            for key, value in kept_group.items():
                put_into(group, key, _copied(value))
        for name, tracked in self._tracked.items():
            if name in self._tracked_states:
                tracked.load_state_dict(_copied(self._tracked_states[name], large=True))

    @property
    def own_bytes(self) -> int:
        """Bytes of the model's entries that are this rank's own where the strategy keeps shared parameters."""
        frozen = self.frozen()
        return sum(size(one) for name, one in self._kept.saved.items() if name not in frozen)

    def header(self, session: Session, model: Fingerprint) -> Header:
        """Header of the boundary that was taken."""
        assert self.position is not None
        return Header(
            job=session.job,
            run=session.run,
            view=session.view,
            step=self.position.step,
            epoch=self.position.epoch,
            consumed=self.position.consumed,
            samples=self.position.samples,
            loader_step=self.position.step,
            world_size=session.place.world_size,
            seed=session.seed,
            strategy=registry.of(session.strategy).name,
            model=model,
        )

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, GPU tensors are read on a stream of their own, after the update before the boundary but not behind
        what came later: that may be a collective whose peer is gone."""
        if self._taken is None:
            yield
            return
        with torch.cuda.device(self._taken.device):  # a thread begins with the first device, whoever's that is
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(self._taken)
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

    def identity(self) -> list[Any]:
        """Equal to that of an earlier call as long as `resting` would be of the same tensors and values."""
        saved = self._kept.saved
        found: list[Any] = [one.data_ptr() for one in self._model.parameters() if not self._kept.keeps(one)]
        found += [(name, one.data_ptr(), one.shape) for name, one in saved.items()]
        for state in self._optimizer.state.values():
            for value in state.values():
                plain = value is None or isinstance(value, (bool, int, float, str))
                found.append(value.data_ptr() if isinstance(value, torch.Tensor) else value if plain else object())
        return found

    def frozen(self) -> dict[str, torch.Tensor]:
        """Parameters without a shared parameter, though others have one: they stay as they are."""
        rolling = self.durable.rolling()
        moving = rolling.parameters() if rolling is not None else ()
        named = plain_parameters(self._model)
        still = {name: one for name, one in named if id(one) not in moving and self._kept.stays(one)}
        found = {name: self._kept.saved.get(name, one.detach()) for name, one in still.items()}
        return {name: one for name, one in found.items() if one.is_contiguous()}

    def resting(self, *, narrow: bool = True) -> dict[str, StateDict]:
        """Return the part of `states` that stays in place from step to step."""
        states = self.states(narrow=narrow)
        groups = [{"params": group["params"]} for group in states["optimizer"]["param_groups"]]
        return {"model": states["model"], "optimizer": {**states["optimizer"], "param_groups": groups}}

    def moving(self) -> dict[str, Any]:
        """Return the part of `states` that `resting` leaves out."""
        return {"groups": self._groups, **self._beside()}

    @staticmethod
    def rejoined(resting: dict[str, Any], moving: dict[str, Any]) -> dict[str, Any]:
        """`states` again. Raises KeyError, TypeError or ValueError where the two do not belong together."""
        groups = zip(resting["optimizer"]["param_groups"], moving.pop("groups"), strict=True)
        resting["optimizer"]["param_groups"] = [{**rest, **moved} for rest, moved in groups]
        return {**resting, **moving}

    def states(self, *, narrow: bool = True) -> dict[str, StateDict]:
        """State dicts by name, as of the boundary. Their tensors are live: copy before the next optimizer.step().

        narrow: shared parameters in their parameters' dtype."""
        model = module_state(self._model)  # not a plain dict: it carries the versions of its modules' layouts
        if self.position is not None:
            for name in ModelTensors.of(self._model).buffers.keys() - self._kept.saved.keys():
                model.pop(name, None)  # it came after the boundary
            model.update({**self._kept.saved, **self._extras})
        shared_params = self.durable.shared_params()
        for name, parameter in plain_parameters(self._model, remove_duplicate=False):
            if id(parameter) in shared_params and name in model:
                shared_param = shared_params[id(parameter)]
                model[name] = shared_param.to(parameter.dtype) if narrow else shared_param
        return {"model": model, "optimizer": self._optimizer_state(), **self._beside()}

    def _optimizer_state(self) -> StateDict:
        """Return the optimizer's state as of the boundary, without groups that the script added since."""
        state = self._optimizer.state_dict()
        live = self._kept_of(state["param_groups"])
        numbers = {old: new for new, old in enumerate(number for group in live for number in group["params"])}
        groups = [
            {**group, **kept, "params": [numbers[one] for one in group["params"]]}
            for group, kept in zip(live, self._groups, strict=True)
        ]
        kept = {key: value for key, value in state["state"].items() if key in numbers or not isinstance(key, int)}
        of_parameters = {numbers.get(key, key): value for key, value in kept.items()}
        return {**state, "state": of_parameters, "param_groups": groups}

    def _kept_of(self, groups: Sequence[Any]) -> list[Any]:
        """Return those that stand in the places of groups which the optimizer had at the boundary."""
        if len(groups) == len(self._groups):
            return list(groups)  # also where the script loaded a state, which makes new groups
        known = {id(one) for one in self._live_groups}
        return [one for one, live in zip(groups, self._optimizer.param_groups, strict=True) if id(live) in known]

    def _beside(self) -> dict[str, StateDict]:
        """State that is neither the model's nor the optimizer's."""
        shared = self.durable.shared()
        tracked = {f"tracked.{name}": state for name, state in self._tracked_states.items()}
        return {**({SHARED: shared} if shared else {}), **tracked}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _copied(value: Any, *, large: bool = False, into: Any = None) -> Any:
    """A deep copy that shares large tensors unless asked. into: an earlier copy, whose memory may be used again."""
    if isinstance(value, torch.Tensor):
        if not large and value.numel() != 1:
            return value
        if large and isinstance(into, torch.Tensor) and alike(into, value) and into.data_ptr() != value.data_ptr():
            return into.copy_(value.detach())
        return value.detach().clone()
    if type(value) in _MAPPINGS:
        items = {key: _copied(item, large=large, into=_item(into, key)) for key, item in value.items()}
        copied = copy.copy(value)  # it may have attributes, as a module's state dict has
        dict.update(copied, items)  # a Counter's own would add
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(item, large=large, into=_item(into, at)) for at, item in enumerate(value))
    return value if type(value) in _IMMUTABLE else copy.deepcopy(value)


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError, TypeError):
        return None
