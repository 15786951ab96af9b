"""What a completion may have as ``prompt``, as token ids.

One prompt is a text, token ids, both mixed, or an object with a ``prompt_string``; several are a list of these, which
is told from one by having no number of its own. So it is in llama-server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from paceline.core.numbers import shown
from paceline.engines.base import Vocabulary
from paceline.serving.bodies import MOST_TEXTS
from paceline.serving.fields import FieldError

TextOrId: TypeAlias = str | int


def read_prompts(prompt: Any, *, num_choices: int, most: int) -> list[list[TextOrId]]:
    """Return the prompts of a request, each as texts and token ids in their order.

    Args:
        prompt: the field ``prompt`` of the request.
        num_choices: answers to each.
        most: answers that one request may have, to all prompts together.

    Raises:
        FieldError: it is something else, or has too many.
    """
    several = isinstance(prompt, list) and bool(prompt) and not any(_is_id(item) for item in prompt)
    items = prompt if several else [prompt]
    if len(items) * num_choices > most:
        each = f" with {num_choices} answers each" if num_choices > 1 else ""
        raise FieldError(
            "prompt",
            f"{len(items)} prompts{each}: at most {most} answers are written at once; send fewer, or start the server "
            "with a larger --max-n",
        )
    return [_one(item) for item in items]


def encode(parts: Sequence[TextOrId], vocabulary: Vocabulary, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the token ids of texts and ids in their order.

    Args:
        parts: texts and token ids.
        vocabulary: reads the texts.
        add_special: put the model's own tokens at the start, if a text stands there.
        parse_special: take the spelling of a control token for that token.
    """
    token_ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            token_ids += vocabulary.tokenize(part, add_special=add_special and place == 0, parse_special=parse_special)
        else:
            token_ids.append(part)
    return token_ids


def read_mixed(content: Any, name: str) -> list[TextOrId]:
    """Return a text, or texts and token ids mixed, as a list of them.

    Args:
        content: a field of the request.
        name: of the field.

    Raises:
        FieldError: it is something else.
    """
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(isinstance(item, str) or _is_id(item) for item in content):
        num_texts = sum(isinstance(item, str) for item in content)
        if num_texts > MOST_TEXTS:
            raise FieldError(name, f"{name} is made of {num_texts} texts: at most {MOST_TEXTS} are taken; join them")
        return list(content)
    raise FieldError(name, f"{name} is {shown(content)}: give a text, token ids, or both in a list")


def _one(prompt: Any) -> list[TextOrId]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise FieldError("prompt", "the prompt has multimodal_data, and this model reads text alone: leave it out")
        if not isinstance(prompt.get("prompt_string"), str):
            raise FieldError("prompt", "the prompt is an object without a text in prompt_string: give one")
        return [prompt["prompt_string"]]
    return read_mixed(prompt, "prompt")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
