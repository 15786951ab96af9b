"""What processors leave of a row, against llama.cpp's own samplers: the same tokens with the same probabilities."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("llama_cpp")

import llama_cpp.llama_cpp as api

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.params import LLAMA_CPP_ORDER, SamplingParams
from paceline.core.sampling import RowSampler, probabilities
from paceline.core.vocabulary import Vocabulary
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.models.embedded import embedded_draft
from paceline.vocabularies.breakers import BreakerFinder

_ENTRY: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

_TEXT: Final = 'if a:\n    print("x * y", a)\nif a:\n    print("x * z", a)\n'
"""Has all of the usual breakers, and repeats itself."""


@pytest.fixture(scope="module")
def vocabulary_pointer() -> Iterator[Any]:
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(embedded_draft()).encode(), params)
    assert model is not None
    yield api.llama_model_get_vocab(model)
    api.llama_model_free(model)


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    with open_vocabulary(embedded_draft()) as opened:
        yield opened


def llama_probabilities(
    params: SamplingParams, row: FloatArray, history: Sequence[int], vocabulary: Any
) -> Float64Array:
    """Run llama.cpp's chain of samplers in its usual order."""
    size = len(row)
    breakers = [text.encode() for text in params.dry_sequence_breakers]
    last_n = len(history) if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    samplers = (
        api.llama_sampler_init_penalties(
            size, params.penalty_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        ),
        api.llama_sampler_init_dry(
            vocabulary,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            last_n,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        ),
        api.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        api.llama_sampler_init_top_k(params.top_k),
        api.llama_sampler_init_typical(params.typical_p, 0),
        api.llama_sampler_init_top_p(params.top_p, 0),
        api.llama_sampler_init_min_p(params.min_p, 0),
        api.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, params.seed),
        *([api.llama_sampler_init_infill(vocabulary)] if "infill" in params.order else []),
        api.llama_sampler_init_temp_ext(params.temperature, params.dynatemp_range, params.dynatemp_exponent),
    )
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for sampler in samplers:
        api.llama_sampler_chain_add(chain, sampler)
    for token_id in history:
        api.llama_sampler_accept(chain, token_id)
    entries: npt.NDArray[Any] = np.zeros(size, _ENTRY)
    entries["id"], entries["logit"] = np.arange(size), row
    listed = api.llama_token_data_array(entries.ctypes.data_as(ctypes.POINTER(api.llama_token_data)), size, -1, False)
    api.llama_sampler_apply(chain, ctypes.byref(listed))
    left = np.ctypeslib.as_array(ctypes.cast(listed.data, ctypes.POINTER(ctypes.c_int32)), (listed.size, 3)).copy()
    api.llama_sampler_free(chain)
    logits = left[:, 1].view(np.float32).astype(np.float64)
    found = np.zeros(size)
    found[left[:, 0]] = np.exp(logits - logits.max())
    normalised: Float64Array = found / found.sum()
    return normalised


FILTERS: Final[dict[str, dict[str, Sequence[Any]]]] = {
    "top_n_sigma": {"top_n_sigma": (0.3, 0.8, 2.0)},
    "typical_p": {"typical_p": (0.3, 0.8, 0.95)},
    "xtc": {"xtc_probability": (1.0, 1.0, 0.0), "xtc_threshold": (0.0, 0.01, 0.05, 0.2, 0.6)},
    "temperature": {"dynatemp_range": (0.4, 0.8, 1.5), "dynatemp_exponent": (0.5, 1.0, 2.0)},
    "infill": {"order": ((*LLAMA_CPP_ORDER[:-1], "infill", "temperature"),)},
    "dry": {
        "dry_multiplier": (0.8, 2.0),
        "dry_base": (1.0, 1.2, 1.75),
        "dry_allowed_length": (0, 1, 2, 4),
        "dry_penalty_last_n": (5, 64, -1),
        "dry_sequence_breakers": (("\n", ":", '"', "*"), (), ("print",), ("    pri", 'nt("x'), ("):\n", "x * y", "é—")),
    },
}


