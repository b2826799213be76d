"""The rules of docs/architecture.md that the source can be read for: who may import whom, and what nobody may call."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeVar

import pytest
from source_tree import ROOT, files, nodes, parsed, text_of, walk

PACKAGES = {
    "atoll": "atoll",
    "controller": "atoll.controller",
    "agent": "atoll.agent",
    "kernels": "atoll.kernels",
    "strategies": "atoll.strategies",
}
SHARED = (
    "atoll.errors",
    "atoll.v1",
    "atoll.kernels",
    "atoll.jobs",
    "atoll.network",
    "atoll.security",
    "atoll.planning",
    "atoll.telemetry",
    "atoll.host",
    "atoll.step_estimators",
    "atoll.relay",
)

STRATEGIES = ("atoll.strategies.registry", "atoll.strategies.declaration")
"""What the controller sees of strategies."""
CONTROLLER_PARTS = tuple(f"atoll.controller.{part}" for part in ("deciding", "estimators", "planners", "simulator"))
CONTROLLER_PARTS += ("atoll.controller.state.records",)
"""What the controller halves of strategies see of it."""


@dataclass(frozen=True)
class Import:
    """`line` of the file `path`, whose module is `importer`, imports the module (or the name in one) `imported`."""

    path: str
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(part for part in rest if part != "__init__")])


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    paths = sorted(path for folder in PACKAGES for path in files(folder))
    return {module_name(path): (path, parsed(path)) for path in paths}


ImportStatement = ast.Import | ast.ImportFrom


def run_at_import(node: ast.AST) -> Iterator[ImportStatement]:
    """Those that are carried out as soon as the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ImportStatement):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (found for other in child.orelse for found in run_at_import(other))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from run_at_import(child)


@cache
def imports_of(name: str, *, at_import: bool = False) -> tuple[Import, ...]:
    """Return all imports of a module, also those inside functions and those for the type checker only, or only those
    that are carried out `at_import`."""
    path, tree = modules()[name]
    where = str(path.relative_to(ROOT))
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: list[Import] = []
    for statement in run_at_import(tree) if at_import else nodes(path):
        if isinstance(statement, ast.Import):
            found += [Import(where, statement.lineno, name, alias.name) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            above = package[: len(package) - statement.level + 1] if statement.level else []
            base = [*above, statement.module] if statement.module else above
            found += [Import(where, statement.lineno, name, ".".join([*base, one.name])) for one in statement.names]
    return tuple(found)


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def all_imports(*importers: str) -> list[Import]:
    return [found for name in modules() if is_in(name, *importers) for found in imports_of(name)]


def listed(found: list[Import]) -> str:
    return "\n".join(map(str, found))


def test_the_rules_see_the_code() -> None:
    """A moved folder must not make every rule pass."""
    assert {"atoll.errors", "atoll.controller", "atoll.agent.runtime", "atoll.kernels"} <= set(modules())
    assert any(found.imported.startswith("atoll.errors") for found in all_imports("atoll"))


@pytest.mark.parametrize(
    ("room", "may_import"),
    [
        ("atoll.controller", ("atoll.controller", *STRATEGIES, *SHARED)),
        (
            "atoll.agent",
            ("atoll.agent", *STRATEGIES, "atoll.strategies.dense", *SHARED),
        ),
        ("atoll.strategies", ("atoll.strategies", "atoll.agent.runtime", *CONTROLLER_PARTS, *SHARED)),
        ("atoll.kernels", ("atoll.kernels", "atoll.errors")),
    ],
)
def test_a_room_imports_only_what_the_table_of_rooms_allows(room: str, may_import: tuple[str, ...]) -> None:
    # `from atoll import kernels` and the like arrive here as atoll.kernels.
    wrong = [i for i in all_imports(room) if is_in(i.imported, "atoll") and not is_in(i.imported, *may_import)]
    assert not wrong, listed(wrong)


def test_the_halves_of_a_strategy_never_meet() -> None:
    """What decides imports no torch and nothing of workers; what trains, and what everyone reads of a strategy, imports
    nothing of the controller."""
    parts = [name for name in modules() if is_in(name, "atoll.strategies")]
    deciding = [name for name in parts if any(is_in(i.imported, "atoll.controller") for i in imports_of(name))]
    found = chains(deciding, ("torch", "atoll.agent"))
    found += chains([name for name in parts if name not in deciding], ("atoll.controller",))
    assert deciding
    assert not found, "\n".join(found)


STRATEGIES_BY_NAME = {
    "atoll/__init__.py": "users make the settings of a strategy themselves",
    "agent/runtime/api/run.py": "its manual says what each strategy does",
}
"""Files and folders outside of strategies/ that name one, and why."""


def test_nothing_but_the_registry_knows_a_strategy_by_its_name() -> None:
    """Strategy `dense` is what a job has that says nothing, and a word beside: it is not looked for."""
    named = re.compile(r"stale[-_]sparse|StaleSparse")
    may = ("strategies/", "kernels/", "atoll/v1/", *STRATEGIES_BY_NAME)
    paths = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in paths if named.search(path.read_text())}
    assert sorted(where for where in found if not where.startswith(may)) == []
    assert [place for place in STRATEGIES_BY_NAME if not any(where.startswith(place) for where in found)] == []


