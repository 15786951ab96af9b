"""Where a model's chat template lies, in files as they are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.chat.messages import read_messages
from paceline.chat.template import ChatTemplate
from paceline.chat.template_sources import find_template, has_template
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.scripted import ScriptedVocabulary
from tests.models.helpers import write_gguf

PIECES = [b"a", b"<s>", b"</s>"]
VOCABULARY = ScriptedVocabulary(PIECES, end_ids=[1, 2])
KEY = "tokenizer__chat_template"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def render(template: ChatTemplate | None, **variables: Any) -> str:
    assert template is not None
    return str.__str__(template.render(read_messages("hi"), **variables))


def write_folder(folder: Path, **files: Any) -> Path:
    """Write files of a folder, those that are no text as JSON; ``__`` in names is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


# --- GGUF -------------------------------------------------------------------------------------------------------------


def test_a_file_has_its_template_in_its_metadata(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        **{KEY: "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}"},
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )
    template = find_template(path, VOCABULARY)
    assert render(template) == "<s>hi</s>False"
    assert template is not None
    assert template.origin == "model.gguf"
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.adds_opening, "as llama.cpp does"
    assert has_template(path)


@pytest.mark.parametrize("metadata", [{}, {KEY: ""}, {KEY: " \n"}, {KEY: 5}, {f"{KEY}s": [1]}])
def test_a_base_model_has_none(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "model.gguf", **metadata)
    assert find_template(path, VOCABULARY) is None
    assert not has_template(path)


def test_a_file_may_have_one_for_tools(tmp_path: Path) -> None:
    named = {KEY: "plain", f"{KEY}__tool_use": "with tools", f"{KEY}__rag": "{% for %}"}
    template = find_template(write_gguf(tmp_path / "model.gguf", **named), VOCABULARY)
    assert render(template) == "plain"
    assert render(template, tools=TOOLS) == "with tools"


def test_a_file_may_have_one_for_tools_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", **{f"{KEY}__tool_use": "with tools"})
    assert render(find_template(path, VOCABULARY)) == "with tools"
    assert has_template(path)


def test_a_file_may_have_others_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", **{f"{KEY}__rag": "rag"})
    assert find_template(path, VOCABULARY) is None


def test_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"tokenizer__ggml__bos_token_id": 3, "tokenizer__ggml__eos_token_id": 2**32 - 1}
    template = find_template(write_gguf(tmp_path / "model.gguf", **{KEY: "x"}, **tokens), VOCABULARY)
    assert template is not None
    assert template.special_tokens == {}


def test_a_file_s_template_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", **{KEY: "{% for %}"})
    with pytest.raises(
        ModelFileError, match=r"the chat template of model\.gguf is no template: line 1: .*; use another"
    ):
        find_template(path, VOCABULARY)
    assert has_template(path), "without a look at what it is"


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "listed"}]}}, "listed"),
        ({"chat_template__json": {"chat_template": "json"}}, "json"),
        ({"chat_template__jinja": "jinja é"}, "jinja é"),
        ({"tokenizer_config__json": {"chat_template": "config"}, "chat_template__json": {"chat_template": "j"}}, "j"),
        ({"tokenizer_config__json": {"chat_template": "config"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"chat_template__json": {"chat_template": "json"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"tokenizer_config__json": {"chat_template": "config"}, "chat_template__json": {}}, "config"),
    ],
)
def test_a_folder_has_its_template_in_one_of_several_files(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    folder = write_folder(tmp_path / "model", **files)
    template = find_template(folder, VOCABULARY)
    assert render(template) == expected
    assert template is not None
    assert template.origin == "model"
    assert not template.adds_opening, "as transformers has it"
    assert has_template(folder)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config__json": {}},
        {"tokenizer_config__json": {"chat_template": None}},
        {"tokenizer_config__json": {"chat_template": ""}},
        {"tokenizer_config__json": {"chat_template": {"default": "x"}}},
        {"tokenizer_config__json": {"chat_template": []}},
        {"tokenizer_config__json": {"chat_template": ["x", 5, {"name": "default"}, {"template": "x"}]}},
        {"tokenizer_config__json": {"chat_template": [{"name": "default", "template": 5}]}},
        {"tokenizer_config__json": {"chat_template": [{"name": "rag", "template": "rag"}]}},
    ],
)
def test_a_base_model_s_folder_has_none(tmp_path: Path, files: dict[str, Any]) -> None:
    assert find_template(write_folder(tmp_path / "model", **files), VOCABULARY) is None


