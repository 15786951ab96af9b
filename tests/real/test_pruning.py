"""Models that others made, with fewer tokens: what is left still gives texts back, and every token can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.prune.measuring import check_loads
from paceline.lab.prune.vocabulary import check_spelling, choose_tokens, count_tokens, read_tokens
from paceline.lab.prune.writer import Cut, write_cut
from paceline.lab.samples import heldout_samples
from paceline.models.gguf_file import GGUFFile


@pytest.mark.parametrize(("model", "wanted"), [("smollm2", 16_000), ("gemma", 32_000)])
def test_a_smaller_vocabulary_spells_the_same_texts(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, wanted: int
) -> None:
    source: Path = request.getfixturevalue(model)
    file, texts = GGUFFile(source), [sample.text for sample in heldout_samples()]
    texts.append("naïve 中文 한국어 \U0001f600\u200d\n\n\n\t\t<|im_end|> <bos> ¼\x00")
    cut = ModelOptions(tmp_path / "cut.gguf", threads=1)
    with open_vocabulary(ModelOptions(source)) as before:
        chosen = choose_tokens(read_tokens(file), wanted, count_tokens(before, texts[::2]), before.end_ids)
        assert len(chosen.token_ids) == wanted
        write_cut(file, Path(cut.path), Cut(token_ids=chosen.token_ids))
        with open_vocabulary(cut) as after:
            found = check_spelling(before, after, texts)
            assert found.texts == len(texts)
            assert found.factor is not None
            assert found.factor < 1.2
            assert {int(chosen.token_ids[new]) for new in after.end_ids} == before.end_ids
            for new, old in enumerate(map(int, chosen.token_ids)):
                assert after.token_spelling(new) == before.token_spelling(old)
                text = before.token_bytes(old).decode(errors="replace")
                if before.tokenize(text, add_special=False) == [old]:
                    assert after.tokenize(text, add_special=False) == [new]
    check_loads(cut)
