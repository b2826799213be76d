"""Deployment files against what the commands really take: flags, ports, names, mounts, secrets."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from atoll.cli.group import hoist
from atoll.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
NODES = ("gpu-1", "gpu-2.lab")


@cache
def commands() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str]) -> dict[str, Any]:
    """What the command would get; raises click's own errors where it would refuse these words. Nothing is run."""
    root = commands()
    name, *rest = hoist(words)
    while name.startswith("--"):  # global options and their values
        name, *rest = rest[("=" not in name) :]
    command = root.commands[name]
    given: dict[str, Any] = command.make_context(name, rest).params
    return given


def documents() -> list[dict[str, Any]]:
    files = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert sorted(files) == sorted(path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
    return [document for name in files for document in yaml.safe_load_all((KUBERNETES / name).read_text())]


def one(kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload, and its pod's spec."""
    for kind in ("StatefulSet", "DaemonSet"):
        workload = one(kind)
        yield workload, workload["spec"]["template"]["spec"]


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "127.0.0.1") for each in container.get("env", [])}


def arguments(container: Mapping[str, Any]) -> list[str]:
    """With $(NAME) as Kubernetes fills it in: what is not declared stays, and is refused here."""
    env = variables(container)
    words = [re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), word) for word in container["args"]]
    assert not [word for word in words if "$(" in word]
    return words


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Keys of each Secret that make-secrets makes, by real certificates and a kubectl that only writes down."""
    folder = tmp_path_factory.mktemp("secrets")
    programs = {
        "kubectl": f'IFS="$(printf "\\t")"; printf "%s\\n" "$*" >> {folder}/asked',  # at once: two write, of a pipe
        "atoll": f'exec {sys.executable} -m atoll.cli.main "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    for nodes in (NODES[:1], NODES[1:]):  # the second call keeps what the first one made
        command = [KUBERNETES / "make-secrets", folder / "ca", *nodes]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    for line in (folder / "asked").read_text().splitlines():
        words = line.split("\t")
        if words[2:5] == ["create", "secret", "generic"]:
            assert words[:2] == ["--namespace", one("Namespace")["metadata"]["name"]]
            files = [word.removeprefix("--from-file=").partition("=") for word in words if word.startswith("--from-f")]
            assert all(Path(path).is_file() for _, _, path in files)
            found[words[5]] = {key for key, _, _ in files}
    return found


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_kubernetes_knows_every_field(version: str) -> None:
    """By the schemas of its own API; a field that it does not know is refused, as a misspelt one would be."""
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_pods_arguments_are_what_the_commands_take() -> None:
    """1. Flags and values are parsed by the commands themselves. 2. State and token lie on volumes that are mounted. 3.
    Whatever runs there writes nowhere else, as nobody else."""
    for _, pod in pods():
        for container in pod["containers"]:
            command, *rest = arguments(container)
            given = parse([command, *rest])
            mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
            for path in (given.get("data_dir") or given["state_dir"], given["token_file"], Path("/tmp")):
                assert any(path.is_relative_to(mount) for mount in mounts), path
            assert variables(container)["ATOLL_TLS_DIR"] == str(given["token_file"].parent)
            context = {**pod["securityContext"], **container["securityContext"]}
            assert context["runAsUser"] == 10001
            assert context["runAsNonRoot"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
    assert "useradd --uid 10001" in (ROOT / "deploy/Dockerfile").read_text()


def test_the_agents_dial_where_the_controller_listens(secrets: dict[str, set[str]]) -> None:
    """1. One port: listened on, exposed, served, probed, dialled. 2. One name: advertised, dialled, certified."""
    (_, controller), (_, agent) = pods()
    container, service = controller["containers"][0], one("Service")
    given = parse(arguments(container))
    port = int(given["listen"].rpartition(":")[2])
    (exposed,) = container["ports"]
    (served,) = service["spec"]["ports"]
    assert (exposed["containerPort"], served["port"], served["targetPort"]) == (port, port, exposed["name"])
    name = f"{service['metadata']['name']}.{one('Namespace')['metadata']['name']}.svc"
    assert given["advertise"] == variables(agent["containers"][0])["ATOLL_CONTROLLER"] == f"{name}:{port}"
    program, probed = container["readinessProbe"]["exec"]["command"]
    script = (KUBERNETES / "make-secrets").read_text()
    assert (program, probed) == ("atoll-probe", f"localhost:{port}")
    assert f"--host {name} " in script
    assert "--host localhost" in script
    assert f"/usr/local/bin/{program}" in (ROOT / "deploy/Dockerfile").read_text()


def test_selectors_find_the_pods_and_nothing_is_mounted_that_is_not_there(secrets: dict[str, set[str]]) -> None:
    """1. Service, workloads and network policy select by labels that the pods have. 2. Each mount has its volume, the
    other way round. 3. Each Secret is made by make-secrets, and has the files that the pods copy, for each node."""
    labels = []
    for workload, pod in pods():
        labels.append(workload["spec"]["template"]["metadata"]["labels"])
        assert workload["spec"]["selector"]["matchLabels"] == labels[-1]
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {*claims, *(volume["name"] for volume in pod["volumes"])}
        containers = [*pod["initContainers"], *pod["containers"]]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes
        (secret,) = (volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume)
        script = pod["initContainers"][0]["args"][0]
        listed = re.search(r"for file in (ca.pem cert.pem[^;]*); do cat \"/secret/\$file\"", script)
        wanted = set(listed[1].split()) if listed else {"ca.pem", "join-token"}
        wanted |= {f"probe-{key}" for key in ("ca.pem", "cert.pem", "key.pem") if "/secret/probe-" in script}
        if "/secret/$NODE_NAME.$file" in script:
            wanted |= {f"{node}.{key}" for node in NODES for key in ("cert.pem", "key.pem")}
        assert secrets[secret] == wanted
    assert one("Service")["spec"]["selector"] == labels[0]
    policy = one("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels[1]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels[1]}}]}]


def test_scripts_of_the_pods_are_shell() -> None:
    for _, pod in pods():
        for container in pod["initContainers"]:
            checked = subprocess.run(
                ["sh", "-n"], input=container["args"][0], capture_output=True, text=True, timeout=60, check=False
            )
            assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("daemon", ["controller", "agent"])
def test_systemd_starts_what_the_command_takes(daemon: str) -> None:
    """With the options that the unit's own comment gives as an example."""
    unit = (ROOT / f"deploy/systemd/atoll-{daemon}.service").read_text()
    start = re.search(r"^ExecStart=/opt/atoll/bin/atoll (.*)$", unit, re.MULTILINE)
    example = re.search(r"_OPTIONS, e\.g\. (.*)$", unit, re.MULTILINE)
    assert start
    assert example
    words = (
        start[1].replace("${STATE_DIRECTORY}", "/var/lib/atoll").replace(f"$ATOLL_{daemon.upper()}_OPTIONS", example[1])
    )
    assert "$" not in words
    given = parse(words.split())
    assert given["token_file"] == Path(f"/etc/atoll/{daemon}/join-token")
    assert re.search(rf"^Environment=ATOLL_TLS_DIR=/etc/atoll/{daemon}$", unit, re.MULTILINE)


