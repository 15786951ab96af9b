"""API keys, and the layer that asks for one."""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import in_flags
from paceline.core.errors import InputError
from paceline.serving.middleware import KeyCheck
from paceline.serving.security import (
    ApiKeys,
    SecuritySettings,
    get_namespace,
    get_owner,
    is_owner,
    mark_owner,
    set_namespace,
)
from tests.serving.asking import Echo, ask, http_scope


def test_keys_come_from_lists_and_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\n  sk-file-1 \r\n#sk-none\nsk-file-2")
    keys = ApiKeys.from_options(["sk-1, sk-2", "sk-ß,,sk-1"], [path])
    assert len(keys) == 5
    for key in (b"sk-1", b"sk-2", "sk-ß".encode(), b"sk-file-1", b"sk-file-2"):
        assert keys.accepts(key)
    for key in (b"", b"sk-", b"sk-11", b"SK-1", b" sk-1", b"sk-1, sk-2", b"#sk-none", b"# ours", b"\xff"):
        assert not keys.accepts(key)


@pytest.mark.parametrize(
    ("lists", "text", "message"),
    [
        (["", "a"], None, "--api-key holds no key: give one, or leave the option out to serve without keys"),
        ([" , "], None, "--api-key holds no key: give one, or leave the option out to serve without keys"),
        ([], b"# nothing\n\n", "--api-key-file FILE holds no key: write one a line, or leave the option out"),
        ([], b"\xff\xfek\x00", "--api-key-file FILE is not UTF-8: write the keys as plain text, one a line"),
        (["a,b\x1bc"], None, "API key 2 of 2 is empty or has a control character: use letters, digits and punctuation"),
    ],
)
def test_what_would_leave_the_server_open_is_refused(
    lists: list[str], text: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(InputError) as refused:
        ApiKeys.from_options(lists, [] if text is None else [path])
    assert in_flags(str(refused.value)).replace(str(path), "FILE") == message


@pytest.mark.parametrize("credential", [b"first", b"second", b"third", b"wrong", b""])
def test_all_keys_are_compared_always(credential: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(one: Any, other: Any) -> bool:
        lengths.append((len(one), len(other)))
        return compare(one, other)

    keys = ApiKeys(["first", "second", "third"])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys.accepts(credential)
    assert lengths == [(32, 32)] * 3


def test_nothing_shown_or_kept_has_a_key_in_it() -> None:
    keys = ApiKeys(["sk-very-secret"])
    assert repr(keys) == "ApiKeys(1 keys)"
    assert "very" not in repr(vars(keys))
    assert "very" not in keys.namespace(b"sk-very-secret")


def test_a_namespace_is_of_one_key_in_one_process() -> None:
    keys = ApiKeys(["a", "b"])
    assert keys.namespace(b"a") == keys.namespace(b"a")
    assert len({keys.namespace(b"a"), keys.namespace(b"b"), keys.namespace(b""), keys.namespace(None)}) == 4
    assert ApiKeys(["a"]).namespace(b"a") != keys.namespace(b"a")
    assert re.fullmatch("[0-9a-f]{32}", keys.namespace(b"a"))


def test_a_salt_parts_a_namespace() -> None:
    def namespaces(name: str) -> list[str]:
        scope = http_scope()
        set_namespace(scope, name)
        return [get_namespace(scope, salt) for salt in (None, "", "x", "y", "\ud800", "x" * 1000)]

    assert len({*namespaces("one"), *namespaces("two")}) == 12
    assert namespaces("one") == namespaces("one")
    assert namespaces("one")[0] == "one"


def test_who_asks_is_the_same_in_every_process_and_behind_a_router() -> None:
    def whose(keys: list[str], *, behind_router: bool = False, **headers: str) -> Any:
        scope = http_scope(**headers)
        KeyCheck(ApiKeys(keys), frozenset(), behind_router=behind_router)(scope)
        return scope

    def routed(client: str) -> Any:
        return whose(["router's"], x_api_key="router's", x_paceline_client=client, behind_router=True)

    mine = whose(["a", "b"], x_api_key="a")
    mark, client = mark_owner(mine), get_owner(mine).decode()
    assert client not in mark
    for scope, is_mine in (
        (whose(["b", "a"], x_api_key="a"), True),
        (whose(["a", "b"], x_api_key="b"), False),
        (whose([], x_api_key="a"), False),
        (whose(["router's"], x_api_key="router's", x_paceline_client=client), False),
        (routed(client), True),
        (routed(""), False),
    ):
        assert is_owner(scope, mark) is is_mine
        assert is_owner(scope, mark_owner(scope))
    # What those without key have saved is theirs alone.
    assert mark_owner(whose([])) == mark_owner(routed("")) == ""
    assert not is_owner(mine, "")


KEY = "sk-this-is-the-secret-key"
NONE = "Invalid API Key: this request has no key; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
WRONG = (
    "Invalid API Key: the key of this request is not known here; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
)
LOCKED = SecuritySettings(keys=ApiKeys([KEY, "other"]))
PUBLIC = frozenset({"/", "/health", "/v1/health"})


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
    answer = ask(LOCKED, method, path, app=routes, public_paths=PUBLIC, headers=headers)
    assert answer.status_code == 401
    assert answer.json() == {"error": {"code": 401, "message": message, "type": "authentication_error", "param": None}}
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not routes.scopes


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/", "/health?x=1", "/%68ealth"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_public_paths_may_be_read(method: str, path: str) -> None:
    assert ask(LOCKED, method, path, public_paths=PUBLIC).status_code == 200


def test_each_key_has_its_namespace_and_without_keys_there_is_one() -> None:
    def namespace(settings: SecuritySettings, **headers: Any) -> str:
        answer = ask(settings, "GET", "/health", public_paths=PUBLIC, headers=headers)
        found: str = answer.json()["namespace"]
        return found

    mine = namespace(LOCKED, Authorization=f"Bearer {KEY}")
    assert mine == namespace(LOCKED, **{"X-Api-Key": KEY})
    assert len({mine, namespace(LOCKED, Authorization="Bearer other"), namespace(LOCKED)}) == 3
    assert namespace(LOCKED, Authorization="Bearer wrong") == namespace(LOCKED)
    open_to_all = SecuritySettings()
    assert namespace(open_to_all) == namespace(open_to_all, Authorization=f"Bearer {KEY}")
