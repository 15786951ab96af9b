"""The vocabulary of a GGUF file in many threads at once, one of which may free it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")

from tests.models import damaged_gguf
from tests.models.helpers import edited_gguf
from tests.timing import WAIT_S, assert_grows_with_length_alone

from paceline.core.errors import ClosedError, InputError
from paceline.engines.llama_cpp import LlamaCppEngine, tokenizing
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft


@pytest.fixture(scope="module")
def embedded() -> Iterator[GgufVocabulary]:
    with open_vocabulary(embedded_draft()) as vocabulary:
        yield vocabulary


@pytest.mark.parametrize("turn", range(5))
def test_a_model_that_is_closed_is_freed_once_nobody_reads_its_vocabulary(turn: int) -> None:
    """What was begun is finished, and what comes later is refused: nothing reads what was freed."""
    text = "def add(a, b): return a + b\n" * (100 << turn)
    engine = LlamaCppEngine(ModelOptions(embedded_draft(), threads=1, context_length=64))
    vocabulary = engine.vocabulary
    expected, spelled = vocabulary.tokenize(text), vocabulary.token_spelling(300)
    began, wrong, refused = threading.Barrier(5), list[str](), list[str]()

    def read_on() -> None:
        while True:
            if vocabulary.tokenize(text) != expected:
                wrong.append("tokens")
            if vocabulary._read_spelling(300) != spelled:
                wrong.append("spelling")

    def read() -> None:
        began.wait(WAIT_S)
        try:
            read_on()
        except ClosedError as error:
            refused.append(str(error))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    began.wait(WAIT_S)
    engine.close()
    for reader in readers:
        reader.join(WAIT_S)
        assert not reader.is_alive()
    assert wrong == []
    assert refused == ["the vocabulary belongs to an engine that was closed"] * 4


def test_whoever_looks_up_a_token_waits_for_no_text_and_texts_for_none_of_each_other() -> None:
    with open_vocabulary(embedded_draft()) as vocabulary, ExitStack() as texts:
        expected = vocabulary.tokenize("def")
        # As where many long texts are tokenized.
        for _ in range(100):
            texts.enter_context(vocabulary._in_use())
        found: list[object] = []

        def read() -> None:
            found.extend((vocabulary.token_bytes(300), vocabulary.control_ids))
            found.extend(vocabulary.tokenize("def") == expected for _ in range(20))

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(WAIT_S)
        assert not reader.is_alive()
        assert found[2:] == [True] * 20


def read_on(vocabulary: GgufVocabulary) -> None:
    while True:
        vocabulary.tokenize("def")


def test_a_model_is_not_freed_while_one_text_is_read_and_nothing_new_is_begun() -> None:
    with open_vocabulary(embedded_draft()) as vocabulary:
        closed = threading.Event()

        def close() -> None:
            vocabulary.invalidate()
            closed.set()

        closer = threading.Thread(target=close)
        with vocabulary._in_use():
            closer.start()
            with pytest.raises(ClosedError):
                read_on(vocabulary)
            assert not closed.is_set()
        assert closed.wait(WAIT_S)
        closer.join(WAIT_S)


# Long texts. Each of these took minutes, or ended the process, or would in an hour.

MARKS: Final = {
    "<|a|>": tokenizing.Mark(1),
    "<|ab|>": tokenizing.Mark(2),
    "|>": tokenizing.Mark(3),
    "\n\n": tokenizing.Mark(4),
    "<|left|>": tokenizing.Mark(5, strips_left=True),
    "<|right|>": tokenizing.Mark(6, strips_right=True),
    "<twice>": None,
}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x<|a|>y<|ab|>", [("x", False), 1, ("y", False), 2]),
        ("<|a|><|a|>", [1, 1]),
        ("<|<|a|>", [("<|", False), 1]),
        ("<twice>", [("<twice>", True)]),
        ("x \n\n y", [("x \n\n y", True)]),
        ("x <|left|> <|a|>", [("x <|left|> ", True), 1]),
        ("x<|left|> y", [("x", False), 5, (" y", False)]),
        ("<|right|> x", [("<|right|> x", True)]),
        ("<|right|>x", [6, ("x", False)]),
        ("", []),
    ],
)
def test_a_text_is_cut_where_a_token_is_certain(text: str, parts: list[object]) -> None:
    assert list(tokenizing.Marks(MARKS).split(text)) == parts


def test_tokens_that_overlap_are_left_to_llama_cpp_and_are_bounded() -> None:
    marks = tokenizing.Marks({"aa": tokenizing.Mark(1), "aaa": tokenizing.Mark(2)})
    assert list(marks.split("xaaaaax")) == [("xaaaaax", True)]
    assert list(marks.split("xaax")) == [("x", False), 1, ("x", False)]
    with pytest.raises(InputError, match="more than 10000 special tokens that run into each other"):
        list(marks.split("a" * 100_000))


@given(
    parts=st.lists(
        st.sampled_from(["<s>", "</s>", "<|im_end|>", "<|im_", "end|>", "def ", "\n\n", "    ", "é", "😀", "12"]),
        max_size=12,
    ),
    parse_special=st.booleans(),
)
def test_what_is_read_in_pieces_has_the_tokens_of_the_whole(
    embedded: GgufVocabulary, parts: list[str], parse_special: bool
) -> None:
    text, vocabulary = "".join(parts), embedded
    with pytest.MonkeyPatch.context() as patch:
        whole = vocabulary.tokenize(text, parse_special=parse_special)
        patch.setattr("paceline.engines.llama_cpp.vocabulary.LONG", 0)
        assert vocabulary.tokenize(text, parse_special=parse_special) == whole
        assert vocabulary.fewest_tokens(text) <= len(whole)


def test_many_special_tokens_take_time_in_proportion() -> None:
    with open_vocabulary(embedded_draft()) as vocabulary:
        (control, *_) = sorted(vocabulary.control_ids)
        text = (vocabulary.token_spelling(control) or b"").decode()
        assert text
        assert_grows_with_length_alone(lambda count: vocabulary.tokenize(text * count, parse_special=True), 1 << 15)


@pytest.mark.parametrize(
    ("splitter", "text"),
    [("bloom", "a"), ("bloom", "a\x1c"), ("bloom", "中"), ("deepseek-llm", " "), ("gpt-4o", "/\n")],
)
def test_a_word_that_would_end_the_process_is_read_on_a_large_stack_or_refused(
    splitter: str, text: str, tmp_path: Path
) -> None:
    """Most splitters are std::regex, which goes a call deeper with each character of a word."""
    path = edited_gguf(tmp_path / "regex.gguf", {"tokenizer.ggml.pre": splitter})
    with open_vocabulary(path) as vocabulary:
        count = 60_000 // len(text)
        assert vocabulary.tokenize(text * count + " b", add_special=False)[-1] == vocabulary.tokenize("a b")[-1]
        with pytest.raises(InputError, match=r"characters in a row .* as one word, and it reads at most 100000"):
            vocabulary.tokenize(text * 120_000)


BASE64: Final = "Zm9vYmFyIGlz+ThpcyB0aGU/"
JSON: Final = '{"id":17,"name":"user17","ok":true},'


@pytest.mark.parametrize("splitter", ["deepseek-llm", "gpt-4o", "exaone-moe", "llama-bpe"])
@pytest.mark.parametrize("text", [BASE64, JSON, "f(a,b){return(a+b)}", "\u4e2d\u6587\uff0c", "0x7f3a"])
def test_a_text_without_spaces_is_no_word(text: str, splitter: str) -> None:
    tokenizing.check_words(text * (1_200_000 // len(text)), splitter)


def test_words_of_other_splitters_are_longer() -> None:
    for text, splitter in ((BASE64, "bloom"), ("a few words ", "exaone-moe"), ("a line, and ", "gemma4")):
        with pytest.raises(InputError, match="as one word"):
            tokenizing.check_words(text * (1_200_000 // len(text)), splitter)
    tokenizing.check_words("a line, and\n" * 100_000, "gemma4")


def test_a_long_text_without_spaces_is_read(tmp_path: Path) -> None:
    path = edited_gguf(tmp_path / "regex.gguf", {"tokenizer.ggml.pre": "deepseek-llm"})
    with open_vocabulary(path) as vocabulary:
        token_ids = vocabulary.tokenize(BASE64 * 10_000, add_special=False)
        assert b"".join(map(vocabulary.token_bytes, token_ids)) == BASE64.encode() * 10_000


def test_of_a_tokenizer_that_leaves_blanks_out_no_length_is_told(tmp_path: Path) -> None:
    names = dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), "whitespace")
    with open_vocabulary(edited_gguf(tmp_path / "blanks.gguf", names)) as vocabulary:
        text = " " * 4000
        assert vocabulary.fewest_tokens(text) <= len(vocabulary.tokenize(text, add_special=False))


def test_a_special_token_that_is_no_unicode_is_in_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = damaged_gguf.read(embedded_draft())
    tokens, kinds = header.get("tokenizer.ggml.tokens"), header.get("tokenizer.ggml.token_type")
    assert tokens is not None
    assert kinds is not None
    tokens.value, kinds.value = list(tokens.value), list(kinds.value)
    tokens.value[3000], kinds.value[3000] = b"\xff<|a|>", 4  # user-defined
    text = "x<|a|>y z"
    with open_vocabulary(header.write(tmp_path / "odd.gguf")) as vocabulary:
        whole = vocabulary.tokenize(text)
        monkeypatch.setattr("paceline.engines.llama_cpp.vocabulary.LONG", 0)
        assert vocabulary.tokenize(text) == whole


def test_a_long_stretch_that_sentencepiece_has_no_tokens_for_is_refused() -> None:
    known = set("abc ")
    tokenizing.check_unknown("ab\n" * 400_000, 1_200_000, known.__contains__)
    tokenizing.check_unknown("\n" * 100_000, 100_000, known.__contains__)
    with pytest.raises(InputError, match="about 298979 characters in a row that this model has no tokens for"):
        tokenizing.check_unknown("abc" + "\n" * 300_000, 300_003, known.__contains__)
