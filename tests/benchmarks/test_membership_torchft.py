"""What a survivor's steps tell of a kill, in the benchmark that has torchft do what membership.py has Atoll do."""

from __future__ import annotations

from pathlib import Path

from membership_torchft import Kill, trains, went_on


def test_the_first_step_without_the_killed_one_counts(tmp_path: Path) -> None:
    """1. Step 8 is under way among three when one is killed, at 8.2; it is whole. 2. Step 9 is not, and is tried again
    by two. 3. Steps of two from before all three had met are nobody's left out; step 5, of two again, is."""
    path = tmp_path / "0"
    replicas = {0: 0, 1: 2, 2: 2, 3: 3, 4: 3, 5: 2, 6: 3, 7: 3, 8: 3}
    before = "".join(f"{step} {seen} {step}.000000\n" for step, seen in replicas.items())
    path.write_text(before + "9 3 9.000000\n9 3 10.000000\n10 2 1")  # half written
    assert went_on(path, killed_s=8.2) is None
    path.write_text(before + "9 3 9.000000\n9 3 10.000000\n10 2 10.700000\n11 2 11.000000\n")
    assert went_on(path, killed_s=8.2) == Kill(10.7 - 8.2, vain=1, left_out=1)


def test_three_train_once_they_have_trained_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "0"
    assert not trains(path)
    path.write_text("".join(f"{step} 3 {step}.0\n" for step in range(19)))
    assert not trains(path)
    path.write_text("".join(f"{step} 3 {step}.0\n" for step in range(20)))
    assert trains(path)
    path.write_text(path.read_text() + "20 2 20.0\n")
    assert not trains(path)
