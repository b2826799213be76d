"""One worker of benchmarks/zen.py: sums tensors with the others by the schemes that are asked for, and tells how long.

    python zen_sums.py '{"rank": 0, "workers": 2, "host": "10.77.0.1", "parent": 1, "folder": "/tmp/..."}'

Lines on stdin and stdout: its endpoint, and everyone's; then {"data": name, "scheme": name, "rounds": count} and
{"took_s": of all rounds, "sent_bytes": of one, with the headers of frames}. Ends with its stdin."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from lab.lifeline import end_with_parent
from torch import nn

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame
from atoll.agent.runtime.transport.topology import members_of
from atoll.agent.runtime.transport.transport import Transport
from atoll.planning.sparse_scheme import Scheme
from atoll.strategies.staged_sums.exchange import StagedExchange
from atoll.strategies.zen.coordinates import Coordinates, GradientLayout, SumTally
from atoll.strategies.zen.messages import largest
from atoll.strategies.zen.partitions import hash_seeds
from atoll.strategies.zen.schemes import stages_among
from atoll.strategies.zen.summation import Summation
from atoll.strategies.zen.tensor import SeparateTensor

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    rank: int
    workers: int
    host: str
    parent: int
    folder: str  # of NAME.npz: unit_R and values_R by rank, shape


def tell(said: Any) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    asked = Assignment(**json.loads(sys.argv[1]))
    end_with_parent(asked.parent)
    torch.set_num_threads(1)
    names = sorted(path.stem for path in Path(asked.folder).glob("*.npz"))
    data = {name: gradient(Path(asked.folder, f"{name}.npz"), asked.rank) for name in names}
    tensors = [SeparateTensor(at, name, data[name][1], True, "zen") for at, name in enumerate(names)]
    ranks = range(asked.workers)
    transport = Transport(
        asked.rank, members_of([f"node-{rank}" for rank in ranks], ["one"] * asked.workers),
        run=1, keys=None, host=asked.host, deadline_s=DEADLINE_S,
    )  # fmt: skip
    try:
        tell(str(transport.bind()))
        most = [largest(tensor.shape) for tensor in tensors]
        exchange = StagedExchange(transport, names, most, stages_among(asked.workers))
        mailbox = exchange.mailbox
        endpoints = [Endpoint.parse(one) for one in json.loads(sys.stdin.readline())]

        def deliver(frame: Frame) -> str | None:
            return mailbox.deliver(int(frame.kind), frame.origin, frame.step, frame.tensor, frame.count, frame.payload)

        transport.connect(endpoints, None, deliver, mailbox.fail)
        exchange.start()
        summation = Summation(exchange, [list(ranks)], asked.rank, hash_seeds(1))
        tell("connected")
        number = 0
        for line in sys.stdin:
            wanted = json.loads(line)
            tensor = tensors[names.index(wanted["data"])]
            number += measure(transport, exchange, summation, tensor, data[tensor.name][0], wanted, number)
        exchange.close()
        transport.goodbye()
    finally:
        transport.close()


def measure(
    transport: Transport,
    exchange: StagedExchange,
    summation: Summation,
    tensor: SeparateTensor,
    mine: Coordinates,
    wanted: dict[str, Any],
    number: int,
) -> int:
    """number: of the rounds before. Returns how many these were."""
    scheme: Scheme = wanted["scheme"]
    tensor.scheme, rounds = scheme, int(wanted["rounds"])
    before = sum(link.bytes_sent for link in transport.links())
    began = time.perf_counter()
    for turn in range(1, rounds + 1):
        exchange.begin(number + turn)
        exchange.finish(summation.start(tensor, mine, lambda _: None), DEADLINE_S)
    took_s = time.perf_counter() - began
    sent = sum(link.bytes_sent for link in transport.links()) - before
    tell({"took_s": took_s, "sent_bytes": sent / rounds})
    return rounds


def gradient(path: Path, rank: int) -> tuple[Coordinates, nn.Parameter]:
    with np.load(path) as file:
        unit, values, shape = file[f"unit_{rank}"], file[f"values_{rank}"], file["shape"].tolist()
    tally = SumTally(GradientLayout.SPARSE, units=len(unit))
    return Coordinates(unit, values, tally), nn.Parameter(torch.empty(shape, device="meta"))


if __name__ == "__main__":
    main()
