"""Which tokens a smaller vocabulary keeps.

Kept whatever the text: control tokens with a meaning, the tokens of bytes and of single characters, those that users
defined, and every token that the file names. So any text can still be spelled, byte for byte. Then come the tokens of a
text, the commonest first, and then those with the lowest ids, which are the commonest of the text that the tokenizer
was made from.

A token is of use only where the tokenizer can still make it. BPE joins characters by its list of merges, SentencePiece
by the scores of what is joined; both pass through other tokens on the way. So what is passed through is kept, too: then
the same steps make the token, as no step that was left out ever came before one of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.conversion.llama import EMBEDDINGS
from paceline.core.errors import InputError, ModelFileError
from paceline.lab.prune.writer import LAYER, LISTS_OF_IDS, MERGES, TOKENS, Indices, split_merge
from paceline.lab.vocabulary_fit import token_ends
from paceline.vocabularies.relation import is_filler

if TYPE_CHECKING:
    from paceline.core.vocabulary import Vocabulary
    from paceline.models.gguf_file import GGUFFile

MULTIPLE: Final = 32
"""The number of tokens is rounded up to a multiple of it: matrix kernels take rows in groups."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens in GGUF."""

_PER_TOKEN: Final = (EMBEDDINGS, "output.weight", "output.bias", "per_layer_token_embd.weight")
"""Tensors that have something for every token."""

