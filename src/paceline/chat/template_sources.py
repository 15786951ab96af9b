"""Where a model's chat template lies: in the metadata of a GGUF file, or beside the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.chat.template import ChatTemplate
from paceline.chat.template_limits import MAX_SOURCE
from paceline.core.errors import CapabilityError, InputError, ModelFileError
from paceline.core.vocabulary import Vocabulary
from paceline.models.files import read_json_if_present
from paceline.models.gguf_header import Value, read_gguf_header

_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
_GGUF_KEY: Final = "tokenizer.chat_template"
_GGUF_TOKENS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_FOLDER_TOKENS: Final = tuple(_GGUF_TOKENS)


def find_template(path: Path, vocabulary: Vocabulary, *, replaced_by: str | Path | None = None) -> ChatTemplate | None:
    """Return a model's chat template; ``None`` for a model that has none, as base models have.

    Args:
        path: of a GGUF file or a Hugging Face folder.
        vocabulary: spells the tokens that templates have variables for.
        replaced_by: a template to use instead: its text, or the path of its file.

    Raises:
        ModelFileError: a file cannot be read, or the template is none.
        InputError: there is no template in the file to use instead.
    """
    is_folder = path.is_dir()
    metadata: Mapping[str, Value] = {} if is_folder else read_gguf_header(path).metadata
    sources = _read_folder_templates(path) if is_folder else _read_gguf_templates(metadata)
    origin = path.name
    if isinstance(replaced_by, Path):
        sources, origin = {_DEFAULT: _read_template(replaced_by)}, replaced_by.name
    elif replaced_by is not None:
        sources, origin = {_DEFAULT: replaced_by}, "`template`"
    # A model may have a template for conversations with tools alone.
    source = sources.get(_DEFAULT, sources.get(_WITH_TOOLS))
    if source is None:
        return None
    return ChatTemplate(
        source,
        origin=origin,
        special_tokens=_read_folder_tokens(path) if is_folder else _read_gguf_tokens(metadata, vocabulary),
        with_tools=sources.get(_WITH_TOOLS),
        adds_opening=not is_folder,
        response_template=(
            read_json_if_present(path / "tokenizer_config.json").get("response_template")
            if is_folder and replaced_by is None
            else None
        ),
    )


def has_template(path: Path) -> bool:
    """Return whether a model has a chat template, which is not looked at."""
    return bool(
        _read_folder_templates(path) if path.is_dir() else _read_gguf_templates(read_gguf_header(path).metadata)
    )


def check_is_chat_model(path: Path, replaced_by: str | Path | None) -> None:
    """Refuse a model that cannot chat, before it is loaded. With a template to use instead it need not have one.

    Raises:
        CapabilityError: the model has no chat template.
    """
    if replaced_by is None and not has_template(path):
        raise no_template_error(path)


def no_template_error(path: Path) -> CapabilityError:
    return CapabilityError(
        f"{path.name} has no chat template, as models without one only continue texts: have it continue a "
        "text (`generate`), or give a template (`template_file`)"
    )


def _read_gguf_templates(metadata: Mapping[str, Value]) -> dict[str, str]:
    found: dict[str, Value | None] = {_DEFAULT: metadata.get(_GGUF_KEY)}
    for key, value in metadata.items():
        if key.startswith(f"{_GGUF_KEY}."):
            found[key.removeprefix(f"{_GGUF_KEY}.")] = value
    return {name: source for name, source in found.items() if isinstance(source, str) and source.strip()}


def _read_gguf_tokens(metadata: Mapping[str, Value], vocabulary: Vocabulary) -> dict[str, str]:
    spelled = {}
    for name, key in _GGUF_TOKENS.items():
        token_id = metadata.get(key)
        if isinstance(token_id, int) and 0 <= token_id < vocabulary.size:
            spelled[name] = (vocabulary.token_spelling(token_id) or b"").decode("utf-8", "replace")
    # As transformers has them, without those that a tokenizer lacks.
    return {name: text for name, text in spelled.items() if text}


def _read_folder_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a folder by name: those in files of their own before those within others."""
    said = read_json_if_present(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(said, list):
        found = {
            str(one["name"]): one["template"]
            for one in said
            if isinstance(one, dict) and {"name", "template"} <= one.keys()
        }
    else:
        found = {_DEFAULT: said}
    older = read_json_if_present(folder / "chat_template.json").get("chat_template")
    if older is not None:
        found[_DEFAULT] = older
    if (folder / "chat_template.jinja").is_file():
        found[_DEFAULT] = _read_template(folder / "chat_template.jinja")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = _read_template(file)
    return {name: source for name, source in found.items() if isinstance(source, str) and source.strip()}


def _read_folder_tokens(folder: Path) -> dict[str, str]:
    said: dict[str, Any] = {
        **read_json_if_present(folder / "special_tokens_map.json"),
        **read_json_if_present(folder / "tokenizer_config.json"),
    }
    return {name: text for name in _FOLDER_TOKENS if (text := _token_text(said.get(name)))}


def _token_text(token: object) -> str:
    """Return a token's text, which a folder gives alone or with how it is treated."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read_template(file: Path) -> str:
    try:
        with file.open(encoding="utf-8-sig") as stream:
            # One more than a template may have is refused as all of it would be.
            source = stream.read(MAX_SOURCE + 1)
    except FileNotFoundError:
        raise InputError(f"there is no file {file} (`template_file`): give the path of a chat template") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelFileError(f"the chat template {file} cannot be read: {reason}") from None
    if not source.strip():
        raise InputError(f"the chat template {file} is empty: give one that writes messages (`template_file`)")
    return source
