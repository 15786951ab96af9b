"""Scenes' requests under a grammar or a reasoning budget, made of what each says without."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from paceline.core.params import StopRules
from paceline.core.reasoning import ReasoningBudget
from paceline.engines.scripted import ScriptedVocabulary
from tests.automaton import FORBIDDEN, AutomatonConstraint
from tests.helpers import Answer
from tests.proofs import COUNTS
from tests.runtime.scenes import Asked


def random_grammar(rng: random.Random, answer: Answer, vocabulary: ScriptedVocabulary) -> AutomatonConstraint:
    """Return an automaton in which some states leave a choice and some none, few of them not even a token."""
    COUNTS["automata"] += 1
    size, num_states = vocabulary.size, rng.randint(1, 8)
    table = np.full((num_states + 1, size), FORBIDDEN)
    said = answer.token_ids
    wrong = rng.random() < 0.3
    runs: list[list[int]] = []
    for state in range(num_states):
        if state and rng.random() < 0.03:
            runs.append([])
            continue
        allowed = set(rng.sample(range(size), rng.choice((1, 1, min(2, size), rng.randint(1, size), size))))
        if said and rng.random() < 0.5:
            allowed |= set(rng.sample(said, rng.randint(1, len(said))))
        for token_id in allowed - vocabulary.end_ids:
            table[state, token_id] = rng.randrange(num_states)
        if vocabulary.end_ids and (rng.random() < 0.3 or not allowed - vocabulary.end_ids):
            table[state, sorted(vocabulary.end_ids)] = num_states
        if (table[state] == FORBIDDEN).all():
            table[state, rng.randrange(size)] = state
        (choices,) = np.nonzero(table[state] != FORBIDDEN)
        runs.append([int(rng.choice(choices)), *rng.choices(range(size), k=rng.randint(0, 3))])
    runs.append([])
    if vocabulary.end_ids:
        table[num_states, sorted(vocabulary.end_ids)] = num_states
    return AutomatonConstraint(table, 0, runs if wrong else None)


def with_grammar(rng: random.Random, answer: Answer, vocabulary: ScriptedVocabulary) -> Asked:
    """Ask for what was answered under a grammar, mostly, and under one that begins behind a reasoning, sometimes."""
    params, rules = answer.request.params, answer.request.rules
    if rng.random() < 0.1:
        return Asked(params, rules)
    if rng.random() < 0.3:
        first = rng.randrange(len(answer.token_ids))
        budget = ReasoningBudget(
            rng.choice((None, 1, 3, 8)),
            (answer.token_ids[0],),
            tuple(answer.token_ids[first : first + rng.randint(1, 2)]),
            begun=rng.random() < 0.5,
        )
        params = dataclasses.replace(params, reasoning_budget=budget)
    # What stops an answer without a grammar is said by few under one.
    rules = StopRules(rules.max_tokens, (*rules.stop, *(["a"] if rng.random() < 0.05 else [])))
    return Asked(params, rules, random_grammar(rng, answer, vocabulary))


def with_budget(rng: random.Random, answer: Answer, vocabulary: ScriptedVocabulary) -> Asked:
    """Ask for what was answered with a budget, if any, and with control tokens written out."""
    rules = answer.request.rules
    controls = sorted(vocabulary.end_ids)
    rules = StopRules(rules.max_tokens, rules.stop, rules.ignore_end, tuple(controls[: rng.randint(0, 2)]))
    params = answer.request.params
    if rng.random() < 0.1:
        return Asked(params, rules)

    def some(most: int) -> tuple[int, ...]:
        """Return tokens that the answer has in a row, where it has any."""
        first = rng.randrange(len(answer.token_ids))
        return tuple(answer.token_ids[first : first + rng.randint(1, most)])

    def any_tokens(least: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary.size) for _ in range(rng.randint(least, 4)))

    budget = ReasoningBudget(
        rng.choice((0, 1, 2, 3, 5, 8)),
        some(2),
        some(2) if rng.random() < 0.6 else any_tokens(1),
        begun=rng.random() < 0.4,
        forced=any_tokens(0) if rng.random() < 0.3 else (),
    )
    return Asked(dataclasses.replace(params, reasoning_budget=budget), rules)
