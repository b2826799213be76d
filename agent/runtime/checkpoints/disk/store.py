"""Checkpoints in an object store, through fsspec: URL/step-000000100-run-000003/{state.safetensors, manifest.json}.

A store has neither locks nor renames. So the manifest, which says what the state file holds, is written last, after
the state was read back, and removed first: without a sound one a checkpoint does not exist. What a run writes has its
number, and a newer run's come first; a fence keeps older runs away. Needs no torch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    STATE_FILE,
    Content,
    Hasher,
    Manifest,
)
from atoll.errors import CheckpointError

_HAS_FOLDERS: Final = frozenset({"file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs"})
_WORDS: Final = 300
ANSWER_S: Final = 20.0
"""How long a store may take for a list or a manifest. Reading a state takes as long as it takes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A checkpoint as a listing shows it: its two files are there. modified_unix_s: None where the store does not
    say."""

    state_bytes: int
    modified_unix_s: float | None


@dataclass(frozen=True, slots=True)
class Listing:
    """`torn`: folders that lack a file, because their writer is at work or died."""

    whole: Mapping[Moment, StoredObject]
    torn: frozenset[Moment]


class Store:
    """The checkpoints under one URL. Every method may raise CheckpointError that says what the store said."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._errors("opening it"):
            from fsspec.core import url_to_fs  # only where there is a store

            self._files, self._root = url_to_fs(self.url)
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else {*self._files.protocol}
        self._has_folders, self._local = bool(_HAS_FOLDERS & protocols), "file" in protocols

    def list(self) -> Listing:
        """Reads no file. Whether a manifest is sound shows when it is read."""
        with self._errors("listing it"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, maxdepth=2, detail=True)
            except FileNotFoundError:
                found = {}
        folders: dict[Moment, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for path, about in found.items():
            folder, _, file = path.rpartition("/")
            moment = Moment.of(folder.rpartition("/")[2])
            if moment is not None:
                folders[moment][file] = about
        whole = {
            moment: StoredObject(
                sum(int(about.get("size") or 0) for name, about in files.items() if name != MANIFEST_FILE),
                _modified_unix_s(files[MANIFEST_FILE]),
            )
            for moment, files in folders.items()
            if manifest.has_all(files.keys())
        }
        return Listing(whole, frozenset(folders.keys() - whole.keys()))

    def manifest(self, moment: Moment) -> tuple[Manifest, bytes]:
        """Return this checkpoint as it was written, verified."""
        file = f"{self._folder(moment)}/{MANIFEST_FILE}"
        with self._errors(f"reading {moment.name}/{MANIFEST_FILE}"), self._files.open(file, "rb") as source:
            raw = bytes(source.read(manifest.MAX_MANIFEST_BYTES + 1))
        try:
            found = manifest.from_bytes(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{self.url}/{moment.name}/{MANIFEST_FILE} cannot be used: {error}") from error
        if found.header.name != moment.name:
            raise CheckpointError(f"{self.url}/{moment.name} holds {found.header.name}: somebody renamed it")
        return found, raw

    @contextmanager
    def opened(self, moment: Moment, name: str) -> Iterator[Any]:
        """Open a state file to be read; not verified."""
        file = f"{self._folder(moment)}/{name}"
        with self._errors(f"reading {moment.name}/{name}"), self._files.open(file, "rb") as source:
            yield source

    def state(self, moment: Moment, name: str = STATE_FILE) -> Iterator[memoryview]:
        """The bytes of a state file in order, not verified."""
        with self.opened(moment, name) as source:
            while part := source.read(CHUNK_BYTES):
                yield memoryview(part)

    def put(
        self,
        sealed: bytes,
        parts: Callable[[str], Iterator[memoryview]],
        stopped: Callable[[], bool] = lambda: False,
        may_seal: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write a checkpoint; once this returns True it counts. sealed: its manifest; parts: of a state file. may_seal:
        asked right before the manifest is written.

        False where `stopped` answers so in between. What cannot be read back as it was written is not sealed."""
        found = manifest.from_bytes(sealed)
        moment = Moment(found.header.run, found.header.step)
        folder = self._folder(moment)
        with self._errors(f"writing {moment.name}"):
            if self._has_folders:
                self._files.makedirs(folder, exist_ok=True)
        for name, written in found.files.items():
            if not self._put_state(moment, name, written, parts(name), stopped):
                return False
        if not may_seal():
            return False
        with self._errors(f"writing {moment.name}/{MANIFEST_FILE}"):
            self._files.pipe_file(f"{folder}/{MANIFEST_FILE}", sealed)
        return True

    def _put_state(
        self, moment: Moment, name: str, written: Content, parts: Iterator[memoryview], stopped: Callable[[], bool]
    ) -> bool:
        hasher = Hasher()
        with self._errors(f"writing {moment.name}"), self._files.open(f"{self._folder(moment)}/{name}", "wb") as target:
            for part in parts:
                if stopped():
                    return False
                target.write(part)
                hasher.update(part)
        if (difference := written.difference(hasher.content())) is not None:
            raise CheckpointError(f"{name} of {moment.name} is damaged and stays here: {difference}")
        hasher = Hasher()
        for part in self.state(moment, name):
            if stopped():
                return False
            hasher.update(part)
        if (difference := written.difference(hasher.content())) is not None:
            raise CheckpointError(f"{self.url}/{moment.name}/{name} reads back damaged: {difference}")
        return True

    def remove(self, moment: Moment) -> None:
        """The manifest first: a half-removed one does not count. One that is not there is removed."""
        folder = self._folder(moment)
        with self._errors(f"removing {moment.name}"):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
            with suppress(FileNotFoundError):
                self._files.rm(folder, recursive=True)

    def remove_all(self) -> None:
        """Every checkpoint, the manifests first, and whatever else is under the URL."""
        found = self.list()
        for moment in (*found.whole, *found.torn):
            self.remove(moment)
        with self._errors("removing what is left"), suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)

    @property
    def creates_atomically(self) -> bool:
        """Return whether the backend has a conditional write of its own. fsspec's looks first and writes then."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        backend = type(self._files)
        if issubclass(backend, AsyncFileSystem):
            return backend._pipe_file is not AsyncFileSystem._pipe_file
        return self._local or backend.pipe_file is not AbstractFileSystem.pipe_file

    def create(self, name: str, content: bytes) -> bool:
        """A new object; False where there is one of this name."""
        with self._errors(f"creating {name}"):
            path = self._path(name)
            if self._has_folders:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                if self._local:
                    with self._files.open(path, "xb") as target:
                        target.write(content)
                else:
                    self._files.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
        return True

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the objects in a folder."""
        with self._errors(f"listing {folder}"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(folder), maxdepth=1)
            except FileNotFoundError:
                return []
        return [path.rpartition("/")[2] for path in found]

    def content(self, name: str, limit_bytes: int) -> bytes:
        with self._errors(f"reading {name}"), self._files.open(self._path(name), "rb") as source:
            return bytes(source.read(limit_bytes))

    def discard(self, name: str) -> None:
        """One that is not there is removed."""
        with self._errors(f"removing {name}"), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _folder(self, moment: Moment) -> str:
        return self._path(moment.name)

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """The one place that knows what stores raise: every backend has exceptions of its own."""
        try:
            yield
        except CheckpointError:
            raise
        except ImportError as error:
            raise CheckpointError(f"{self.url}: {error}. Install it where workers and agents run") from error
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]
            raise CheckpointError(f"{self.url}: {doing} failed: {words}") from error


def answered(url: str, ask: Callable[[Store], T], deadline_s: float = ANSWER_S) -> T:
    """Return a store's answer within a deadline, which some backends lack. Raises CheckpointError."""
    answers: list[T] = []
    failed: list[CheckpointError] = []

    def asking() -> None:
        try:
            answers.append(ask(Store(url)))
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=asking, name="atoll-store", daemon=True)
    thread.start()
    thread.join(timeout=deadline_s)
    if failed:
        raise failed[0]
    if not answers:
        raise CheckpointError(f"{url} did not answer within {deadline_s:g} s")
    return answers[0]


def _modified_unix_s(about: Mapping[str, Any]) -> float | None:
    """Return when a file was written; backends name that field differently."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modify", "modified", "created"):
        value = about.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
    return None


FOLDER: Final = "fence"
_TRIES: Final = 32
_MAX_RUN_BYTES: Final = 32


class StoreFence:
    """Fence of one run in a store. Methods raise CheckpointError if the store does not answer."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._begun = False
        self.warning = ""
        """Why the store cannot fence, for people; empty where it can."""

    def advance(self, store: Store) -> int:
        """Take the next number, unless a newer run has one. Returns the newest run: this one, where it may go on."""
        if not self._begun:
            self._begin(store)
        if self.warning:
            return self._run
        for _ in range(_TRIES):
            number, newest = self._newest(store)
            if newest > self._run:
                return newest
            if store.create(_name(number + 1), f"{self._run}\n".encode()):
                after, newest = self._newest(store)
                if after == number + 1:  # else others went on meanwhile, and what was taken had been removed already
                    self._remove_before(store, number)
                    return newest
        raise CheckpointError(f"{store.url}: others took the next number of its fence {_TRIES} times")

    def newest_run(self, store: Store) -> int:
        """Return the newest run that has taken a number; 0 if none has."""
        return self._newest(store)[1]

    def _begin(self, store: Store) -> None:
        if not store.creates_atomically:
            self.warning = f"{store.url}: its backend has no conditional writes"
        else:
            number, newest = self._newest(store)
            name, content = _name(number + 1), f"{self._run}\n".encode()
            if newest <= self._run and store.create(name, content) and store.create(name, content):
                self.warning = f"{store.url} ignores the condition of conditional writes"
        self._begun = True

    def _newest(self, store: Store) -> tuple[int, int]:
        """The highest number, and the run that has it; zeros where there is none."""
        numbers = sorted((int(name) for name in store.names(FOLDER) if name.isdigit()), reverse=True)
        if not numbers:
            return 0, 0
        content = store.content(_name(numbers[0]), _MAX_RUN_BYTES).strip()
        if not content.isdigit():
            raise CheckpointError(f"{store.url}/{_name(numbers[0])} holds {content!r}, not a run number. Remove it")
        return numbers[0], int(content)

    def _remove_before(self, store: Store, number: int) -> None:
        for name in store.names(FOLDER):
            if name.isdigit() and int(name) < number:
                store.discard(f"{FOLDER}/{name}")


def _name(number: int) -> str:
    return f"{FOLDER}/{number:012d}"
