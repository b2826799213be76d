"""Profiles and devices in, verdicts out. A device of speed v takes 20/v ms a step, 1/v ms a sample, and measures v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made import profile

from atoll.controller.estimators.profile import NoiseEstimate, OverlapEstimate, Profile
from atoll.controller.jobs.admission.admitting import (
    MAX_JUDGED,
    AdmissionAnswer,
    AdmissionQuestion,
    RatedDevice,
    answer,
    dispensable,
)
from atoll.step_estimators.estimates import NodeEstimate


def ask(
    known: Profile, *offers: RatedDevice, works: tuple[float, ...] = (1.0, 1.0, 1.0), **fields: Any
) -> AdmissionAnswer | None:
    workers = [RatedDevice(f"n{i}/0", work) for i, work in enumerate(works)]
    values: dict[str, Any] = {"split": "inverse-time", "batch_range": None, "restart_s": 6.0, **fields}
    return answer(AdmissionQuestion(profile=known, workers=workers, offers=offers, **values))


def judged(known: Profile, *offers: RatedDevice, **fields: Any) -> AdmissionAnswer:
    found = ask(known, *offers, **fields)
    assert found is not None
    return found


def test_a_device_of_half_the_speed_is_admitted_and_one_of_a_twentieth_waits() -> None:
    found = judged(profile(1, 1, 1), RatedDevice("half/0", 0.5), RatedDevice("slow/0", 0.05))
    assert list(found.admitted) == ["half/0"]
    assert "less time, more than the uncertainty of" in found.admitted["half/0"]
    assert list(found.waiting) == ["slow/0"]
    assert "the run would take" in found.waiting["slow/0"]
    assert "longer" in found.waiting["slow/0"]
    assert found.gain == pytest.approx(0.1, abs=0.05)


def test_devices_are_predicted_by_their_work_against_workers_that_are_unequal_too() -> None:
    """What is common to the workers is calculations per sample: one of 0.3 says the same of the offer as one of 1."""
    unequal = judged(profile(1, 0.6, 0.3), RatedDevice("half/0", 0.5), works=(1.0, 0.6, 0.3))
    assert list(unequal.admitted) == ["half/0"]
    slow = judged(profile(1, 0.6, 0.3), RatedDevice("slow/0", 0.03), works=(1.0, 0.6, 0.3))
    assert list(slow.waiting) == ["slow/0"]


def test_work_that_does_not_predict_the_workers_makes_offers_less_sure() -> None:
    """The three train equally fast though one measured a quarter of the work: so may the offer."""
    sure = judged(profile(1, 1, 1), RatedDevice("n/0", 1.0)).admitted["n/0"]
    unsure = judged(profile(1, 1, 1), RatedDevice("n/0", 1.0), works=(1.0, 1.0, 0.25))
    reasons = {**unsure.admitted, **unsure.waiting}
    assert uncertainty(reasons["n/0"]) > 2 * uncertainty(sure)


def uncertainty(reason: str) -> float:
    return float(reason.partition("uncertainty of ")[2].split()[0])


def test_what_was_learned_of_a_device_counts_more_than_what_it_measured() -> None:
    known = profile(1, 1, 1)
    believed = judged(known, RatedDevice("n/0", 1.0), learned={"n/0": 0.03})
    assert list(believed.waiting) == ["n/0"]
    fast = judged(known, RatedDevice("n/0", 0.01), learned={"n/0": 0.00125})
    assert list(fast.admitted) == ["n/0"]


def test_a_device_of_which_nothing_is_known_is_said_to_be_unknown() -> None:
    assert judged(profile(1, 1, 1), RatedDevice("n/0", 0.0)).unknown == ("n/0",)
    nobody_measured = judged(profile(1, 1, 1), RatedDevice("n/0", 1.0), works=(0.0, 0.0, 0.0))
    assert nobody_measured == AdmissionAnswer({}, {}, ("n/0",))


def test_before_every_rank_has_measured_there_is_no_answer() -> None:
    known = profile(1, 1, 1)
    missing = replace(known, ranks={rank: known.ranks[rank] for rank in (0, 1)})
    assert ask(missing, RatedDevice("n/0", 1.0)) is None
    assert ask(replace(known, total_batch=0), RatedDevice("n/0", 1.0)) is None


def test_before_two_batches_seconds_per_sample_serve_and_are_trusted_less() -> None:
    whole, coarse = profile(1, 1, 1), profile(1, 1, 1, modelled=False)
    assert list(judged(coarse, RatedDevice("n/0", 0.5)).admitted) == ["n/0"]
    assert list(judged(coarse, RatedDevice("n/0", 0.05)).waiting) == ["n/0"]
    twin = RatedDevice("n/0", 1.0)
    assert uncertainty(judged(coarse, twin).admitted["n/0"]) > uncertainty(judged(whole, twin).admitted["n/0"])


def test_a_step_that_synchronising_rules_gains_nothing_from_more_devices() -> None:
    """0.1 s of compute, and 3 s that the models do not explain or that the overlap does."""
    known = profile(1, 1, 1)
    assert judged(known, RatedDevice("n/0", 0.5)).admitted
    unexplained = judged(replace(known, step_s=3.0), RatedDevice("n/0", 0.5))
    assert "within the uncertainty" in unexplained.waiting["n/0"]
    synchronising = replace(known, overlap=OverlapEstimate(gamma=0.2, t_o=2.5, t_u=0.5, error_s=0.1))
    assert judged(synchronising, RatedDevice("n/0", 0.5)).waiting


def test_a_restart_that_does_not_pay_within_ten_minutes_is_not_made() -> None:
    assert judged(profile(1, 1, 1), RatedDevice("n/0", 0.5), restart_s=6.0).admitted
    dear = judged(profile(1, 1, 1), RatedDevice("n/0", 0.5), restart_s=300.0)
    assert dear.waiting["n/0"].endswith("but the restart costs 50.0 %")
    assert dear.gain == 0


def test_with_even_batches_a_slow_device_waits_that_a_split_by_speed_would_take() -> None:
    offer = RatedDevice("n/0", 0.4)
    assert judged(profile(1, 1, 1), offer).admitted
    assert judged(profile(1, 1, 1), offer, split="even").waiting


def test_a_batch_that_may_grow_makes_room_for_a_device_that_a_small_one_has_no_use_for() -> None:
    noise = NoiseEstimate(noise_scale=5000.0, error=0.1, low=5000.0, high=5000.0, steps=50)
    small = profile(1, 1, 1, total_batch=24, noise=noise)
    offer = RatedDevice("n/0", 0.5)
    assert judged(small, offer).waiting
    assert judged(small, offer, batch_range=(24, 2400)).admitted


def test_a_batch_smaller_than_the_run_leaves_everybody_waiting() -> None:
    tiny = profile(1, 1, 1, total_batch=3)
    assert "none of the 1 candidates" in judged(tiny, RatedDevice("n/0", 1.0)).waiting["n/0"]


def test_of_very_many_the_fastest_are_judged_and_the_others_later() -> None:
    offers = [RatedDevice(f"m{i:03}/0", 1 + i / 1000) for i in range(100)]
    found = judged(profile(1, 1, 1), *offers)
    assert len(found.admitted) + len(found.waiting) == MAX_JUDGED
    assert "m099/0" in found.admitted
    assert "m000/0" not in {**found.admitted, **found.waiting}


def known_as(known: Profile, **fields: Any) -> AdmissionQuestion:
    workers = [RatedDevice(f"n{i}/0", 1.0) for i in range(len(known.ranks))]
    return AdmissionQuestion(
        profile=known, workers=workers, offers=(), split="inverse-time", batch_range=None, restart_s=6.0, **fields
    )


def test_a_worker_whose_fixed_cost_alone_is_longer_than_the_others_step_is_dispensable() -> None:
    found = dispensable(known_as(profile(1, 1, 1, 0.02)))
    assert found is not None
    assert found.rank == 3
    assert found.reason.startswith("the run would take")
    assert dispensable(known_as(profile(1, 0.6, 0.3))) is None
    assert dispensable(known_as(profile(1, 1, 1, 0.02, modelled=False))) is not None  # 0.55 s for its two samples
    assert dispensable(known_as(profile(1, 0.6, 0.3, modelled=False))) is None
    assert dispensable(known_as(profile(1))) is None


def test_a_line_through_batches_close_together_is_not_believed_far_from_them() -> None:
    """1. Noise made the workers' steps look as long for 78 samples as for 82: a fourth would bring nothing. 2. Such a
    line errs at 60 samples by more than a tenth. 3. Seconds per sample serve, and the device is admitted."""
    flat = {"q": 0.00001, "s": 0.09, "k": 0.0, "m": 0.0, "error": 0.03}
    for low, high, admitted in ((78, 82, True), (20, 82, False)):
        known = profile(1, 1, 1)
        ranks = {
            rank: replace(observed, estimate=NodeEstimate(**flat, low_batch=low, high_batch=high))
            for rank, observed in known.ranks.items()
        }
        assert bool(judged(replace(known, ranks=ranks), RatedDevice("n/0", 0.5)).admitted) == admitted
