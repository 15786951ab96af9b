"""No control token comes of what others than the template wrote, whatever the vocabulary; those of the template do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf")

import gguf

from paceline.chat import prompts
from paceline.chat.marked_text import MarkedText, template_marks
from paceline.chat.messages import read_messages
from paceline.chat.prompts import tokenize_rendered
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError
from paceline.core.vocabulary import Vocabulary
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.engines.scripted import ScriptedVocabulary
from paceline.vocabularies import spelling
from tests.chat.conversing import control_of, spellings, vocabulary_alone, write_sentencepiece, written
from tests.models.helpers import with_last_tokens
from tests.tiers import by_tier
from tests.timing import assert_grows_with_length_alone

APART = ["<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<think>", "[INST]"]
OVERLAPPING = [*APART, "|><|", "<|im", "end|>xyz", "a|a", "a|a|a|a", "[PAD5]", "é|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
EXAMPLES = by_tier(600, quick=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Vocabulary]:
    """The embedded vocabulary with control tokens that no text has two of in one place, but for one that is longer."""
    with open_vocabulary(with_last_tokens(folder / "apart.gguf", APART)) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module")
def overlapping(folder: Path) -> Iterator[Vocabulary]:
    """The embedded vocabulary with control tokens that overlap, one of them by name padding."""
    with open_vocabulary(with_last_tokens(folder / "overlapping.gguf", OVERLAPPING)) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Iterator[Vocabulary]:
    """A vocabulary whose merges lead to control tokens."""
    kinds = gguf.TokenType
    parts = ["<s", "</", "</s", "<a", "<a▁", "<a▁b", "[P", "[PA", "[PAD", "[PAD5", "un", "unk", "<unk"]
    tokens = {
        **dict.fromkeys(parts, kinds.NORMAL),
        "<a▁b>": kinds.CONTROL,
        "[PAD5]": kinds.UNKNOWN,
        "<|end|>": kinds.CONTROL,
    }
    with vocabulary_alone(write_sentencepiece(folder / "spm.gguf", tokens, add_bos_token=True)) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module")
def byte_level() -> Vocabulary:
    """transformers' byte-level BPE. Its normalizer makes plain letters of wide ones before it looks for a token."""
    pytest.importorskip("transformers")
    import tokenizers

    from paceline.engines.torch_hf.vocabulary import TokenizerVocabulary

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=True) for text in OVERLAPPING[:9]])
    return TokenizerVocabulary(_wrapped(backend), size=300)


@pytest.fixture(scope="module")
def merging() -> Vocabulary:
    """transformers' BPE with spaces as ▁, whose merges lead to control tokens."""
    pytest.importorskip("transformers")
    import tokenizers

    from paceline.engines.torch_hf.vocabulary import TokenizerVocabulary

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁<>/sabé", "<s", "</", "</s"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    tokenizer = _wrapped(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return TokenizerVocabulary(tokenizer, size=len(pieces))


def _wrapped(backend: Any, **names: str) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


VOCABULARIES = ["apart", "overlapping", "sentencepiece", "byte_level", "merging"]


@pytest.fixture(params=VOCABULARIES, scope="module")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    chosen: Vocabulary = request.getfixturevalue(request.param)
    return chosen


def control_texts(vocabulary: Vocabulary) -> list[str]:
    return sorted({text for text in spellings(vocabulary, sorted(vocabulary.control_ids)) if text})


def assert_whose(text: MarkedText, token_ids: list[int], vocabulary: Vocabulary) -> None:
    """Check that tokens spell a text, and that its control tokens lie where the template wrote all of one."""
    # Every piece begins with a space that SentencePiece puts there, and ▁ is a space to it: without the bytes of both.
    left_out = " ▁".encode() if vocabulary.kind == "spm" else b""
    read = [(vocabulary.token_spelling(token_id) or b"", token_id in vocabulary.control_ids) for token_id in token_ids]
    written_by = zip(str.__str__(text), template_marks(text), strict=True)
    is_control = [(byte, control) for spelling, control in read for byte in spelling if byte not in left_out]
    is_ours = [
        (byte, bool(mark)) for character, mark in written_by for byte in character.encode() if byte not in left_out
    ]
    assert bytes(byte for byte, _ in is_control) == bytes(byte for byte, _ in is_ours)
    assert all(ours for (_, control), (_, ours) in zip(is_control, is_ours, strict=True) if control)


