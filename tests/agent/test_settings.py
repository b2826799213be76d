from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.address import local_address, route_address
from atoll.agent.supervisor.rendezvous_ports import HELD, RendezvousPorts
from atoll.agent.supervisor.settings import AgentSettings
from atoll.errors import BadInput, SettingError
from atoll.host.ports import candidate_ports
from atoll.host.routes import interface_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("controllers", ()),
        ("controllers", ("host:port",)),
        ("name", ""),
        ("name", "a/b"),
        ("name", "n" * 64),
        ("island", "-x"),
        ("speed", 0.0),
        ("speed", 1.5),
        ("speed", float("nan")),
        ("share_gpu", 0),
        ("share_gpu", 65),
        ("threads", 0),
        ("token", "t" * 5000),
    ],
)
def test_setting_that_cannot_work_is_named(name: str, value: Any) -> None:
    good: dict[str, Any] = {"controllers": ("127.0.0.1:7700",), "name": "node", "state_dir": Path("/x")}
    with pytest.raises(SettingError, match=name.removesuffix("s")):
        AgentSettings(**good | {name: value})


def test_token_is_not_shown() -> None:
    settings = AgentSettings(controllers=("h:1",), name="n", state_dir=Path("/x"), token="s3cret")
    assert "s3cret" not in repr(settings)
    assert settings.jobs == Path("/x/jobs")


async def test_address_is_that_of_the_route() -> None:
    assert await local_address(None, "localhost:7700") == "127.0.0.1"
    assert await local_address("10.1.2.3", "localhost:7700") == "10.1.2.3"
    assert route_address("127.0.0.1:7700") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    with pytest.raises(BadInput, match="no name that resolves"):
        await local_address("bad name", "localhost:7700")


def test_ports_are_held_until_released_and_replaced() -> None:
    ports = RendezvousPorts()
    held = ports.held
    assert len(held) == HELD
    assert set(held) <= set(candidate_ports())
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held[0]))
    ports.release(held[0])
    with socket.socket() as other:
        other.bind(("127.0.0.1", held[0]))
    assert len(ports.held) == HELD
    assert held[0] not in ports.held
    ports.release(1)
    assert len(ports.held) == HELD
    ports.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", held[1]))
