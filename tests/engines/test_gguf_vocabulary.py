"""The vocabulary of a GGUF file in many threads at once, one of which may free it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("llama_cpp")

from tests.timing import WAIT_S

from paceline.core.errors import ClosedError
from paceline.engines.llama_cpp import LlamaCppConfig, LlamaCppEngine
from paceline.engines.llama_cpp.loading import vocabulary_of
from paceline.models.embedded import embedded_draft


@pytest.mark.parametrize("turn", range(5))
def test_a_model_that_is_closed_is_freed_once_nobody_reads_its_vocabulary(turn: int) -> None:
    """What was begun is finished, and what comes later is refused: nothing reads what was freed."""
    text = "def add(a, b): return a + b\n" * (100 << turn)
    engine = LlamaCppEngine(LlamaCppConfig(embedded_draft(), threads=1, context_length=64))
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


def test_whoever_looks_up_a_token_waits_for_no_text() -> None:
    with vocabulary_of(embedded_draft()) as vocabulary, ExitStack() as texts:
        # As where as many long texts are tokenized as may be at once.
        for lock in vocabulary._tokenizing:
            texts.enter_context(lock)
        found: list[object] = []
        reader = threading.Thread(target=lambda: found.append((vocabulary.token_bytes(300), vocabulary.control_ids)))
        reader.start()
        reader.join(WAIT_S)
        assert not reader.is_alive()
        assert len(found) == 1