def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    """By its own check of all units at once. A setting that it does not know is a line of its, and would do nothing."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here: its units were NOT checked by it")
    units = [tmp_path / path.name for path in (ROOT / "deploy/systemd").glob("*.service")]
    assert len(units) == 2
    for unit in units:
        text = (ROOT / "deploy/systemd" / unit.name).read_text()
        unit.write_text(text.replace("/opt/atoll/bin/atoll", sys.executable))  # what is to be run must be there
    command = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_runs_what_the_commands_take() -> None:
    """Each `atoll` in the script, with what the shell fills in replaced by something."""
    lines = (ROOT / "deploy/slurm/atoll.sbatch").read_text().replace("\\\n", " ").splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    found = [match for line in code for match in re.findall(r"(?:^|[\s|;])atoll ((?:--timeout 60 )?[a-z]+ .*)", line)]
    seen = set()
    for text in found:
        words = shlex.split(re.split(r"\s(?:>|2>|&$|\||')|'", re.sub(r'"\$\{?[^"]*"|"\$@"', "1", text))[0])
        if words[0] == "certs":
            continue  # tests/test_manual.py types them
        parse(words)
        seen.add(next(word for word in words if not word.startswith("-") and not word.isdigit()))
    assert seen == {"controller", "agent", "submit", "logs", "status"}


@pytest.mark.parametrize(("file", "brought"), [("skypilot.yaml", "file_mounts"), ("atoll.dstack.yml", "files")])
def test_a_cloud_s_task_brings_what_its_nodes_use(file: str, brought: str) -> None:
    """1. Each folder of a node that is named is brought there. 2. What comes from the tree is in it; dist/ is made."""
    task = yaml.safe_load((ROOT / "deploy/cloud" / file).read_text())
    given = task[brought]
    places = given if isinstance(given, dict) else {there: here for here, there in (one.split(":") for one in given)}
    used = [task.get(part, "") for part in ("setup", "run", "commands", "env", "envs")]
    assert set(re.findall(r"/tmp/[a-z-]+", str(used))) == set(places)
    base = ROOT if file == "skypilot.yaml" else ROOT / "deploy/cloud"
    made = {"dist", "mine"}
    inside = [base / here for here in places.values() if not here.startswith("~")]
    assert [path for path in inside if path.name not in made and not path.exists()] == []


def test_compose_runs_what_the_commands_take() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    commands = [service["command"] for name, service in services.items() if name.startswith(("agent", "controller"))]
    assert len(commands) == 4
    for command in commands:
        parse(command)