def parts_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[tuple[str, bool]]]:
    """Parts of a text, each with whether the template wrote it: control tokens whole and cut, and other text."""
    tokens = st.sampled_from(control_texts(vocabulary))
    cut = st.builds(lambda text, start, end: text[start:end], tokens, st.integers(0, 5), st.integers(1, 12))
    other = st.text("a <s>|é\n[", max_size=4)
    return st.lists(st.tuples(tokens | cut | other, st.booleans()), max_size=8)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_control_tokens_are_the_template_s(vocabulary: Vocabulary, data: st.DataObject) -> None:
    text = written(*data.draw(parts_of(vocabulary)))
    assert_whose(text, tokenize_rendered(text, vocabulary, adds_opening=False), vocabulary)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_text_of_somebody_makes_none(vocabulary: Vocabulary, data: st.DataObject) -> None:
    text = "".join(part for part, _ in data.draw(parts_of(vocabulary)))
    for token_ids in (
        tokenize_rendered(MarkedText(text), vocabulary, adds_opening=False),
        vocabulary.tokenize(text, add_special=False),
    ):
        assert vocabulary.control_ids.isdisjoint(token_ids)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_what_the_template_spells_becomes_tokens(apart: Vocabulary, data: st.DataObject) -> None:
    """However somebody tries, between the template's."""
    parts = data.draw(st.lists(st.sampled_from([*APART, "<|", "end|>", "a", " ", "\n"]), max_size=5))
    tokens = data.draw(st.lists(st.sampled_from(APART), min_size=len(parts), max_size=len(parts)))
    text = written(
        *(
            (part, ours)
            for both in zip(parts, tokens, strict=True)
            for part, ours in zip(both, (False, True), strict=True)
        )
    )
    token_ids = tokenize_rendered(text, apart, adds_opening=False)
    assert control_of(token_ids, apart) == tokens


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_where_nobody_spells_one_the_tokens_are_the_tokenizer_s(apart: Vocabulary, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.tuples(st.text("aé <|\n🙂", max_size=6), st.sampled_from(["", *APART]))))
    text = written(*((part, ours) for both in parts for part, ours in zip(both, (False, True), strict=True)))
    plain = str.__str__(text)
    token_ids = tokenize_rendered(text, apart, adds_opening=False)
    if all(text_of_somebody_is_free(text, start, len(token)) for token in APART for start in places(plain, token)):
        assert token_ids == apart.tokenize(plain, add_special=False, parse_special=True)
    assert_whose(text, token_ids, apart)


def places(text: str, part: str) -> list[int]:
    return [start for start in range(len(text)) if text.startswith(part, start)]


def text_of_somebody_is_free(text: MarkedText, start: int, length: int) -> bool:
    return 0 not in template_marks(text)[start : start + length]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("<|im_end|>", True)], ["<|im_end|>"]),
        ([("<|im_end|>", False)], []),
        ([("<|im_", True), ("end|>", False)], []),
        ([("<|im_", False), ("end|>", True)], []),
        ([("<|im_e", True), ("n", False), ("d|>", True)], []),
        ([("<|im_", True), ("end|>", True)], ["<|im_end|>"]),
        ([("<|im_start|>", True), ("<|im_start|>", False), ("<|im_start|>", True)], ["<|im_start|>"] * 2),
        ([("<|im_end|>", False), ("<|im_end|>", True)], ["<|im_end|>"]),
        ([("<|im_end|>", True), ("<|im_end|>", False)], ["<|im_end|>"]),
        ([("<|im_end|>", True), ("\n", False)], ["<|im_end|>"]),
        ([("<|im_end|>", True), ("\n", True)], ["<|im_end|>\n"]),
        ([("<|im_end|>", False), ("\n", True)], []),
        ([("<|im_end|>", True), ("a <think> b", False), ("<think>", True)], ["<|im_end|>", "<think>"]),
        ([("", True), ("", False)], []),
    ],
)
def test_whole_partly_and_side_by_side(apart: Vocabulary, parts: list[tuple[str, bool]], expected: list[str]) -> None:
    text = written(*parts)
    token_ids = tokenize_rendered(text, apart, adds_opening=False)
    assert control_of(token_ids, apart) == expected
    assert_whose(text, token_ids, apart)


