from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings
from tests.serving.security.asking import Echo, ask

KEYS = ApiKeys(["secret"])
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}


def settings(origins: str) -> SecuritySettings:
    return SecuritySettings(keys=KEYS, cors=CorsPolicy.from_list(origins))


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
    shared = settings("https://a.example,https://b.example:8443,null")
    for origin in ("https://a.example", "https://b.example:8443", "null"):
        for key, status in (("secret", 200), ("wrong", 401)):
            answer = ask(shared, headers={"Origin": origin, "X-Api-Key": key})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"


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


def test_origins_are_compared_without_case() -> None:
    assert CorsPolicy(("https://Chat.Example",)).allows("https://chat.example")


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://", "https://a.example/", "https://a.example/x", "https://*.example", "://a", "x y"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InputError) as refused:
        CorsPolicy.from_list(f"https://fine.example,{origin}")
    assert str(refused.value) == (
        f"--cors-origins cannot use {origin!r}: write an origin without path, such as https://chat.example.org, "
        "or 'localhost' or '*'"
    )


@pytest.mark.parametrize(
    ("origins", "keys", "warns"), [("*", False, True), ("*", True, False), ("localhost", False, False)]
)
def test_the_warning_of_a_server_that_all_pages_may_use(origins: str, keys: bool, warns: bool) -> None:
    warning = CorsPolicy.from_list(origins).warning(keys)
    assert (warning is not None) == warns
    assert warning is None or warning.endswith("give --api-key, or list the origins")
