"""One worker of benchmarks/wan.py: trains a model by one of the methods and tells what happens, a JSON line a step.

    python wan_train.py '{"model": "mlp", "method": "ddp", "steps": 60, ...}'    (started by lab/cell.py)

Which worker it is stands in RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as under torchrun. Lines on stdout:
{"event": "ready"} when everything is built and all workers have met; then it waits for a line on stdin, so that the
links are shaped for training alone. {"event": "step"} with the seconds since then, the loss of this worker's share, the
bytes sent by its machine and its memory. {"event": "done"} with the strategy's own statistics and the loss on held-out
samples of the model that all ranks share in the end.

Memory: `beyond_bytes` is the peak resident size while training, less the resident size once data, model and optimizer
were built, less the state that the optimizer makes in its first step. Gradients and activations are in it for every
method.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from lab.lifeline import end_with_parent
from lab.options import Method
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from wan_models import TASKS

import atoll
from atoll.agent.runtime.data.orders import EpochOrder
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.zen.settings import Zen

SEED: Final = 1  # of weights, order of samples, PowerSGD's first directions: the same for all methods
EPOCHS: Final = 1_000_000  # more than any run has
ONE_BUCKET_MB: Final = 400  # PowerSGD's hook over gloo hangs or aborts with several buckets
POWERSGD_FROM: Final = 2  # its own lower limit, with error feedback and warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the laboratory asks of this worker."""

    model: str
    method: str
    steps: int
    batch: int  # samples a worker takes in a step; 0: the model's own
    tiny: bool
    device: str  # the network device whose bytes count
    parent: int
    ready_s: float  # how long to wait for the start after this worker is ready


def tell(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, e.g. VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}")


def sent_bytes(device: str) -> int:
    return int(Path("/sys/class/net", device, "statistics/tx_bytes").read_text())


def main() -> None:
    asked = Assignment(**json.loads(sys.argv[1]))
    end_with_parent(asked.parent)

    torch.set_num_threads(1)
    method, task = Method.parse(asked.method), TASKS[asked.model]
    prepare = METHODS[method.name](method)  # first, because atoll.init seeds the generators
    torch.manual_seed(SEED)
    model, (dataset, held_out) = task.build(asked.tiny), task.split(asked.tiny)
    optimizer = task.optimizer(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    built = status_bytes("VmRSS") + 4 * parameters * task.state_copies
    trained = prepare(Built(model, optimizer, dataset, task.loss, asked.batch or task.batch))

    tell("ready", parameter_bytes=4 * parameters)
    wait_for_start(asked.ready_s)
    sent_before, began = sent_bytes(asked.device), time.perf_counter()
    for step, loss in zip(range(1, asked.steps + 1), trained.losses, strict=False):
        sent, beyond = sent_bytes(asked.device) - sent_before, status_bytes("VmHWM") - built
        at_s = time.perf_counter() - began
        tell("step", step=step, at_s=at_s, loss=loss, sent_bytes=sent, beyond_bytes=beyond)
    statistics = trained.statistics()
    trained.synchronize()
    tell("done", statistics=statistics, held_out=held_out_loss(model, held_out, task.loss))
    trained.close()


@torch.no_grad()
def held_out_loss(
    model: torch.nn.Module, samples: torch.utils.data.TensorDataset, loss: Callable[..., torch.Tensor]
) -> float:
    """Of the model that all ranks share at the end (each its own under `local`), on samples nobody trained on."""
    model.eval()
    inputs, targets = samples[:]
    return loss(model(inputs), targets).item()


def wait_for_start(limit_s: float) -> None:
    if not select.select([sys.stdin], [], [], limit_s)[0] or not sys.stdin.readline():
        raise SystemExit(f"no start within {limit_s:g} s: the other workers were not ready, or the laboratory ended")


@dataclass(frozen=True, slots=True)
class Built:
    """The same for every method."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataset: torch.utils.data.TensorDataset
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int  # of this worker


def no_statistics() -> Mapping[str, float]:
    return {}


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Trained:
    """A training run whose steps happen as `losses` is iterated."""

    losses: Iterator[float]
    statistics: Callable[[], Mapping[str, float]] = field(default=no_statistics)
    synchronize: Callable[[], None] = field(default=nothing)  # make the model the same on every rank
    close: Callable[[], None] = field(default=nothing)


Prepare = Callable[[Built], Trained]


def batches(built: Built) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's share of each global batch, in the order that Atoll's own loader takes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples, whole = len(built.dataset), built.batch * world_size
    order = EpochOrder(lambda: samples, SEED, shuffle=True)
    for epoch in range(EPOCHS):
        for start in range(0, samples - whole + 1, whole):
            begin = start + rank * built.batch
            inputs, targets = built.dataset[torch.tensor(order.indices(epoch, begin, begin + built.batch))]
            yield inputs, targets


def plain_steps(built: Built, model: torch.nn.Module) -> Iterator[float]:
    for inputs, targets in batches(built):
        loss = built.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        built.optimizer.step()
        built.optimizer.zero_grad()
        yield loss.item()


def local(_: Method) -> Prepare:
    return lambda built: Trained(plain_steps(built, built.model))


def ddp(method: Method) -> Prepare:
    dist.init_process_group("gloo")

    def prepare(built: Built) -> Trained:
        one_bucket = ONE_BUCKET_MB if method.name == "ddp-powersgd" else None
        replica = DistributedDataParallel(built.model, bucket_cap_mb=one_bucket)
        if method.name == "ddp-fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if method.name == "ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=int(method.options.get("rank", 1)), start_powerSGD_iter=POWERSGD_FROM
            )
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Trained(plain_steps(built, replica), close=dist.destroy_process_group)

    return prepare


def atoll_dense(_: Method) -> Prepare:
    return with_run(atoll.init(seed=SEED))


def atoll_stale_sparse(method: Method) -> Prepare:
    chosen: dict[str, Any] = dict(method.options)
    return with_run(atoll.init(seed=SEED, strategy=StaleSparse(**chosen)))


def atoll_zen(method: Method) -> Prepare:
    chosen: dict[str, Any] = dict(method.options)
    return with_run(atoll.init(seed=SEED, strategy=Zen(**chosen)))


def with_run(run: atoll.Run) -> Prepare:
    def prepare(built: Built) -> Trained:
        whole = built.batch * run.world_size
        model, optimizer, loader = run.prepare(
            built.model, built.optimizer, built.dataset, batch_size=whole, drop_last=True
        )

        def steps() -> Iterator[float]:
            for _ in run.epochs(EPOCHS):
                for inputs, targets in loader:
                    loss = built.loss(model(inputs), targets)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    yield loss.item()

        return Trained(steps(), statistics=run.statistics, synchronize=run.synchronize, close=run.close)

    return prepare


METHODS: Final[Mapping[str, Callable[[Method], Prepare]]] = {
    "local": local,
    "ddp": ddp,
    "ddp-fp16": ddp,
    "ddp-powersgd": ddp,
    "dense": atoll_dense,
    "stale-sparse": atoll_stale_sparse,
    "zen": atoll_zen,
}

if __name__ == "__main__":
    main()
