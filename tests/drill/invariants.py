"""Checks what must hold of a drill: PASS or FAIL, each with what it rests on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from drill.crowd import SIZE, CrowdLeft
from drill.evidence import Evidence

_SHOWN: Final = 3
"""How many violations are written out; the others are counted."""


@dataclass(frozen=True, slots=True)
class InvariantResult:
    """One invariant. `evidence`: what was compared, or what was found instead."""

    name: str
    holds: bool
    evidence: str


def _result(name: str, wrong: Iterable[str], passed: Callable[[], str]) -> InvariantResult:
    found = list(wrong)
    if not found:
        return InvariantResult(name, True, passed())
    rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return InvariantResult(name, False, "; ".join(found[:_SHOWN]) + rest)


def of_dense(evidence: Evidence, ranks: int, samples: int, undisturbed: Evidence) -> list[InvariantResult]:
    """All that strategy `dense` promises with fixed membership. samples: of the dataset."""
    return [
        steps_once(evidence),
        samples_once(evidence, samples, may_miss=0),
        one_state(evidence, ranks),
        redone_alike(evidence),
        same_bits(evidence, undisturbed, ranks),
    ]


def of_sparse(
    evidence: Evidence, ranks: int, samples: int, *, killed: int, per_rank: int, lost: Sequence[str]
) -> list[InvariantResult]:
    """What `stale-sparse` promises: equal weights in the end; nothing twice. A worker that is killed may take with it
    the samples of the two steps in flight, and its residual.

    killed: workers that were. per_rank: samples of a step and rank. lost: events that tell of lost residuals."""
    return [
        steps_once(evidence),
        samples_once(evidence, samples, may_miss=2 * per_rank * killed),
        final_alike(evidence, ranks),
        residuals_told(lost, killed),
    ]


def steps_once(evidence: Evidence) -> InvariantResult:
    """Each step counts once: runs follow each other without a gap, and within a run no rank begins a step twice."""

    def wrong() -> Iterator[str]:
        if not evidence.begun:
            yield "no step was trained"
            return
        missing = sorted(set(range(max(evidence.by_step) + 1)) - set(evidence.by_step))
        yield from (f"step {step} is missing" for step in missing)
        counts = Counter((one.run, one.rank, one.step) for one in evidence.begun)
        yield from (
            f"run {run}, rank {rank} began step {step} {count} times"
            for (run, rank, step), count in counts.items()
            if count > 1
        )
        reached = -1
        for run, (first, last) in evidence.spans.items():
            if first > reached + 1:
                yield f"run {run} began at step {first}, but no run before it came beyond step {reached}"
            reached = max(reached, last)

    def passed() -> str:
        again = sum(len(runs) - 1 for runs in evidence.by_step.values())
        return f"{len(evidence.by_step)} steps by {len(evidence.spans)} runs or views, {again} of them begun again"

    return _result("every step counts once", wrong(), passed)


def samples_once(evidence: Evidence, samples: int, *, may_miss: int) -> InvariantResult:
    """Of each epoch, each sample of the lineage that counts: once. may_miss: in all epochs together."""
    epochs: dict[int, Counter[int]] = {}
    for step in evidence.by_step:
        for one in evidence.that_counts(step).values():
            epochs.setdefault(one.epoch, Counter()).update(one.samples)
    missing = {epoch: samples - len(counts) for epoch, counts in epochs.items() if len(counts) < samples}

    def wrong() -> Iterator[str]:
        for epoch, counts in sorted(epochs.items()):
            if twice := [sample for sample, count in counts.items() if count > 1]:
                yield f"epoch {epoch}: {len(twice)} samples twice, e.g. {min(twice)}"
            if counts and not 0 <= min(counts) <= max(counts) < samples:
                yield f"epoch {epoch}: a sample that is none of 0 to {samples - 1}"
        if sum(missing.values()) > may_miss:
            yield f"missing samples by epoch: {missing}, {may_miss} in all may be"

    missed = f", {sum(missing.values())} missing of at most {may_miss}" if may_miss else ""
    return _result("every sample once an epoch", wrong(), lambda: f"{samples} in {len(epochs)} epochs{missed}")


def one_state(evidence: Evidence, ranks: int) -> InvariantResult:
    """All ranks of a run begin each step from the same weights."""

    def wrong() -> Iterator[str]:
        for step, runs in evidence.by_step.items():
            for run, by_rank in runs.items():
                if len({one.weights for one in by_rank.values()}) > 1:
                    said = ", ".join(f"rank {rank} {one.weights}" for rank, one in by_rank.items())
                    yield f"run {run}, step {step}: {said}"
                if len(by_rank) < ranks and step < evidence.spans[run][1]:
                    yield f"run {run}, step {step}: only ranks {sorted(by_rank)}, but the run went on"

    def passed() -> str:
        return f"{len(evidence.begun)} hashes of weights, {ranks} ranks"

    return _result("one state on all ranks", wrong(), passed)


def redone_alike(evidence: Evidence) -> InvariantResult:
    """A step that several runs began, each began from the same weights and with the same samples.

    A step that counted twice, or a state put together from two, shows here at the first step after it."""
    redone = 0

    def wrong() -> Iterator[str]:
        nonlocal redone
        for step, runs in evidence.by_step.items():
            trained = {run: ranks for run, ranks in runs.items() if (run, step) not in evidence.shown_again}
            redone += len(trained) > 1
            for (before, old), (after, new) in pairwise(trained.items()):
                where = f"in run {before} than in run {after}"
                for rank in old.keys() & new.keys():
                    if old[rank].weights != new[rank].weights:
                        yield f"step {step}, rank {rank}: other weights {where}"
                    if old[rank].samples != new[rank].samples:
                        yield f"step {step}, rank {rank}: other samples {where}"

    return _result("what is done again is done alike", wrong(), lambda: f"{redone} steps")


def same_bits(evidence: Evidence, undisturbed: Evidence, ranks: int) -> InvariantResult:
    """Every step, and the end, as in the run of the same job that nobody disturbed."""

    def wrong() -> Iterator[str]:
        if evidence.by_step.keys() != undisturbed.by_step.keys():
            yield f"{len(evidence.by_step)} steps against {len(undisturbed.by_step)} undisturbed"
        for step in evidence.by_step.keys() & undisturbed.by_step.keys():
            ours, theirs = evidence.that_counts(step), undisturbed.that_counts(step)
            run = next(iter(ours.values())).run
            for rank in ours.keys() & theirs.keys():
                if ours[rank].weights != theirs[rank].weights and (run, step) not in evidence.shown_again:
                    yield f"step {step}, rank {rank}: {ours[rank].weights} against {theirs[rank].weights} undisturbed"
        yield from _finals(evidence, ranks)
        if evidence.final != undisturbed.final:
            yield f"final weights {_shown(evidence)} against {_shown(undisturbed)} undisturbed"

    return _result(
        "same bits as undisturbed", wrong(), lambda: f"{len(evidence.by_step)} steps and the end: {_shown(evidence)}"
    )


def final_alike(evidence: Evidence, ranks: int) -> InvariantResult:
    return _result("equal weights in the end", _finals(evidence, ranks), lambda: _shown(evidence))


def residuals_told(lost: Sequence[str], killed: int) -> InvariantResult:
    """Residuals are handed over; where that cannot be, it is told, and only of who was killed."""
    text = f"{len(lost)} times told as lost, {killed} workers killed"
    return InvariantResult("only the killed lose their residuals", len(lost) <= killed, text)


def nothing_left(processes: Sequence[str], files: Sequence[str]) -> InvariantResult:
    """After the cluster was stopped. processes, files: what is still there, in words."""
    left = [*(f"process {one}" for one in processes), *(f"file {one}" for one in files)]
    return _result("nothing is left over", left, lambda: "no process, nothing in shared memory")


def ended_well(phase: str, reason: str, restarts: int) -> InvariantResult:
    """No strike is the script's fault. restarts: that were counted as such."""
    text = f"{phase}: {reason}; {restarts} failures counted as the script's own"
    return InvariantResult("the job ends well", phase == "DONE" and restarts == 0, text)


