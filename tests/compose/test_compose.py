"""The compose stack as a story: see tour.py, which also runs by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).with_name("tour.py")
SKIPPED = 77


@pytest.mark.containers
@pytest.mark.timeout(1800)
def test_job_on_containers_survives_the_death_of_one() -> None:
    """Three agents train; one container is killed, the job goes on; it returns, the job grows; the job ends DONE."""
    with subprocess.Popen(
        [sys.executable, str(TOUR)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as tour:
        try:
            said, _ = tour.communicate(timeout=1740)
        except BaseException:
            tour.terminate()  # it takes its containers down on SIGTERM
            tour.communicate(timeout=150)
            raise
    if tour.returncode == SKIPPED:
        pytest.skip(said.strip())
    print(said)
    assert tour.returncode == 0, said
