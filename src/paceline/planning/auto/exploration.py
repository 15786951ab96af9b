"""Exploration budgets: the time that may be spent on trying drafts, as shares."""

from typing import Final

PROBE_SHARE: Final = 0.005
"""Of plain time, for probes."""

WARM_UP_SHARE: Final = 0.01
"""Of what is left of an answer, for planning the first rounds of a request, in which every drafter is asked."""

FREE_PREFILL_SHARE: Final = 0.03
"""Of what is left of an answer, for a drafter without a model to read the prompt."""

PROMPT_CATCH_UP_SHARE: Final = 0.03
"""Of the time a prompt took the target, for a draft model to catch up with it."""

PROMISING_CATCH_UP_SHARE: Final = 0.08
"""Of what is left of an answer, for a draft model to catch up if drafts as they were elsewhere would be worth it."""

DOUBTED_CATCH_UP_SHARE: Final = 0.04
"""Of what is left of an answer, where drafts as they were elsewhere were not worth it the last time."""

UNPROMISING_CATCH_UP_SHARE: Final = 0.01
"""Of what is left of an answer, where drafts as they were elsewhere, or mostly are, would not be worth it."""
