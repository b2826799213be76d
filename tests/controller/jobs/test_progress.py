from __future__ import annotations

from atoll.controller.jobs.progress import ProgressBoard
from atoll.v1.agents_pb2 import WorkerTelemetry
from atoll.v1.common_pb2 import StepSample, WorkerId


def test_an_epochs_short_last_batch_is_no_measure_of_speed_nor_of_the_total_batch() -> None:
    """1. Twenty whole batches of 64. 2. The epoch's last has 4 samples and costs almost as much. 3. The planner is told
    64 and the time per sample of whole batches; in the demo it once planned for a total of 96 instead of 256."""
    board = ProgressBoard()
    progress = board.begin("vit-1234", 1)
    worker = WorkerId(job="vit-1234", run=1, rank=0)
    whole = [StepSample(step=s, plan=1, local_batch=32, total_batch=64, compute_s=0.32) for s in range(20)]
    short = StepSample(step=20, plan=1, local_batch=2, total_batch=4, compute_s=0.3)
    board.observe(WorkerTelemetry(id=worker, steps=[*whole, short]))
    assert progress.total_batch == 64
    speed = progress.speeds()[0]
    assert (speed.local_batch, round(speed.seconds_per_sample, 6)) == (32, 0.01)
    assert progress.to_wire(0.0).step == 21  # steps completed
