"""Strategies for the parts of an answer."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from paceline.core.logprobs import TokenLogprob

TEXTS: Final = st.one_of(
    st.sampled_from(
        ["", " the", "\n", '"\\/\b\x00\x1f\x7f', "\u2028", "\ud83d", "\udcff a", "ß中😀", "\\ud83d", "</script>"]
    ),
    st.text(st.characters(exclude_categories=())),
)

LOGPROBS: Final = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 259),
    logprob=st.floats(-50, 0),
    top=st.lists(st.tuples(st.integers(0, 259), st.floats(-50, 0)), max_size=3).map(tuple),
)
