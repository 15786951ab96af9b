"""Slot files over HTTP: what was read outlives the server, for whoever saved it, and for the same model alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("llama_cpp")

from paceline.engines.options import CacheType
from paceline.server_options import ServerOptions
from tests.serving.hosted import Hosted, hosted, pair, scripted

PROMPT: Final = "def area(width, height):\n    return width * height\n\n\ndef volume("
BODY: Final = {"prompt": PROMPT, "n_predict": 24, "temperature": 0, "ignore_eos": True, "id_slot": 2}
FIRST, SECOND = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("key-one", "key-two"))
ACTION: Final = "/slots/2?action="
NAME: Final = {"filename": "begun.bin"}


def served(folder: Path, keys: tuple[str, ...] = (), **options: Any) -> Any:
    return hosted(lambda: pair(**options), ServerOptions(slot_save_path=str(folder), api_key=keys))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Hosted]:
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def answered(server: Hosted) -> Any:
    """An answer that was saved under the name."""
    answer = server.answer("/completion", BODY)
    assert answer["id_slot"] == 2
    saved = server.answer(f"{ACTION}save", NAME)
    held = answer["tokens_evaluated"] + answer["tokens_predicted"] - 1
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (2, "begun.bin", held)
    assert saved["timings"]["save_ms"] > 0
    return answer


def test_what_was_saved_outlives_the_server(server: Hosted, answered: Any, folder: Path) -> None:
    path = folder / NAME["filename"]
    assert path.stat().st_mode & 0o077 == 0
    assert [each.name for each in folder.iterdir()] == [path.name]
    with served(folder) as again:
        restored = again.answer("/slots/0?action=restore", NAME)
        held = answered["tokens_evaluated"] + answered["tokens_predicted"] - 1
        assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (0, held, path.stat().st_size)
        # The same text, of a prompt of which one token is read.
        answer = again.answer("/completion", BODY)
        assert answer["content"] == answered["content"]
        assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (answered["tokens_evaluated"] - 1, 1)
        # A place that it was restored to holds it as if it had been said there.
        assert again.answer("/slots/0?action=erase", {})["n_erased"] == held
        forgotten = again.answer("/completion", {**BODY, "prompt": PROMPT[:60]})
        assert forgotten["timings"]["cache_n"] == 0


def test_erasing_forgets_the_text_of_a_place_and_no_other(server: Hosted) -> None:
    for slot, prompt in enumerate(("import os\nimport sys\n\nprint(os.", "class Tree:\n    def __init__(self, left")):
        server.answer("/completion", {**BODY, "prompt": prompt, "id_slot": slot})
    erased = server.web.post(f"{server.url}/slots/1?action=erase")
    assert erased.status_code == 200, erased.text
    found = [
        server.answer("/completion", {**BODY, "prompt": prompt, "n_predict": 0})["timings"]["cache_n"] > 0
        for prompt in ("import os\nimport sys\n\nprint(os.", "class Tree:\n    def __init__(self, left")
    ]
    assert found == [True, False]
    # Nor is anything forgotten of a place in which nothing was said.
    assert server.answer("/slots/3?action=erase", {})["n_erased"] == 0
    kept = server.answer("/completion", {**BODY, "prompt": "import os\nimport sys\n\nprint(os.", "n_predict": 0})
    assert kept["timings"]["cache_n"] > 0


@pytest.mark.parametrize(
    "filename", ["", ".", "..", ".begun.bin", "../begun.bin", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "x" * 201]
)
def test_only_names_of_files_in_the_folder_are_taken(server: Hosted, filename: str) -> None:
    for action in ("save", "restore"):
        error = server.refusal(ACTION + action, {"filename": filename})
        assert error["param"] == "filename"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/slots/2?action=move", NAME, "save, restore or erase"),
        ("/slots/2", NAME, "save, restore or erase"),
        ("/slots/2?action=save", {}, "save needs a filename"),
        ("/slots/2?action=save", {"filename": 5}, "filename"),
        ("/slots/4?action=save", NAME, "there is no slot 4: they are 0 to 3"),
        ("/slots/-1?action=erase", {}, "there is no slot -1"),
        ("/slots/2?action=restore", {"filename": "none.bin"}, "there is no slot file none.bin"),
        ("/slots/3?action=save", {"filename": "new.bin"}, "of fewer than 8 tokens"),
    ],
)
def test_what_cannot_be_done_is_told(server: Hosted, path: str, body: dict[str, Any], said: str) -> None:
    assert said in server.refusal(path, body)["message"]


def spoil(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    (length,) = struct.unpack_from("<I", data, 16)
    header = json.loads(data[20 : 20 + length])
    if how == "no header":
        return data[:16] + struct.pack("<I", 1 << 31) + data[20:]
    if how in ("tokens", "floor"):
        changed = json.dumps({**header, how: 10**9 if how == "tokens" else -1}).encode()
        return data[:16] + struct.pack("<I", len(changed)) + changed + data[20 + length :]
    return {
        "empty": b"",
        "other": b"GGUF" + data[4:],
        "truncated": data[:-1],
        "longer": data + b"x",
        "bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
    }[how]


@pytest.mark.parametrize("how", ["empty", "other", "truncated", "longer", "bit", "no header", "tokens", "floor"])
def test_a_damaged_file_is_refused_and_changes_nothing(server: Hosted, answered: Any, folder: Path, how: str) -> None:
    (folder / "spoiled.bin").write_bytes(spoil((folder / NAME["filename"]).read_bytes(), how))
    try:
        message = server.refusal(f"{ACTION}restore", {"filename": "spoiled.bin"})["message"]
        assert message.startswith("spoiled.bin is damaged, or no slot file")
    finally:
        (folder / "spoiled.bin").unlink()


def test_a_file_that_is_none_is_not_written_over(server: Hosted, answered: Any, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    try:
        assert server.refusal(f"{ACTION}save", {"filename": "notes.txt"}, 403)["type"] == "permission_error"
        assert (folder / "notes.txt").read_text() == "mine"
    finally:
        (folder / "notes.txt").unlink()


@pytest.mark.parametrize(
    ("options", "what"),
    [({"cache_type_k": "bf16"}, "type of keys"), ({"flash_attention": True}, "attention")],
)
def test_a_file_of_another_setting_is_refused(answered: Any, folder: Path, options: dict[str, Any], what: str) -> None:
    with served(folder, **options) as other:
        assert f"was made with another {what}" in other.refusal(f"{ACTION}restore", NAME)["message"]
        assert other.answer("/completion", BODY)["timings"]["cache_n"] == 0


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_quantised_keys_and_values_are_restored_as_they_were(tmp_path: Path, cache_type: CacheType) -> None:
    types: dict[str, Any] = {"cache_type_k": cache_type, "cache_type_v": cache_type, "flash_attention": None}
    with served(tmp_path, **types) as server:
        first = server.answer("/completion", BODY)
        server.answer(f"{ACTION}save", NAME)
    with served(tmp_path, **types) as server:
        server.answer(f"{ACTION}restore", NAME)
        again = server.answer("/completion", BODY)
    assert again["timings"]["prompt_n"] == 1
    assert again["content"] == first["content"]


def test_a_file_is_of_the_key_that_saved_it(tmp_path: Path) -> None:
    keys = ("key-one", "key-two")
    with served(tmp_path, keys) as server:
        server.answer("/completion", BODY, **FIRST)
        server.answer(f"{ACTION}save", NAME, **FIRST)
        # The place is the other one's, the file too.
        for path, status, said in (
            (ACTION + "save", 403, "another one's"),
            (ACTION + "restore", 400, "there is no slot"),
        ):
            response = server.post(path, NAME, **SECOND)
            assert response.status_code == status, response.text
            assert said in response.json()["error"]["message"]
        assert server.post(f"{ACTION}save", {"filename": "new.bin"}, **SECOND).status_code == 400
        assert server.answer(f"{ACTION}erase", {}, **SECOND)["n_erased"] == 0
    data = (tmp_path / NAME["filename"]).read_bytes()
    assert b"key-one" not in data
    with served(tmp_path, keys) as server:
        assert server.answer(f"{ACTION}restore", NAME, **FIRST)["n_restored"] > 0
        # What one key has restored no other one starts from.
        assert server.answer("/completion", BODY, **SECOND)["timings"]["cache_n"] == 0
        assert server.answer("/completion", BODY, **FIRST)["timings"]["prompt_n"] == 1


def test_without_a_folder_and_on_another_engine_there_are_none(server: Hosted, tmp_path: Path) -> None:
    with hosted(scripted) as plain:
        assert "--slot-save-path" in plain.refusal(f"{ACTION}save", NAME, 501)["message"]
    with hosted(scripted, ServerOptions(slot_save_path=str(tmp_path))) as other:
        for action in ("save", "restore"):
            assert "another" in other.refusal(f"/slots/0?action={action}", NAME, 501)["message"]
