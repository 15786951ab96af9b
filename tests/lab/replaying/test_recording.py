"""Files of recordings: whole, or one clear error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.api import Model
from paceline.core.errors import InputError
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.lab.replaying.recorder import record
from paceline.lab.replaying.recording import (
    RECORDING_VERSION,
    Recording,
    load_recordings,
    save_recordings,
)
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.planning.helpers import Skill, synthetic


def some() -> list[Recording]:
    target = ScriptedEngine(random_model(10, seed=1), ScriptedVocabulary.of_size(10))
    draft = ScriptedEngine(random_model(10, seed=1, spread=1.0), ScriptedVocabulary.of_size(10, [4]))
    drafters: list[Drafter] = [SuffixDrafter(1), DraftModelDrafter(draft, target_vocab_size=10)]
    with Model(target, drafters, NO_SPECULATION) as model:
        return [
            record(model, prompt, depth=4, siblings=3, name=f"prompt {seed}", max_tokens=20, temperature=0.9, seed=seed)
            for seed, prompt in enumerate(([1], [2, 3, 2, 3], [5, 6]))
        ]


def resumed(recording: Recording) -> Recording:
    """The same, as if the first drafter had gone on near where a copy broke off wherever it proposed anything."""
    first, *others = recording.traces
    chains = tuple(tuple(dataclasses.replace(level, resumed=True) for level in chain) for chain in first.chains)
    return dataclasses.replace(recording, traces=(dataclasses.replace(first, chains=chains), *others))


def test_files_give_back_what_was_saved(tmp_path: Path) -> None:
    recordings = some()
    recordings[1] = resumed(recordings[1])
    path = tmp_path / "some.npz"
    save_recordings(path, recordings)
    loaded = load_recordings(path)
    # Margins are stored in single precision.
    for one, other in zip(recordings, loaded, strict=True):
        assert dataclasses.replace(one, traces=()) == dataclasses.replace(other, traces=())
        for trace, again in zip(one.traces, other.traces, strict=True):
            assert dataclasses.replace(trace, chains=()) == dataclasses.replace(again, chains=())
            for chain, loaded_chain in zip(trace.chains, again.chains, strict=True):
                assert [dataclasses.replace(level, margins=(None,) * len(level.margins)) for level in chain] == [
                    dataclasses.replace(level, margins=(None,) * len(level.margins)) for level in loaded_chain
                ]
                margins = [margin for level in chain for margin in level.margins]
                again_margins = [margin for level in loaded_chain for margin in level.margins]
                assert [margin is None for margin in margins] == [margin is None for margin in again_margins]
                known = [margin for margin in margins if margin is not None]
                assert [margin for margin in again_margins if margin is not None] == pytest.approx(known, rel=1e-6)
    assert any(level.count and level.resumed for chain in loaded[1].traces[0].chains for level in chain)
    assert list(tmp_path.iterdir()) == [path]


def test_unlike_recordings_need_files_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="different drafters or depths"):
        save_recordings(tmp_path / "x.npz", [synthetic(1, {"draft": Skill(0.5)}), synthetic(1, {})])
    with pytest.raises(InputError, match="no recordings to save"):
        save_recordings(tmp_path / "x.npz", [])
    with pytest.raises(InputError, match="cannot be written"):
        save_recordings(tmp_path / "missing" / "x.npz", [synthetic(1, {})])
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, header: dict[str, object], **arrays: object) -> None:
    with np.load(path) as file:
        kept = {key: file[key] for key in file.files}
    changed = {**json.loads(kept["header"].tobytes()), **header}
    kept["header"] = np.frombuffer(json.dumps(changed).encode(), dtype=np.uint8)
    np.savez(path, **{**kept, **arrays})


def test_damaged_files_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    message = "some.npz is not a file of recordings, or it is damaged"
    with pytest.raises(InputError, match=r"cannot read the recordings .*No such file"):
        load_recordings(path)
    save_recordings(path, some())
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for damaged in (b"", b"text", whole[:100], whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            load_recordings(path)
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npy").replace(path)
    with pytest.raises(InputError, match=message):
        load_recordings(path)

    for header, arrays in (
        ({"format": "other"}, {}),
        ({"recordings": []}, {}),
        ({"depth": 5}, {}),
        ({"drafters": [{"name": "a"}]}, {}),
        ({}, {"token_ids": np.full(60, 99)}),
        ({}, {"0.margins": np.zeros((2, 2))}),
    ):
        path.write_bytes(whole)
        rewritten(path, header, **arrays)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message):
            load_recordings(path)


def test_other_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    save_recordings(path, some())
    rewritten(path, {"version": 99})
    with pytest.raises(InputError, match=f"version 99, and only {RECORDING_VERSION} can be read"):
        load_recordings(path)
