"""Heads beside llama.cpp's driver: what it drafted for two tiny models once, and what its log is read as."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.core.errors import CapabilityError
from paceline.engines.loading import open_engine, states_read
from paceline.engines.options import ModelOptions
from tests.engines.tiny_models import write_block_head, write_eagle_head, write_model

pytest.importorskip("llama_cpp")

from benchmarks.beside_driver import Answer, Round, ask_driver, compare, decode, driver_like, read_log

PROMPT = "One prompt, read as bytes"
# Drafts of four tokens by speculative-simple of llama.cpp 0c1e57098, from the answer's second token on.
DRAFTED = {
    "eagle3": [(213, 119, 119, 119), (28, 28, 235, 96), (119, 119, 119, 136), (33, 119, 119, 93)],
    "mtp": [(153, 20, 215, 217), (117, 213, 121, 9), (261, 68, 83, 251), (106, 125, 91, 39)],
    "dflash": [(292, 193, 292, 292), (197, 197, 292, 295), (292, 292, 264, 295), (292, 264, 295, 295)],
    "dspark": [(277, 277, 277, 277), (294, 277, 277, 277), (277, 277, 277, 277), (291, 294, 294, 294)],
}

LOG = """\
0.01 D spec draft:  - seq_id 0, draft candidate   0, pos   0:      7 (   0.900) 'a'
0.01 D spec draft:  - seq_id 0, draft candidate   1, pos   0:      8 (   0.050) 'b'
0.01 D spec draft:  - seq_id 0, draft candidate   0, pos   1:      2 (   0.600) '</s>'
0.01 D spec draft:  - seq_id 0, draft candidate   0, pos   2:      9 (   0.305) 'c'
0.01 D accepted 1/3 draft tokens, the last target token is: (5)
0.01 D spec draft:  - seq_id 0, draft candidate   0, pos   0:      4 (   0.302) 'd'
0.01 D spec draft:  - seq_id 0, draft candidate   1, pos   0:      3 (   0.300) 'e'
0.01 D spec draft:  - seq_id 0, draft candidate   0, pos   1:      9 (   0.500) 'c'
0.01 D spec common_specu: truncating draft to 1 tokens
0.01 D accepted 0/1 draft tokens, the last target token is: (6)
0.01 I n_predict = 3
"""
READ = Answer([1, 7, 5, 6], {1: Round((7, 2), 1), 3: Round((4,), 0)})
ENDING = {4: Round((5,), 0)}


@pytest.mark.parametrize("kind", DRAFTED)
def test_a_head_drafts_what_it_does_for_the_driver(tmp_path: Path, kind: str) -> None:
    name = "qwen35" if kind == "mtp" else "llama"
    path = write_model(tmp_path / "target.gguf", name, tokenizer="bytes", mtp=kind == "mtp", layers=4)
    file = tmp_path / "head.gguf"
    match kind:
        case "eagle3":
            write_eagle_head(file, 32)
        case "dflash":
            write_block_head(file, 32)
        case "dspark":
            write_block_head(file, 32, rank=6, metadata={"dflash.sample_from_anchor": False})
    head = None if kind == "mtp" else file
    options = ModelOptions(
        path,
        context_length=256,
        max_sequences=1,
        threads=1,
        flash_attention=False,
        cache_type_k="f32",
        cache_type_v="f32",
        hold_states=states_read(ModelOptions(path), head),
    )
    target = open_engine(options)
    drafter = driver_like(target, options, head)
    answer = decode(target, [drafter], target.vocabulary.tokenize(PROMPT), 12, 4)
    drafter.close()
    target.close()
    assert [answer.rounds[start].drafted for start in range(1, 5)] == DRAFTED[kind]


def test_a_log_is_read_and_compared() -> None:
    theirs = read_log(LOG, 1, {2})
    assert theirs.token_ids == READ.token_ids
    # What it drafts behind a token that ends the text, or cuts off, does not count.
    assert {start: (each.drafted, each.accepted) for start, each in theirs.rounds.items()} == {
        start: (each.drafted, each.accepted) for start, each in READ.rounds.items()
    }
    # The round that ends a text does not count either.
    found = compare(Answer(READ.token_ids, READ.rounds | ENDING), theirs, 99)
    assert (found["rounds"], found["apart"], found["ours"], found["driver"]) == (2, [], [1, 3], [1, 3])
    for tokens, ties in (((3,), 1), ((8,), 0)):
        other = Answer(READ.token_ids, {**READ.rounds, 3: Round(tokens, 0), **ENDING})
        found = compare(other, theirs, 99)
        assert (found["rounds"], len(found["apart"]), found["ties"]) == (2, 1, ties)


def test_a_log_whose_end_was_lost_is_asked_for_again(tmp_path: Path) -> None:
    log, once = tmp_path / "log.txt", tmp_path / "once"
    log.write_text(LOG)
    program = tmp_path / "driver.py"
    program.write_text(
        f"from pathlib import Path\nlog, once = Path({str(log)!r}), Path({str(once)!r})\n"
        "print(log.read_text() if once.exists() else log.read_text()[:300])\nonce.touch()\n"
    )
    assert ask_driver([sys.executable, str(program)], 1, {2}).token_ids == READ.token_ids
    log.write_text("no round")
    with pytest.raises(CapabilityError, match="no whole log"):
        ask_driver([sys.executable, str(program)], 1, {2})
