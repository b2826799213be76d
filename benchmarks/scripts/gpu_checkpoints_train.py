"""Trains a GPT for the stage of checkpoints of scripts/gpu-check, and writes a line of JSON for each step.

    gpu_checkpoints_train.py OUT SHAPE STEPS [hash | stuck-at STEP]

SHAPE: its place in training_steps.SHAPES of the device. "hash": each line has a hash of the model's and the optimizer's
state before the step. "stuck-at": in that step the device (without one: the script) hangs for a minute."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

STUCK_S: Final = 60.0
CYCLES_PER_S: Final = 2_000_000_000
PRIME: Final = 1_000_003


def state_hash(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return a sum over all bits of float32 tensors, weighed by their place: computed on the device, and exact."""
    moments = (one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor))
    total = 0
    for tensor in (*model.state_dict().values(), *moments):
        bits = tensor.detach().float().contiguous().view(torch.int32).flatten().long()
        total = (31 * total + int((bits * (torch.arange(len(bits), device=bits.device) % PRIME + 1)).sum())) % 2**61
    return total


def hang(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(STUCK_S * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    else:
        time.sleep(STUCK_S)


def main() -> None:
    from gpu_check.training_steps import SHAPES

    import atoll

    out, place, steps, *more = sys.argv[1:]
    run = atoll.init(seed=1)
    shape = SHAPES[run.device.type][int(place)]
    model = shape.model(str(run.device))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=run.device.type == "cuda")
    model, optimizer, loader = run.prepare(model, optimizer, shape.data(int(steps)), batch_size=shape.batch)
    training: Any = run._training
    with Path(out).open("a", encoding="utf-8") as lines:
        begun_s = time.perf_counter()
        for _ in run.epochs(1):
            for inputs, targets in loader:
                line: dict[str, Any] = {
                    "step": run.step,
                    "hash": state_hash(model, optimizer) if more == ["hash"] else 0,
                }
                if more[:1] == ["stuck-at"] and run.step == int(more[1]):
                    hang(run.device)
                with torch.autocast(run.device.type, dtype=torch.bfloat16):
                    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                loss.item()  # waits for the device: a step's time is its own
                ended_s = time.perf_counter()
                writer = training.state.saver._under_way
                line |= {"s": ended_s - begun_s, "writing": writer is not None and writer.is_alive()}
                lines.write(json.dumps(line | {"memory_cost_s": training.state.memory._cadence.cost_s}) + "\n")
                lines.flush()
                begun_s = ended_s


if __name__ == "__main__":
    main()
