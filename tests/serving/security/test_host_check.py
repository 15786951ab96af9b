from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings, open_warning, secured
from paceline.serving.security.host_check import host_name
from paceline.serving.security.loopback import is_loopback
from tests.serving.security.asking import Echo, ask, body_part, call, http_scope

LOCAL = SecuritySettings(allowed_hosts=())
WAY_OUT = "is not a name of this server: use localhost or 127.0.0.1, or start the server with --allowed-hosts NAME"


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8080", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.0.1:1", "127.1.2.3:80", "[::1]",
        "[::1]:8080", "[::ffff:127.0.0.1]:8080",
    ],
)  # fmt: skip
def test_loopback_names_pass_at_any_port(host: str) -> None:
    assert ask(LOCAL, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "notlocalhost", "192.168.1.2:8080", "[::2]",
        "localhost:80@evil.example", "evil.example/localhost", "localhost evil.example", "::1", "[::1", "localhost:x",
        "", ":8080", "0.0.0.0", "127.0.0.1.evil.example", "2130706433",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/health"), ("OPTIONS", "/")])
def test_foreign_names_are_refused(host: str, method: str, path: str) -> None:
    routes = Echo()
    answer = ask(LOCAL, method, path, app=routes, headers={"Host": host})
    assert answer.status_code == 403
    message = f"the host {host!r} {WAY_OUT}"
    assert answer.json() == {"error": {"code": 403, "message": message, "type": "permission_error", "param": None}}
    assert not routes.scopes


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_there_is_one_host(hosts: list[str]) -> None:
    scope = http_scope()
    scope["headers"] = [(b"host", host.encode()) for host in hosts]
    assert call(secured(Echo(), LOCAL), scope, body_part(b"", more=False)).status == 403


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (SecuritySettings(), True),
        (SecuritySettings(hosts=("::1", "127.0.0.1", "/run/p.sock")), True),
        (SecuritySettings(hosts=("/run/p.sock",)), True),
        (SecuritySettings(keys=ApiKeys(["k"])), False),
        (SecuritySettings(hosts=("0.0.0.0",)), False),
        (SecuritySettings(hosts=("127.0.0.1", "192.168.1.2")), False),
        (SecuritySettings(allowed_hosts=("name.example",)), True),
        (SecuritySettings(allowed_hosts=("*",)), False),
        (SecuritySettings(allowed_hosts=("EVIL.example.",)), False),
        (SecuritySettings(hosts=("0.0.0.0",), allowed_hosts=("name.example",)), True),
        (SecuritySettings(keys=ApiKeys(["k"]), allowed_hosts=("name.example",)), True),
    ],
)
def test_where_names_are_checked(settings: SecuritySettings, refused: bool) -> None:
    answer = ask(settings, headers={"Host": "evil.example:8080", "X-Api-Key": "k"})
    assert answer.status_code == (403 if refused else 200)
    assert ask(settings, headers={"Host": "localhost:8080", "X-Api-Key": "k"}).status_code == 200


@pytest.mark.parametrize(("server", "status"), [(("/run/p.sock", None), 200), (("127.0.0.1", 80), 403), (None, 403)])
def test_a_unix_socket_takes_any_name(server: tuple[str, int | None] | None, status: int) -> None:
    scope = http_scope() | {"server": server}
    scope["headers"] = [(b"host", b"anything")]
    assert call(secured(Echo(), LOCAL), scope, body_part(b"", more=False)).status == status


@pytest.mark.parametrize("host", ["a.example:8080", "fd00::1", "", "http://a.example", "a b"])
def test_allowed_names_have_no_port(host: str) -> None:
    with pytest.raises(InputError) as refused:
        SecuritySettings(allowed_hosts=("fine", host))
    assert str(refused.value) == (
        f"--allowed-hosts cannot use {host!r}: write a name without port, such as box.lan or [fd00::1]"
    )


def test_a_long_host_is_cut_and_spelled() -> None:
    message = ask(LOCAL, headers={"Host": "\x1b" + "x" * 5000}).json()["error"]["message"]
    assert message.startswith("the host '\\\\x1bxxx")
    assert len(message) < 400


@pytest.mark.parametrize(
    ("value", "name"),
    [("a:1", "a"), ("A.b.", "a.b"), ("[::1]:2", "[::1]"), ("a:", "a"), ("a:b", None), ("[a]", "[a]"), ("[x]", None)],
)
def test_the_name_of_a_host(value: str, name: str | None) -> None:
    assert host_name(value) == name


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "myhost", "localhost.lan", "[::ffff:10.0.0.1]"])
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("hosts", "has_keys", "named"),
    [
        (["127.0.0.1"], False, None),
        (["localhost", "::1", "/tmp/p.sock"], False, None),
        (["0.0.0.0"], True, None),
        (["0.0.0.0"], False, "0.0.0.0"),
        (["127.0.0.1", "::", "192.168.1.2"], False, "::, 192.168.1.2"),
    ],
)
def test_the_warning_of_an_open_server(hosts: list[str], has_keys: bool, named: str | None) -> None:
    expected = named and (
        f"other machines can reach this server at {named}, and it asks for no key: "
        "give --api-key or --api-key-file, or listen at 127.0.0.1 (--host)"
    )
    assert open_warning(hosts, has_keys) == expected


def test_all_warnings_together() -> None:
    everywhere, all_pages = ("0.0.0.0",), CorsPolicy(("*",))
    assert len(SecuritySettings(hosts=everywhere, cors=all_pages).warnings()) == 2
    assert SecuritySettings(hosts=everywhere).warnings() == [open_warning(everywhere, False)]
    assert SecuritySettings(hosts=everywhere, cors=all_pages, keys=ApiKeys(["k"])).warnings() == []
    assert SecuritySettings().warnings() == []
