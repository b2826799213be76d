"""A process that waited for its launch beside a new interpreter, both real: what a script can tell of that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.agent.runtime.api import warm_start
from atoll.agent.runtime.api.warm_start import LaunchOrder, code_of
from atoll.agent.supervisor.processes.environment import TORCHRUN_VARIABLES
from atoll.agent.supervisor.processes.fork_server import forked

pytestmark = pytest.mark.timeout(300)

ENDS_S = 120
WHERE = """
    import atexit, os, pickle, sys, threading, time
    print({name: __builtins__ and str(value).split(" at 0x")[0] for name, value in sorted(globals().items())})
    print(type(__builtins__), __loader__.path, __loader__.name, __annotations__)
    print(sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), sys.stdin.read(), os.environ["RANK"])
    class Mine:
        pass
    def late():
        threading.main_thread().join()
        print("late", type(pickle.loads(pickle.dumps(Mine()))) is Mine, sys.modules["__main__"].Mine is Mine)
    threading.Thread(target=late).start()
    atexit.register(print, "at exit")
    def broken():
        raise ValueError("inner")
    try:
        broken()
    except ValueError as error:
        raise KeyError("outer") from error
    """
SPAWNS = """
    import multiprocessing, os, sys
    def square(number):
        return number * number, __name__, os.getcwd(), sys.argv[1]
    if __name__ == "__main__":
        print(multiprocessing.get_start_method(allow_none=True))
        for how in ("spawn", "fork"):
            with multiprocessing.get_context(how).Pool(1) as pool:
                print(pool.map(square, range(3)))
        sys.exit("that was all")
    """
INTERRUPTED = """
    import os, signal
    sys = __import__("sys")
    sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_frame.f_code.co_name)
    os.kill(os.getpid(), signal.SIGINT)
    """
BECOMES_COLD = """
    import os
    os.environ["OMP_NUM_THREADS"] = "3"
    print("torch" in __import__("sys").modules, os.environ["RANK"], open("/proc/self/fd/0").name, os.getcwd())
    """


MODULE = """
    import os, sys
    from . import beside
    from deeper.further import FURTHER
    print({name: str(value).split(" at 0x")[0] for name, value in sorted(globals().items())})
    print(sys.argv, sys.orig_argv, sys.path[:2], os.environ["PYTHONPATH"], beside.ARGV, FURTHER)
    raise ValueError("inner")
    """


def write(folder: Path, script: str, module: str = "") -> str:
    path = folder.joinpath(*module.split(".")).with_suffix(".py") if module else folder / "train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(script))
    return str(path.relative_to(folder))


Ended = tuple[str, int]
"""What it printed, and its exit code."""


def cold(folder: Path, script: str, env: Mapping[str, str], module: str = "") -> Ended:
    path = write(folder, script, module)
    command = [sys.executable, *(("-m", module) if module else (path,)), "--x"]
    whole = {**os.environ, **env}
    ended = subprocess.run(
        command, cwd=folder, env=whole, stdin=subprocess.DEVNULL, stdout=-1, stderr=-2, timeout=ENDS_S, check=False
    )
    return ended.stdout.decode(), ended.returncode


@contextmanager
def server(
    stdout: int | None = None, program: Sequence[str] = (warm_start.__file__,)
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """And this end of its input."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, *program]
    env = {**os.environ, "ATOLL_WORKER_SECRET": "0" * 32}
    started = subprocess.Popen(command, cwd="/", env=env, stdin=theirs, stdout=stdout, stderr=stdout and -2)
    theirs.close()
    with started as process, ours:
        yield process, ours


@pytest.fixture(scope="module")
def serving() -> Iterator[socket.socket]:
    """A server from which one fork has come and ended. Most of what a launch costs is what a server imports."""
    with server() as (process, line), tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        assert line.recv(1) == warm_start.READY
        first = LaunchOrder((write(Path(folder), "pass"),), folder, {}).to_json()
        assert forked(line, first, output.fileno()).wait() == 0
        yield line
        line.close()
        assert process.wait(ENDS_S) == 0


def fork(line: socket.socket, folder: Path, script: str, env: Mapping[str, str], module: str = "") -> Ended:
    """A later fork."""
    order = LaunchOrder((write(folder, script, module), "--x"), str(folder), env, module).to_json()
    with tempfile.TemporaryFile() as output:
        code = forked(line, order, output.fileno()).wait()
        output.seek(0)
        return output.read().decode(), code


@pytest.mark.parametrize(
    ("script", "code", "ends_with"),
    [
        (WHERE, 1, "late True True\nat exit\n"),
        (SPAWNS, 1, "that was all\n"),
        (INTERRUPTED, -signal.SIGINT, "hook KeyboardInterrupt <module>\n"),
        (BECOMES_COLD, 0, "\n"),
    ],
    ids=["where", "spawns", "interrupted", "becomes-cold"],
)
def test_script_cannot_tell(serving: socket.socket, tmp_path: Path, script: str, code: int, ends_with: str) -> None:
    """Names of `__main__`, arguments, paths, input, threads that outlive the script, pickles of its classes, children
    that are spawned, tracebacks, and the exit code: the same text to the last byte."""
    there = cold(tmp_path, script, {"RANK": "4"})
    assert there[0].endswith(ends_with)
    assert there[1] == code
    assert fork(serving, tmp_path, script, {"RANK": "4"}) == there


