from __future__ import annotations

import re

import pytest

from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.registry import build_drafters
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.vocabularies.token_pairs import DraftVocab

LETTERS = sorted({letter.encode() for letter in "The quick brown fox, 1234; na\u00efve.\n"})


def engine(pieces: list[bytes], ends: tuple[int, ...] = ()) -> ScriptedEngine:
    return ScriptedEngine(random_model(len(pieces), seed=1), ScriptedVocabulary(pieces, ends))


TARGET, SAME, OTHER = LETTERS, [*LETTERS, b"fox"], [b"qu", b"own", *reversed(LETTERS)]


@pytest.mark.parametrize(
    ("draft", "vocab", "expected"),
    [
        (SAME, "auto", DraftModelDrafter),
        (SAME, "same", DraftModelDrafter),
        (SAME, "translate", TranslatedDrafter),
        (OTHER, "auto", TranslatedDrafter),
        (OTHER, "translate", TranslatedDrafter),
    ],
)
def test_a_draft_is_translated_where_it_has_to_be_or_is_asked_to(
    draft: list[bytes], vocab: DraftVocab, expected: type
) -> None:
    (drafter,) = build_drafters(["draft"], target=engine(TARGET), draft=engine(draft), draft_vocab=vocab)
    assert type(drafter) is expected
    assert drafter.name == "draft"


def test_a_refused_draft_is_told_how_it_could_be_had() -> None:
    with pytest.raises(VocabularyMismatchError, match=re.escape("have it translated (`DraftOptions.vocab='auto'`)")):
        build_drafters(["draft"], target=engine(TARGET), draft=engine(OTHER), draft_vocab="same")
    with pytest.raises(VocabularyMismatchError, match="cannot be translated"):
        build_drafters(["draft"], target=engine(TARGET), draft=engine([b"x", b"yy", b"z"]))


def test_pairs_of_tokens_are_refused_where_they_do_nothing() -> None:
    with pytest.raises(InputError, match=re.escape("`DraftOptions.token_map` a=b has no effect")):
        build_drafters(["draft"], target=engine(TARGET), draft=engine(SAME), draft_map=["a=b"])
    with pytest.raises(InputError, match=re.escape("the draft has no token '<s>'")):
        build_drafters(["draft"], target=engine(TARGET), draft=engine(OTHER), draft_map=["<s>=a"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token_map": ["ab"]}, "`DraftOptions.token_map` 'ab' is no pair of tokens"),
        ({"token_map": ["=b"]}, "`DraftOptions.token_map` '=b' is no pair of tokens"),
        (
            {"token_map": ["a=b"], "vocab": "same"},
            "has no effect with `DraftOptions.vocab='same'`",
        ),
        ({"vocab": "other"}, "unknown `DraftOptions.vocab` 'other': choose from auto, same, translate"),
    ],
)
def test_options_of_a_draft_are_checked(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        DraftOptions("draft.gguf", **options)  # type: ignore[arg-type]


def test_what_is_asked_of_a_draft_reaches_its_engine() -> None:
    draft = DraftOptions(embedded_draft(), vocab="translate", token_map=("a=b",)).beside(
        ModelOptions(embedded_target())
    )
    assert (draft.draft_vocab, draft.draft_map) == ("translate", ("a=b",))
    with pytest.raises(InputError, match="unknown draft_vocab 'no'"):
        ModelOptions("draft.gguf", draft_vocab="no")  # type: ignore[arg-type]
