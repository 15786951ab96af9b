"""Models and vocabularies that others made, of which one drafts for another: texts come back, and answers are equal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import paceline
from paceline.core.params import VerifierName
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.models.embedded import HELDOUT_KINDS, embedded_target, heldout
from paceline.vocabularies.alignment import Alignment
from paceline.vocabularies.mapping import TokenMapping, check_translation
from tests.chat.conversing import vocabulary_alone
from tests.proofs import LINES

VOCABULARIES = ("llama-bpe", "llama-spm", "qwen2", "phi-3", "gpt-2", "deepseek-llm", "starcoder")
MIN_AS_AT_ONCE = 0.97


def places(vocabulary: Vocabulary, token_ids: Sequence[int]) -> set[tuple[int, int]]:
    """Return tokens with where they end, counted from the end of the text."""
    found, end = set(), 0
    for token_id in reversed(token_ids):
        found.add((end, token_id))
        end += len(vocabulary.token_bytes(token_id))
    return found


@pytest.mark.parametrize("target_name", VOCABULARIES)
def test_every_text_comes_back_in_the_tokens_of_another_vocabulary(models: Path, target_name: str) -> None:
    """Token by token of the target, and for the most part as the draft's own tokenizer has all of it at once."""
    shares = []
    with ExitStack() as opened:
        vocabularies = {
            name: opened.enter_context(vocabulary_alone(models / f"ggml-vocab-{name}.gguf")) for name in VOCABULARIES
        }
        target = vocabularies.pop(target_name)
        for name, draft in vocabularies.items():
            mapping = TokenMapping(target, draft)
            check_translation(mapping)
            same = most = 0
            for kind in HELDOUT_KINDS:
                text = heldout(kind)[0][:1500].rstrip()
                alignment = Alignment(mapping)
                token_ids = target.tokenize(text)
                for length in range(1, len(token_ids) + 1):
                    alignment.follow(token_ids[:length])
                assert alignment.is_ready, (name, kind)
                said = b"".join(map(draft.token_bytes, alignment.draft_ids)) + alignment.held_back
                assert said.decode().removeprefix(" ") == text.removeprefix(" "), (name, kind)
                at_once = draft.tokenize(text)
                same += len(places(draft, alignment.draft_ids) & places(draft, at_once))
                most += max(len(at_once), len(alignment.draft_ids))
            shares.append(same / most)
            assert shares[-1] >= MIN_AS_AT_ONCE, (name, shares[-1])
    LINES.append(
        f"translated: {target_name}'s texts came back in {len(shares)} vocabularies, at least {min(shares):.2%} of the "
        "tokens as of the whole text at once"
    )


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_drafts_for_one_with_another_vocabulary(
    smollm2: Path, temperature: float, verify: VerifierName
) -> None:
    target = ModelOptions(embedded_target(), context_length=512, exact=True)
    with paceline.load(
        target, draft=DraftOptions(smollm2), drafters=["draft"], policy=paceline.FixedPolicy(4), verify=verify
    ) as model:
        (drafter,) = model.drafters
        assert isinstance(drafter, TranslatedDrafter)
        accepted = rounds = 0
        for seed, kind in enumerate(HELDOUT_KINDS):
            prompt = heldout(kind)[0][:300]
            answer = model.generate(prompt, max_tokens=48, temperature=temperature, seed=seed)
            if model.repeats_text({"temperature": temperature}):
                plain = model.generate(prompt, max_tokens=48, temperature=temperature, seed=seed, speculate=False)
                assert answer.token_ids == plain.token_ids, kind
            accepted += answer.stats.num_accepted
            rounds += answer.stats.rounds
        assert accepted / rounds > 0.3, (accepted, rounds)
        assert {"aligned", "merged"} <= set(drafter.cases)
