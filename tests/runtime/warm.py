"""Workers that begin with torch imported already: importing it is most of what a short run costs.

One process imports it and forks a worker whenever it is asked to. A worker is a process of its own that runs its script
from the first line and ends as an interpreter does, but for taking its modules apart: that copies 170 MB, 0.3 s of a
processor. Those of tests/e2e do that too.

`scripts/test` imports once for all groups: it forks each group's pytest, which forks its own stock before it does
anything else (tests/warm_pytest.py)."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any, ClassVar, Final, NoReturn, Protocol

ROOT: Final = Path(__file__).resolve().parents[2]
COMMAND_LINE: Final = str(ROOT / "atoll" / "cli" / "main.py")
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ATOLL_WORKER_SECRET": "0" * 32}
"""Of the process that workers are forked from: what is imported there reads it once. An agent's workers show their own
secret in the place of that one (atoll/agent/runtime/api/warm_start.py)."""


class WarmWorker:
    """What a test does with a subprocess.Popen."""

    def __init__(self, pid: int, stock: WarmStock) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.processor_s = 0.0
        """Known once it has ended: its own, and that of the children it waited for."""
        self._stock = stock

    def poll(self) -> int | None:
        self._stock.hear(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        ends_s = time.monotonic() + timeout
        while self.returncode is None:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._stock.hear(left_s)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server(Protocol):
    """The process that workers are forked from: a subprocess.Popen, or one that was forked itself."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int: ...


class ForkedServer:
    """A child of a process that has imported torch, which serves as one that was started for it does."""

    def __init__(self) -> None:
        theirs, ours = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for given, number in ((theirs[0], 0), (ours[1], 1)):
                os.dup2(given, number)
            for descriptor in (*theirs, *ours):
                os.close(descriptor)
            os.environ.update(ENVIRONMENT)
            become(serve())
            end(run())
        os.close(theirs[0])
        os.close(ours[1])
        self.stdin: IO[bytes] = os.fdopen(theirs[1], "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(ours[0], "rb", buffering=0)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """It was killed: it ends at once."""
        del timeout
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class WarmStock:
    """Owns the process that workers are forked from."""

    of_pytest: ClassVar[WarmStock | None] = None
    """Of this process, where tests/warm_pytest.py runs pytest."""

    def __init__(self, server: Server | None = None) -> None:
        """server: None to start one, in a process group of its own: a Ctrl-C is for who asks it for workers."""
        self._process: Server = server or subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | ENVIRONMENT,
            process_group=0,
        )
        self._heard = b""
        self._workers: dict[int, WarmWorker] = {}
        self._newest: WarmWorker | None = None

    def __enter__(self) -> WarmStock:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def fileno(self) -> int:
        """Readable when there is something to hear."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None = None,
        errors: IO[bytes] | None = None,
    ) -> WarmWorker:
        """command: as for subprocess, [interpreter, script, arguments...]. errors: for stderr, if not the log."""
        path, beside = (file.name if file is not None else None for file in (log, errors or log))
        asked = json.dumps({"command": command[1:], "environment": dict(environment), "log": path, "errors": beside})
        assert self._process.stdin is not None
        self._process.stdin.write(asked.encode() + b"\n")
        self._newest = None
        ends_s = time.monotonic() + 120  # importing takes long beside other work
        while self._newest is None:
            assert time.monotonic() < ends_s
            self.hear(1.0)
        return self._newest

    def run(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a script, in this process's folder and environment, as subprocess.run does with its output captured."""
        with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
            process = self.start(("", *command), os.environ, output, errors)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())

    def load(self, *modules: str) -> None:
        """Have what is started from now on begin with these imported, too."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"modules": modules}).encode() + b"\n")

    def hear(self, timeout_s: float) -> None:
        """Take in who was born and who ended, waiting for the first such word."""
        if not select.select([self], [], [], timeout_s)[0]:
            return
        read = os.read(self.fileno(), 65536)
        if not read:
            raise ChildProcessError("the process that workers are forked from is gone")
        *lines, self._heard = (self._heard + read).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "code" in said:
                worker = self._workers.pop(said["pid"])
                worker.processor_s, worker.returncode = said["processor_s"], said["code"]
            else:
                self._newest = self._workers[said["pid"]] = WarmWorker(said["pid"], self)


@contextmanager
def stock_of_pytest() -> Iterator[WarmStock]:
    """The one that all tests of this process use."""
    if WarmStock.of_pytest is not None:
        yield WarmStock.of_pytest
        return
    with WarmStock() as started:
        yield started


def serve() -> dict[str, Any]:
    """Fork a worker for each line of stdin. Returns in the worker, with what was asked."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    heard = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while (one := _reaped()) is not None:
                os.write(1, json.dumps(one).encode() + b"\n")
        if 0 not in ready:
            continue
        read = os.read(0, 65536)
        if not read:
            sys.exit(0)
        *lines, heard = (heard + read).split(b"\n")
        for line in lines:
            asked: dict[str, Any] = json.loads(line)
            if "modules" in asked:
                load(asked["modules"])
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(ended)
                os.close(wake)
                return asked
            os.write(1, json.dumps({"pid": pid}).encode() + b"\n")


def load(modules: Iterable[str]) -> None:
    """Import these, and let the processes that are forked from now on end quickly."""
    for name in modules:
        importlib.import_module(name)
    for finalizer in [*vars(weakref.finalize)["_registry"]]:
        finalizer.atexit = False  # torch's, which take its operators apart at the end of each worker: 0.08 s
    gc.freeze()  # a worker's end would go through all of it, and copy its pages


def _reaped() -> dict[str, float] | None:
    try:
        pid, status, used = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    if not pid:
        return None
    return {"pid": pid, "code": os.waitstatus_to_exitcode(status), "processor_s": used.ru_utime + used.ru_stime}


def become(asked: dict[str, Any]) -> None:
    """Make this process look like one that was started with the command."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output, errors = (
        os.open(path, os.O_WRONLY | os.O_APPEND) if path is not None else os.dup(2)
        for path in (asked["log"], asked["errors"])
    )
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # a test whose worker hangs asks for its stacks
    sys.argv = asked["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def run() -> int:
    """Run the script and return the exit code that an interpreter would have. Its bytecode is stored as a module's is:
    many workers run the same script."""
    path = sys.argv[0]
    store = SourceFileLoader("__main__", path) if Path(path).is_relative_to(ROOT) else None
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    try:
        code = store.get_code("__main__") if store else compile(Path(path).read_bytes(), path, "exec")
        exec(code, vars(main))  # noqa: S102 - the script that was asked for
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 - whatever the script raised, as the interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    from atoll.strategies.registry import FOLDERS

    load(["torch._dynamo"])  # `atoll.init` would, for the first optimizer: a second of each worker
    load(["atoll.agent.runtime.api.run", *(f"atoll.strategies.{folder}.worker" for folder in FOLDERS)])
    load(["atoll.agent.daemon", "atoll.controller.daemon", "atoll.cli.main"])  # for pytest, and daemons of tests/e2e
    become(serve())
    end(run())