@pytest.mark.parametrize("name", [*FILTERS, "all"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["alone", "with the usual filters"])
def test_processors_leave_what_llama_cpp_leaves(
    name: str, is_cut: bool, vocabulary: Vocabulary, vocabulary_pointer: Any
) -> None:
    rng = np.random.default_rng([*name.encode(), is_cut])
    finder, text = BreakerFinder(vocabulary), vocabulary.tokenize(_TEXT, add_special=False)
    changed, outcomes = 0, Counter[str]()

    def spell(token_id: int) -> str:
        return vocabulary.token_bytes(token_id).decode()

    for case in range(30):
        values: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.5])), "seed": case}
        for of_filter in FILTERS if name == "all" else (name,):
            values |= {field: choices[int(rng.integers(len(choices)))] for field, choices in FILTERS[of_filter].items()}
        if name == "all" and (case % 2 or not is_cut):
            # llama.cpp's infill counts the tokens that top_n_sigma left out, and takes the square of many.
            values.pop("order")
        if name == "all" and case % 2:
            # llama.cpp's typical_p takes the logarithm of a probability that is 0 where this one leaves tokens out ...
            values.pop("typical_p")
            # ... and XTC keeps one of these alone where all that reach a probability of 0 are too likely.
            values["xtc_threshold"] = max(values["xtc_threshold"], 0.01)
        elif name == "all":
            # ... or where DRY takes so much that it underflows.
            values.pop("top_n_sigma")
            values["dry_base"] = 1.0
        values |= (
            {"top_k": int(rng.choice([5, 40])), "repeat_penalty": 1.1}
            if is_cut
            else {"top_k": 200 if name == "infill" else 0, "top_p": 1.0, "min_p": 0.0}
        )
        if not is_cut and "top_n_sigma" in values:
            # To its dynamic temperature, what deviates too much still counts as a token that might come.
            values.pop("dynatemp_range", None)
        history = [*text * 3][: int(rng.integers(1, 3 * len(text)))]
        if case % 4 == 0:
            history = rng.choice(history[:4], 200).tolist()
        elif name == "dry" and case % 4 == 1:
            # From the end of one token into the next one, four tokens before the end.
            history = [*text * 3][: 2 * len(text) + int(rng.integers(len(text)))]
            over_two = spell(history[-5])[-1:] + spell(history[-4])
            values |= {"dry_sequence_breakers": (over_two,), "dry_allowed_length": 1, "dry_penalty_last_n": -1}
        row: FloatArray = rng.normal(0.0, rng.choice([0.5, 2.0, 4.0]), vocabulary.size).astype(np.float32)
        # What would go on with the text, among others.
        row[[*text[:20], history[0]]] += rng.exponential(1.5, 21).astype(np.float32) + 8.0
        row[[*vocabulary.end_ids]] = row.max() - rng.uniform(2.0, 12.0)
        params = SamplingParams(**values)
        sampler = RowSampler(params, breakers=finder.find(params), vocabulary=vocabulary)
        ours = probabilities(sampler.candidates(row, history), vocabulary.size, greedy=params.greedy)
        theirs = llama_probabilities(params, row, history, vocabulary_pointer)
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-6, err_msg=str(values))
        plain = SamplingParams(**{field: values[field] for field in values if field not in _FIELDS})
        outcomes[_outcome(ours, vocabulary)] += 1
        changed += not np.allclose(
            ours, probabilities(RowSampler(plain).candidates(row, history), len(row), greedy=plain.greedy)
        )
    assert changed >= 6
    if name == "infill":
        assert min(outcomes[each] for each in ("an end", "a text", "either")) >= 1, outcomes


def _outcome(probs: Float64Array, vocabulary: Vocabulary) -> str:
    ends = {token_id in vocabulary.end_ids for token_id in np.flatnonzero(probs).tolist()}
    return "either" if len(ends) == 2 else "an end" if True in ends else "a text"


_FIELDS: Final = {field for fields in FILTERS.values() for field in fields}
