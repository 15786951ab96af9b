"""The contract of a vocabulary: a model's token ids and what they stand for."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class InfillTokens(NamedTuple):
    """Tokens that tell a model to fill the gap between two texts (arXiv 2207.14255); ``None`` where it has none.

    Attributes:
        prefix: stands before the text before the gap.
        suffix: stands before the text behind it.
        middle: stands before what is filled in.
        repository: stands before the name of a repository.
        file: stands before the name of each of its files.
        end: ends what is filled in.
    """

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    repository: int | None = None
    file: int | None = None
    end: int | None = None


class Vocabulary(Protocol):
    """The token ids of a model and what they stand for.

    Any thread may use it, until the engine is closed, while the engine makes a pass too: a long text takes a while to
    tokenize, and nobody else is to wait for it.
    """

    @property
    def kind(self) -> str:
        """Family of the tokenizer, such as ``"bpe"`` or ``"spm"``; equal for vocabularies that can be compared."""
        ...

    @property
    def size(self) -> int:
        """Number of token ids, which is the length of a row of logits."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """End-of-generation tokens."""
        ...

    @property
    def text_end_ids(self) -> frozenset[int]:
        """Those of :attr:`end_ids` that the model's own file has as ordinary text, whatever the engine thinks."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that stand for no text, such as those that end a turn; padding is not among them."""
        ...

    @property
    def infill_tokens(self) -> InfillTokens:
        """Tokens that tell the model to fill a gap."""
        ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any text.
            add_special: put the model's own special tokens at the start; none is put at the end, since a text that is
                closed has no continuation.
            parse_special: take the spelling of a control token for that token; for text that is trusted, such as a
                chat template's own. Without, none of :attr:`control_ids` comes of a text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text; empty for control tokens. Texts are the concatenation of these."""
        ...

    def token_spelling(self, token_id: int) -> bytes | None:
        """Return what a token is: the bytes of an ordinary token, the text that names a control token.

        ``None`` for an id that only pads the rows of logits. Empty where a model has no tokenizer that could tell.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, without reading it; 0 where its length does not tell."""
        ...
