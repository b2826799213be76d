from __future__ import annotations

from dataclasses import replace

from drill import invariants
from drill.evidence import Evidence
from drill.stories import CALM, RANKS, SAMPLES, begun, evidence, trained


def broken(found: Evidence) -> list[str]:
    verdicts = invariants.of_dense(found, RANKS, SAMPLES, CALM)
    assert all(verdict.evidence for verdict in verdicts)
    return [verdict.name for verdict in verdicts if not verdict.holds]


def test_an_undisturbed_job_and_one_that_did_a_step_again_hold() -> None:
    assert broken(CALM) == []
    assert broken(evidence(trained(1, range(4)), trained(2, range(3, 6)))) == []


def test_a_batch_shown_again_at_an_epochs_end_is_no_step_done_twice() -> None:
    shown = [begun(2, rank, 2, weights="w3") for rank in range(RANKS)]
    assert broken(evidence(trained(1, range(3)), shown, trained(2, range(3, 6)))) == []


def test_a_step_that_counted_twice_shows_in_the_weights_after_it() -> None:
    """Run 2 goes on from weights that contain step 3 already."""
    twice = [replace(one, weights=f"w{one.step + 1}") for one in trained(2, range(3, 6))]
    assert broken(evidence(trained(1, range(4)), twice, final=7)) == [
        "what is done again is done alike",
        "same bits as undisturbed",
    ]


def test_a_step_that_was_left_out_is_missing() -> None:
    found = evidence(trained(1, range(3)), trained(2, range(4, 6)))
    verdict = invariants.steps_once(found)
    assert not verdict.holds
    assert "step 3 is missing" in verdict.evidence
    assert "run 2 began at step 4" in verdict.evidence


def test_a_step_that_a_rank_began_twice_in_one_run_is_named() -> None:
    verdict = invariants.steps_once(evidence(trained(1, range(6)), [begun(1, 0, 4)]))
    assert verdict.evidence == "run 1, rank 0 began step 4 2 times"


def test_nothing_trained_is_no_success() -> None:
    assert not invariants.steps_once(Evidence((), {})).holds


def test_a_state_of_two_steps_shows_in_ranks_that_differ() -> None:
    mixed = [replace(one, weights="w3") if (one.rank, one.step) == (1, 4) else one for one in CALM.begun]
    found = Evidence(tuple(mixed), CALM.final)
    assert broken(found) == ["one state on all ranks", "same bits as undisturbed"]
    assert "run 1, step 4: rank 0 w4, rank 1 w3" in invariants.one_state(found, RANKS).evidence


def test_a_rank_may_lack_only_in_the_step_that_a_run_ended_in() -> None:
    alone = [begun(1, 0, 3)]
    assert broken(evidence(trained(1, range(3)), alone, trained(2, range(3, 6)))) == []
    assert not invariants.one_state(evidence(trained(1, range(3)), alone, trained(1, range(4, 6))), RANKS).holds


def test_samples_that_are_twice_missing_or_strange_are_told() -> None:
    swapped = [replace(one, samples=(0, 1)) if (one.rank, one.step) == (1, 1) else one for one in CALM.begun]
    verdict = invariants.samples_once(Evidence(tuple(swapped), {}), SAMPLES, may_miss=0)
    assert "epoch 0: 2 samples twice, e.g. 0" in verdict.evidence
    assert "missing samples by epoch: {0: 2}" in verdict.evidence
    assert "none of 0 to 9" in invariants.samples_once(CALM, 10, may_miss=0).evidence


def test_sparse_may_miss_what_was_in_flight_with_a_killed_worker_and_no_more() -> None:
    fewer = Evidence(tuple(one for one in CALM.begun if (one.rank, one.step) != (1, 2)), CALM.final)
    verdicts = invariants.of_sparse(fewer, RANKS, SAMPLES, killed=1, per_rank=2, lost=["rank 1's"])
    assert [verdict.holds for verdict in verdicts] == [True, True, True, True]
    assert "2 missing of at most 4" in verdicts[1].evidence
    verdicts = invariants.of_sparse(fewer, RANKS, SAMPLES, killed=0, per_rank=2, lost=["rank 1's"])
    assert [verdict.holds for verdict in verdicts] == [True, False, True, False]


def test_other_final_weights_or_a_rank_that_never_came_to_the_end_fail() -> None:
    assert broken(Evidence(CALM.begun, {0: "w6", 1: "w5"})) == ["same bits as undisturbed"]
    assert broken(Evidence(CALM.begun, {0: "w6"})) == ["same bits as undisturbed"]
    assert not invariants.final_alike(Evidence(CALM.begun, {0: "w6", 1: "w5"}), RANKS).holds


def test_many_violations_are_counted_and_three_are_written_out() -> None:
    found = Evidence(tuple(replace(one, weights=f"w{one.step}-{one.rank}") for one in CALM.begun), {})
    assert invariants.one_state(found, RANKS).evidence.endswith("and 3 more")


def test_leftovers_failures_and_a_job_that_ended_early_fail() -> None:
    assert invariants.nothing_left([], []).holds
    assert invariants.nothing_left(["17 python"], ["atoll-1"]).evidence == "process 17 python; file atoll-1"
    assert invariants.ended_well("DONE", "all finished", 0).holds
    assert not invariants.ended_well("DONE", "all finished", 1).holds
    assert not invariants.ended_well("FAILED", "it raised", 0).holds
    assert not invariants.all_up(["machine-1 ended with 1: no room"]).holds
    assert not invariants.outlasted(still_trained=False, missed=0).holds
