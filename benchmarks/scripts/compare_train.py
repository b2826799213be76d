"""Submitted by benchmarks/checkpoint_compare.py: trains steps without checkpoints, with them, without, and writes what
rank 0 saw. Run 2 and later only tell how long it took to have the state back.

    compare_train.py OUT WAY STEPS WIDTH BATCH REMOTE_BPS WAITS_S

WAY: atoll, dcp-disk, dcp-remote, save. REMOTE_BPS: 0 asks for the one that suits the steps. WAITS_S: of a step, beside
what its batch takes. Where OUT is there already, a way but atoll only retrieves what the job before wrote."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints_train import make
from compare_ways import DistributedCheckpoint, Link, PlainSave, Way, forget_cached
from paced_train import waited
from torch import nn

WARM = 5  # steps that are not counted
STATE_STEPS = 7.76
"""How many steps the paper's remote storage takes for the state: 128 x 9.4 GB at 20 Gbit/s in steps of 62 s."""


def main() -> None:
    import atoll

    out, way, steps, width, batch = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    remote_bps, waits_s, written = float(sys.argv[6]), float(sys.argv[7]), out.exists()
    run = atoll.init(seed=1)
    found_s = timed_find()
    model, dataset = make(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=batch)
    number = int(os.environ["ATOLL_RUN"])
    if number > 1:
        out.with_suffix(f".run-{number}").write_text(json.dumps(found_s[0]))
    tier: Any = run._training.state.memory  # type: ignore[union-attr]
    watch = TierWatch(tier, atoll_way=way == "atoll")
    other: Way | None = None
    state: dict[str, Any] = {}
    marks: list[float] = []
    first = run.step
    begin, end = bounds(steps)
    last = end + steps // 2 if number == 1 else begin + 30
    for _ in run.epochs(10_000):
        for inputs, labels in loader:
            begun_s = time.monotonic()
            step = run.step - first
            if step == begin:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
                pace_bps = remote_bps or rate_bps(state, marks[WARM:])
                if way != "atoll":
                    other = build(way, out.with_suffix(".d"), pace_bps)
                if written and other is not None:
                    retrieve(other, state, out)
                    return
                watch.on = True
            if begin <= step < end and other is not None:
                watch.at(other, state, begun_s)
            if step == end:
                watch.on = False
                if other is not None:
                    other.finish()
            marks.append(time.monotonic())
            if step == last:
                break
            logits = waited(model(inputs), waits_s / 3, 2 * waits_s / 3)
            run.backward(nn.functional.cross_entropy(logits, labels))
            optimizer.step()
            optimizer.zero_grad()
        if step == last:
            break
    if run.is_main and number == 1:
        out.write_text(json.dumps(watch.told(marks, steps, other) | {"pace_bps": pace_bps, "bytes": size(state)}))
    if way == "atoll" and number < 3:
        die(tier if number == 2 and run.rank == 1 else None)


def timed_find() -> list[float]:
    """What finding a checkpoint to go on from takes from now on."""
    from atoll.agent.runtime.checkpoints import restore
    from atoll.agent.runtime.checkpoints.disk.header import Fingerprint
    from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
    from atoll.agent.runtime.session.session import Session

    found_s: list[float] = []
    find = restore.find

    def timed(session: Session, directory: Path, model: Fingerprint) -> Recovered | None:
        dist.barrier()  # whose process came up later is not the storage's fault
        begun_s = time.monotonic()
        found = find(session, directory, model)
        dist.barrier()
        found_s.append(time.monotonic() - begun_s)
        return found

    restore.find = timed
    return found_s


def bounds(steps: int) -> tuple[int, int]:
    """From which step to which checkpoints are taken; half as many come before and after."""
    return WARM + steps // 2, WARM + steps // 2 + steps


class TierWatch:
    """When checkpoints began and were complete. on: checkpoints are taken now."""

    def __init__(self, tier: Any, *, atoll_way: bool) -> None:
        self.on = False
        self._tier = tier if atoll_way else None
        self.begun_s: list[float] = []
        self.took_s: list[float] = []
        self.held_s: list[float] = []
        remember, settle = tier.at_boundary, tier.wait_for_reads

        def at_boundary(agreed: Any) -> Any:
            if not (self.on and atoll_way):
                return None
            now_s, before = time.monotonic(), tier._begun_step
            complete = remember(agreed)
            self.held_s.append(time.monotonic() - now_s)
            if complete is not None and self.begun_s:
                self.took_s.append(now_s - self.begun_s[-1])
            if tier._begun_step != before:
                self.begun_s.append(now_s)
            return complete

        def settled() -> None:
            now_s = time.monotonic()
            settle()
            if self.on and atoll_way:
                self.held_s.append(time.monotonic() - now_s)

        tier.at_boundary, tier.wait_for_reads = at_boundary, settled

    def at(self, way: Way, state: dict[str, Any], now_s: float) -> None:
        if way.maybe_begin(state):
            self.begun_s.append(now_s)
            self.held_s.append(time.monotonic() - now_s)

    def told(self, marks: list[float], steps: int, way: Way | None) -> dict[str, Any]:
        took = [after - before for before, after in pairwise(marks)]
        begin, end = bounds(steps)
        off, on = took[WARM : begin - 1] + took[end + 1 :], took[begin : end - 1]
        done_s = way.done_s if way is not None else self.took_s
        if not done_s:
            raise SystemExit(f"no checkpoint was complete within {steps} steps; take more")
        every = self._tier._cadence.every if self._tier is not None else 1  # as it would go on
        return {
            "off_s": statistics.fmean(off),
            "on_s": statistics.fmean(on),
            "interval_s": max(sum(on) / len(self.begun_s), every * statistics.fmean(on)),
            "checkpoint_s": statistics.median(done_s),
            "held_s": sum(self.held_s) / len(on),
            "checkpoints": len(self.begun_s),
        }


def size(state: dict[str, Any]) -> int:
    tensors = [*state["model"].values(), *(one for values in state["optimizer"].values() for one in values.values())]
    return sum(one.numel() * one.element_size() for one in tensors)


def rate_bps(state: dict[str, Any], marks: list[float]) -> float:
    """The same on all ranks."""
    step_s = torch.tensor((marks[-1] - marks[0]) / (len(marks) - 1), dtype=torch.float64)
    dist.broadcast(step_s, 0)
    return 8 * size(state) / (STATE_STEPS * float(step_s))


def build(way: str, folder: Path, pace_bps: float) -> Way:
    folder.mkdir(exist_ok=True)
    if way == "save":
        return PlainSave(folder)
    return DistributedCheckpoint(folder, Link(pace_bps, dist.get_world_size()) if way == "dcp-remote" else None)


def retrieve(way: Way, state: dict[str, Any], out: Path) -> None:
    forget_cached(way.folder)
    dist.barrier()
    begun_s = time.monotonic()
    way.load(state)
    dist.barrier()
    if dist.get_rank() == 0:
        out.with_suffix(".retrieved").write_text(json.dumps(time.monotonic() - begun_s))


def die(tier: Any) -> None:
    """As a machine that loses power. tier: whose memory is lost with it."""
    folder = tier._memory.folder if tier is not None else None
    dist.barrier()
    if folder is not None:
        for path in folder.glob("*.mem"):
            path.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
