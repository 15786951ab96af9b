"""How many tokens a text has at least, told without a tokenizer.

No token stands for more bytes than the longest one, so a text of n bytes has at least n / longest tokens. Much of what
is long in a vocabulary is runs of blanks and punctuation; counted by letters, digits and what is not ASCII alone, the
bound of ordinary texts is several times closer.

It holds where every byte of a text is a byte of one of its tokens: for byte-level BPE and SentencePiece as they are
here. Where a tokenizer rewrites a text first (lower case, accents or blanks left out, other forms of Unicode), fewer
bytes may be left, and nothing is told.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_OTHERS: Final = bytes(byte for byte in range(128) if chr(byte) not in string.ascii_letters + string.digits)
"""All of ASCII but letters and digits."""


@dataclass(frozen=True, slots=True)
class TokenReach:
    """The longest tokens of a vocabulary.

    Attributes:
        num_bytes: most bytes of a token; ``None`` where blanks of a text may be left out.
        num_word_bytes: most letters, digits and bytes that are not ASCII of a token.
    """

    num_bytes: int | None
    num_word_bytes: int

    @classmethod
    def of(cls, spellings: Iterable[bytes], *, keeps_blanks: bool = True) -> TokenReach:
        """Measure spellings as they stand in a text, those of control tokens too.

        ``keeps_blanks`` says whether all blanks of a text are in its tokens.
        """
        longest = longest_word = 1
        for spelling in spellings:
            longest = max(longest, len(spelling))
            if len(spelling) > longest_word:
                longest_word = max(longest_word, len(spelling.translate(None, _OTHERS)))
        return cls(longest if keeps_blanks else None, longest_word)

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least."""
        encoded = text.encode("utf-8", "surrogatepass")
        by_words = -(-len(encoded.translate(None, _OTHERS)) // self.num_word_bytes)
        return by_words if self.num_bytes is None else max(by_words, -(-len(encoded) // self.num_bytes))


def most_tokens(text: str) -> int:
    """Return how many tokens a text has at most, where every token has a byte of it: told at once."""
    return 4 * len(text)
