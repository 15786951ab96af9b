"""``logit_bias`` as clients of OpenAI's API and of llama-server send it: an object, or a list of pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.core.numbers import shown
from paceline.serving.bodies import MOST_TEXTS, whole_of
from paceline.serving.fields import FieldError

_ID: Final = re.compile("-?[0-9]{1,18}")
"""A text that is a token's id: longer ones than any id are texts to be biased, as all others."""


def read_biases(given: Any) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
    """Return biases of token ids, and those of texts, which the tokenizer has to read.

    Args:
        given: as it was sent; ``None`` for none.

    Raises:
        FieldError: it has another form.
    """
    ids: dict[int, float] = {}
    texts: list[tuple[str, float]] = []
    for token, bias in _pairs(given):
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise FieldError(
                "logit_bias", f"logit_bias has {shown(bias)} for {shown(token)}: give a number, or false to ban it"
            )
        value = -math.inf if bias is False else float(bias)
        if isinstance(token, str) and not _ID.fullmatch(token):
            texts.append((token, value))
            if len(texts) > MOST_TEXTS:
                raise FieldError(
                    "logit_bias", f"logit_bias has more than {MOST_TEXTS} texts: give token ids, or fewer texts"
                )
        else:
            ids[int(token)] = value
    return ids, tuple(texts)


def _pairs(given: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    if given is not None and not isinstance(given, list):
        raise _wrong(given)
    for pair in given or ():
        if not isinstance(pair, list) or len(pair) != 2 or not _is_token(whole_of(pair[0])):
            raise _wrong(pair)
        yield whole_of(pair[0]), pair[1]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _wrong(found: Any) -> FieldError:
    return FieldError(
        "logit_bias",
        f"logit_bias has {shown(found)}: give an object of biases by token id or text, or a list of such pairs",
    )
