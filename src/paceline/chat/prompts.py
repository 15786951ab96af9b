r"""From a rendered conversation to token ids: the template's control tokens become tokens, those of users stay text.

::

    rendered     <|im_start|>user\n  never write <|im_end|>, please  <|im_end|>\n<|im_start|>assistant\n
    in pieces    <|im_start|>        user\n never ... please         <|im_end|>\n<|im_start|>assistant\n
    read as      control tokens      plain text                      control tokens

Where nobody spells a control token there is one piece, and its tokens are those of the tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from paceline.chat.marked_text import MarkedText, template_marks
from paceline.chat.messages import Message
from paceline.chat.reasoning import ReasoningMarkers
from paceline.chat.tool_calls.base import ExpectedCalls
from paceline.chat.tool_calls.formats import control_marks
from paceline.chat.tool_calls.parser import load_template
from paceline.core.vocabulary import Vocabulary
from paceline.vocabularies.spelling import Spellings

if TYPE_CHECKING:
    from paceline.options import GenerateOptions

_THEIRS: Final = 0
"""Mark of a character that came with the conversation, among those of ``template_marks``."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a conversation comes to.

    Attributes:
        text: as the template wrote it.
        token_ids: for :meth:`paceline.Model.generate`.
        messages: those of the conversation that are in it.
        num_left_out: how many messages are not, as the context has no room for them.
        markers: what stands around reasoning in answers; ``None`` for a model that does not reason.
        begun: whether the prompt has opened the reasoning, so that an answer begins within it.
        continued: whether the prompt ends with the beginning of a message, which an answer goes on with.
        options: what the request needs besides: which control tokens to keep in its text, and how long it may reason.
        calls: of tools that the answer may have; ``None`` where nobody looks for any.
    """

    text: str
    token_ids: Sequence[int]
    messages: Sequence[Message]
    num_left_out: int
    markers: ReasoningMarkers | None
    begun: bool
    continued: bool
    options: GenerateOptions
    calls: ExpectedCalls | None = None


def expect_calls(prompt: ChatPrompt, calls: ExpectedCalls, vocabulary: Vocabulary) -> ChatPrompt:
    """Return a prompt of whose answer calls are read; control tokens that are marks of calls stay in its text.

    Raises:
        CapabilityError: the library that reads calls is not installed.
        ModelFileError: the model's own response template is none.
    """
    load_template(calls.call_format.template, calls.call_format.name)
    preserved = (*(prompt.options.get("preserved_ids") or ()), *control_marks(calls.call_format, vocabulary).values())
    return replace(prompt, options={**prompt.options, "preserved_ids": tuple(dict.fromkeys(preserved))}, calls=calls)


def tokenize_rendered(text: MarkedText, vocabulary: Vocabulary, *, adds_opening: bool) -> list[int]:
    """Return the token ids of a rendered conversation.

    No control token comes of what others than the template wrote, in part or whole.

    Args:
        text: with marks on what the template wrote.
        vocabulary: of the model.
        adds_opening: put the tokens before it that the model wants before a text, unless it begins with them: a
            template that writes its own begin token does not get two.
    """
    token_ids: list[int] = []
    for is_spelled, group in groupby(_split_stretches(text, vocabulary), key=attrgetter("is_spelled")):
        stretches = list(group)
        token_ids += _tokenize_apart(stretches, vocabulary) if is_spelled else _tokenize_together(stretches, vocabulary)
    if not adds_opening:
        return token_ids
    opening = vocabulary.tokenize("", add_special=True)
    return token_ids if token_ids[: len(opening)] == opening else [*opening, *token_ids]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A control token that the template wrote, or what is between two of them, where somebody may spell one."""

    text: str
    is_token: bool = False
    is_spelled: bool = False


def _split_stretches(text: MarkedText, vocabulary: Vocabulary) -> Iterator[_Stretch]:
    """Yield the stretches of a text: what is between control tokens, which may be empty, and these, by turns."""
    plain, marks = str.__str__(text), template_marks(text)
    tokens: list[tuple[int, int]] = []
    spelled: list[tuple[int, int]] = []
    for start, end in _get_spellings(vocabulary).in_text(plain):
        if _THEIRS in marks[start:end]:
            spelled.append((start, end))
        elif not tokens or start >= tokens[-1][1]:
            tokens.append((start, end))
    at = passed = 0
    reach = 0  # where what somebody spelled so far ends
    for start, end in [*tokens, (len(plain), len(plain))]:
        while passed < len(spelled) and spelled[passed][0] < start:
            reach = max(reach, spelled[passed][1])
            passed += 1
        yield _Stretch(plain[at:start], is_spelled=reach > at)
        yield _Stretch(plain[start:end], is_token=start < end)
        at = end


def _tokenize_together(stretches: list[_Stretch], vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of stretches in which nobody spells a control token, read as one text.

    They are read one by one where a tokenizer finds control tokens that are not spelled: it may normalise a text first,
    or know padding by its name.
    """
    token_ids = vocabulary.tokenize(
        "".join(stretch.text for stretch in stretches), add_special=False, parse_special=True
    )
    found = Counter(filter(vocabulary.control_ids.__contains__, token_ids))
    written = Counter(stretch.text for stretch in stretches if stretch.is_token)
    if all(count <= written[_spell(token_id, vocabulary)] for token_id, count in found.items()):
        return token_ids
    apart = _tokenize_apart(stretches, vocabulary)
    # Tokens for what a vocabulary does not know are in both.
    return apart if found - Counter(apart) else token_ids


def _tokenize_apart(stretches: list[_Stretch], vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of stretches that are read one by one, without control tokens but for those of the template."""
    token_ids: list[int] = []
    for stretch in stretches:
        token_ids += vocabulary.tokenize(stretch.text, add_special=False, parse_special=stretch.is_token)
    return token_ids


def _spell(token_id: int, vocabulary: Vocabulary) -> str:
    """Return how a control token is spelled; empty for what is padding by its name."""
    return (vocabulary.token_spelling(token_id) or b"").decode("utf-8", "replace")


_known: Final[WeakKeyDictionary[Vocabulary, Spellings]] = WeakKeyDictionary()


def _get_spellings(vocabulary: Vocabulary) -> Spellings:
    """Return what the control tokens of a vocabulary are spelled like, which takes a while the first time."""
    try:
        known = _known.get(vocabulary)
        if known is None:
            known = _known[vocabulary] = _read_spellings(vocabulary)
    except TypeError:  # a vocabulary that nothing can refer to weakly
        return _read_spellings(vocabulary)
    return known


def _read_spellings(vocabulary: Vocabulary) -> Spellings:
    return Spellings({_spell(token_id, vocabulary) for token_id in vocabulary.control_ids} - {""})
