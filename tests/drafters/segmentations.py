"""Vocabularies that are random segmentations of bytes, and a draft that says in one what a target says in another."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction, ScriptedVocabulary, random_model

CHARACTERS = ("a", "b", " ", "\u00e9", "\U0001f600", "\n")


def random_pieces(rng: random.Random, most: int) -> list[bytes]:
    """Return pieces of texts of a few characters: mostly every single byte, and runs of bytes that may part one."""
    text = "".join(rng.choices(CHARACTERS, weights=(6, 6, 4, 2, 1, 1), k=60)).encode()
    singles = sorted({bytes([byte]) for character in CHARACTERS for byte in character.encode()})
    whole = [character.encode() for character in CHARACTERS]
    in_bytes = rng.random() < 0.4
    pieces = set(singles if in_bytes else whole)
    for _ in range(most):
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randint(1, 7)]
        pieces.add(piece if in_bytes else piece.decode("utf-8", "ignore").encode() or b"ab")
    if rng.random() < 0.5:
        # Words that begin with a space, as most tokenizers have them: no text of theirs ends with one.
        pieces |= {b" a", b" b", b" ab"}
    found = sorted(pieces)
    rng.shuffle(found)
    if rng.random() < 0.3:
        del found[-2:]
    if rng.random() < 0.5:
        found += [b"", *rng.sample(found, 3)]  # padding, and ids of the same bytes
    return found


def segment(data: bytes, vocabulary: ScriptedVocabulary) -> list[int]:
    """Cut bytes into the longest tokens of a vocabulary, without the bytes that it has none for."""
    token_ids = []
    while data:
        token_id = next((i for i in vocabulary._longest_first if data.startswith(vocabulary.token_bytes(i))), None)
        if token_id is None:
            data = data[1:]
            continue
        token_ids.append(token_id)
        data = data[len(vocabulary.token_bytes(token_id)) :]
    return token_ids


def translating_model(
    rng: random.Random,
    target: LogitFunction,
    vocabulary: ScriptedVocabulary,
    draft: ScriptedVocabulary,
    distance: float,
    spread: float,
) -> LogitFunction:
    """Return a model over a draft's tokens that likes what the target likes, but for a ``distance`` from 0 to 1."""
    ends = min(vocabulary.end_ids, default=None)
    known, meant = [], []
    for token_id in range(draft.size):
        piece = draft.token_bytes(token_id)
        begun = [i for i in vocabulary._longest_first if piece and vocabulary.token_bytes(i).startswith(piece)]
        of_target = begun or segment(piece, vocabulary)[:1]
        if not of_target and token_id in draft.end_ids and ends is not None:
            of_target = [ends]
        if of_target:
            known.append(token_id)
            meant.append(of_target)
    # Some drafts like tokens that are long, others short ones, which begin more.
    taste = rng.choice((0.3, 0.0, -0.3)) * spread
    bonus = np.array([taste * len(draft.token_bytes(token_id)) for token_id in known])
    noise = random_model(draft.size, seed=rng.getrandbits(32), order=2, spread=spread)

    def logits(tokens: Sequence[int]) -> Float64Array:
        history = segment(b"".join(draft.token_bytes(token_id) for token_id in tokens[-8:]), vocabulary)
        row = np.full(draft.size, -3.0 * spread)
        liked = target(history or [0])
        row[known] = (1.0 - distance) * np.array([liked[of_target].max() for of_target in meant]) + bonus
        return row + distance * noise(tokens)

    return logits
