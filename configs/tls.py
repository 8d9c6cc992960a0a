"""Encryption between the machines of a run."""

from __future__ import annotations

import ipaddress

from pydantic import field_validator, model_validator

from configs.field import Section, absolute_path, setting

_PATH = 4096


class TlsConfig(Section):
    """What daemons and engines speak where they listen on other than loopback addresses."""

    certificate: str = setting(
        "",
        "PEM file with the certificate of the machine that reads it, for all addresses that its "
        "daemons and engines listen at, and what links it to tls.ca. Empty: each process gets one "
        "at its start, from an authority of the run, which lies in its storage.",
        max_length=_PATH,
    )
    key: str = setting("", "PEM file with the key of that certificate.", max_length=_PATH)
    ca: str = setting(
        "", "PEM file with what signed the certificates of all machines.", max_length=_PATH
    )
    trusted_network: bool = setting(
        False,
        "Nobody else is on the network between the machines of the run: daemons and engines speak "
        "plain HTTP there, with tokens and prompts that whoever listens can read.",
    )

    @field_validator("certificate", "key", "ca")
    @classmethod
    def _absolute(cls, path: str) -> str:
        return absolute_path(path) or "" if path else ""

    @model_validator(mode="after")
    def _complete(self) -> TlsConfig:
        given = [name for name in ("certificate", "key", "ca") if getattr(self, name)]
        if given and len(given) < 3:
            raise ValueError(
                f"only {' and '.join(given)} given: certificate, key and ca belong together"
            )
        if given and self.trusted_network:
            raise ValueError("certificates are of no use where trusted_network is set")
        return self

    def secures(self, address: str) -> bool:
        """Whether what listens at an address does so with TLS."""
        return not self.trusted_network and not is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether only processes of its own machine reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
