from __future__ import annotations

import re

import pytest

from paceline.serving.security import SecuritySettings
from tests.serving.security.asking import ask


@pytest.mark.parametrize("given", ["a", "req_1234", "0b5e-8:1/2.3+4=", "x" * 128])
def test_a_sane_id_is_kept(given: str) -> None:
    answer = ask(SecuritySettings(), headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]
    assert answer.json()["id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\x1bb", "ä", "<script>", '"'])
def test_another_id_is_replaced(given: str) -> None:
    first, second = (ask(SecuritySettings(), headers={"X-Request-Id": given.encode()}) for _ in range(2))
    assert re.fullmatch("req-[0-9a-f]{24}", first.headers["x-request-id"])
    assert first.json()["id"] == first.headers["x-request-id"] != second.headers["x-request-id"]


def test_browsers_take_an_answer_for_nothing_else() -> None:
    answer = ask(SecuritySettings())
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