def test_the_package_has_no_loose_modules() -> None:
    """What users import is `atoll` itself; everything else is in a room with one idea."""
    assert {path.name for path in (ROOT / "atoll").glob("*.py")} == {"__init__.py"}


def folder_of(name: str) -> str:
    """Return the folder of a module, as it is imported."""
    return name if modules()[name][0].name == "__init__.py" else name.rpartition(".")[0]


def test_no_two_folders_import_each_other_however_long_the_way() -> None:
    """Imports between folders lead one way, also those inside functions and those for the type checker: whoever reads
    a folder never comes back to it. CPython's own sort finds a cycle and names its folders."""
    needs: dict[str, set[str]] = {}
    for name in modules():
        for each in imports_of(name):
            target = next((one for one in (each.imported, each.imported.rpartition(".")[0]) if one in modules()), None)
            if target is not None and folder_of(target) != folder_of(name):
                needs.setdefault(folder_of(name), set()).add(folder_of(target))
    order = list(TopologicalSorter(needs).static_order())  # raises CycleError, whose message is the way round
    assert order.index("atoll.errors") < order.index("atoll.agent.runtime.step") < order.index("atoll")


def test_every_room_is_where_tools_that_read_imports_look_for_it() -> None:
    """From a plain clone, before anything is built or installed: `atoll/controller` leads to `controller/`."""
    for folder, package in PACKAGES.items():
        as_imported = ROOT.joinpath(*package.split("."))
        assert as_imported.resolve() == ROOT / folder
        assert folder == "atoll" or as_imported.readlink() == Path("..") / folder


def test_planners_import_the_standard_library_numerics_their_own_data_classes_and_nothing_else() -> None:
    own = ("atoll.controller.planners", "atoll.planning", "atoll.errors")
    own += ("atoll.host.documents",)  # it words refusals
    allowed = (*own, "atoll.kernels.timeline", "numpy", "scipy", "pydantic", *sys.stdlib_module_names)
    wrong = [i for i in all_imports("atoll.controller.planners") if not is_in(i.imported, *allowed)]
    assert not wrong, listed(wrong)


def test_planners_read_no_clock_no_file_and_no_socket() -> None:
    forbidden = ("time", "datetime", "os", "pathlib", "socket", "subprocess", "threading", "asyncio", "secrets", "uuid")
    wrong = [i for i in all_imports("atoll.controller.planners") if is_in(i.imported, *forbidden)]
    assert not wrong, listed(wrong)


def chains(starts: Iterable[str], targets: tuple[str, ...]) -> list[str]:
    """How each of `starts`, when imported, comes to load one of `targets`, through Atoll's own modules."""
    queue = [(name, name) for name in starts]
    seen = {name for name, _ in queue}
    found = []
    while queue:
        name, chain = queue.pop(0)
        for each in imports_of(name, at_import=True):
            if is_in(each.imported, *targets):
                found.append(f"{chain} -> {each.imported} ({each.path}:{each.line})")
            for module in with_parents(each.imported):
                if module in modules() and module not in seen:
                    seen.add(module)
                    queue.append((module, f"{chain} -> {module}"))
    return found