def outlasted(still_trained: bool, missed: int) -> InvariantResult:
    """missed: strikes that found nobody to hit."""
    trained = f"it trained when the last strike was over; {missed} strikes found nobody"
    text = trained if still_trained else "it ended before them"
    return InvariantResult("the job outlasts the strikes", still_trained, text)


def all_up(fallen: Sequence[str]) -> InvariantResult:
    """fallen: daemons that ended by themselves, in words."""
    return _result("daemons end by strikes alone", fallen, lambda: "all are up after the last strike")


def crowds_kept(crowds: Sequence[CrowdLeft]) -> InvariantResult:
    """Agents whose streams end at once are kept until their leases end."""
    wrong = [text for crowd in crowds for text in crowd.wrong]
    return _result(
        "a node is kept until its lease ends", wrong, lambda: f"of {len(crowds)} crowds of {SIZE}, everybody"
    )


def _finals(evidence: Evidence, ranks: int) -> Iterator[str]:
    if len(evidence.final) != ranks:
        yield f"ranks {sorted(evidence.final)} of {ranks} came to the end"
    if len(set(evidence.final.values())) > 1:
        yield f"final weights differ: {dict(evidence.final)}"


def _shown(evidence: Evidence) -> str:
    return " ".join(sorted(set(evidence.final.values()))) or "none"
