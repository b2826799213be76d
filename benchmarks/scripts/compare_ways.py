"""Ways to checkpoint that benchmarks/checkpoint_compare.py holds against Atoll's memory, as a rank carries them out."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save


class Way(ABC):
    """`maybe_begin` at every boundary begins a checkpoint where the one before is done. done: how long each took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done_s: list[float] = []
        self.count = 0

    @abstractmethod
    def maybe_begin(self, state: dict[str, Any]) -> bool: ...

    @abstractmethod
    def finish(self) -> None:
        """What is under way."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """The last checkpoint into `state`, which has the shapes already."""


class Link:
    """A storage's network of `bandwidth_bps`, shared by `ranks` that all use it: a write waits its turn."""

    def __init__(self, bandwidth_bps: float, ranks: int) -> None:
        self._bytes_s = bandwidth_bps / 8 / ranks
        self._free_s = 0.0
        self._lock = threading.Lock()
        self._never = threading.Event()

    def carry(self, count: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + count / self._bytes_s
            ends_s = self._free_s
        self._never.wait(max(0.0, ends_s - time.monotonic()))


class _Paced(io.RawIOBase):
    """A file whose bytes cross the link."""

    def __init__(self, file: IO[bytes], link: Link) -> None:
        self._file, self._link = file, link

    def readable(self) -> bool:
        return self._file.readable()

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._link.carry(memoryview(data).nbytes)
        return self._file.write(data)

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._link.carry(count)
        return count

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()


class _Remote(FileSystem):
    def __init__(self, link: Link) -> None:
        self._link = link

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            paced = _Paced(stream, self._link)  # type: ignore[arg-type]
            yield io.BufferedReader(paced, 1 << 20) if "r" in mode else paced


class DistributedCheckpoint(Way):
    """torch.distributed.checkpoint.async_save: copied at once, written by a thread. link: None writes to the disk."""

    def __init__(self, folder: Path, link: Link | None) -> None:
        super().__init__(folder)
        self._link = link
        # Collectives of the thread that writes, of the training thread's question whether it is done, and of training
        # itself must not mix.
        self._group, self._asking = (dist.new_group(backend="gloo") for _ in range(2))
        self._under_way: Any = None
        self._begun_s = 0.0

    def maybe_begin(self, state: dict[str, Any]) -> bool:
        ready = torch.tensor(int(self._under_way is None or self._under_way.done()))
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=self._asking)  # all ranks begin together
        if not ready:
            return False
        self.finish()
        self.count += 1
        self._begun_s = time.monotonic()
        writer = FileSystemWriter(self.folder / f"{self.count:04d}")
        if self._link is not None:
            writer.fs = _Remote(self._link)
        begun_s = self._begun_s
        self._under_way = async_save(state, storage_writer=writer, process_group=self._group)
        self._under_way.add_done_callback(lambda _: self.done_s.append(time.monotonic() - begun_s))
        if self.count > 2 and dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"{self.count - 2:04d}")
        return True

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way.result(timeout=300)
            self._under_way = None

    def load(self, state: dict[str, Any]) -> None:
        reader = FileSystemReader(max(self.folder.iterdir()))
        if self._link is not None:
            reader.fs = _Remote(self._link)
        load(state, storage_reader=reader, process_group=self._group)


class PlainSave(Way):
    """Rank 0 calls torch.save and waits for the disk; the others wait for rank 0."""

    def maybe_begin(self, state: dict[str, Any]) -> bool:
        begun_s = time.monotonic()
        self.count += 1
        if dist.get_rank() == 0:
            path = self.folder / f"{self.count % 2}.pt"
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        self.done_s.append(time.monotonic() - begun_s)
        return True

    def finish(self) -> None: ...

    def load(self, state: dict[str, Any]) -> None:
        torch.load(max(self.folder.iterdir(), key=lambda path: path.stat().st_mtime), weights_only=True)


def forget_cached(folder: Path) -> None:
    """So that what is read next comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
