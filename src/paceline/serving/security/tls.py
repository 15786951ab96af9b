"""The two files of TLS, looked at before anything takes long."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import InputError


@dataclass(frozen=True)
class TlsFiles:
    """A private key and its certificate, which were found to belong together.

    Attributes:
        key: PEM file of the private key, without a passphrase.
        certificate: PEM file of the certificate, followed by those that vouch for it.
    """

    key: Path
    certificate: Path

    def __post_init__(self) -> None:
        for option, path in (("--ssl-key-file", self.key), ("--ssl-cert-file", self.certificate)):
            _check_readable(option, path)
        _check_pair(self.key, self.certificate)

    @classmethod
    def from_options(cls, key: Path | None, certificate: Path | None) -> TlsFiles | None:
        """Return the checked files of ``--ssl-key-file`` and ``--ssl-cert-file``; ``None`` where neither is given.

        Raises:
            InputError: one is missing, cannot be read or is of another kind, or they do not belong together.
        """
        if key is None and certificate is None:
            return None
        if certificate is None:
            raise InputError("--ssl-key-file needs the certificate too: give --ssl-cert-file")
        if key is None:
            raise InputError("--ssl-cert-file needs the private key too: give --ssl-key-file")
        return cls(key, certificate)


def _check_readable(option: str, path: Path) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {option} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise InputError(f"{option} {path} is not in PEM form: its text has to have a line '-----BEGIN ...-----'")


def _check_pair(key: Path, certificate: Path) -> None:
    encrypted = False

    def no_passphrase() -> str:
        # Without this, OpenSSL would ask at the terminal, and a server has nobody to answer.
        nonlocal encrypted
        encrypted = True
        return ""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if encrypted:
            raise InputError(f"--ssl-key-file {key} has a passphrase: write the key to a file without one") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"--ssl-key-file {key} is not the key of --ssl-cert-file {certificate}") from None
        reason = (error.reason or "not understood").lower().replace("_", " ")
        raise InputError(
            f"cannot use --ssl-cert-file {certificate} with --ssl-key-file {key} ({reason}): "
            "give a certificate and its private key, both in PEM form"
        ) from None
