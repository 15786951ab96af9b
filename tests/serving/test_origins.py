"""Which web pages may use a server."""

from __future__ import annotations

import pytest

from paceline.cli.options import in_flags
from paceline.core.errors import InputError
from paceline.serving.middleware import with_security
from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings, host_name, is_loopback, open_warning
from tests.serving.asking import Echo, ask, body_part, call, http_scope

KEYS = ApiKeys(["secret"])
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}


def settings(origins: str) -> SecuritySettings:
    return SecuritySettings(keys=KEYS, cors=CorsPolicy(tuple(origins.replace(" ", "").split(","))))


@pytest.mark.parametrize(
    ("origin", "name", "value"),
    [
        ("localhost", "Access-Control-Allow-Origin", "localhost"),
        ("web.mydomain.fr", "Access-Control-Allow-Origin", "web.mydomain.fr"),
        ("origin", "Access-Control-Allow-Credentials", "true"),
        ("web.mydomain.fr", "Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS"),
        ("web.mydomain.fr", "Access-Control-Allow-Headers", "*"),
    ],
)
def test_a_preflight_needs_no_key_and_is_answered_as_llama_server_does(origin: str, name: str, value: str) -> None:
    answer = ask(settings("*"), "OPTIONS", "/completions", headers={"Origin": origin, **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers[name] == value


LOOPBACK = [
    "http://localhost", "http://localhost:8080", "http://127.0.0.1", "http://127.0.0.1:3000", "http://[::1]",
    "http://[::1]:3000", "https://localhost",
]  # fmt: skip
FOREIGN = [
    "http://web.mydomain.fr", "http://evil.com", "http://notlocalhost", "http://localhost.evil.com", "localhost",
    "http://localhost@evil.com", "http://[", "null", "", "file://localhost", "https://c.example.evil.com",
]  # fmt: skip


@pytest.mark.parametrize("origin", LOOPBACK)
@pytest.mark.parametrize("origins", ["localhost", "https://a.example, localhost"])
def test_localhost_reflects_pages_of_this_machine(origin: str, origins: str) -> None:
    answer = ask(settings(origins), "OPTIONS", "/completions", headers={"Origin": origin, **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("origins", ["localhost", "localhost,https://c.example", "https://c.example"])
def test_other_pages_get_the_status_but_not_the_header(origin: str, origins: str) -> None:
    headers = {"Origin": origin, "X-Api-Key": "secret", **PREFLIGHT}
    for method in ("OPTIONS", "POST"):
        answer = ask(settings(origins), method, headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.headers["vary"] == "Origin"


def test_listed_pages_may_read_answers_and_refusals() -> None:
    shared = settings("https://A.Example,https://b.example:8443,null")
    for origin in ("https://a.example", "https://b.example:8443", "null"):
        for key, status in (("secret", 200), ("wrong", 401)):
            answer = ask(shared, headers={"Origin": origin, "X-Api-Key": key})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert answer.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after"


def test_listed_pages_are_allowed_headers_by_name() -> None:
    headers = {"Origin": "https://a.example", **PREFLIGHT}
    answer = ask(settings("https://a.example"), "OPTIONS", headers=headers)
    assert answer.headers["access-control-allow-headers"] == "Authorization"
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-max-age"] == "600"


def test_who_asks_from_no_page_gets_no_header() -> None:
    answer = ask(settings("*"), headers={"X-Api-Key": "secret"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_without_cors_no_answer_speaks_of_origins() -> None:
    routes = Echo()
    answer = ask(SecuritySettings(), "OPTIONS", app=routes, headers={"Origin": "http://evil.com", **PREFLIGHT})
    assert len(routes.scopes) == 1
    assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://", "https://a.example/", "https://a.example/x", "https://*.example", "://a", "x y"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InputError) as refused:
        CorsPolicy(("https://fine.example", origin))
    assert in_flags(str(refused.value)) == (
        f"--cors-origins cannot use {origin!r}: write an origin without path, such as https://chat.example.org, "
        "or 'localhost' or '*'"
    )


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
    assert call(with_security(Echo(), LOCAL), scope, body_part(b"", more=False)).status == 403


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
    assert call(with_security(Echo(), LOCAL), scope, body_part(b"", more=False)).status == status


@pytest.mark.parametrize("host", ["a.example:8080", "fd00::1", "", "http://a.example", "a b"])
def test_allowed_names_have_no_port(host: str) -> None:
    with pytest.raises(InputError) as refused:
        SecuritySettings(allowed_hosts=("fine", host))
    assert in_flags(str(refused.value)) == (
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
    warning = open_warning(hosts, has_keys)
    assert (warning and in_flags(warning)) == expected


def test_all_warnings_together() -> None:
    everywhere, all_pages = ("0.0.0.0",), CorsPolicy(("*",))
    both = SecuritySettings(hosts=everywhere, cors=all_pages).warnings()
    assert both[0] == open_warning(everywhere, False)
    assert both[1:] == SecuritySettings(cors=all_pages).warnings() == [all_pages.warning(False)]
    assert both[1].endswith("give `api_key`, or list the origins")
    assert SecuritySettings(cors=CorsPolicy(("localhost",))).warnings() == []
    assert SecuritySettings(hosts=everywhere, cors=all_pages, keys=ApiKeys(["k"])).warnings() == []
    assert SecuritySettings().warnings() == []


OPEN = SecuritySettings()
FOREIGN_PAGE = "https://evil.example"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8080"},
        {"Origin": "https://127.0.0.1:8080"},
        {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://LOCALHOST", "Host": "localhost:80"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": FOREIGN_PAGE, "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_this_servers_own_pages_and_programs_pass(headers: dict[str, str]) -> None:
    assert ask(OPEN, headers=headers).status_code == 200


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Origin": FOREIGN_PAGE}, FOREIGN_PAGE),
        ({"Origin": "http://127.0.0.1:3000"}, "http://127.0.0.1:3000"),
        ({"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"}, "http://127.0.0.1:3000"),
        ({"Origin": "null"}, "null"),
        ({"Origin": ""}, "another site"),
        ({"Origin": "http://["}, "http://["),
        ({"Origin": "http://127.0.0.1:8080.evil.example"}, "http://127.0.0.1:8080.evil.example"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site"),
        ({"Sec-Fetch-Site": "nonsense"}, "another site"),
    ],
)
def test_foreign_pages_are_refused(method: str, headers: dict[str, str], named: str) -> None:
    routes = Echo()
    answer = ask(OPEN, method, app=routes, headers={"Content-Type": "text/plain", **headers})
    assert answer.status_code == 403
    message = (
        f"a page of {named} may not use this server: start the server with --cors-origins and that origin, "
        "or with --api-key"
    )
    assert answer.json() == {"error": {"code": 403, "message": message, "type": "permission_error", "param": None}}
    assert "access-control-allow-origin" not in answer.headers
    assert not routes.scopes


def test_reading_is_left_to_the_browser() -> None:
    answer = ask(OPEN, "GET", "/v1/models", headers={"Origin": FOREIGN_PAGE})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        (SecuritySettings(cors=CorsPolicy((FOREIGN_PAGE,))), 200),
        (SecuritySettings(cors=CorsPolicy(("*",))), 200),
        (SecuritySettings(cors=CorsPolicy(("localhost",))), 403),
        (SecuritySettings(cors=CorsPolicy(("https://other.example",))), 403),
        (SecuritySettings(keys=ApiKeys(["k"])), 200),
    ],
)
def test_pages_that_may_read_may_act_and_keys_need_no_check(settings: SecuritySettings, status: int) -> None:
    assert ask(settings, headers={"Origin": FOREIGN_PAGE, "X-Api-Key": "k"}).status_code == status
