from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.serving.security import SecuritySettings, TlsFiles, socket_options
from tests.serving.security.certificates import CERTIFICATE, KEY, KEY_WITH_PASSPHRASE, OTHER_KEY


def test_a_pair_is_taken(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    files = TlsFiles.from_options(key, certificate)
    assert files == TlsFiles(key, certificate)
    options = socket_options(SecuritySettings(tls=files))
    assert (options["ssl_keyfile"], options["ssl_certfile"]) == (str(key), str(certificate))


def test_none_is_plain_http() -> None:
    assert TlsFiles.from_options(None, None) is None
    assert "ssl_keyfile" not in socket_options(SecuritySettings())


@pytest.mark.parametrize(
    ("key", "certificate", "message"),
    [
        (KEY, None, "--ssl-key-file needs the certificate too: give --ssl-cert-file"),
        (None, CERTIFICATE, "--ssl-cert-file needs the private key too: give --ssl-key-file"),
        (OTHER_KEY, CERTIFICATE, "--ssl-key-file KEY is not the key of --ssl-cert-file CERT"),
        (KEY_WITH_PASSPHRASE, CERTIFICATE, "--ssl-key-file KEY has a passphrase: write the key to a file without one"),
        ("", CERTIFICATE, "--ssl-key-file KEY is not in PEM form: its text has to have a line '-----BEGIN ...-----'"),
        (KEY, "\0\1", "--ssl-cert-file CERT is not in PEM form: its text has to have a line '-----BEGIN ...-----'"),
        (CERTIFICATE, KEY, None),
        (KEY, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", CERTIFICATE, None),
    ],
)
def test_another_pair_is_one_line(
    key: str | None, certificate: str | None, message: str | None, tmp_path: Path
) -> None:
    paths: list[Path | None] = []
    for name, text in (("KEY", key), ("CERT", certificate)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        paths.append(None if text is None else path)
    with pytest.raises(InputError) as refused:
        TlsFiles.from_options(paths[0], paths[1])
    said = str(refused.value).replace(f"{tmp_path}/", "")
    if message is None:
        assert said.startswith("cannot use --ssl-cert-file CERT with --ssl-key-file KEY (")
        assert said.endswith("): give a certificate and its private key, both in PEM form")
        assert "\n" not in said
    else:
        assert said == message


@pytest.mark.parametrize(("missing", "option"), [("key", "--ssl-key-file"), ("cert", "--ssl-cert-file")])
def test_a_file_that_cannot_be_read_is_one_line(missing: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "cert").write_text(CERTIFICATE)
    (tmp_path / missing).unlink()
    with pytest.raises(InputError, match=rf"^cannot read {option} .*{missing}: No such file or directory$"):
        TlsFiles.from_options(tmp_path / "key", tmp_path / "cert")
    (tmp_path / missing).mkdir()
    with pytest.raises(InputError, match=rf"^cannot read {option} .*{missing}: Is a directory$"):
        TlsFiles.from_options(tmp_path / "key", tmp_path / "cert")