def test_module_cannot_tell(serving: socket.socket, tmp_path: Path) -> None:
    """As above, of a module of a package with relative imports; its folder and PYTHONPATH are where it finds others."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/beside.py").write_text("import sys\nARGV = sys.argv[1:]")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/further.py").write_text("FURTHER = 7")
    env = {"PYTHONPATH": str(tmp_path)}
    there = cold(tmp_path, MODULE, env, "package.train")
    assert "['--x'] 7" in there[0]
    assert there[0].endswith("ValueError: inner\n")
    assert there[1] == 1
    assert fork(serving, tmp_path, MODULE, env, "package.train") == there


def test_a_server_asks_not_who_the_worker_is_and_its_forks_have_nothing_in_common(tmp_path: Path) -> None:
    """1. Imported before the launch is known. 2. Two forks draw from each generator that draws without a seed: other
    numbers. 3. Each has in /proc the secret of its launch, in a session of its own, and this process for a parent,
    whatever becomes of the server. 4. It ends with this one: the kernel was told. 5. The server ends at the end of its
    input. It has read no variable of a launch, started no thread, left no socket or file open, touched no device, and
    grpc is not in it: training never sees it."""
    watch = """
        def watched():
            import os, sys, threading
            read = set()
            class Watched(type(os.environ)):
                def __getitem__(self, name):
                    read.add(name)
                    return super().__getitem__(name)
                def __contains__(self, name):
                    read.add(name)
                    return super().__contains__(name)
            os.environ.__class__ = Watched
            before, server = set(os.listdir("/proc/self/fd")), os.getpid()
            from atoll.agent.runtime.api import warm_start
            try:
                warm_start.main()
            finally:
                import torch
                if os.getpid() == server:
                    read.discard("ATOLL_WORKER_SECRET")  # it is there: who copies all variables reads it
                    print(sorted(name for name in read if name.startswith("ATOLL_") or name in sys.argv))
                    print([t.name for t in threading.enumerate()], set(os.listdir("/proc/self/fd")) - before)
                    print(torch.cuda.is_initialized(), torch.distributed.is_initialized(), "grpc" in sys.modules)
        watched()  # whose names outlive those of the module, which are the script's in a fork
        """
    script = """
        import ctypes, multiprocessing, os, random, sys, uuid
        import numpy
        told = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(told), 0, 0, 0)
        shown = open("/proc/self/environ", "rb").read().split(b"\\0")
        assert b"ATOLL_WORKER_SECRET=" + os.environ["ATOLL_WORKER_SECRET"].encode() in shown, shown
        assert os.getsid(0) == os.getpgid(0) == os.getpid() and told.value == 9
        print(random.random(), numpy.random.rand(), uuid.uuid4(), bytes(multiprocessing.current_process().authkey))
        print(os.getppid())
        """
    path, seen = write(tmp_path, script), []
    program = ("-c", textwrap.dedent(watch), *TORCHRUN_VARIABLES)
    with server(subprocess.PIPE, program) as (process, line), tempfile.TemporaryFile() as output:
        assert line.recv(1) == warm_start.READY
        for secret in ("a" * 32, "b" * 32):
            order = LaunchOrder((path,), str(tmp_path), {"ATOLL_WORKER_SECRET": secret})
            output.truncate(0)
            worker = forked(line, order.to_json(), output.fileno())
            if secret[0] == "b":  # the server ends before the script does
                line.close()
                printed = process.communicate(timeout=ENDS_S)[0].decode()
            assert worker.wait() == 0
            output.seek(0)
            drawn, parent = output.read().decode().splitlines()
            assert int(parent) == os.getpid()
            seen.append(drawn.split(maxsplit=3))
    assert all(one != other for one, other in zip(*seen, strict=True)), seen
    assert printed == "[]\n['MainThread'] set()\nFalse False False\n"
    assert process.returncode == 0


def test_what_only_a_new_interpreter_runs_alike(tmp_path: Path) -> None:
    """1. A plain script is compiled. 2. Not one that does not compile or is not there; one that may set a variable that
    torch read at its import; one that has a module beside it with the name of one that was imported. 3. What torchrun
    sets is only read, and a folder without code hides nothing."""
    beside = {str(tmp_path)}
    assert code_of(str(tmp_path / write(tmp_path, "import os\nos.environ['TORCHELASTIC_RUN_ID']")), beside) is not None
    for script in ("x = (", "\0", "import os\nos.environ.setdefault('MKL_NUM_THREADS', '1')"):
        assert code_of(str(tmp_path / write(tmp_path, script)), beside) is None
    assert code_of(str(tmp_path / "absent.py"), beside) is None
    path = str(tmp_path / write(tmp_path, "pass"))
    (tmp_path / "pytest").mkdir()
    assert code_of(path, beside) is not None
    (tmp_path / "pytest" / "__init__.py").touch()
    assert code_of(path, beside) is None
