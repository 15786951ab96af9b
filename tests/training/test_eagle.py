"""The head that is trained is the head that llama.cpp runs, and it learns."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tomllib", reason="the recipe needs Python 3.11")
pytest.importorskip("llama_cpp")
torch = pytest.importorskip("torch", reason="needs paceline[torch]")

from training.distill import PROMPT_LENGTH, SETTINGS  # noqa: E402
from training.eagle import (  # noqa: E402
    JSON_OPENINGS,
    EagleHead,
    draw_prompts,
    load_target,
    train_eagle,
    write_head,
)
from transformers import LlamaForCausalLM  # noqa: E402

from paceline.engines.base import COMMITTED_END, Step  # noqa: E402
from paceline.engines.llama_cpp import LlamaCppEngine, open_head  # noqa: E402
from paceline.engines.loading import open_vocabulary  # noqa: E402
from paceline.engines.options import ModelOptions  # noqa: E402
from paceline.models.embedded import embedded_target  # noqa: E402
from training import corpus, paths, sources, train  # noqa: E402

ROUNDING = 2e-4


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return load_target(embedded_target())


@pytest.mark.parametrize("known", [None, [3, 17, 300, 301, 4095]], ids=["all tokens", "some tokens"])
def test_steps_of_training_are_what_llama_cpp_drafts(
    target: LlamaForCausalLM, tmp_path: Path, known: list[int] | None
) -> None:
    torch.manual_seed(1)
    steps, places = 4, 6
    head = EagleHead(target, None if known is None else torch.tensor(known))
    for gain in [each for each in head.parameters() if each.ndim == 1]:
        gain.data.uniform_(0.5, 1.5)  # else one norm is as good as another
    tokens = torch.randint(0, 4096, (1, places + steps))
    states = torch.randn(1, places + steps, 3 * 512)
    with torch.inference_mode():
        expected = [head.logits(outputs)[0].numpy() for outputs in head.unroll(tokens, states, steps)]

    options = ModelOptions(
        embedded_target(), context_length=64, threads=1, hold_states=head.layers, cache_type_k="f32", cache_type_v="f32"
    )
    engine = LlamaCppEngine(options)
    write_head(head, embedded_target(), tmp_path / "head.gguf")
    drafting = open_head(engine, tmp_path / "head.gguf")
    for place in range(places):
        sequence = drafting.open()
        read = tokens[0, 1 : place + 2].tolist()
        given = states[0, : place + 1].numpy()
        rows = [Step(sequence, read, range(COMMITTED_END, place), [place], given)]
        for step in range(steps):
            said = drafting.forward(rows).logits(0, 0).copy()
            drafting.commit(sequence, range(len(rows[0].token_ids)))
            if known is not None:
                assert np.isneginf(np.delete(said, known)).all()
                said = said[known]
            np.testing.assert_allclose(said, expected[step][place], rtol=0, atol=ROUNDING)
            rows = [Step(sequence, [int(tokens[0, place + step + 2])], [COMMITTED_END], [0])] if step < 3 else rows
        drafting.close_sequence(sequence)
    drafting.close()
    engine.close()


def test_a_run_ends_by_its_tokens_or_its_time() -> None:
    config = train.TrainConfig("a run", seed=0, tokens=100 * 2048, peak_lr=1.0, seconds=10.0)
    assert train.done_share(config, steps=30, seconds=1.0) == 0.3
    assert train.done_share(config, steps=30, seconds=8.0) == 0.8
    assert train.learning_rate(config, 1e9, 0.85) == pytest.approx(0.5)


def test_a_head_learns_what_the_target_says(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    config = train.TrainConfig(
        "eagle",
        seed=0,
        tokens=16 * train.LENGTH,
        peak_lr=1.5e-3,
        batch_tokens=train.LENGTH,
        warmup_tokens=0,
        long_share=0.0,
        num_threads=1,
        compile=False,
    )
    # It trains in bfloat16, after which llama.cpp cannot run in the same thread on a processor with AMX.
    with ThreadPoolExecutor(1) as apart:
        head = apart.submit(train_eagle, config, embedded_target(), num_texts=4).result()
    texts = torch.from_numpy(np.load(paths.texts("target-q8_0", 4, 0)).astype(np.int64))[:2]
    assert agreement(head, target, texts) > 0.02 > agreement(EagleHead(target), target, texts)


def test_texts_begin_as_every_kind_of_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Names that are not held out.
    prose = sources.Document("prose", "here", "here/a/prose", "A line of prose, and what it is about.\n" * 200)
    code = sources.Document("code", "here", "here/b/code", "    if a == b:\n        return a + b\n" * 200)
    assert not corpus.is_heldout(prose.name)
    assert not corpus.is_heldout(code.name)
    monkeypatch.setattr(sources, "standard_library", lambda: iter([code]))
    monkeypatch.setattr(sources, "installed_packages", lambda: iter([prose]))
    prompts = draw_prompts(embedded_target(), 2 * 4 * len(SETTINGS), seed=3)
    assert {len(prompt) for prompt in prompts} == {PROMPT_LENGTH}
    with open_vocabulary(ModelOptions(embedded_target())) as vocabulary:
        texts = [b"".join(map(vocabulary.token_bytes, prompt)).decode(errors="replace") for prompt in prompts]
    for first in (0, 16):
        # As many of a kind follow one another as there are settings to go on with.
        assert all("return a" in text for text in texts[first : first + 4])
        assert all("of prose" in text for text in texts[first + 4 : first + 8])
        assert all(text.startswith(JSON_OPENINGS) for text in texts[first + 8 : first + 12])
    assert len({*texts[8:12], *texts[24:28]}) == 8


def agreement(head: EagleHead, target: LlamaForCausalLM, texts: Any) -> float:
    """Return the share of first drafts that are what the target would say greedily."""
    with torch.inference_mode():
        read = target.model(texts, output_hidden_states=True)
        states = torch.cat([read.hidden_states[layer] for layer in head.layers], -1)
        drafted = head.logits(next(head.unroll(texts, states, 1))).argmax(-1)
        wanted = target.lm_head(read.last_hidden_state[:, 1:]).argmax(-1)
        return float((drafted == wanted).float().mean())
