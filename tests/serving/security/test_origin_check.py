from __future__ import annotations

import pytest

from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings
from tests.serving.security.asking import Echo, ask

OPEN = SecuritySettings()
FOREIGN = "https://evil.example"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8080"},
        {"Origin": "https://127.0.0.1:8080"},
        {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://LOCALHOST", "Host": "localhost:80"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": FOREIGN, "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_this_servers_own_pages_and_programs_pass(headers: dict[str, str]) -> None:
    assert ask(OPEN, headers=headers).status_code == 200


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Origin": FOREIGN}, FOREIGN),
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
    answer = ask(OPEN, "GET", "/v1/models", headers={"Origin": FOREIGN})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        (SecuritySettings(cors=CorsPolicy((FOREIGN,))), 200),
        (SecuritySettings(cors=CorsPolicy(("*",))), 200),
        (SecuritySettings(cors=CorsPolicy(("localhost",))), 403),
        (SecuritySettings(cors=CorsPolicy(("https://other.example",))), 403),
        (SecuritySettings(keys=ApiKeys(["k"])), 200),
    ],
)
def test_pages_that_may_read_may_act_and_keys_need_no_check(settings: SecuritySettings, status: int) -> None:
    assert ask(settings, headers={"Origin": FOREIGN, "X-Api-Key": "k"}).status_code == status
