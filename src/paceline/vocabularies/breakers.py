"""Finds the tokens of texts across which nothing counts as repeated (DRY), as llama.cpp does.

A text may lie within one token, or begin at the end of one token and go on in the next ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from paceline.core.processors import MAX_REST, NO_BREAKERS, Breakers
from paceline.vocabularies.exact_tokens import ExactTokenizer

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.core.vocabulary import Vocabulary

_KEPT: Final = 32
"""Sets of texts whose tokens are kept, the latest ones: each takes a byte a token, and some more."""


class BreakerFinder:
    """Finds them in one vocabulary, from any thread; what was found is kept for a while."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._found: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, params: SamplingParams) -> Breakers:
        """Return where the texts stand, if DRY is on; the first time that takes 0.2 s for 150,000 tokens."""
        texts = params.dry_sequence_breakers
        if not texts or "dry" not in params.active:
            return NO_BREAKERS
        with self._lock:
            found = self._found.get(texts)
        if found is None:
            found = _find(self._vocabulary, texts)
        with self._lock:
            self._found[texts] = found
            self._found.move_to_end(texts)
            if len(self._found) > _KEPT:
                self._found.popitem(last=False)
        return found


def _find(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Breakers:
    tokenizer = ExactTokenizer(vocabulary)
    wanted = [text.encode(errors="surrogatepass") for text in texts]
    # By what a token may end with: the text that goes on in the next one, and the tokens of its rest.
    begun: dict[bytes, list[tuple[bytes, tuple[int, ...]]]] = {}
    for text in wanted:
        for size in range(1, len(text)):
            rest = tokenizer.continuation(text[size:])
            if rest:
                begun.setdefault(text[:size], []).append((text, tuple(rest[:MAX_REST])))
    longest = max(map(len, begun), default=0)
    alone = bytearray(vocabulary.size)
    rests: dict[int, tuple[tuple[int, ...], ...]] = {}
    for token_id in range(vocabulary.size):
        spelling = vocabulary.token_spelling(token_id) or b""
        alone[token_id] = any(text in spelling for text in wanted)
        found = [
            rest
            for size in range(1, min(len(spelling), longest) + 1)
            for text, rest in begun.get(spelling[-size:], ())
            if text not in spelling
        ]
        if found:
            rests[token_id] = tuple(found)
    return Breakers(bytes(alone), rests)
