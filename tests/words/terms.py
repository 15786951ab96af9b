"""The planner's old private terms, told apart from ordinary English.

A term is a word that the planner's code uses in a sense of its own. Most of these are also ordinary words, so each has
patterns of the company that its private sense keeps, and exceptions that say why they are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

DRAFTS: Final = r"(?:draft(?:er|s|ers|ing)?|draft model|lookup|drafts?' cost|speculation|planner)"
"""What the planner speaks of, as a pattern."""

CODE: Final = re.compile(r"``?[^`\n]*``?|\b\w+\.py\b|\]\([^)\s]*\)|--[\w-]+")
"""Names of code, files, options and addresses within prose: identifiers are counted apart."""


@dataclass(frozen=True, slots=True)
class Ordinary:
    """Words that a term's patterns would take for the term.

    Attributes:
        pattern: the words, as a regular expression.
        why: what they mean instead.
    """

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Term:
    """An old private term.

    Attributes:
        old: as it is called in the code.
        say: the field's word for it.
        patterns: regular expressions of its private sense in prose; upper and lower case are the same.
        words: parts of identifiers and of JSON keys that stand for it.
        allowed: exceptions in prose.
        allowed_names: names outside the planner that have one of ``words`` and mean something else, with the reason.
    """

    old: str
    say: str
    patterns: tuple[str, ...]
    words: tuple[str, ...]
    allowed: tuple[Ordinary, ...] = ()
    allowed_names: tuple[tuple[str, str], ...] = ()

    def found_in(self, prose: str) -> list[str]:
        """Return the places of a text that use the term in its private sense, in their order."""
        for exception in self.allowed:
            prose = re.sub(exception.pattern, lambda match: "\0" * len(match[0]), prose, flags=re.IGNORECASE)
        spans: dict[int, str] = {}
        taken = 0
        for match in sorted(
            (match for pattern in self.patterns for match in re.finditer(pattern, prose, re.IGNORECASE)),
            key=lambda match: (match.start(), -match.end()),
        ):
            if match.start() >= taken:
                spans[match.start()] = match[0]
                taken = match.end()
        return list(spans.values())

    def is_in_name(self, name: str, *, of_planner: bool = False) -> bool:
        """Return whether an identifier or a key has the term as one of its words.

        Args:
            name: the identifier, or the key.
            of_planner: whether the planner's code gives the name; no exception holds there.
        """
        if not of_planner and name in dict(self.allowed_names):
            return False
        return any(word in self.words for word in words_of(name))


TERMS: Final = (
    Term(
        "look",
        "probe",
        (
            rf"\b(?:a|an|the|one|each|every|first|last|next|further|such|between|many) looks?\b(?=[^.]*\b{DRAFTS})",
            rf"\b{DRAFTS}\b[^.]*\b(?:about|after|between|by|few|for|in|more|of|on|such|the|two|with) looks?\b",
            rf"\blooks? at (?:a |the |each |that )?{DRAFTS}",
            r"\blooks? (?:take \d|that (?:was|were|is|are) (?:right|wrong|promising))",
            r"\b(?:right|wrong|promising) looks?\b|\blook is due\b",
            r"\blooks? (?:that )?(?:may |can |could )?(?:follow|survive|go deeper|not be paid|be paid)",
            rf"\b{DRAFTS}\b[^.]*\blooked at\b",
            r"\blooking (?:costs|share|budget)",
        ),
        ("look", "looks", "looking", "looked"),
        (
            Ordinary(r"\blook(?:s|ed|ing)?[- ](?:up|for|ahead|behind|like|back|further)\b", "to search, or to see"),
            Ordinary(r"\blook(?:s|ed|ing)? (?:the same|cheap|dear|slower|faster|foreign|good)\b", "to seem"),
            Ordinary(r"\bwithout a look (?:at the network|for a newer one)", "the hub is not asked"),
            Ordinary(r"\bkept cost profile is looked at\b", "a profile is checked, no drafter"),
            Ordinary(r"\bpage to look at\b", "a report is read"),
        ),
        (
            ("_LOOK_S", "seconds between two glances at how far something is"),
            ("_FIRST_LOOK_S", "seconds to wait for the hub"),
            ("look", "`_Meter.look` reads the clock"),
            ("_look", "asks the hub what it has"),
            ("looking", "what a measurement is at: it looks for cores"),
            ("_look_again", "what a pool of sequences held is asked anew"),
            ("_looking", "a lock of what looks tokens up"),
            ("_MAX_LOOKED_UP", "references of a schema that are resolved"),
            ("TOP_P_FIRST_LOOK", "candidates that top-p sorts at first"),
            ("looks_local", "a name has the form of a path"),
            ("looked_up_bytes", "embeddings, of which a pass reads some rows"),
        ),
    ),
    Term(
        "paper",
        "counterfactual credit",
        (r"\bon paper\b", r"\bpaper (?:rounds?|trading|wins?|gains?|credit)\b"),
        ("paper",),
    ),
    Term(
        "rest",
        "back-off",
        (
            r"\b(?:a|an|one|each|every|the longest|the shortest|this|that) rest\b(?=[^.]*\brounds?\b)",
            r"\brests\b(?=[^.]*\brounds?\b)",
            rf"\b{DRAFTS} (?:is |are |was |were )?(?:resting|at rest|rests?|rested)\b",
            r"\blying down\b|\blies? down\b|\blay down\b",
        ),
        ("rest", "rests", "resting"),
        (),
        (
            ("rest", "what is left of a list, or of a whole"),
            ("rest_s", "seconds of a round that no part of it accounts for"),
            ("rest_ms", "milliseconds of a round that no part of it accounts for"),
            ("gemma_rest", "rule of a grammar: what follows the first member"),
        ),
    ),
    Term(
        "hearing",
        "warm-up",
        (
            r"\bhearings?\b",
            rf"\b(?:{DRAFTS}|requests?) (?:is|are|was|were|be|has been|have been) heard\b",
            r"\ba new request is heard\b",
            r"\bhas a say in (?:its|the) first\b",
        ),
        ("hearing", "hearings", "heard"),
        (),
        (("heard", "lines of a log, or bytes of a download, that somebody was told of"),),
    ),
    Term(
        "company",
        "co-proposal",
        (
            r"\bin company\b",
            rf"\b(?:{DRAFTS})(?:'s)? company\b|\bcompany of (?:other )?{DRAFTS}",
            rf"\bbeside (?:other|another) {DRAFTS}\b",
            r"\b(?:gains?|asked|proposed) (?:beside|alone)\b|\bbeside(?: others?)? or alone\b",
            r"\bdrafts? and alone\b",
        ),
        ("company", "alone", "beside"),
        (
            Ordinary(r"\bdraft model alone\b", "no other drafter takes part"),
            Ordinary(r"\bleft alone\b", "not used"),
        ),
        (
            ("alone", "without other requests or parts"),
            ("beside", "next to: a file, a setting, or llama-server"),
            ("_beside", "options of a call with those of its prompt"),
            ("_errors_alone_logged", "nothing but errors is logged"),
            ("beside-server", "a measurement next to llama-server"),
            ("beside_server", "a measurement next to llama-server"),
            ("_BESIDE_MODELS", "files next to models"),
        ),
    ),
    Term("comeback", "re-entry test", (r"\bcome-?backs?\b",), ("comeback", "comebacks")),
    Term("unmet", "cold start", (r"\bunmet\b",), ("unmet",)),
    Term(
        "keeping",
        "prior store",
        (
            r"\b(?:in|into|from|out of|the planner's|paceline's) keeping\b"
            r"(?! (?:with|to|it|them|its|the|a|an|all|up)\b)",
            r"\bkeeping's\b",
        ),
        ("keeping",),
    ),
    Term(
        "blind",
        "draw-independent",
        (r"\bblind(?:ly|ness)?\b",),
        ("blind", "blindly"),
        (Ordinary(r"\b(?:colou?r[- ]blind(?:ness)?|blind (?:people|readers?|users?|person))\b", "of people"),),
    ),
    Term(
        "hoped, doubted, tried share",
        "exploration budget",
        (
            r"\b(?:hoped|doubted)\b",
            r"\b(?:hope|doubt|trying|tried) share\b|\bshare (?:that is |to be )?(?:hoped|doubted|tried)\b",
        ),
        ("hoped", "doubted", "hope", "doubt", "tried"),
        (),
        (("tried", "attempts that were made"),),
    ),
)
"""The old terms of the glossary, in its order."""


def words_of(name: str) -> list[str]:
    """Return the words that a name is made of, in lower case: ``LONGEST_REST`` and ``PaperRound`` alike."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def prose_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a Markdown text with the number of their first line, without code and names of code.

    Fenced blocks are code, and every row of a table is a paragraph of its own.
    """
    first, held, fenced = 0, list[str](), False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        begins_anew = not line.strip() or re.match(r"\s*(?:[-*|#]|\d+\.) ?", line) is not None
        if (fence or begins_anew) and held:
            yield first, CODE.sub(" ", " ".join(held))
            held = []
        if fence:
            fenced = not fenced
        elif not fenced and line.strip():
            first = first if held else number
            held.append(line.strip())
    if held:
        yield first, CODE.sub(" ", " ".join(held))
