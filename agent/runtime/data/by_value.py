"""Passes objects between the training process and its loader workers with the classes that the script defines.

Plain multiprocessing lets a worker import the script for its definitions. That trains a second time where the script
has no main guard, and fails in a notebook. Here both directions are pickled by value: the dataset and its functions,
the indices, batches and exceptions. A class crosses once, then goes by a token: a batch has the script's own class."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import uuid
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Final

import cloudpickle
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, get_worker_info

from atoll.errors import BadInput

_FOUND_BY: Final = ("__spec__", "__file__")
"""The attributes by which a new process finds the training script."""
_BY_TOKEN: Final[dict[str, type]] = {}
_TOKENS: Final[dict[type, str]] = {}
"""The classes that the training process sent by value. A worker has its copy of each under the same token."""


class ByValue(Dataset[Any]):
    """Arrives in a worker process as the object that it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        try:
            return _unpack, (_pack(self.held, set()),)
        except Exception as error:
            raise _not_sent(self.held, error, "handed to a loader's worker process") from error


def start_method(given: BaseContext | None) -> str:
    """Return the start method of a DataLoader's context."""
    return given.get_start_method() if given is not None else "forkserver"


def context_by_value(name: str) -> BaseContext:
    """Return a multiprocessing context whose queues pickle by value. Raises BadInput for an unknown start method."""
    if name not in ("forkserver", "spawn"):
        raise BadInput(
            f'multiprocessing_context = {name!r} cannot be used: use "forkserver" or "spawn". This process has '
            "threads, whose locks a forked worker would inherit locked"
        )
    context = copy(multiprocessing.get_context(name))
    if name == "forkserver":
        context.set_forkserver_preload(["torch.utils.data"])  # imported once there, not once in every worker
    context.Queue = partial(_QueueByValue, ctx=context)  # type: ignore[method-assign]
    return context


class _QueueByValue(Queue):  # type: ignore[type-arg]
    """Carries torch's pairs (number, indices) to a worker, and (number, batch) back.

    `put` pickles at once. A plain queue does so on a thread that prints an error and sends nothing: the other side then
    waits for ever."""

    def __init__(self, *, ctx: BaseContext) -> None:
        super().__init__(ctx=ctx)
        self._known: set[str] | None = set()
        """Tokens of the classes that the worker has got; None in the worker, whose receiver has all."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._known = None

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(obj, tuple):
            obj = (obj[0], self._packed(obj[1]))
        super().put(obj, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self._known is None:
            _end_with_training_process()
        obj = super().get(block, timeout)
        if not isinstance(obj, tuple):
            return obj
        try:
            return obj[0], _unpack(obj[1])
        except Exception:
            if self._known is None:
                raise
            return obj[0], _wrapped("while reading a batch of a loader's worker process")

    def _packed(self, held: Any) -> bytes:
        try:
            return _pack(held, self._known)
        except Exception as error:
            refusal = _not_sent(held, error, "sent between the training process and its loader's workers")
            if self._known is not None:
                raise refusal from error
            worker = get_worker_info()
            assert worker is not None
            try:
                raise refusal from error
            except BadInput:
                return _pack(_wrapped(f"in DataLoader worker process {worker.id}"), self._known)


@cache
def _end_with_training_process() -> None:
    """End this worker process when the one that trains has ended, also where that was killed.

    Torch's own watch looks at the server that forked the worker, and that server lives as long as its workers. The
    first `get` calls this: while a worker is unpickled, multiprocessing does not know its parent yet."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive():
            parent.join(60.0)
        os._exit(1)

    threading.Thread(target=watch, name="atoll-training-process", daemon=True).start()


class _SharingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors go by shared memory, as in all that torch hands to a process. Classes that the receiver has go by
    token."""

    dispatch_table: ClassVar[Any] = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, buffer: io.BytesIO, known: set[str] | None) -> None:
        super().__init__(buffer)
        self._known = known
        self.sent: list[tuple[str, type]] = []
        """Classes of the training process that went by value. Those that a worker makes may be new in every batch."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type):
            return super().reducer_override(obj)
        token = _TOKENS.get(obj)
        if token is not None and (self._known is None or token in self._known):
            return _class_of, (token,)
        reduced = super().reducer_override(obj)
        if self._known is not None and reduced is not NotImplemented and obj.__module__ != "builtins":
            self.sent.append((token or uuid.uuid4().hex, obj))
        return reduced


def _pack(held: Any, known: set[str] | None) -> bytes:
    buffer = io.BytesIO()
    pickler = _SharingPickler(buffer, known)
    pickler.dump((held, pickler.sent))  # the list fills while `held` is written
    _register(pickler.sent)
    if known is not None:
        known.update(token for token, _ in pickler.sent)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    held, classes = cloudpickle.loads(packed)
    _register(classes)
    return held


def _register(classes: list[tuple[str, type]]) -> None:
    for token, one in classes:
        _BY_TOKEN[token] = one
        _TOKENS[one] = token


def _wrapped(where: str) -> ExceptionWrapper:
    """Return the exception that is being handled, in the form in which torch's loader raises it again."""
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def _class_of(token: str) -> type:
    return _BY_TOKEN[token]


def _not_sent(held: Any, error: Exception, what: str) -> BadInput:
    return BadInput(
        f"{type(held).__name__} cannot be {what}: {error}. It, or what its code refers to, holds something that is of "
        "one process alone: make that where it is used, or put the code into a module of its own"
    )


@contextmanager
def without_script() -> Iterator[None]:
    """Inside, processes that are started do not import the training script."""
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main[name] for name in _FOUND_BY if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        del main["__spec__"]
        main.update(kept)
