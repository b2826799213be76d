"""Input of planner `strategy` from what a run and the agents measured. Pure.

A link's bandwidth comes from training itself where that shows it: from whole gradients that a step waited for, or from
the links of a strategy that exchanges by itself. Both are at most what a link carries, since small bursts show latency.
So what agents measured since counts if it is more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from atoll.controller.deciding.strategy_candidates import candidates
from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.model.connectivity import relay_notice
from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.jobs.model.peer_links import PeerLink
from atoll.controller.jobs.model.strategy_in_force import why_not_switchable
from atoll.controller.planners.strategy_choice.facts import (
    IslandLink,
    MeasuredIsland,
    MeasuredStep,
    RankTimes,
    StrategyInput,
)
from atoll.controller.planners.strategy_choice.step_times import BACKWARD_SHARE, GRADIENT_BYTES
from atoll.controller.state.records import LeftStrategy, RunMember
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies import registry

NEEDED_STEPS: Final = 3
"""Whole steps under the newest plan before a run's step counts as measured."""
WAITS_FROM: Final = 1.2
"""Factor of a step over its computing from which the step shows what the link carries."""
PEERS_LAG_S: Final = 40.0
"""Seconds in which a view's links count as its own training shows them: agents' newest readings are of before."""
SAME: Final = 2.0
"""Factor within which a link is the same as when a strategy was left."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """ranks: by island, in the order of the run, each with its member. step_s: of the strategy in force."""

    ranks: Mapping[str, Sequence[tuple[RunMember, RankProfile]]]
    profile: Profile
    step_s: float

    @property
    def compute_s(self) -> float:
        return max(rank.compute_s for ranks in self.ranks.values() for _, rank in ranks)

    @property
    def uncertainty(self) -> float:
        """Return the largest relative error of the computing times."""
        ranks = [rank for island in self.ranks.values() for _, rank in island]
        return min(max(rank.compute_error_s / rank.compute_s for rank in ranks), 10.0)


def measured_run(observed: ObservedJob, members: Sequence[RunMember]) -> MeasuredRun | None:
    """Return the run's measurements by the strategy in force; None before all ranks have some."""
    profile, plan = observed.training.profile, observed.plans.newest
    if profile is None or plan is None or not profile.entries or profile.plan != plan.id:
        return None
    if profile.steps < NEEDED_STEPS or not profile.step_s > 0:
        return None
    by_island: dict[str, list[tuple[RunMember, RankProfile]]] = {}
    for number, member in enumerate(members):
        rank = profile.ranks.get(number)
        if rank is None or rank.local_batch < 1 or not rank.compute_s > 0:
            return None
        by_island.setdefault(member.island or "-", []).append((member, rank))
    return MeasuredRun(by_island, profile, profile.step_s)


def strategy_input(observed: ObservedJob, run: MeasuredRun) -> StrategyInput:
    """Return the planner's input for the strategies that the script allows and the run can change to."""
    running, script = observed.strategy, observed.training.script
    peers = observed.peer_links.by_island({m.node: name for name, ranks in run.ranks.items() for m, _ in ranks})
    links = links_between(observed, run, peers)
    refused = {name: why for name in registry.strategies() if (why := why_not_switchable(observed.job, running, name))}
    if relay_notice([member for ranks in run.ranks.values() for member, _ in ranks]):
        refused |= {
            name: "it goes through no relay" for name, each in registry.strategies().items() if not each.relayed
        }
    refused |= {} if script is None else script.refused
    refused.pop(running, None)
    measured = [MeasuredStep.of_measured(strategy=running, step_s=run.step_s)]
    left = observed.job.learned.left_strategy
    if left is not None and left.strategy != running and _is_same(left, run, links):
        measured.append(MeasuredStep.of_measured(strategy=left.strategy, step_s=left.step_s))
    return StrategyInput.of_measured(
        islands=tuple(_island(name, run, peers.get((name, name))) for name in run.ranks),
        links=links,
        entries=run.profile.entries,
        gradient_density=1.0 if script is None else script.gradient_density,
        candidates=candidates(refused),
        running=running,
        measured=tuple(measured),
        uncertainty=run.uncertainty,
    )


def left_strategy(observed: ObservedJob, run: MeasuredRun, given: StrategyInput) -> LeftStrategy:
    """Return what the strategy in force measured, for when it is compared again."""
    return LeftStrategy(
        strategy=observed.strategy,
        step_s=run.step_s,
        compute_s=run.compute_s,
        bandwidth_bps=thinnest_bps(given.links),
    )


def thinnest_bps(links: Sequence[IslandLink]) -> float:
    return min((link.bandwidth_bps for link in links), default=0.0)


def _is_same(left: LeftStrategy, run: MeasuredRun, links: Sequence[IslandLink]) -> bool:
    """Return True if links and devices are about as fast as when the strategy was left."""
    pairs = ((left.bandwidth_bps, thinnest_bps(links)), (left.compute_s, run.compute_s))
    return all(then <= SAME * now and now <= SAME * then for then, now in pairs)


def _island(name: str, run: MeasuredRun, inside: PeerLink | None) -> MeasuredIsland:
    ranks = tuple(
        RankTimes.of_measured(compute_s=rank.compute_s, batch=rank.local_batch) for _, rank in run.ranks[name]
    )
    if inside is None:
        return MeasuredIsland(name=name, ranks=ranks)
    return MeasuredIsland.of_measured(name=name, ranks=ranks, bandwidth_bps=inside.bandwidth_bps, rtt_s=inside.rtt_s)


def links_between(
    observed: ObservedJob, run: MeasuredRun, peers: Mapping[tuple[str, str], PeerLink]
) -> tuple[IslandLink, ...]:
    """Return the links between islands whose bandwidth is known. peers: by the agents."""
    whole_bps = _bps_of_whole_gradients(observed, run)
    in_force = observed.views.in_force
    since_unix_s = PEERS_LAG_S + (in_force.in_force_unix_s if in_force is not None else 0.0)
    found = []
    for source, target in permutations(run.ranks, 2):
        peer = peers.get((source, target))
        link = run.profile.links.get(source)
        own = link.bandwidth_bps if link is not None else 0.0
        others = peer.bandwidth_bps if peer is not None and (not own or peer.measured_unix_s > since_unix_s) else 0.0
        known = whole_bps or max(own, others)
        if known > 0:
            rtt_s = peer.rtt_s if peer is not None else 0.0
            found.append(IslandLink.of_measured(source=source, target=target, bandwidth_bps=known, rtt_s=rtt_s))
    return tuple(found)


def _bps_of_whole_gradients(observed: ObservedJob, run: MeasuredRun) -> float:
    """Return the bandwidth of a ring's slowest link that the steps show; 0 if they wait for no gradients.

    Gradients travel beside the backward pass and after it."""
    traffic = registry.find(observed.strategy).exchange
    if traffic is None or traffic.kind != "gradients" or run.step_s < WAITS_FROM * run.compute_s:
        return 0.0
    ranks = sum(len(island) for island in run.ranks.values())
    sent = 2 * (ranks - 1) / ranks * GRADIENT_BYTES * run.profile.entries
    return 8 * sent / (run.step_s - (1 - BACKWARD_SHARE) * run.compute_s)
