from __future__ import annotations

from typing import Any

import pytest

from paceline.serving.security import ApiKeys, SecuritySettings
from tests.serving.security.asking import Echo, ask

KEY = "sk-this-is-the-secret-key"
NONE = "Invalid API Key: this request has no key; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
WRONG = (
    "Invalid API Key: the key of this request is not known here; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
)
LOCKED = SecuritySettings(keys=ApiKeys([KEY, "other"]), public_paths=frozenset({"/", "/health", "/v1/health"}))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {KEY} "},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
        {"Authorization": "Basic eDp5", "X-Api-Key": KEY},
    ],
)
def test_a_key_opens(headers: dict[str, str]) -> None:
    assert ask(LOCKED, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "message"),
    [
        ("POST", "/v1/completions", {}, NONE),
        ("POST", "/v1/completions", {"Authorization": "Bearer "}, NONE),
        ("POST", "/v1/completions", {"Authorization": ""}, NONE),
        ("POST", "/v1/completions", {"Authorization": "Bearer invalid-key"}, WRONG),
        ("POST", "/v1/completions", {"X-Api-Key": KEY[:-1]}, WRONG),
        ("POST", "/v1/completions", {"X-Api-Key": f"{KEY}x"}, WRONG),
        ("GET", f"/v1/models?api_key={KEY}", {}, NONE),
        ("POST", "/health", {}, NONE),
        ("GET", "/health/", {}, NONE),
        ("GET", "/Health", {}, NONE),
        ("OPTIONS", "/v1/completions", {}, NONE),
        ("DELETE", "/nowhere", {}, NONE),
    ],
)
def test_without_a_key_nothing_opens(method: str, path: str, headers: dict[str, str], message: str) -> None:
    routes = Echo()
    answer = ask(LOCKED, method, path, app=routes, headers=headers)
    assert answer.status_code == 401
    assert answer.json() == {"error": {"code": 401, "message": message, "type": "authentication_error", "param": None}}
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not routes.scopes


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/", "/health?x=1", "/%68ealth"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_public_paths_may_be_read(method: str, path: str) -> None:
    assert ask(LOCKED, method, path).status_code == 200


def test_each_key_has_its_namespace_and_without_keys_there_is_one() -> None:
    def namespace(settings: SecuritySettings, **headers: Any) -> str:
        answer = ask(settings, "GET", "/health", headers=headers)
        found: str = answer.json()["namespace"]
        return found

    mine = namespace(LOCKED, Authorization=f"Bearer {KEY}")
    assert mine == namespace(LOCKED, **{"X-Api-Key": KEY})
    assert len({mine, namespace(LOCKED, Authorization="Bearer other"), namespace(LOCKED)}) == 3
    assert namespace(LOCKED, Authorization="Bearer wrong") == namespace(LOCKED)
    open_to_all = SecuritySettings()
    assert namespace(open_to_all) == namespace(open_to_all, Authorization=f"Bearer {KEY}")