_JOINED_BY_SCORES: Final = "llama"
"""Name in GGUF of SentencePiece's way; the other ways that can be cut go by a list of merges."""
_OTHER_WAYS: Final = {"bert": "word pieces", "t5": "a unigram model", "rwkv": "a tree", "plamo2": "a table"}
"""Names in GGUF of tokenizers that are not cut, and how they find a text's tokens."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A vocabulary as its file has it.

    Attributes:
        scores: by token, where tokens are joined by scores; else ``None``.
        ranks: place in the list of merges by both parts, where there is one; else empty.
        named: ids that the file names.
    """

    texts: list[str]
    types: list[int]
    scores: list[float] | None
    ranks: dict[tuple[str, str], int]
    named: frozenset[int]

    @property
    def size(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that are kept.

    Attributes:
        token_ids: in their new order, which is the old one but for one of them.
        always: how many are kept whatever the text.
        of_text: how many are kept for the text, with what is passed through to make them.
        before: tokens there were.
    """

    token_ids: Indices
    always: int
    of_text: int
    before: int


def read_tokens(file: GGUFFile) -> TokenTable:
    """Read a vocabulary that can be cut; raise ``ModelFileError``, which says why, for any other."""
    name = file.path.name
    model = file.get("tokenizer.ggml.model")
    texts = file.get(TOKENS)
    if not isinstance(model, str) or not isinstance(texts, list):
        raise ModelFileError(f"{name} has no tokenizer, so there is no telling which of its tokens to keep (--vocab)")
    if model in _OTHER_WAYS:
        raise ModelFileError(
            f"{name} has a tokenizer of the kind {model!r}, which finds tokens by {_OTHER_WAYS[model]}: only those "
            "that join characters (BPE, SentencePiece) can be cut (--vocab)"
        )
    rows = file.tensors[EMBEDDINGS].shape[0] if EMBEDDINGS in file.tensors else 0
    if rows != len(texts):
        raise ModelFileError(f"{name} has {len(texts)} tokens and {rows} rows of {EMBEDDINGS}: a cut would mix them up")
    for tensor_name, tensor in file.tensors.items():
        if LAYER.fullmatch(tensor_name) is None and len(texts) in tensor.shape and tensor_name not in _PER_TOKEN:
            raise ModelFileError(
                f"{name} has {tensor_name} of {' x '.join(map(str, tensor.shape))}, with something for every token "
                "that is not known here: leave out --vocab"
            )
    merges = file.get(MERGES)
    scores = file.get("tokenizer.ggml.scores")
    if model == _JOINED_BY_SCORES:
        merges = None
        scores = scores if isinstance(scores, list) else [0.0] * len(texts)
    elif not isinstance(merges, list):
        raise ModelFileError(f"{name} lacks {MERGES}, which its tokenizer needs: nothing can be cut (--vocab)")
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges or ()):
        ranks.setdefault(split_merge(merge), rank)
    types = file.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(texts):
        types = [_NORMAL] * len(texts)
    return TokenTable(texts, types, None if merges else scores, ranks, _named_ids(file, len(texts)))


def _named_ids(file: GGUFFile, size: int) -> frozenset[int]:
    named = [file.get(key) for key in file.fields if key.endswith("_token_id")]
    for key in LISTS_OF_IDS:
        named += file.get(key, [])
    return frozenset(token_id for token_id in named if isinstance(token_id, int) and 0 <= token_id < size)


def count_tokens(vocabulary: Vocabulary, texts: Iterable[str]) -> Counter[int]:
    """Return how often each token is in some texts."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(vocabulary.tokenize(text, add_special=False))
    return counts


def check_size(table: TokenTable, wanted: int) -> int:
    """Return how many tokens there will be where ``wanted`` are asked for.

    Raises:
        InputError: there are not as many tokens, or more have to be kept.
    """
    room = -(-wanted // MULTIPLE) * MULTIPLE
    if not 0 < room < table.size:
        raise InputError(
            f"--vocab {wanted}: the model has {table.size} tokens, so nothing would be cut; give a smaller number"
        )
    always = len(always_kept(table))
    if always > room:
        raise InputError(
            f"--vocab {wanted}: {always} of the {table.size} tokens are control tokens, bytes and single characters, "
            f"without which some texts could not be spelled; give {always} or more"
        )
    return room


def always_kept(table: TokenTable) -> set[int]:
    """Return the ids that are kept whatever the text."""
    return {*table.named, *(token_id for token_id in range(table.size) if _is_always_kept(table, token_id))}


def choose_tokens(
    table: TokenTable,
    wanted: int,
    counts: Counter[int],
    also: Iterable[int] = (),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ChosenTokens:
    """Return the tokens of a vocabulary of ``wanted`` tokens, rounded up to a multiple of :data:`MULTIPLE`.

    Args:
        table: the vocabulary.
        wanted: number of tokens.
        counts: of a text.
        also: further ids that are kept in any case, such as those that end an answer.
        report: called with the tokens chosen so far and in all.

    Raises:
        InputError: see :func:`check_size`.
    """
    size, room = table.size, check_size(table, wanted)
    kept = {*also, *always_kept(table)}
    always = len(kept)
    joiner = _Joiner(table)

    def take(token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if len(kept) == room:
                break
            if token_id in kept:
                continue
            needed = joiner.steps(table.texts[token_id]) - kept | {token_id}
            if len(kept) + len(needed) <= room:
                kept.update(needed)
                report(len(kept), room)

    take(token_id for token_id, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    of_text = len(kept) - always
    take(token_id for token_id in range(size) if table.types[token_id] == _NORMAL)
    take(range(size))
    return ChosenTokens(_shift(table, sorted(kept)), always, of_text, size)


def _shift(table: TokenTable, token_ids: list[int]) -> Indices:
    """Return the tokens with the first one of text behind the others, so that hardly any id is what it was.

    Where some ids stayed the same tokens, the vocabulary could be taken for the source's with a few tokens exchanged,
    and drafts would go wrong by the others instead of being translated.
    """
    first = next((token_id for token_id in token_ids if table.types[token_id] in (_NORMAL, _BYTE)), None)
    if first is not None:
        token_ids = [token_id for token_id in token_ids if token_id != first] + [first]
    return np.array(token_ids, np.int64)


def _is_always_kept(table: TokenTable, token_id: int) -> bool:
    kind, text = table.types[token_id], table.texts[token_id]
    if kind == _CONTROL:
        return not is_filler(text.encode(errors="surrogateescape"))
    return kind in (_UNKNOWN, _USER_DEFINED, _BYTE) or (kind == _NORMAL and len(text) == 1)


class _Joiner:
    """Joins a token's characters as llama.cpp does, and says what that passes through."""

    def __init__(self, table: TokenTable) -> None:
        self._ids = {text: token_id for token_id, text in reversed(list(enumerate(table.texts)))}
        self._ranks = table.ranks
        self._scores = table.scores

    def steps(self, text: str) -> set[int]:
        """Return the ids that are made on the way from single characters to what a text ends up as."""
        made: set[int] = set()
        symbols = list(text)
        made.update(self._ids[symbol] for symbol in symbols if symbol in self._ids)
        while len(symbols) > 1:
            ranked = [
                (self._rank(left, right), place) for place, (left, right) in enumerate(itertools.pairwise(symbols))
            ]
            rank, place = min(ranked)
            if rank == np.inf:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
            token_id = self._ids.get(symbols[place])
            if token_id is not None:
                made.add(token_id)
        return made

    def _rank(self, left: str, right: str) -> float:
        """Return which pair is joined first, the least; infinity for one that is not."""
        if self._scores is None:
            return self._ranks.get((left, right), np.inf)
        token_id = self._ids.get(left + right)
        return np.inf if token_id is None else -self._scores[token_id]


@dataclass(frozen=True, slots=True)
class Respelled:
    """How texts are cut by both vocabularies.

    Attributes:
        tokens_before: tokens of all texts that came back before the cut.
        tokens_after: tokens that these texts take now.
        texts: number of texts that came back before the cut.
    """

    tokens_before: int
    tokens_after: int
    texts: int

    @property
    def factor(self) -> float | None:
        """Tokens of a text over what they were."""
        return self.tokens_after / self.tokens_before if self.tokens_before else None


def check_spelling(before: Vocabulary, after: Vocabulary, texts: Iterable[str]) -> Respelled:
    """Tokenize texts with both vocabularies, and return how many tokens they take.

    Raises:
        ModelFileError: a text that came back byte for byte does so no more.
    """
    num_before = num_after = num_texts = 0
    for text in texts:
        ours, theirs = token_ends(before, text), token_ends(after, text)
        if ours is None:
            continue
        if theirs is None:
            raise ModelFileError(
                f"the smaller vocabulary does not reproduce a text that begins with {text[:40]!r}: keep "
                "more tokens (--vocab)"
            )
        num_texts += 1
        num_before += len(ours)
        num_after += len(theirs)
    return Respelled(num_before, num_after, num_texts)