def test_a_folder_may_have_one_for_tools(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_folder(tmp_path / "listed", tokenizer_config__json={"chat_template": listed})
    assert render(find_template(folder, VOCABULARY)) == "plain"
    assert render(find_template(folder, VOCABULARY), tools=TOOLS) == "tools"
    folder = write_folder(tmp_path / "filed", chat_template__jinja="plain")
    write_folder(folder / "additional_chat_templates", tool_use__jinja="filed tools", rag__jinja="{% for %}")
    assert render(find_template(folder, VOCABULARY)) == "plain"
    assert render(find_template(folder, VOCABULARY), tools=TOOLS) == "filed tools"


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "lstrip": False, "special": True}])
def test_special_tokens_are_texts_or_objects(tmp_path: Path, token: Any) -> None:
    folder = write_folder(
        tmp_path / "model",
        chat_template__jinja="{{ bos_token }}{{ eos_token is defined }}",
        tokenizer_config__json={"bos_token": token, "eos_token": None, "unk_token": 5, "pad_token": {"content": ""}},
    )
    template = find_template(folder, VOCABULARY)
    assert render(template) == "<s>False"
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>"}


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "model",
        chat_template__jinja="x",
        special_tokens_map__json={"bos_token": "<a>", "eos_token": {"content": "<b>"}},
        tokenizer_config__json={"bos_token": "<s>"},
    )
    template = find_template(folder, VOCABULARY)
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "<b>"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is not valid JSON"),
        ({"tokenizer_config__json": "[]"}, r"tokenizer_config\.json holds a JSON list, not an object"),
        ({"chat_template__json": "5"}, r"chat_template\.json holds a JSON int, not an object"),
        ({"chat_template__jinja": "{{"}, "the chat template of model is no template: line 1: "),
        (
            {"tokenizer_config__json": {"chat_template": "{% if %}"}},
            "the chat template of model is no template: line 1: ",
        ),
        (
            {"chat_template__jinja": "a" * 70_000},
            "the chat template of model has more than 65536 characters; use another",
        ),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path / "model", **files)
    with pytest.raises(ModelFileError, match=message) as caught:
        find_template(folder, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja cannot be read: it is not UTF-8"):
        find_template(folder, VOCABULARY)


# --- --chat-template-file ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "folder", "base"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "folder":
        return write_folder(
            tmp_path / "model",
            chat_template__jinja="own",
            tokenizer_config__json={
                "bos_token": "<s>",
                "chat_template": [{"name": "tool_use", "template": "own tools"}],
            },
        )
    own = {KEY: "own", f"{KEY}__tool_use": "own tools"} if request.param == "file" else {}
    return write_gguf(tmp_path / "model.gguf", **own, tokenizer__ggml__bos_token_id=1)


def test_another_template_takes_the_place_of_all(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("other {{ bos_token }}", encoding="utf-8")
    template = find_template(model, VOCABULARY, replaced_by=file)
    assert render(template) == "other <s>"
    assert render(template, tools=TOOLS) == "other <s>"
    assert template is not None
    assert template.origin == file.name
    assert template.adds_opening == model.is_file()


def test_a_byte_order_mark_is_no_part_of_a_template(model: Path, tmp_path: Path) -> None:
    file = (model if model.is_dir() else tmp_path) / "chat_template.jinja"
    file.write_text("other {{ bos_token }}", encoding="utf-8-sig")
    assert render(find_template(model, VOCABULARY, replaced_by=file)) == "other <s>"
    if model.is_dir():
        assert render(find_template(model, VOCABULARY)) == "other <s>"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            None,
            InputError,
            r"there is no file .*other\.jinja \(`template_file`\): give the path of a chat template",
        ),
        (b"", InputError, r"the chat template .*other\.jinja is empty: give one that writes messages"),
        (b" \n", InputError, r"the chat template .*other\.jinja is empty: give one that writes messages"),
        (b"\xff", ModelFileError, r"the chat template .*other\.jinja cannot be read: it is not UTF-8"),
        (b"{% for %}", ModelFileError, r"the chat template of .*other\.jinja is no template: line 1: "),
        (
            b"a" * 70_000,
            ModelFileError,
            r"the chat template of .*other\.jinja has more than 65536 characters; use another",
        ),
    ],
)
def test_another_template_that_is_none_is_one_line(
    model: Path, tmp_path: Path, content: bytes | None, error: type[InputError], message: str
) -> None:
    file = tmp_path / "other.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        find_template(model, VOCABULARY, replaced_by=file)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read: Is a directory"):
        find_template(model, VOCABULARY, replaced_by=tmp_path)


def test_a_file_without_end_is_not_read_to_its_end(model: Path) -> None:
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("there is no /dev/zero")
    with pytest.raises(ModelFileError, match="the chat template of zero has more than 65536 characters"):
        find_template(model, VOCABULARY, replaced_by=endless)


def test_how_answers_are_read_is_said_by_folders_for_their_own_template(tmp_path: Path) -> None:
    said = {"fields": {"content": {"content": "text"}}}
    folder = write_folder(tmp_path, tokenizer_config__json={"chat_template": "config", "response_template": said})
    own = find_template(folder, VOCABULARY)
    other = find_template(folder, VOCABULARY, replaced_by="other")
    assert own is not None
    assert other is not None
    assert (own.response_template, other.response_template) == (said, None)
