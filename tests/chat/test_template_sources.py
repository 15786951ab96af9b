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


def found(path: Path, **given: Any) -> ChatTemplate:
    template = find_template(path, VOCABULARY, **given)
    assert template is not None
    return template


def render(template: ChatTemplate, **variables: Any) -> str:
    return str.__str__(template.render(read_messages("hi"), **variables))


def write_folder(folder: Path, **files: Any) -> Path:
    """Write files of a folder, those that are no text as JSON; ``__`` in names is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


# --- GGUF -------------------------------------------------------------------------------------------------------------


def test_a_file_has_its_template_in_its_metadata(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        **{KEY: "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}"},
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        # Beyond the vocabulary.
        tokenizer__ggml__unknown_token_id=2**32 - 1,
    )
    template = found(path)
    assert render(template) == "<s>hi</s>False"
    assert template.origin == "model.gguf"
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.adds_opening, "as llama.cpp does"
    assert has_template(path)


@pytest.mark.parametrize("metadata", [{}, {KEY: ""}, {KEY: " \n"}, {KEY: 5}, {f"{KEY}s": [1]}])
def test_a_base_model_has_none(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "model.gguf", **metadata)
    assert find_template(path, VOCABULARY) is None
    assert not has_template(path)


def test_a_file_may_have_one_for_tools_and_others(tmp_path: Path) -> None:
    named = {KEY: "plain", f"{KEY}__tool_use": "with tools", f"{KEY}__rag": "{% for %}"}
    both = found(write_gguf(tmp_path / "both.gguf", **named))
    assert (render(both), render(both, tools=TOOLS)) == ("plain", "with tools")
    alone = write_gguf(tmp_path / "tools.gguf", **{f"{KEY}__tool_use": "with tools"})
    assert render(found(alone)) == "with tools"
    assert has_template(alone)
    assert find_template(write_gguf(tmp_path / "rag.gguf", **{f"{KEY}__rag": "rag"}), VOCABULARY) is None


# --- folders ----------------------------------------------------------------------------------------------------------

CONFIG, LISTED = {"chat_template": "config"}, [{"name": "default", "template": "listed"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": CONFIG}, "config"),
        ({"tokenizer_config__json": {"chat_template": LISTED}}, "listed"),
        ({"chat_template__json": {"chat_template": "json"}}, "json"),
        ({"chat_template__jinja": "jinja é"}, "jinja é"),
        ({"tokenizer_config__json": CONFIG, "chat_template__json": {"chat_template": "j"}}, "j"),
        ({"tokenizer_config__json": CONFIG, "chat_template__jinja": "jinja"}, "jinja"),
        ({"chat_template__json": {"chat_template": "json"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"tokenizer_config__json": CONFIG, "chat_template__json": {}}, "config"),
    ],
)
def test_a_folder_has_its_template_in_one_of_several_files(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    folder = write_folder(tmp_path / "model", **files)
    template = found(folder)
    assert render(template) == expected
    assert template.origin == "model"
    assert not template.adds_opening, "as transformers has it"
    assert has_template(folder)


@pytest.mark.parametrize(
    "said",
    [
        *(None, "", {"default": "x"}, []),
        ["x", 5, {"name": "default"}, {"template": "x"}],
        [{"name": "default", "template": 5}],
        [{"name": "rag", "template": "rag"}],
    ],
)
def test_a_base_model_s_folder_has_none(tmp_path: Path, said: Any) -> None:
    assert find_template(write_folder(tmp_path / "empty"), VOCABULARY) is None
    folder = write_folder(tmp_path / "model", tokenizer_config__json={"chat_template": said})
    assert find_template(folder, VOCABULARY) is None


def test_a_folder_may_have_one_for_tools(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    in_list = write_folder(tmp_path / "listed", tokenizer_config__json={"chat_template": listed})
    in_file = write_folder(tmp_path / "filed", chat_template__jinja="plain")
    write_folder(in_file / "additional_chat_templates", tool_use__jinja="with tools", rag__jinja="{% for %}")
    for folder in (in_list, in_file):
        assert (render(found(folder)), render(found(folder), tools=TOOLS)) == ("plain", "with tools")


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "lstrip": False, "special": True}])
def test_special_tokens_are_texts_or_objects_in_either_of_two_files(tmp_path: Path, token: Any) -> None:
    folder = write_folder(
        tmp_path / "model",
        chat_template__jinja="{{ bos_token }}{{ unk_token is defined }}",
        special_tokens_map__json={"bos_token": "<a>", "eos_token": {"content": "<b>"}},
        tokenizer_config__json={"bos_token": token, "cls_token": None, "unk_token": 5, "pad_token": {"content": ""}},
    )
    assert render(found(folder)) == "<s>False"
    assert found(folder).special_tokens == {"bos_token": "<s>", "eos_token": "<b>"}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json"),
        ({"tokenizer_config__json": "[]"}, "tokenizer_config.json"),
        ({"chat_template__json": "5"}, "chat_template.json"),
        ({"chat_template__jinja": "{{"}, "the chat template of model is no template: line 1: "),
        ({"tokenizer_config__json": {"chat_template": "{% if %}"}}, "of model is no template: line 1: "),
        ({"chat_template__jinja": "a" * 70_000}, "the chat template of model has more than 65536 characters"),
        ({"chat_template__jinja": b"\xff\xfe"}, "chat_template.jinja"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path: Path, files: dict[str, Any], named: str) -> None:
    folder = write_folder(tmp_path / "model", **files)
    with pytest.raises(ModelFileError) as caught:
        find_template(folder, VOCABULARY)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# --- --chat-template-file ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "folder", "base"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "folder":
        tools = [{"name": "tool_use", "template": "own tools"}]
        config = {"bos_token": "<s>", "chat_template": tools}
        return write_folder(tmp_path / "model", chat_template__jinja="own", tokenizer_config__json=config)
    own = {KEY: "own", f"{KEY}__tool_use": "own tools"} if request.param == "file" else {}
    return write_gguf(tmp_path / "model.gguf", **own, tokenizer__ggml__bos_token_id=1)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_another_template_takes_the_place_of_all(model: Path, tmp_path: Path, encoding: str) -> None:
    """Without a byte order mark, if it has one."""
    file = tmp_path / "other.jinja"
    file.write_text("other {{ bos_token }}", encoding=encoding)
    template = found(model, replaced_by=file)
    assert render(template) == render(template, tools=TOOLS) == "other <s>"
    assert (template.origin, template.adds_opening) == (file.name, model.is_file())


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, InputError),
        (b"", InputError),
        (b" \n", InputError),
        (b"\xff", ModelFileError),
        (b"{% for %}", ModelFileError),
        (b"a" * 70_000, ModelFileError),
    ],
)
def test_another_template_that_is_none_is_one_line(
    model: Path, tmp_path: Path, content: bytes | None, error: type[InputError]
) -> None:
    file = tmp_path / "other.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"other\.jinja") as caught:
        find_template(model, VOCABULARY, replaced_by=file)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_what_is_no_file_or_has_no_end_is_no_template(model: Path, tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        if path.exists():
            with pytest.raises(ModelFileError):
                find_template(model, VOCABULARY, replaced_by=path)


def test_how_answers_are_read_is_said_by_folders_for_their_own_template(tmp_path: Path) -> None:
    said = {"fields": {"content": {"content": "text"}}}
    folder = write_folder(tmp_path, tokenizer_config__json={"chat_template": "config", "response_template": said})
    assert found(folder).response_template == said
    assert found(folder, replaced_by="other").response_template is None
