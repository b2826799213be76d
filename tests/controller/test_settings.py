from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.controller.settings import ControllerSettings
from atoll.errors import BadInput, SettingError
from atoll.network.rpc import Tls

TLS = Tls(Path("ca.pem"), Path("cert.pem"), Path("key.pem"))


def made(**fields: Any) -> ControllerSettings:
    return ControllerSettings(**{"data_dir": Path("data"), **fields})


@pytest.mark.parametrize("listen", ["0.0.0.0:7700", "10.0.0.1:7700", "head.lan:7700", "[::]:7700"])
def test_other_machines_are_served_with_certificates_or_by_express_wish_only(listen: str) -> None:
    with pytest.raises(SettingError, match=r"`atoll certs`.*`--insecure`"):
        made(listen=listen)
    assert made(listen=listen, tls=TLS).listen == listen
    assert made(listen=listen, insecure=True).listen == listen


@pytest.mark.parametrize("etcd", ["10.0.0.2:2379", "store.lan", "[fd00::1]:2379"])
def test_an_etcd_on_another_machine_is_used_with_a_certificate_or_by_express_wish_only(etcd: str) -> None:
    """1. `--etcd store.lan` without --etcd-ca was taken as it is. 2. Whoever is on the network between could read jobs
    and write one: code on every node."""
    with pytest.raises(SettingError, match=r"etcd = .*--etcd-ca.*`--insecure`"):
        made(etcd=("127.0.0.1:2379", etcd), tls=TLS)
    assert made(etcd=(etcd,), etcd_tls=TLS).etcd == (etcd,)
    assert made(etcd=(etcd,), insecure=True).etcd == (etcd,)
    assert made(etcd=("127.0.0.1:2379",)).etcd_tls is None


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:7700", "[::1]:7700", "127.9.9.9:1"])
def test_loopback_needs_nothing(listen: str) -> None:
    assert made(listen=listen).tls is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"listen": "127.0.0.1:99999"}, "is not HOST:PORT"),
        ({"advertise": "x:y"}, "is not HOST:PORT"),
        ({"etcd": ("a:b",)}, "is not HOST:PORT"),
        ({"etcd_tls": TLS}, "Give --etcd too"),
        ({"heartbeat_s": 0}, "heartbeat_s = 0 must be 0.01 to 60 seconds"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s = nan"),
        ({"node_lease_s": 1}, r"node_lease_s = 1 must be at least two heartbeats \(2 s\)"),
        ({"leader_lease_s": 0}, "leader_lease_s = 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        made(**fields)


def test_the_token_is_read_without_its_line_break(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert made(token_file=file).read_token() == "0123456789abcdef"
    assert made().read_token() is None


def test_a_token_that_is_missing_or_short_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        made(token_file=tmp_path / "nothing").read_token()
    file = tmp_path / "token"
    file.write_text("hunter2")
    with pytest.raises(SettingError, match="holds 7 characters") as refused:
        made(token_file=file).read_token()
    assert "hunter2" not in str(refused.value)
