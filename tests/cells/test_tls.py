"""What listens wider than the loopback address: certificates, and clients that insist on them."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from cells.client import DaemonClient, DaemonGoneError
from cells.daemon import Daemon, Registration
from cells.ports import OPEN
from cells.tls import Tls, TlsError, issue, make_authority, trusting
from configs.tls import TlsConfig, is_loopback
from storage.layout import RunLayout
from storage.objects import Store

LAYOUT = RunLayout("r1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_addresses_need_none(address: str) -> None:
    assert is_loopback(address) and not TlsConfig().secures(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "fd00::1", "node-3", "8.8.8.8"])
def test_all_others_do_unless_the_network_is_trusted(address: str) -> None:
    assert TlsConfig().secures(address)
    assert not TlsConfig(trusted_network=True).secures(address)


@pytest.mark.parametrize(
    "given",
    [{"certificate": "c"}, {"certificate": "c", "key": "k"}, {"ca": "x"}],
    ids=lambda given: "+".join(given),
)
def test_certificate_key_and_authority_belong_together(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="belong together"):
        TlsConfig(**given)
    whole = {"certificate": "c", "key": "k", "ca": "x"}
    with pytest.raises(ValidationError, match="of no use"):
        TlsConfig(**whole, trusted_network=True)


def test_all_processes_of_a_run_have_one_authority(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = (Tls(store, LAYOUT, TlsConfig()) for _ in range(2))
    assert first.ca() == second.ca() == first.ca()
    assert Tls(store, RunLayout("r2"), TlsConfig()).ca() != first.ca()


def test_the_files_of_a_certificate_are_private_and_do_not_stay(tmp_path: Path) -> None:
    with Tls(Store(tmp_path), LAYOUT, TlsConfig()).identity("10.0.0.1") as identity:
        assert identity is not None
        folder = identity.key.parent
        assert folder.stat().st_mode & 0o077 == 0
        assert "PRIVATE KEY" in identity.key.read_text() and "PRIVATE" not in identity.ca
    assert not folder.exists()


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("certificate", "key", "ca")}
    config = TlsConfig(**{name: str(path) for name, path in files.items()})
    tls = Tls(Store(tmp_path), LAYOUT, config)
    with pytest.raises(TlsError, match=r"tls\.certificate"), tls.identity("10.0.0.1"):
        pass
    for path in files.values():
        path.write_text("nothing")
    with pytest.raises(TlsError, match=r"tls\.key"), tls.identity("10.0.0.1"):
        pass


class Served:
    """A daemon that listens at all addresses of this machine."""

    def __init__(self, store: Store, config: TlsConfig) -> None:
        self._store = store

        async def close() -> None: ...

        self.daemon = Daemon(
            name="d",
            kind="cell",
            lease_s=60,
            routes=[],
            close=close,
            host="0.0.0.0",
            tls=Tls(store, LAYOUT, config),
        )

    async def registration(self, running: asyncio.Task[None]) -> Registration:
        key = LAYOUT.host("d")
        while not self._store.exists(key):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
        return self._store.read_record(key, Registration)


async def client_of(registration: Registration, **changed: str) -> dict[str, object]:
    """What a daemon answers to a client that believes this registration."""
    client = DaemonClient(registration.model_copy(update=changed))
    try:
        return await asyncio.to_thread(client.call, "GET", "/healthz", limit_s=10)
    finally:
        client.close()


async def test_a_daemon_and_its_clients(tmp_path: Path) -> None:
    store = Store(tmp_path)
    served = Served(store, TlsConfig())
    running = asyncio.create_task(served.daemon.run(store, LAYOUT.host("d")))
    found = await served.registration(running)
    try:
        assert found.url.startswith("https://0.0.0.0:")
        assert int(found.url.rpartition(":")[2]) in OPEN
        assert (await client_of(found))["name"] == "d"
        plain = found.url.replace("https", "http")
        other = make_authority().certificate
        for changed in ({"url": plain}, {"ca": other}, {"ca": ""}):
            with pytest.raises(DaemonGoneError):
                await client_of(found, **changed)
    finally:
        served.daemon.stop()
        await running


async def test_a_trusted_network_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    served = Served(store, TlsConfig(trusted_network=True))
    running = asyncio.create_task(served.daemon.run(store, LAYOUT.host("d")))
    found = await served.registration(running)
    served.daemon.stop()
    await running
    assert found.url.startswith("http://") and not found.ca
    assert "0.0.0.0: without TLS (tls.trusted_network)" in caplog.text


@pytest.fixture
def certificates(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An authority and a certificate for 127.0.0.2 as a person makes them."""
    if shutil.which("openssl") is None:
        authority = make_authority()
        certificate, key = issue(authority, "127.0.0.2")
        made = {"certificate": certificate, "key": key, "ca": authority.certificate}
        for name, text in made.items():
            (tmp_path / name).write_text(text)
    else:
        _openssl(tmp_path)
    yield {name: str(tmp_path / name) for name in ("certificate", "key", "ca")}


def _openssl(folder: Path) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    new += ["-nodes", "-days", "30"]
    own = [*new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca"]
    signed = [*new, "-subj", "/CN=cell", "-addext", "subjectAltName=IP:0.0.0.0,IP:127.0.0.2"]
    signed += ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca", "-CAkey", "ca.key"]
    for command in (own, [*signed, "-keyout", "key", "-out", "certificate"]):
        subprocess.run(command, cwd=folder, check=True, timeout=30, capture_output=True)


async def test_certificates_of_ones_own(tmp_path: Path, certificates: dict[str, str]) -> None:
    store = Store(tmp_path / "root")
    served = Served(store, TlsConfig(**certificates))
    signer = await asyncio.to_thread(Path(certificates["ca"]).read_text)
    running = asyncio.create_task(served.daemon.run(store, LAYOUT.host("d")))
    found = await served.registration(running)
    try:
        assert found.ca == signer
        assert not store.exists(LAYOUT.authority)
        assert (await client_of(found, url=found.url.replace("0.0.0.0", "127.0.0.2")))["name"]
        with pytest.raises(DaemonGoneError):  # not in the certificate
            await client_of(found, url=found.url.replace("0.0.0.0", "127.0.0.3"))
    finally:
        served.daemon.stop()
        await running


def test_clients_want_the_name_and_a_new_protocol() -> None:
    context = trusting(make_authority().certificate)
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