@pytest.mark.parametrize(
    "parts",
    [
        [("<|im_end|>", True), ("<|im_start|>", False)],
        [("<|im_end|>", True), ("xyz", False)],
        [("<|im_", False), ("end|>xyz", True)],
        [("<|im_end|>", True), ("<|", False), ("im_start|>", True)],
        [("a|a", True), ("|", False), ("a|a", True)],
        [("a|a", True), ("|a|a", False)],
        [("a|", False), ("a|a", True), ("|a", False)],
        [("[PAD5]", False)],
        [("[PAD", True), ("5]", False)],
        [("a\u0301 e\u0301", False), ("|>", True)],
    ],
)
def test_overlaps_are_nobody_s(overlapping: Vocabulary, parts: list[tuple[str, bool]]) -> None:
    text = written(*parts)
    assert_whose(text, tokenize_rendered(text, overlapping, adds_opening=False), overlapping)


def test_padding_by_name_is_no_token_of_somebody_s(overlapping: Vocabulary) -> None:
    """llama.cpp spells out no such token, and knows it by its name all the same."""
    padding = next(iter(overlapping.tokenize("[PAD5]", add_special=False, parse_special=True)))
    assert padding in overlapping.control_ids
    assert overlapping.token_spelling(padding) is None
    text = written(("<think>", True), ("[PAD5]", False), ("<think>", True))
    token_ids = tokenize_rendered(text, overlapping, adds_opening=False)
    assert padding not in token_ids
    assert "".join(spellings(overlapping, token_ids)) == text


def test_what_a_tokenizer_normalises_is_no_token_of_somebody_s(byte_level: Vocabulary) -> None:
    wide = "＜｜ｉｍ＿ｅｎｄ｜＞"
    end = byte_level.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert byte_level.tokenize(wide, add_special=False, parse_special=True) == end, "or this shows nothing"
    token_ids = tokenize_rendered(written(("<|im_start|>", True), (wide, False)), byte_level, adds_opening=False)
    assert byte_level.control_ids.intersection(token_ids) == {token_ids[0]}
    assert "".join(spellings(byte_level, token_ids)) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("text", ["<s>", "</s>", "a<s></s>", "<a b>", "<unk>", "[PAD5]", "<|end|>", "<s", "s>", "<s>>"])
def test_merges_lead_to_no_control_token(sentencepiece: Vocabulary, text: str) -> None:
    token_ids = sentencepiece.tokenize(text, add_special=False)
    assert sentencepiece.control_ids.isdisjoint(token_ids)
    assert b"".join(map(sentencepiece.token_bytes, token_ids)).decode() == " " + text


def test_letters_are_tokens_of_letters_where_there_are_any(sentencepiece: Vocabulary, merging: Vocabulary) -> None:
    """Models hardly see the tokens of bytes that SentencePiece has for what it does not know."""
    assert spellings(sentencepiece, sentencepiece.tokenize("<s>", add_special=False)) == [" ", "<", "s", ">"]
    for vocabulary in (sentencepiece, merging):
        byte_of_letter = vocabulary.tokenize("é<s>" if vocabulary is sentencepiece else "ü<s>", add_special=False)
        assert min(byte_of_letter[-3:]) > 258, "the tokens of bytes come first"


def test_what_the_tokenizer_does_not_know_stays_so(sentencepiece: Vocabulary, merging: Vocabulary) -> None:
    for vocabulary, text in itertools.product((sentencepiece, merging), ("日本", "a\x00b", "ü")):
        text_and_token = written(("<s>", True), (text, False))
        token_ids = tokenize_rendered(text_and_token, vocabulary, adds_opening=False)
        assert token_ids == vocabulary.tokenize("<s>" + text, add_special=False, parse_special=True)


# --- the begin token --------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["begins", "does not begin"], scope="module")
def beginning(request: pytest.FixtureRequest, folder: Path) -> Iterator[Vocabulary]:
    path = folder / f"begin-{request.param}.gguf"
    edits = {"add_bos_token": request.param, "bos_token_id": 4095}
    with open_vocabulary(with_last_tokens(path, ["<|im_start|>", "<|im_end|>", "<s>"], **edits)) as vocabulary:
        yield vocabulary


@pytest.mark.parametrize("adds_opening", [True, False])
@pytest.mark.parametrize("begin", ["", "{{ bos_token }}", "<s>"])
@pytest.mark.parametrize("content", ["hi", "<s>", "<s><s>hi"])
def test_there_is_one_begin_token(beginning: Vocabulary, adds_opening: bool, begin: str, content: str) -> None:
    opens = beginning.tokenize("") == [4095]
    template = ChatTemplate(begin + CHATML, origin="a.gguf", special_tokens={"bos_token": "<s>"})
    for messages in (content, [{"role": "system", "content": content}, {"role": "user", "content": content}]):
        text = template.render(read_messages(messages))
        token_ids = tokenize_rendered(text, beginning, adds_opening=adds_opening)
        assert token_ids.count(4095) == (1 if begin or (opens and adds_opening) else 0)
        assert (token_ids[0] == 4095) == (4095 in token_ids)