def with_parents(imported: str) -> Iterator[str]:
    """Importing a.b.c runs a, a.b and, if it is a module and not a name in one, a.b.c."""
    parts = imported.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def test_a_training_process_loads_no_grpc() -> None:
    """Neither by itself nor through what it imports: a gRPC channel and forked DataLoader workers crash together."""
    runtime = [name for name in modules() if is_in(name, "atoll.agent.runtime")]
    found = chains([*runtime, "atoll"], ("grpc", "grpc_health", "grpc_reflection"))
    found += [str(i) for i in all_imports("atoll.agent.runtime") if is_in(i.imported, "grpc", "atoll.network.rpc")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("daemon", ["atoll.controller", "atoll.agent"])
def test_a_daemon_runs_without_torch(daemon: str) -> None:
    """Only agent/runtime imports it, and nothing of the daemons loads that part of the runtime when it starts."""
    own = [name for name in modules() if is_in(name, daemon) and not is_in(name, "atoll.agent.runtime")]
    found = chains(own, ("torch",))
    found += [str(i) for name in own for i in imports_of(name) if is_in(i.imported, "torch")]
    assert not found, "\n".join(found)


def test_the_command_line_starts_without_torch_and_without_the_daemons() -> None:
    """`atoll jobs` must not take the seconds that importing torch takes."""
    found = chains(["atoll", "atoll.cli.main"], ("torch",)) if "atoll.cli.main" in modules() else ["no atoll.cli.main"]
    assert not found, "\n".join(found)


Located = TypeVar("Located", ast.Await, ast.Assert, ast.Call, ast.ClassDef)


def found(kind: type[Located], folders: Iterable[str], naming: str = "") -> Iterator[tuple[str, Located]]:
    """Yield the nodes of a kind, and where each is, of the files whose text has the pattern `naming`."""
    for path in (path for folder in folders for path in files(folder)):
        if re.search(naming, text_of(path)):
            name = str(path.relative_to(ROOT))
            yield from ((f"{name}:{node.lineno}", node) for node in nodes(path) if isinstance(node, kind))


def calls(folders: Iterable[str], *names: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call of `names`: where it is, the name as written there ("torch.load", "?.join"), the call itself."""
    for where, node in found(ast.Call, folders, "|".join(map(re.escape, names))):
        name = dotted(node.func)
        if f".{name}".endswith(tuple(f".{each}" for each in names)):
            yield where, name, node


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{dotted(value)}.{name}"
        case _:
            return "?"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def test_nothing_unpickles_what_another_machine_may_have_sent() -> None:
    """The one that unpickles hands a dataset to the loader's own worker processes."""
    wrong = [
        str(i)
        for i in all_imports("atoll")
        if is_in(i.imported, "pickle", "dill", "cloudpickle", "shelve", "marshal")
        and i.importer != "atoll.agent.runtime.data.by_value"
    ]
    for where, name, call in calls(
        [*PACKAGES, "examples", "benchmarks", "tests"], "torch.load", "numpy.load", "np.load"
    ):
        if name == "torch.load":
            weights_only = keyword(call, "weights_only")
            if not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
                wrong.append(f"{where}: torch.load without weights_only=True")
        if name in {"numpy.load", "np.load"}:
            wrong += [f"{where}: allow_pickle"] if keyword(call, "allow_pickle") else []
    assert not wrong, "\n".join(wrong)


def test_every_wait_for_a_thread_or_process_has_a_deadline() -> None:
    """`thread.join()`, `process.communicate()` and `subprocess.run(...)` without a timeout wait for ever. What is
    awaited has its deadline around it, in `asyncio.timeout`."""
    runs = {f"subprocess.{name}" for name in ("run", "check_output", "check_call", "call")}
    awaited = {where for where, _ in found(ast.Await, PACKAGES, "join|communicate")}
    wrong = []
    for where, name, call in calls(PACKAGES, "join", "communicate", *runs):
        last = name.rpartition(".")[2]
        if last in {"join", "communicate"} and "." in name and not (call.args or call.keywords or where in awaited):
            wrong.append(f"{where}: {name}() without a timeout")
        if name in runs:
            wrong += [] if keyword(call, "timeout") else [f"{where}: {name} without a timeout"]
    assert not wrong, "\n".join(wrong)


MAY_SLEEP = {
    "agent/runtime/session/throttle.py": "slows a device down by as much as it was asked to",
    "agent/supervisor/processes/leftover_processes.py": "strangers' processes can only be looked at again",
    "agent/runtime/transport/collectives.py": "the end of NCCL's kernels can only be asked for again",
    "agent/runtime/checkpoints/disk/fence.py": "a file lock can be waited for with a deadline only by asking again",
    "atoll/cli/cluster/background.py": "likewise",
}


def test_nothing_sleeps_in_place_of_waiting_for_a_condition() -> None:
    sleeps = [where for where, name, _ in calls(PACKAGES, "sleep") if name in {"time.sleep", "sleep"}]
    assert [where for where in sleeps if where.partition(":")[0] not in MAY_SLEEP] == []


READS_TEXT = ("search", "match", "fullmatch", "findall", "finditer", "sub", "split", "partition", "rpartition")
READS_TEXT += ("startswith", "endswith", "removeprefix", "removesuffix", "index", "find")


def test_no_code_reads_the_sentence_of_an_event() -> None:
    """Events have fields. Whoever parsed a sentence would keep its words from ever being changed."""
    wrong = []
    for where, _, call in calls([*PACKAGES, "benchmarks", "tests/drill"], *READS_TEXT):
        parts = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for part in (node for top in (*parts, *call.args) for node in ast.walk(top)):
            named = isinstance(part, ast.Attribute) and part.attr == "text" and isinstance(part.value, ast.Name)
            if named and part.value.id in {"event", "happened", "one", "told", "e"}:
                wrong.append(f"{where}: {ast.unparse(call)}")
    assert not wrong, "\n".join(wrong)


def test_modules_are_named_for_what_they_hold() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}
    folders = [*PACKAGES, "examples", "benchmarks", "tests"]
    wrong = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.stem in vague]
    assert not wrong


