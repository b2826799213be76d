"""Where strategy `stale-sparse` meets the training thread: hooks in, pipeline and transport behind.

A pass is numbered from 1 within a run. Gradients leave in the backward hooks; optimizer.step() only tells the rates;
a layer's forward pre-hook waits until the update of pass n - staleness is in its weights and takes a newer one if it
is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn

from atoll.agent.runtime.checkpoint.header import Header
from atoll.agent.runtime.control import Agreed
from atoll.agent.runtime.gradients import squared_norm, total
from atoll.agent.runtime.loader import Position
from atoll.agent.runtime.session import Session
from atoll.agent.runtime.stale import held_back, topology
from atoll.agent.runtime.stale.agreement import Agreement
from atoll.agent.runtime.stale.digests import Digests
from atoll.agent.runtime.stale.layout import Layer, adopt_optimizer_state, flat_view, lay_out, own_module_layers
from atoll.agent.runtime.stale.offload import Offload
from atoll.agent.runtime.stale.publication import scatter_blocks
from atoll.agent.runtime.stale.taken import TakenGradient
from atoll.agent.runtime.stale.traffic import Traffic
from atoll.agent.runtime.stale.updates import Updates
from atoll.agent.runtime.strategy import StaleSparse
from atoll.agent.runtime.synchronisation import Callbacks, Norms, Origin, Pass
from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.kernels.pipeline import Pipeline
from atoll.v1.common_pb2 import LEVEL_WARNING

FREEZE_DEADLINE_S: Final = 5.0


class StaleSynchroniser:
    """All methods run on the training thread, but for `freeze` and `masters`."""

    survives_update = True

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
        self._updates = Updates(optimizer)
        self._layers = lay_out(model, optimizer, self._updates, lazy=settings.momentum == "lazy")
        self._taken = [TakenGradient.like(layer.parameter) for layer in self._layers]
        self._deadline_s = session.collective_timeout_s
        self._agreed = agreed
        self._acted_on = 0  # the pass whose words `_agreed` is
        self._number = 0  # passes begun in this run
        self._resolved = 0  # passes whose update was ordered, or carried over to the next
        self._made = 0  # updates since the job began
        self._first_step = 0
        self._muted = False  # a rehearsal: its gradients go nowhere
        self.open = False
        self._weight, self._rate, self._clip_norm, self._sampled = 0.0, settings.rate, 0.0, False
        self._keep: list[int] = []
        self._local_sqnorms: list[torch.Tensor | float] = []
        self._came: set[int] = set()
        self._fetched: set[int] = set()  # layers whose weights were brought up to date since the boundary
        self._unhooked: set[int] = set()  # layers used without their own module's forward: fetched at the boundary
        self._waited_s = 0.0
        self._fresh = self._looked = 0
        self._stalls_s = dict.fromkeys((layer.name for layer in self._layers), 0.0)
        self._offload: Offload | None = None
        self._traffic: Traffic | None = None
        self._pipeline: Pipeline
        self._hooks = [
            layer.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, layer))  # type: ignore[no-untyped-call]
            for layer in self._layers
        ]
        self._hooks += [
            module.register_forward_pre_hook(partial(self._before_forward, held))
            for module, held in own_module_layers(model, self._layers)
        ]

    # --- the run

    def start(self, position: Position, origin: Origin | None) -> None:
        session, settings = self._session, self._settings
        saved = origin.extra if origin is not None else {}
        self._first_step = position.step
        for layer in self._layers:
            view = flat_view(layer.parameter)
            assert view is not None  # or lay_out had refused it
            layer.master.copy_(saved.get(f"master.{layer.name}", view))
            if layer.last_step is not None and f"last_step.{layer.name}" in saved:
                layer.last_step.copy_(saved[f"last_step.{layer.name}"])
        self._made = max(
            adopt_optimizer_state(self._layers, self._optimizer, self._updates), int(saved.get("updates", 0))
        )
        if origin is not None and "versions" in saved and settings.error_feedback:
            self._take_over(origin)
        members = topology.members(session)
        self._pipeline = Pipeline(
            rank=session.place.rank,
            islands=topology.islands(members),
            threads=max(1, torch.get_num_threads()),
            policy=settings.scheduling,
            values=settings.values,
            selection=settings.selection,
            error_feedback=settings.error_feedback,
            digest_every=settings.digest_every if session.place.world_size > 1 else 0,
            seed=session.seed % 2**63,
            first_step=1,
        )
        for layer in self._layers:
            layer.number = self._pipeline.add_tensor(
                order=layer.order,
                rule=layer.rule,
                master=layer.master,
                residual=layer.residual,
                first=layer.first,
                second=layer.second,
                last_step=layer.last_step,
                live=flat_view(layer.parameter) if layer.on_cpu else None,
                group=layer.group,
            )
        if session.device.type == "cuda":
            self._offload = Offload(session.device)
        self._agreement = Agreement(session.place.rank, session.place.world_size, self._tell_agreement)
        self._digests = Digests(session.place.rank, [layer.name for layer in self._layers], self._tell_digests)
        if session.group is not None:
            self._traffic = Traffic(
                session,
                members,
                pipeline=self._pipeline,
                agreement=self._agreement,
                digests=self._digests,
                settings=settings,
            )
        self._set_rate(settings.rate)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._clear_taken()
        if self._offload is not None:
            self._offload.close()
        if self._traffic is not None:
            self._traffic.close()
        if hasattr(self, "_pipeline"):
            self._pipeline.close()

    def leave(self) -> None:
        if self._traffic is not None:
            self._traffic.leave()

    # --- the pass

    def begin(self, opened: Pass) -> None:
        self._muted = opened.cut.step < self._first_step
        self._clear_taken()
        self._came.clear()
        self._local_sqnorms.clear()
        self.open = True
        if self._muted:
            return
        if self._number > self._resolved:
            self._pipeline.carry(self._number)
            self._resolved = self._number
        self._number += 1
        self._weight, self._sampled = opened.cut.weight, opened.sampled and opened.cut.weight > 0
        self._set_rate(self._settings.rate if opened.rate is None else opened.rate)
        self._unhooked.update(layer.number for layer in self._layers if layer.number not in self._fetched)
        self._agreement.say(self._number, opened.cut, opened.plan_id, opened.stop)

    def end(self) -> Norms:
        self.open = False
        if self._muted:
            return Norms()
        for layer in self._layers:
            if layer.number not in self._came:
                self._compress(layer, None)
        return Norms(total(self._local_sqnorms) if self._sampled else 0.0)

    def before_update(self) -> None:
        if self._number == self._resolved:
            return  # a second step() without a backward pass between has nothing to apply
        if self.open:
            raise BadInput("optimizer.step() in the middle of a backward pass; call it after run.backward(loss)")
        self._clear_taken()
        self._made += 1
        self._pipeline.apply(
            self._number,
            self._made,
            self._updates.rates(),
            maximize=self._updates.maximize,
            clip_norm=self._clip_norm,
        )
        self._clip_norm = 0.0
        self._resolved = self._number

    def clip(self, max_norm: float) -> bool:
        self._clip_norm = max_norm
        return True

    # --- the boundary

    def agreed(self, own: Agreed) -> Agreed:
        if self._session.group is None:
            return own
        number = self._number - self._settings.staleness
        if number > self._acted_on:
            self._agreed, waited_s = self._agreement.act_on(number, self._deadline_s)
            self._acted_on = number
            self._waited_s += waited_s
        return self._agreed

    def boundary(self, *, settle: bool) -> None:
        self._clear_taken()
        self._fetched.clear()
        self._digests.take(self._pipeline.digests())
        self._digests.check()
        if settle:
            self._fetch(self._layers, self._resolved)
        elif self._unhooked:
            self._fetch([layer for layer in self._layers if layer.number in self._unhooked], self._required)

    def waited(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    # --- the state

    def freeze(self) -> None:
        if hasattr(self, "_pipeline"):
            self._pipeline.quiesce(FREEZE_DEADLINE_S)

    def masters(self) -> Mapping[int, torch.Tensor]:
        for layer in self._layers:
            if layer.rule in ("adam", "adamw"):
                self._optimizer.state[layer.parameter]["step"].fill_(float(self._made))
        return {id(layer.parameter): layer.shaped(layer.master) for layer in self._layers}

    def extra(self) -> Mapping[str, torch.Tensor]:
        extra = {"updates": torch.tensor(self._made), "versions": torch.tensor(self._pipeline.versions())}
        for layer in self._layers:
            if layer.last_step is not None:
                extra[f"last_step.{layer.name}"] = layer.last_step
            if layer.parameter.dtype != torch.float32:
                extra[f"master.{layer.name}"] = layer.master
        return extra

    def aside(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        directory = self._session.checkpoint.directory
        if directory is None or not self._settings.error_feedback:
            return None
        packed = held_back.pack(self._layers, self._pipeline.recent_parts(), copy=copy)
        return partial(held_back.write, directory, header, self._session.place.rank, packed)

    def statistics(self) -> Mapping[str, float]:
        stats = self._pipeline.take_stats()._asdict()
        looked, self._looked = self._looked, 0
        fresh, self._fresh = self._fresh, 0
        numbers = {name: float(value) for name, value in stats.items()}
        numbers["fresh_share"] = fresh / looked if looked else 0.0
        numbers["rate"] = self._rate
        if self._traffic is not None:
            numbers["sent_bytes"] = float(self._traffic.sent_bytes())
        return numbers

    @property
    def stalls_s(self) -> Mapping[str, float]:
        """Seconds waited for each parameter's update since the run began, by name."""
        return self._stalls_s

    def _take_over(self, origin: Origin) -> None:
        """Collective: every residual of the run before that is still readable goes to one rank of this one."""
        session, directory = self._session, self._session.checkpoint.directory
        rank = session.place.rank
        assert directory is not None  # a checkpoint was read from it

        def skipped(why: str) -> None:
            session.notice(LEVEL_WARNING, f"rank {rank}: {why}")

        found = {one.rank: one for one in held_back.find(directory, origin, skipped)}
        mine = [int(old in found) for old in range(origin.world_size)]
        rows = session.group.gather_rows(mine) if session.group is not None else [mine]
        held = [[old for old, there in enumerate(row) if there] for row in rows]
        versions = dict(zip((layer.name for layer in self._layers), origin.extra["versions"].tolist(), strict=True))
        for old, owner in enumerate(held_back.shared_out(held, origin.world_size)):
            if owner == rank:
                held_back.take_over(found[old], versions, self._layers, skipped)
            elif owner is None and session.place.is_main:
                text = f"what rank {old} of run {origin.run} had held back is lost with its machine; training goes on"
                session.notice(LEVEL_WARNING, text)

    # --- hooks

    @torch.no_grad()
    def _on_gradient(self, layer: Layer, parameter: torch.Tensor) -> None:
        if not self.open:
            self._callbacks.begin()
        gradient = parameter.grad
        assert gradient is not None  # the hook runs after it was accumulated
        if layer.number in self._came:
            raise BadInput(
                f"parameter {layer.name} got two gradients in one pass. Call run.backward(loss) in place of "
                "loss.backward() for each of several losses, and use_reentrant=False in activation checkpointing"
            )
        if gradient.layout != torch.strided:
            raise BadInput(f"parameter {layer.name} has a sparse gradient; build its embedding with sparse=False")
        self._came.add(layer.number)
        parameter.grad = self._taken[layer.order]
        if self._muted:
            return
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        flat = flat_view(gradient)
        assert flat is not None  # of the parameter's own layout
        if self._sampled:
            self._local_sqnorms.append(squared_norm(flat))
        self._callbacks.before_launch()
        if self._offload is None or layer.on_cpu:
            self._compress(layer, flat)
        else:
            self._offload.submit(layer.number, self._number, flat, self._later(layer))

    def _later(self, layer: Layer) -> Callable[[torch.Tensor], None]:
        number, weight, keep = self._number, self._weight, self._keep[layer.order]
        return lambda copied: self._pipeline.compress(number, layer.number, copied, weight, keep)

    def _compress(self, layer: Layer, gradient: torch.Tensor | None) -> None:
        self._pipeline.compress(self._number, layer.number, gradient, self._weight, self._keep[layer.order])

    def _before_forward(self, held: list[Layer], module: nn.Module, inputs: Any) -> None:
        if any(layer.number not in self._fetched for layer in held):
            try:
                self._fetch([layer for layer in held if layer.number not in self._fetched], self._required)
            except PeerLost as error:
                self._lost(error)

    def _lost(self, error: PeerLost) -> NoReturn:
        self._callbacks.lost(error)

    # --- the weights

    @property
    def _required(self) -> int:
        """The pass whose update the next forward must have (StellaTrain, section 3.3: never older)."""
        return max(0, min(self._number - self._settings.staleness, self._resolved))

    def _fetch(self, layers: list[Layer], number: int) -> None:
        """Bring these layers' weights to pass `number` at least. Raises PeerLost."""
        if self._offload is not None:
            self._offload.check()
        try:
            on_cpu = [layer.number for layer in layers if layer.on_cpu]
            waited_s = 0.0
            if on_cpu:
                _, fresh, waited_s = self._pipeline.fetch(on_cpu, number, self._deadline_s)
                self._fresh += fresh
            for layer in layers:
                if not layer.on_cpu:
                    waited_s += self._take_changes(layer, number)
        except DeadlineExceeded as error:
            raise PeerLost(str(error)) from error
        self._looked += len(layers)
        self._waited_s += waited_s
        for layer in layers:
            self._stalls_s[layer.name] += waited_s / len(layers)
            self._fetched.add(layer.number)

    def _take_changes(self, layer: Layer, number: int) -> float:
        version, waited_s, index, values = self._pipeline.changes(layer.number, number, self._deadline_s)
        self._fresh += version > number
        live = flat_view(layer.parameter)
        assert live is not None
        scatter_blocks(live, index, values)
        return waited_s

    def _clear_taken(self) -> None:
        for layer in self._layers:
            if type(layer.parameter.grad) is TakenGradient:
                layer.parameter.grad = None

    def _set_rate(self, rate: float) -> None:
        if not self._keep or rate != self._rate:
            self._rate = rate
            self._keep = [layer.keep_blocks(rate, self._session.place.world_size) for layer in self._layers]

    def _tell_agreement(self, number: int, payload: bytes) -> None:
        if self._traffic is not None:
            self._traffic.tell_agreement(number, payload)

    def _tell_digests(self, number: int, payload: bytes) -> None:
        if self._traffic is not None:
            self._traffic.tell_digests(number, payload)
