"""Certificates of what listens on other than loopback addresses, and who trusts them.

A run has an authority of its own: a certificate and its key, which lie in the run's storage beside
the tokens of its daemons and are as safe as those. Every process that listens gets a certificate
for its address from it when it starts; every client trusts the authority and nothing else. Settings
name other certificates in their place.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from configs.tls import TlsConfig, is_loopback
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Record, encode

log = logging.getLogger(__name__)

LIFE = datetime.timedelta(days=365)
_SKEW = datetime.timedelta(days=1)
"""Clocks of two machines may differ."""
ANY = ("0.0.0.0", "::")


class TlsError(RuntimeError):
    """A certificate of the settings can't be used; the text names its file."""


class Authority(Record):
    """What signs the certificates of a run, as PEM."""

    certificate: str
    key: str


@dataclass(frozen=True)
class Identity:
    """What a server shows: files, and ``ca``, what its clients have to trust, as PEM."""

    certificate: Path
    key: Path
    ca: str


class Tls:
    """The certificates of one run."""

    def __init__(self, store: Store, layout: RunLayout, config: TlsConfig) -> None:
        self._store = store
        self._key = layout.authority
        self._config = config

    def ca(self) -> str:
        """What clients trust, as PEM.

        Raises:
            TlsError: ``tls.ca`` can't be read.
            StorageError: the authority can't be read or written.
        """
        if self._config.ca:
            return _read("tls.ca", Path(self._config.ca))
        return self._authority().certificate

    @contextmanager
    def identity(self, address: str) -> Iterator[Identity | None]:
        """The certificate for ``address``, whose files are there until the end of the block; None
        where plain HTTP is spoken.

        Raises:
            TlsError: one of the settings can't be read.
            StorageError: the authority can't be read or written.
        """
        config = self._config
        if not config.secures(address):
            if not is_loopback(address):
                log.warning("%s: without TLS (tls.trusted_network)", address)
            yield None
        elif config.certificate:
            certificate, key = Path(config.certificate), Path(config.key)
            _check(certificate, key)
            yield Identity(certificate, key, self.ca())
        else:
            authority = self._authority()
            with tempfile.TemporaryDirectory(prefix="gyre-tls-") as folder:  # readable by us alone
                found = Identity(
                    Path(folder) / "certificate", Path(folder) / "key", authority.certificate
                )
                certificate_pem, key_pem = issue(authority, address)
                found.certificate.write_text(certificate_pem, encoding="ascii")
                found.key.write_text(key_pem, encoding="ascii")
                yield found

    def _authority(self) -> Authority:
        if not self._store.exists(self._key):
            # Of several processes that come at once, one writes; all read what it wrote.
            self._store.write_once(self._key, encode(make_authority()))
        return self._store.read_record(self._key, Authority)


@lru_cache(maxsize=64)
def trusting(ca: str) -> ssl.SSLContext:
    """For clients of servers that ``ca`` has signed, and of no others."""
    return ssl.create_default_context(cadata=ca)


def trust_of(ca: str) -> ssl.SSLContext | bool:
    """What aiohttp and httpx take; an empty ``ca`` is a server without TLS."""
    return trusting(ca) if ca else True


def make_authority() -> Authority:
    """A new one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Gyre run")
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate=_pem(certificate), key=_pem_of_key(key))


def issue(authority: Authority, address: str) -> tuple[str, str]:
    """A certificate for ``address`` and its key, as PEM. For all addresses of this machine where it
    is none in particular."""
    signer = serialization.load_pem_private_key(authority.key.encode(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    above = x509.load_pem_x509_certificate(authority.certificate.encode())
    key = ec.generate_private_key(ec.SECP256R1())
    names = _here() if address in ANY else [address]
    certificate = (
        _builder(above.subject, _name("Gyre"), key.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(one) for one in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate), _pem_of_key(key)


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFE)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _here() -> list[str]:
    found = {*ANY, socket.gethostname(), "localhost"}
    for addresses in psutil.net_if_addrs().values():
        found |= {
            one.address.partition("%")[0]
            for one in addresses
            if one.family in (socket.AF_INET, socket.AF_INET6)
        }
    return sorted(found)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode("ascii")


def _check(certificate: Path, key: Path) -> None:
    _read("tls.certificate", certificate)
    _read("tls.key", key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"tls.certificate {certificate} and tls.key {key}: {error}") from None


def _read(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise TlsError(f"{setting}: {error}") from None