def test_modules_beside_the_tests_have_names_of_their_own() -> None:
    """They are found through sys.path, where of two with one name only the first is ever seen. The modules of a package
    have its name before theirs."""
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "scripts" not in path.parts]
    paths = [path for path in paths if not (path.parent / "__init__.py").exists()]
    names = Counter(path.stem for path in paths if not path.stem.startswith("test_") and path.stem != "conftest")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_share_a_name() -> None:
    """One name, one thing, also of private classes: what is found by its name is what was meant."""
    places: dict[str, list[str]] = {}
    for where, node in found(ast.ClassDef, PACKAGES):
        places.setdefault(node.name, []).append(where)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


PROMISED_IN_SECONDS = {
    "tests/e2e/test_failures.py": "a cancelled job is gone within 5 s",
    "tests/runtime/test_runs.py": "a stuck worker leaves within the grace that it was given",
}


def test_no_test_measures_how_fast_the_machine_is() -> None:
    """`assert time.monotonic() - begun_s < 0.5` fails where others work too. Speed is for benchmarks/; a test looks at
    what is done, imported or called. What users are promised in seconds is listed."""
    limiting = set()
    for where, node in found(ast.Assert, ["tests"], r"(monotonic|perf_counter|time)\(\) -"):
        if any(isinstance(each, ast.Compare) and is_upper_limit(each) for each in walk(node.test)):
            limiting.add(where.partition(":")[0])
    assert limiting == set(PROMISED_IN_SECONDS)


def is_upper_limit(compare: ast.Compare) -> bool:
    operands = [compare.left, *compare.comparators]
    below = [left for left, op in zip(operands, compare.ops, strict=False) if isinstance(op, ast.Lt | ast.LtE)]
    clocks = ("time.monotonic()", "time.perf_counter()", "time.time()")
    return any(isinstance(left, ast.BinOp) and ast.unparse(left).startswith(clocks) for left in below)
