"""Whole controllers inside a test: the real daemon on a real port, over a real etcd."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import tarfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atoll.controller.daemon import serve
from atoll.controller.settings import ControllerSettings
from atoll.network.rpc import Tls, open_channel
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceStub

CALL_S = 30.0


class Controller:
    """One running daemon. `stub` speaks JobService to it."""

    def __init__(self, address: str, stub: Any, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.address = address
        self.stub = stub
        self.task = task
        self.stop = stop

    async def submit(self, workers: tuple[int, int] = (1, 1), request_id: str = "", **fields: Any) -> str:
        code = bundle({fields.get("script", "train.py"): b"print('hello')\n"})
        spec = spec_for(code, min_workers=workers[0], max_workers=workers[1], **fields)
        return await self.submit_raw(spec, [code], request_id or uuid.uuid4().hex)

    async def submit_raw(self, spec: common_pb2.JobSpec, code: list[bytes], request_id: str) -> str:
        async def parts() -> AsyncIterator[pb.SubmitRequest]:
            yield pb.SubmitRequest(header=pb.SubmitHeader(spec=spec, request_id=request_id))
            for chunk in code:
                yield pb.SubmitRequest(code=chunk)

        reply = await self.stub.Submit(parts(), timeout=CALL_S)
        return str(reply.job)

    async def get(self, job: str) -> pb.Job:
        return await self.stub.Get(pb.GetRequest(job=job), timeout=CALL_S)  # type: ignore[no-any-return]

    async def phase(self, job: str, *phases: int, within_s: float = 60.0, run: int = 0) -> pb.Job:
        """The job once it is in one of `phases` (and in `run`, if given). Fails when it ends in another."""
        ended = (pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED)
        seen = []
        async for state in self.stub.Watch(pb.WatchRequest(job=job), timeout=within_s):
            seen.append(f"{pb.Phase.Name(state.phase)}: {state.reason}")
            if state.phase in phases and state.run >= run:
                return state  # type: ignore[no-any-return]
            assert state.phase not in ended, seen
        raise AssertionError(seen)

    async def left(self, node: str) -> None:
        """Wait until the controller has noticed that the stream of this node's agent is over: until then it gives the
        node workers, and its name and its GPUs to no other agent."""
        async with asyncio.timeout(30):
            while True:
                nodes = (await self.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)).nodes
                if not any(one.name == node and one.connected for one in nodes):
                    return
                await asyncio.sleep(0.02)

    async def events(self, job: str = "") -> list[str]:
        stream = self.stub.Events(pb.EventsRequest(job=job), timeout=CALL_S)
        return [event.text async for event in stream]


def bundle(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, filename="", mode="wb", mtime=0) as zipped,  # the same files, the same bytes
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def spec_for(code: bytes, **fields: Any) -> common_pb2.JobSpec:
    chosen: dict[str, Any] = {"name": "tiny", "script": "train.py", "min_workers": 1, "max_workers": 1, **fields}
    return common_pb2.JobSpec(code_sha256=hashlib.sha256(code).hexdigest(), **chosen)


@asynccontextmanager
async def controller(
    data_dir: Path, etcd: str | None, client_tls: Tls | None = None, **settings: Any
) -> AsyncIterator[Controller]:
    """A daemon that serves. Stopped in order at the end, unless the test did away with its task."""
    chosen = ControllerSettings(
        data_dir=data_dir,
        etcd=(etcd,) if etcd else (),
        **{"listen": "127.0.0.1:0", "leader_lease_s": 10, "node_lease_s": 2, "heartbeat_s": 0.2, **settings},
    )
    (data_dir / "address").unlink(missing_ok=True)
    stop = asyncio.Event()
    task = asyncio.create_task(serve(chosen, stop), name="controller")
    try:
        address = await told_address(data_dir / "address", task)
        async with open_channel(address, client_tls) as channel:
            yield Controller(address, JobServiceStub(channel), task, stop)
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=60)
        if not task.cancelled():
            task.result()


async def leading(one: Controller, within_s: float = 60.0) -> Controller:
    """Wait until a controller answers as the leader."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await one.stub.List(pb.ListRequest(), timeout=CALL_S)
            except Exception as error:
                if getattr(error, "code", None) is None:
                    raise
                await asyncio.sleep(0.05)
            else:
                return one


async def told_address(path: Path, task: asyncio.Task[None] | None = None) -> str:
    """What a daemon wrote down once it serves."""
    async with asyncio.timeout(60):
        while not (address := _read(path)):
            if task and task.done():
                task.result()
            await asyncio.sleep(0.02)
    return address


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
