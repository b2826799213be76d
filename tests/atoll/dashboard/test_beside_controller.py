"""The page that a controller serves beside itself: a real controller, its private etcd, requests without a browser."""

from __future__ import annotations

import datetime
import json
import ssl
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.security.certificates import create_authority, identity, issue

STARTS_S = 40.0
COMMAND = (sys.executable, "-m", "atoll.cli.main")


class Served:
    """A controller with a page, and whoever opened the address that it wrote down."""

    def __init__(self, address: str, authority: Path | None) -> None:
        self.address = address
        context = ssl.create_default_context(cafile=authority) if authority else None
        kept = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(kept, urllib.request.HTTPSHandler(context=context))

    def ask(self, path: str, host: str | None = None) -> tuple[int, str]:
        request = urllib.request.Request(urllib.parse.urljoin(self.address, path))
        if host is not None:
            request.add_header("host", host)
        try:
            with self._opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def certificate(self) -> str:
        """What a new connection is shown, as PEM."""
        found = urllib.parse.urlparse(self.address)
        assert found.hostname is not None
        return ssl.get_server_certificate((found.hostname, found.port or 0), timeout=60)

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path)[1])


@contextmanager
def controller(data: Path, *options: str, authority: Path | None = None) -> Iterator[Served]:
    told, log = data / "dashboard", data.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            (*COMMAND, "controller", f"--data-dir={data}", *options),
            stdout=output,
            stderr=output,
        )
    try:
        ends_s = time.monotonic() + STARTS_S
        while not (told.exists() and (address := told.read_text().strip())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() <= ends_s, log.read_text()
            time.sleep(0.05)
        yield Served(address, authority)
        assert address.partition("token=")[2] not in log.read_text()
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert not told.exists()


def until_led(served: Served) -> Any:
    ends_s = time.monotonic() + STARTS_S
    while "error" in (found := served.json("/api/events")):
        assert time.monotonic() <= ends_s, found
        time.sleep(0.1)
    return found


def test_on_this_machine_it_has_the_token_in_a_file_of_its_user(tmp_path: Path) -> None:
    """1. The address is in the data folder, for its user alone, and not in the log. 2. Without the token nobody comes
    in. 3. With it the page is there, and asks this controller. 4. The file goes with the controller."""
    data = tmp_path / "head"
    with controller(data, "--listen=127.0.0.1:0", "--dashboard=127.0.0.1:0") as served:
        assert stat.S_IMODE((data / "dashboard").stat().st_mode) == 0o600
        assert served.ask("/api/events")[0] == 401
        status, page = served.ask(served.address)
        assert (status, "<!doctype html>" in page) == (200, True)
        assert until_led(served)["earlier"] == 0


def test_other_machines_reach_it_by_the_controllers_certificate_and_the_token(tmp_path: Path) -> None:
    """127.0.0.2 stands for an address of the network. 1. HTTPS, under the advertised name alone. 2. The page asks with
    the client's certificate that it was given. 3. The controller's is renewed: the page has the new one at once."""
    now = datetime.datetime.now(datetime.UTC)
    ca = tmp_path / "ca"
    create_authority(ca, now)
    own = identity(issue(ca, "controller", "head", ["127.0.0.2"], now))
    issue(ca, "client", "dashboard", [], now)
    options = (f"--tls-ca={own.ca}", f"--tls-cert={own.certificate}", f"--tls-key={own.key}")
    page = ("--dashboard=127.0.0.2:0", f"--dashboard-identity={ca / 'client-dashboard'}")
    with controller(tmp_path / "head", "--listen=127.0.0.2:0", *options, *page, authority=own.ca) as served:
        assert served.address.startswith("https://127.0.0.2:")
        assert served.ask("/", host="evil.example")[0] == 421
        assert served.ask("/")[0] == 401
        assert served.ask(served.address)[0] == 200
        assert until_led(served)["earlier"] == 0
        before = own.certificate.read_text()
        assert served.certificate() == before
        own.certificate.parent.rename(tmp_path / "old")
        fresh = issue(ca, "controller", "head", ["127.0.0.2"], now)
        assert fresh == own.certificate.parent
        assert served.certificate() == own.certificate.read_text() != before
        assert served.ask("/api/events")[0] == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dashboard", "0.0.0.0:0"), "on this machine alone"),
        (("--dashboard", "127.0.0.1:http"), "HOST:PORT"),
    ],
)
def test_a_controller_without_certificates_shows_it_to_this_machine_alone(
    runner: CliRunner, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    told = refused(runner, tmp_path, *options)
    assert (words in told, told.count("\n")) == (True, 1), told


def test_with_certificates_the_page_needs_one_of_a_client(runner: CliRunner, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    create_authority(tmp_path / "ca", now)
    own = issue(tmp_path / "ca", "controller", "head", ["127.0.0.1"], now)
    files = [f"--tls-{name}={own / file}.pem" for name, file in (("ca", "ca"), ("cert", "cert"), ("key", "key"))]
    told = refused(runner, tmp_path, *files, "--dashboard", "127.0.0.1:0")
    assert "--dashboard-identity" in told
    assert told.count("\n") == 1


def refused(runner: CliRunner, folder: Path, *options: str) -> str:
    """The line with which the command ends."""
    done = runner.invoke(app, ["controller", "--data-dir", str(folder / "data"), *options])
    assert (done.exit_code, done.stdout) == (2, ""), done
    return done.stderr