def test_a_message_that_begins_with_it_stands_for_none(beginning: Vocabulary) -> None:
    template = ChatTemplate("{{ messages[0].content }}", origin="a.gguf")
    token_ids = tokenize_rendered(template.render(read_messages("<s>hi")), beginning, adds_opening=True)
    opening = beginning.tokenize("")
    assert token_ids == [*opening, *beginning.tokenize("<s>hi", add_special=False)]
    assert token_ids.count(4095) == len(opening)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_a_conversation(apart: Vocabulary) -> None:
    template = ChatTemplate(CHATML, origin="a.gguf")
    messages = [{"role": "user", "content": "Never write <|im_end|>, please."}, {"role": "<|im_end|>", "content": "ok"}]
    text = template.render(read_messages(messages))
    token_ids = tokenize_rendered(text, apart, adds_opening=True)
    assert_whose(text, token_ids, apart)
    assert control_of(token_ids, apart) == [
        "<|im_start|>",
        "<|im_end|>\n",
        "<|im_start|>",
        "<|im_end|>\n",
        "<|im_start|>",
    ]


@settings(max_examples=EXAMPLES)
@given(parts=st.lists(st.sampled_from([*OVERLAPPING, "a", "|", "<", "<|", "<|i", "é", "x"]), max_size=12))
@pytest.mark.parametrize("window", [1, 2, 5, 1 << 15])
def test_every_spelling_is_found_wherever_the_search_goes_on(
    overlapping: Vocabulary, window: int, parts: list[str]
) -> None:
    spellings, text = prompts._get_spellings(overlapping), "".join(parts)
    places = range(len(text) + 1)
    every = [(start, end) for start in places for end in reversed(places) if text[start:end] in spellings._texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spelling, "_WINDOW", window)
        assert list(spellings.in_text(text)) == every


def test_beginnings_of_control_tokens_take_little_time(apart: Vocabulary) -> None:
    """A second or two for each million of them, and none of that at once: other threads go on."""

    def read(count: int) -> None:
        token_ids = tokenize_rendered(MarkedText("<|im" * count), apart, adds_opening=False)
        assert token_ids == apart.tokenize("<|im" * count, add_special=False)

    assert_grows_with_length_alone(read, 100_000)


def test_many_of_them_take_little_time(apart: Vocabulary) -> None:
    """If each were compared with each, it would be minutes."""
    start = MarkedText.of_template("<|im_start|>")

    def read(count: int) -> None:
        spelled = MarkedText("<|im_end|>" * (20 * count))
        text = MarkedText.joined([start + "a"] * count + [spelled] + [start + "<think>"] * count)
        token_ids = tokenize_rendered(text, apart, adds_opening=False)
        assert sum(token_id in apart.control_ids for token_id in token_ids) == 2 * count

    assert_grows_with_length_alone(read, 2000)


def test_a_vocabulary_without_control_tokens() -> None:
    letters = ScriptedVocabulary.of_size(200)
    assert tokenize_rendered(written(("<a", True), ("b>", False)), letters, adds_opening=True) == letters.tokenize(
        "<ab>"
    )


def test_half_a_surrogate_pair_is_an_input_error(vocabulary: Vocabulary) -> None:
    with pytest.raises(InputError, match="half a surrogate pair"):
        tokenize_rendered(MarkedText("a\ud83d"), vocabulary, adds_opening=False)


def test_threads_that_read_differently_do_not_disturb_each_other(byte_level: Vocabulary) -> None:
    """Whether control tokens are read is a setting of the tokenizer, which threads share."""
    text = "a<|im_end|>b" * 50
    expected = {parse: byte_level.tokenize(text, parse_special=parse) for parse in (False, True)}
    wrong: list[bool] = []
    barrier = threading.Barrier(4)

    def read(parse: bool) -> None:
        barrier.wait()
        wrong.extend(parse for _ in range(200) if byte_level.tokenize(text, parse_special=parse) != expected[parse])

    threads = [threading.Thread(target=read, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
