"""A worker's process before its launch: it has imported what every worker imports, and forks one for each launch that
comes on its standard input, a socket (agent/supervisor/processes/fork_server.py).

    {"argv": [SCRIPT, ARGUMENT...], "folder": ..., "env": {...}, "module": NAME or ""}

That one is what a new interpreter with these arguments would be: the script's names are those of `__main__`, tracebacks
begin in the script, spawned children find it. Where the script could notice the difference, it becomes that
interpreter by exec. An end of input ends the server, and no worker.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import json
import os
import re
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Final, NoReturn

_READ_AT_IMPORT: Final = re.compile(
    rb"\b(?:(?:OMP|GOMP|KMP|MKL|OPENBLAS|NPY|PYTORCH|TORCH|TORCHDYNAMO|TORCHINDUCTOR|LD)_|PYTHON[A-Z]|TMPDIR\b)"
)
"""Variables that what is imported here reads once, as it is imported."""
_STDIN: Final = 0
NUMBER_BYTES: Final = 4
READY: Final = b"1"
_SECRET: Final = "ATOLL_WORKER_SECRET"
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Launch message from the agent to a process that waits."""

    argv: Sequence[str]
    """The script, as its user named it, and its arguments."""
    folder: str
    env: Mapping[str, str]
    """The variables of the launch, beside those that the process was executed with."""
    module: str = ""
    """Run as `python -m` does; the script is the file that it is in."""

    @property
    def arguments(self) -> Sequence[str]:
        """A new interpreter's."""
        return ("-m", self.module, *self.argv[1:]) if self.module else self.argv

    def to_json(self) -> bytes:
        fields = {"argv": [*self.argv], "folder": self.folder, "env": {**self.env}, "module": self.module}
        return json.dumps(fields).encode()

    @staticmethod
    def from_json(text: bytes) -> LaunchOrder:
        fields = json.loads(text)
        return LaunchOrder(fields["argv"], fields["folder"], fields["env"], fields["module"])


def main() -> NoReturn:
    """Serve launches until none can come. Ends the process when the script of one has ended, too."""
    parent = os.getppid()
    _import()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that is shared
    with socket.socket(fileno=os.dup(_STDIN)) as agent:
        launch = _next_launch(agent, parent)
    if launch is not None:
        _carry_out(launch)
    sys.exit()


def _import() -> None:
    """All that comes with `atoll.init`, and with the first optimizer: most of the time from exec to the first step."""
    from atoll.agent.runtime.api import run
    from atoll.strategies import registry

    assert run is not None
    import_module("torch._dynamo")
    registry.strategies()


def _next_launch(agent: socket.socket, parent: int) -> LaunchOrder | None:
    """This process's own, where it was forked here. None: no launch comes any more."""
    agent.sendall(READY)
    while True:
        head, descriptors, _, _ = socket.recv_fds(agent, NUMBER_BYTES, 1)
        if not head:
            return None
        head += _exactly(agent, NUMBER_BYTES - len(head))
        given = _exactly(agent, int.from_bytes(head, "little"))
        if _is_fork(agent, parent, descriptors[0]):
            return LaunchOrder.from_json(given)


