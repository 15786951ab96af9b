"""What is refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.models.helpers import write_gguf

import paceline.engines.loading as loading
from paceline.conversion.convert import gguf_to_folder
from paceline.core.errors import CapabilityError, ContextLengthError, InputError, ModelFileError
from paceline.core.vocabulary import Vocabulary
from paceline.engines.loading import check_prompt, foreseen_context_length, open_engine, open_vocabulary
from paceline.engines.options import DraftOptions, EngineName, ModelOptions
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target

TEXTS = ("", "def f(x):\n", "größer 日本 \x00")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "folder"
    gguf_to_folder(embedded_draft(), path, dtype="F16")
    return path


@pytest.mark.parametrize("engine", ["llama_cpp", "torch_hf"])
def test_a_vocabulary_alone_is_that_of_the_engine(engine: EngineName, folder: Path) -> None:
    if engine == "torch_hf":
        pytest.importorskip("torch", reason="needs paceline[torch]")
    options = ModelOptions(folder if engine == "torch_hf" else embedded_draft(), context_length=64, threads=1)
    opened = open_engine(options)
    try:
        with open_vocabulary(options) as vocabulary:
            for text in TEXTS:
                assert vocabulary.tokenize(text) == opened.vocabulary.tokenize(text)
    finally:
        opened.close()


def test_a_third_engine_is_taken_for_none_of_the_others() -> None:
    options = ModelOptions(embedded_draft(), engine="llama_cpp")
    object.__setattr__(options, "engine", "third")  # as if it were in the table of engines
    with pytest.raises(InputError, match="unknown engine third"):
        open_engine(options)
    with pytest.raises(InputError, match="unknown engine third"), open_vocabulary(options):
        pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths whose vocabularies were loaded."""
    paths: list[str] = []

    @contextmanager
    def counting(options: ModelOptions) -> Iterator[Vocabulary]:
        paths.append(str(options.path))
        with open_vocabulary(options) as vocabulary:
            yield vocabulary

    monkeypatch.setattr(loading, "open_vocabulary", counting)
    return paths


@pytest.mark.parametrize("context_length", [64, None])
def test_only_a_prompt_of_many_bytes_is_counted(context_length: int | None, counted: list[str]) -> None:
    options = ModelOptions(embedded_draft(), context_length=context_length)
    longest = foreseen_context_length(options)
    check_prompt(options, "x" * (longest - 9))
    assert counted == []
    # Its bytes are more than the context has room for, its tokens are not.
    check_prompt(options, " " * longest)
    assert counted == [str(embedded_draft())]
    with pytest.raises(
        ContextLengthError,
        match=rf"the context holds {longest}, answer included: shorten the prompt or "
        + (r"raise .*\(`context_length`\)" if context_length else "take a model made for longer texts"),
    ):
        check_prompt(options, "€" * longest)


def test_the_context_is_foreseen_as_the_engine_will_give_it(tmp_path: Path) -> None:
    trained = describe(embedded_draft()).context_length
    assert trained is not None
    with pytest.raises(ContextLengthError, match=f"{trained + 1} tokens is more than the {trained}"):
        foreseen_context_length(ModelOptions(embedded_draft(), context_length=trained + 1))
    shrinking = ModelOptions(embedded_draft(), context_length=trained + 1, context_may_shrink=True)
    assert foreseen_context_length(shrinking) == trained
    short = write_gguf(tmp_path / "short.gguf", llama__context_length=100)
    assert foreseen_context_length(ModelOptions(short)) == 100
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        check_prompt(ModelOptions(tmp_path / "bad.gguf"), "x")


def test_a_draft_runs_as_its_target_does() -> None:
    target = ModelOptions(
        embedded_target(), threads=1, threads_batch=2, flash_attention=True, exact=True, context_length=512
    )
    draft = DraftOptions(embedded_target()).beside(target)
    assert (draft.threads, draft.threads_batch, draft.flash_attention) == (1, 2, True)
    assert (draft.context_length, draft.context_may_shrink, draft.branches, draft.exact) == (512, True, 0, False)
    own = DraftOptions(embedded_target(), 64, 3, ("none",), threads=4).beside(target)
    assert (own.context_length, own.context_may_shrink, own.gpu_layers, own.devices) == (64, False, 3, ("none",))
    # Threads of its own are for both kinds of passes.
    assert (own.threads, own.threads_batch) == (4, None)


def test_a_draft_on_another_engine_gets_nothing_in_terms_of_its_targets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    target = ModelOptions(embedded_target(), threads=1, threads_batch=2, flash_attention=True)
    draft = DraftOptions(tmp_path).beside(target)
    assert (draft.threads, draft.threads_batch, draft.flash_attention) == (1, None, None)
    draft = DraftOptions(embedded_target()).beside(ModelOptions(tmp_path, threads=1, dtype="float32"))
    assert (draft.threads, draft.dtype) == (1, None)
    with pytest.raises(CapabilityError, match="give those of both"):
        DraftOptions(tmp_path, threads=2).beside(target)


def test_a_drafts_context_of_0_is_all_that_it_was_made_for(tmp_path: Path) -> None:
    target = ModelOptions(embedded_target(), context_length=64)
    draft = DraftOptions(embedded_draft(), 0).beside(target)
    assert draft.context_length == describe(embedded_draft()).context_length
    assert not draft.context_may_shrink
    silent = write_gguf(tmp_path / "silent.gguf")
    with pytest.raises(InputError, match=r"is the model's own context, and .*silent\.gguf names none"):
        DraftOptions(silent, 0).beside(target)


@pytest.mark.parametrize("size", [1, -1])
def test_a_draft_needs_room_for_what_was_said_and_for_what_it_drafts(size: int) -> None:
    with pytest.raises(InputError, match=f"^`DraftOptions.context_length` {size}: the least is 2"):
        DraftOptions(embedded_draft(), size)


def test_a_draft_has_to_be_named() -> None:
    with pytest.raises(InputError, match="no draft model is named: give one \\(`draft`\\)"):
        DraftOptions().beside(ModelOptions(embedded_target()))
