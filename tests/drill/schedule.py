"""Plans who is struck when, from a seed. Pure: the same arguments give the same schedule."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.errors import BadInput

MAX_MINUTES: Final = 24 * 60.0
MIN_EVERY_S: Final = 5.0
_MID_RECOVERY_S: Final = (0.2, 1.0)
_AWAY_S: Final = (3.0, 8.0)
_STOPPED_S: Final = (8.0, 12.0)
"""Longer than the two leases after which a silent machine is lost."""


class Strike(StrEnum):
    """What is done to the cluster at once. All are SIGKILL but the stops, which are SIGSTOP and, later, SIGCONT."""

    WORKER = "worker"
    EVERYONE = "all workers"
    AGENT = "agent"
    MACHINE = "machine"
    PAIR = "pair of machines"
    WORKER_STOP = "worker stopped"
    MACHINE_STOP = "machine stopped"
    LEADER = "leader"
    LEADER_STOP = "leader stopped"
    RECOVERY = "worker, then leader"
    ETCD = "etcd member"
    SAVING = "worker, then who saves"
    OVERFLOW = "overflow on one rank"
    CROWD = "a crowd leaves"

    @property
    def takes_workers(self) -> bool:
        """Whether who trains is hit: a run or a view ends by it."""
        return self not in (Strike.LEADER, Strike.LEADER_STOP, Strike.ETCD, Strike.OVERFLOW, Strike.CROWD)


KINDS: Final[Mapping[str, tuple[Strike, ...]]] = {
    "workers": (Strike.WORKER,),
    "everyone": (Strike.EVERYONE,),
    "agents": (Strike.AGENT,),
    "machines": (Strike.MACHINE,),
    "pairs": (Strike.PAIR,),
    "stops": (Strike.WORKER_STOP, Strike.MACHINE_STOP, Strike.LEADER_STOP),
    "leader": (Strike.LEADER,),
    "recovery": (Strike.RECOVERY,),
    "etcd": (Strike.ETCD,),
    "saving": (Strike.SAVING,),
    "overflow": (Strike.OVERFLOW,),
    "crowd": (Strike.CROWD,),
}
"""What `--kinds` knows. Each of its strikes comes equally often."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One strike. Whom it hits is known only when it is due: `draw`, in [0, 1), picks among who is there then."""

    at_s: float
    """After the job began to train."""

    strike: Strike
    draw: float
    away_s: float
    """How long what was killed or stopped stays so."""

    then_s: float
    """RECOVERY: from the worker's death to the leader's, at most 1 s."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A strike that was carried out: when, by this machine's wall clock, and on whom."""

    strike: Strike
    at_s: float
    victims: tuple[str, ...]


def plan(kinds: Sequence[str], length_s: float, every_s: float, seed: int) -> tuple[Planned, ...]:
    """One strike in each `every_s` of the drill, at a random moment of it; the last span is left for recovering.

    kinds: of KINDS. Strikes are dealt from a shuffled deck of all of them, again and again, so that none is left out
    by chance. Raises BadInput."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BadInput(f"no kind of strike {unknown[0]!r}. Known: {', '.join(KINDS)}")
    if not kinds:
        raise BadInput(f"no kind of strike was named. Known: {', '.join(KINDS)}")
    if not MIN_EVERY_S <= every_s <= length_s / 2:  # NaN too
        raise BadInput(
            f"a strike every {every_s:g} s: it must be {MIN_EVERY_S:g} s at least, and fit twice in the drill"
        )
    if not length_s <= 60 * MAX_MINUTES:
        raise BadInput(f"a drill of {length_s / 60:g} minutes. At most {MAX_MINUTES:g}")
    random_ = random.Random(seed)
    strikes = [strike for kind in dict.fromkeys(kinds) for strike in KINDS[kind]]
    planned: list[Planned] = []
    deck: list[Strike] = []
    for span in range(int(length_s / every_s) - 1):
        if not deck:
            deck = random_.sample(strikes, len(strikes))
        strike = deck.pop()
        stopped = strike in (Strike.WORKER_STOP, Strike.MACHINE_STOP, Strike.LEADER_STOP)
        at_s = every_s * (span + random_.random())
        away_s = random_.uniform(*(_STOPPED_S if stopped else _AWAY_S))
        planned.append(Planned(at_s, strike, random_.random(), away_s, random_.uniform(*_MID_RECOVERY_S)))
    return tuple(planned)