def _exactly(agent: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = agent.recv(size - len(found))
        if not more:
            sys.exit()
        found += more
    return found


def _is_fork(agent: socket.socket, parent: int, output_fd: int) -> bool:
    """Fork a worker, and tell its pid; True in that. It is a child of `parent`, which adopts orphans meanwhile: so it
    has its end told, and this process may end before."""
    told, tell = os.pipe()
    waits, go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those of what was imported are its libraries', which expect forks
        between = os.fork()
        if between == 0 and os.fork():
            os._exit(0)
    if between == 0:
        os.setsid()
        for output in (1, 2):
            os.dup2(output_fd, output)
        os.write(tell, os.getpid().to_bytes(NUMBER_BYTES, "little"))
        os.close(go)
        went = os.read(waits, 1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if not went or os.getppid() != parent:
            os._exit(1)
        _draw_anew()
    else:
        os.waitpid(between, 0)
        os.close(tell)
        pid = os.read(told, NUMBER_BYTES)
        if not pid:
            sys.exit("no process could be forked")
        os.write(go, b"1")
        os.close(go)
        agent.sendall(pid)
    for descriptor in (output_fd, told, waits, *((tell,) if between == 0 else ())):
        os.close(descriptor)
    return between == 0


def _draw_anew() -> None:
    """Draw multiprocessing's key and numpy's seed anew, or all forks share them. Python's changes by itself."""
    import multiprocessing

    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _show(mark: str, value: str) -> None:
    """Write the mark over /proc/PID/environ, which stays as it was at exec. It shows which job a process is of."""
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    for place in itertools.takewhile(bool, (variables[one] for one in itertools.count())):
        shown = ctypes.string_at(place)
        if shown.startswith(mark.encode()) and len(shown) == len(mark + value):
            ctypes.memmove(place + len(mark), value.encode(), len(value))


def _carry_out(launch: LaunchOrder) -> None:
    os.chdir(launch.folder)
    if _SECRET in launch.env:
        _show(f"{_SECRET}=", launch.env[_SECRET])
    os.environ.update(launch.env)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    script = os.path.join(os.getcwd(), launch.argv[0])
    beside = os.getcwd() if launch.module else os.path.dirname(os.path.realpath(script))
    code = code_of(script, {beside, launch.folder})
    if code is None:
        _begin_again(launch)
    sys.path.insert(0, launch.folder)  # as PYTHONPATH says, which nobody reads any more
    _become_main(script, launch, beside)
    if launch.module:
        _run(lambda: vars(runpy)["_run_module_as_main"](launch.module))  # what `python -m` calls
    else:
        _run(lambda: exec(code, sys.modules["__main__"].__dict__))  # noqa: S102 - what this process is for


def code_of(script: str, folders: Collection[str]) -> CodeType | None:
    """The script's, or None where only a new interpreter is sure to run it as it would have. folders: where modules are
    looked for first."""
    try:
        with io.open_code(script) as file:
            source = file.read()
        if _sets_what_was_read(source) or any(map(_hides_what_was_imported, folders)):
            return None
        return compile(source, script, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None  # the interpreter has its own words for it


def _sets_what_was_read(source: bytes) -> bool:
    """Return True if the script may set a variable that was read at import. One that only reads it starts cold, too."""
    return (b"environ" in source or b"putenv" in source) and _READ_AT_IMPORT.search(source) is not None


def _hides_what_was_imported(folder: str) -> bool:
    """Return True if a module beside the script has the name of an imported one, and would have been found first."""
    imported = {name.partition(".")[0] for name in sys.modules} - set(sys.builtin_module_names)
    beside = {name.partition(".")[0] for name in os.listdir(folder)} & imported
    found = (PathFinder.find_spec(name, [folder]) for name in beside - {"__main__"})
    return any(spec is not None and spec.loader is not None for spec in found)


def _begin_again(launch: LaunchOrder) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *launch.arguments])


def _become_main(script: str, launch: LaunchOrder, beside: str) -> None:
    """Leave in `__main__`, sys and multiprocessing what the interpreter would have put there."""
    import multiprocessing.process

    names = sys.modules["__main__"].__dict__
    builtins = names["__builtins__"]
    usual: dict[str, object] = dict.fromkeys(("__doc__", "__package__", "__spec__", "__cached__"))
    usual["__annotations__"] = {}
    there = {name: value for name, value in usual.items() if name in names}  # not the same in all versions of Python
    names.clear()
    names.update(there, __name__="__main__", __builtins__=builtins, __file__=script)
    names["__loader__"] = SourceFileLoader("__main__", script)
    sys.argv = ["-m" if launch.module else launch.argv[0], *launch.argv[1:]]
    sys.orig_argv[:] = [sys.executable, *launch.arguments]
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path.insert(0, beside)
    vars(multiprocessing.process)["ORIGINAL_DIR"] = str(Path.cwd())  # where spawned children begin


def _run(script: Callable[[], object]) -> None:
    try:
        script()
    except SystemExit:
        raise
    except BaseException as error:  # whatever the script raised: the interpreter shows it, from the script's frame on
        own, frame = 2, error.__traceback__
        while own and frame is not None:
            own, frame = own - 1, frame.tb_next
        _begin_tracebacks_at(frame)
        raise


def _begin_tracebacks_at(frame: TracebackType | None) -> None:
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: Any) -> None:
        hook(kind, error.with_traceback(frame), frame)

    sys.excepthook = show


if __name__ == "__main__":
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]  # the modules of this folder are not top-level ones
    from atoll.agent.runtime.api import warm_start

    warm_start.main()  # in a module of its own: the names of this one are to be the script's
