"""Smaller vocabularies: what has to stay stays, tokens can still be made, and texts come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from paceline.core.errors import InputError, ModelFileError
from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.prune.vocabulary import (
    ChosenTokens,
    TokenTable,
    check_spelling,
    choose_tokens,
    count_tokens,
    read_tokens,
)
from paceline.lab.prune.writer import Cut, split_merge, write_cut
from paceline.lab.samples import heldout_samples
from paceline.models.embedded import embedded_draft
from paceline.models.gguf_file import GGUFFile
from paceline.vocabularies.relation import relate_vocabularies
from tests.engines.tiny_models import write_model
from tests.models.helpers import edited_gguf

NORMAL, _, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)


def table(words: list[str], merges: Sequence[str] = (), types: Mapping[str, int] = MappingProxyType({})) -> TokenTable:
    """Return a vocabulary in which tokens are joined by a list of merges."""
    ranks = {split_merge(merge): rank for rank, merge in enumerate(merges)}
    return TokenTable(words, [types.get(word, NORMAL) for word in words], None, ranks, frozenset())


def chosen_words(of: TokenTable, wanted: int, **counts: int) -> set[str]:
    by_id = Counter({of.texts.index(word): count for word, count in counts.items()})
    return {of.texts[token_id] for token_id in choose_tokens(of, wanted, by_id).token_ids}


LETTERS = [chr(letter) for letter in range(97, 123)]
FILL = [f"fill{number}" for number in range(40)]


def test_what_a_token_is_made_of_is_kept_with_it() -> None:
    words = [*LETTERS, *FILL, "ab", "cd", "abcd", "bc"]
    kept = chosen_words(table(words, ["b c", "a b", "c d", "ab cd"]), 30, abcd=5)
    # Of its characters, "bc" is joined first: then nothing makes it, and nothing is passed through but that.
    assert {"abcd", "bc"} <= kept
    kept = chosen_words(table(words, ["a b", "c d", "ab cd", "b c"]), 30, abcd=5)
    assert {"abcd", "ab", "cd"} <= kept
    assert "bc" not in kept


def test_sentencepiece_joins_by_scores() -> None:
    words = [*LETTERS, *FILL, "ab", "bc", "abc"]
    scores = [-9.0] * len(words)
    scores[words.index("ab")], scores[words.index("bc")] = -2.0, -1.0
    of = TokenTable(words, [NORMAL] * len(words), scores, {}, frozenset())
    kept = {words[token_id] for token_id in choose_tokens(of, 32, Counter({words.index("abc"): 1})).token_ids}
    assert {"abc", "bc"} <= kept
    assert "ab" not in kept


def test_what_spells_any_text_is_kept_whatever_the_text() -> None:
    words = [*LETTERS, *FILL, "<0x0A>", "<|end|>", "mine", "<unused7>", "é"]
    of = table(words, types={"<0x0A>": BYTE, "<|end|>": CONTROL, "mine": USER_DEFINED, "<unused7>": CONTROL})
    found = choose_tokens(of, 32, Counter({words.index("fill39"): 3}))
    kept = {words[token_id] for token_id in found.token_ids}
    assert {*LETTERS, "<0x0A>", "<|end|>", "mine", "é", "fill39"} <= kept
    # What was kept free is not in use, and the rest has the lowest ids.
    assert "<unused7>" not in kept
    assert "fill0" in kept
    assert (found.always, found.of_text, len(found.token_ids), found.before) == (30, 1, 32, len(words))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="nothing would be cut"):
        choose_tokens(table([*LETTERS, *FILL]), 66, Counter())
    with pytest.raises(InputError, match="give 40 or more"):
        choose_tokens(table([*(chr(300 + number) for number in range(40)), *FILL]), 8, Counter())


@pytest.fixture(scope="module")
def draft() -> GGUFFile:
    return GGUFFile(embedded_draft())


@pytest.fixture(scope="module")
def smaller(draft: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ChosenTokens]:
    """The embedded draft with 1,024 of its 4,096 tokens."""
    with open_vocabulary(ModelOptions(draft.path)) as vocabulary:
        counts = count_tokens(vocabulary, (sample.text for sample in heldout_samples()[:8]))
    chosen = choose_tokens(read_tokens(draft), 1000, counts)
    path = tmp_path_factory.mktemp("smaller") / "small.gguf"
    write_cut(draft, path, Cut(token_ids=chosen.token_ids))
    return path, chosen


def test_every_kept_token_comes_out_of_the_tokenizer(smaller: tuple[Path, ChosenTokens]) -> None:
    path, chosen = smaller
    assert len(chosen.token_ids) == 1024
    checked = 0
    with open_vocabulary(ModelOptions(embedded_draft())) as before, open_vocabulary(ModelOptions(path)) as after:
        assert after.size == 1024
        for new, old in enumerate(map(int, chosen.token_ids)):
            assert after.token_spelling(new) == before.token_spelling(old)
            try:
                text = before.token_bytes(old).decode()
            except UnicodeDecodeError:
                continue
            if text and before.tokenize(text, add_special=False) == [old]:
                checked += 1
                assert after.tokenize(text, add_special=False) == [new]
        assert {int(chosen.token_ids[new]) for new in after.end_ids} == before.end_ids
        # Its ids are not taken for the ones of the source.
        assert not relate_vocabularies(before, after).fits
    assert checked > 700


def test_texts_come_back_in_more_tokens(smaller: tuple[Path, ChosenTokens]) -> None:
    texts = [sample.text for sample in heldout_samples()] + ["naïve 中文 \U0001f600\n\n\ttabs"]
    with open_vocabulary(ModelOptions(embedded_draft())) as before, open_vocabulary(ModelOptions(smaller[0])) as after:
        found = check_spelling(before, after, texts)
    assert found.texts == len(texts)
    assert found.factor is not None
    assert 1.0 < found.factor < 2.0


def test_a_vocabulary_that_changes_texts_is_refused(draft: GGUFFile, tmp_path: Path) -> None:
    # Without the token of the letter "e".
    texts = draft.get("tokenizer.ggml.tokens")
    kept = [token_id for token_id in range(512) if texts[token_id] != "e"]
    path = tmp_path / "lossy.gguf"
    write_cut(draft, path, Cut(token_ids=np.array(kept)))
    with (
        open_vocabulary(ModelOptions(draft.path)) as before,
        open_vocabulary(ModelOptions(path)) as after,
        pytest.raises(ModelFileError, match="does not reproduce a text"),
    ):
        check_spelling(before, after, ["the text"])


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "word pieces"),
        ({"tokenizer.ggml.model": "t5"}, "unigram"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens and 4096 rows"),
    ],
)
def test_vocabularies_that_cannot_be_cut_say_why(tmp_path: Path, edits: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        read_tokens(GGUFFile(edited_gguf(tmp_path / "other.gguf", edits)))


def test_a_model_without_a_tokenizer_has_no_tokens_to_choose(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tokenizer"):
        read_tokens(GGUFFile(write_model(tmp_path / "bare.gguf", "llama")))
