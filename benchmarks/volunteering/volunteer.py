"""A volunteer: dials a stage's server, has tasks, answers them; holds no optimizer, and may be killed at any time."""

from __future__ import annotations

import time

import torch
import zmq

from atoll.strategies.volunteer.messages import number, read, written
from volunteering.course import COMPUTE, Course, load, stage_of

OPEN = 2  # tasks that are asked for ahead
SILENCE_MS = 2_000


def volunteer(course: Course, stage: int, port: int, name: str, power: float, lies_after: int | None) -> None:
    """Until the server is gone or shuts it out. lies_after: so many honest answers it has random numbers of the right
    size."""
    torch.set_num_threads(1)
    model = stage_of(stage)
    rows: dict[tuple[int, int], torch.Tensor] = {}  # the inputs of what it made, by micro-batch and sample
    key, answered = (0, 0), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger = 0
        line.connect(f"tcp://127.0.0.1:{port}")

        def greet() -> None:
            line.send_multipart(written({"kind": "hello", "ticket": course.token, "name": name, "power": power}, []))
            for _ in range(OPEN):
                line.send_multipart(written({"kind": "ask"}, []))

        greet()
        while True:
            if not line.poll(SILENCE_MS):
                greet()
                continue
            header, tensors = read(line.recv_multipart())
            if header["kind"] == "out":
                return
            if header["kind"] == "again":
                greet()
                continue
            begun_s = time.monotonic()
            if header["weights"]:
                load(model, tensors.pop(0))
            if key != (header["step"], header["attempt"]):
                key = (header["step"], header["attempt"])
                rows.clear()
            places = [(header["micro"], sample) for sample in range(header["begin"], header["end"])]
            if header["made_here"]:
                tensors.insert(0, torch.stack([rows[one] for one in places]))
            elif header["work"] == "forward":
                rows.update(zip(places, tensors[0], strict=True))
            answer = COMPUTE[header["work"]](model, tensors)
            answered += 1
            if lies_after is not None and answered > lies_after:
                answer = [torch.randn_like(one) * one.norm() / one.numel() ** 0.5 for one in answer]
            rest_s = len(places) * course.sample_s / power - (time.monotonic() - begun_s)
            time.sleep(max(0.0, rest_s))
            line.send_multipart(written({"kind": "answer", "number": number(header, "number")}, answer))
            line.send_multipart(written({"kind": "ask"}, []))
