"""Counts the files of the project through which one training step passes on the training thread, and their lines.

    python benchmarks/step_walk.py [--ranks 2] [--strategy dense] [--files]

Two ranks train over gloo on this machine. In one step each Python call is noted (sys.setprofile); a file counts if a
function of it runs. `lines` are those of whole files, because a reader opens whole files; `executed` are the lines of
the functions that ran."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
ROOMS: Final = ("atoll", "agent", "controller", "strategies", "kernels")
WARM_STEPS: Final = 14
"""Steps before the one that is looked at: one of the first is sampled for its norms, and caches fill."""
DEADLINE_S: Final = 120.0


class Walk:
    """Code of the project that runs between `begin` and `end`, by file."""

    def __init__(self) -> None:
        self.codes: dict[Path, set[CodeType]] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                self.codes.setdefault(path, set()).add(frame.f_code)

    @contextmanager
    def noted(self) -> Iterator[None]:
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def table(self) -> dict[str, Any]:
        lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in self.codes}
        executed = sum(
            len({line for *_, line in code.co_lines() if line}) for one in self.codes.values() for code in one
        )
        return {"files": len(lines), "lines": sum(lines.values()), "executed": executed, "by_file": lines}


def train(strategy: str) -> None:
    """Train on one rank, and print what one step passed through. An agent's threads are not followed."""
    import torch

    import atoll

    torch.set_num_threads(1)
    run = atoll.init(seed=3, strategy=strategy)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(400, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=16)
    walks = {"optimizer.step()": Walk(), "backward and step": Walk(), "the whole step": Walk()}

    def followed(step: int, name: str, call: Callable[[], object]) -> None:
        if step != WARM_STEPS:
            call()
            return
        with walks[name].noted():
            call()

    for _ in run.epochs(1):
        batches = iter(loader)
        for step in range(WARM_STEPS + 4):
            taken: list[Any] = []
            followed(step, "the whole step", lambda: taken.append(next(batches)))  # noqa: B023 - called at once
            some, wanted = taken[0]
            loss = []
            followed(
                step,
                "backward and step" if strategy == "dense" else "the whole step",
                lambda: loss.append(torch.nn.functional.mse_loss(model(some), wanted)),  # noqa: B023 - called at once
            )
            followed(step, "backward and step", lambda: run.backward(loss[0]))  # noqa: B023 - called at once
            followed(step, "optimizer.step()", optimizer.step)
            optimizer.zero_grad()
        for _ in batches:
            break
    for one, other in (("optimizer.step()", "backward and step"), ("backward and step", "the whole step")):
        for path, codes in walks[one].codes.items():
            walks[other].codes.setdefault(path, set()).update(codes)
    print(json.dumps({name: walk.table() for name, walk in walks.items()}), flush=True)
    os._exit(0)  # the rest of the epoch is not trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="dense")
    parser.add_argument("--files", action="store_true", help="also print each file with its lines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.strategy)
    from atoll.host.ports import hold_port

    with hold_port() as held:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "OMP_NUM_THREADS": "1"}
        common["WORLD_SIZE"] = str(options.ranks)
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", "--strategy", options.strategy],
                env={
                    **os.environ,
                    **common,
                    "WORLD_SIZE": str(options.ranks),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    walks = json.loads(said[0].splitlines()[-1])
    for name, walk in walks.items():
        print(f"{options.strategy}, {name}: {walk['files']} files, {walk['lines']} lines, {walk['executed']} executed")
        if options.files:
            print("\n".join(f"  {lines:5d} {path}" for path, lines in sorted(walk["by_file"].items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
