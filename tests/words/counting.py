"""Counts of old terms by where they stand, and of docstrings that do not stand by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.words import collecting
from tests.words.collecting import PLANNING, ROOT, SOURCES, Seen
from tests.words.docstrings import Fault, constant_faults, entry_faults
from tests.words.terms import TERMS, Term

SEEN_BY_USERS: Final[Mapping[str, Callable[[], Iterable[Seen]]]] = {
    "documents": collecting.documents,
    "pages": collecting.pages,
    "help": collecting.help_texts,
    "strings": lambda: collecting.strings(SOURCES),
    "strings of benchmarks": lambda: collecting.strings(ROOT / "benchmarks"),
    "keys": collecting.keys,
    "bodies": collecting.bodies,
}
"""Where a user may meet a term, with what yields the texts."""

SEEN_IN_CODE: Final[Mapping[str, Callable[[], Iterable[Seen]]]] = {
    "identifiers": collecting.identifiers,
    "docstrings": collecting.docstrings,
}
"""Where only a reader of the code meets a term, with what yields the texts."""


@dataclass(frozen=True, slots=True)
class Found:
    """An old term where it stands.

    Attributes:
        term: the term.
        place: file and line, or the command whose help has it.
        words: the words, or the name.
    """

    term: Term
    place: str
    words: str

    @property
    def in_planning(self) -> bool:
        """Whether it stands in the planner's own code."""
        return in_planning(self.place)


def in_planning(place: str) -> bool:
    """Return whether a place is in the planner's own code."""
    return place.startswith(f"{PLANNING.relative_to(ROOT).as_posix()}/")


def find(texts: Iterable[Seen]) -> Iterator[Found]:
    """Yield every old term of some texts."""
    for seen in texts:
        for term in TERMS:
            if not seen.is_name:
                yield from (Found(term, seen.place, words) for words in term.found_in(seen.text))
            elif term.is_in_name(seen.text, of_planner=in_planning(seen.place)):
                yield Found(term, seen.place, seen.text)


def docstring_faults() -> tuple[list[Fault], list[Fault]]:
    """Return entries that point back, and constants without a docstring of their own, of the whole package."""
    paths = sorted(SOURCES.rglob("*.py"))
    return _all(entry_faults, paths), _all(constant_faults, paths)


def _all(check: Callable[[Path, Path], Iterator[Fault]], paths: Iterable[Path]) -> list[Fault]:
    return [fault for path in paths for fault in check(path, ROOT)]


def figures() -> dict[str, Any]:
    """Return all counts and places as plain data."""
    entries, constants = docstring_faults()
    return {
        "users": {where: _counts(list(find(texts()))) for where, texts in SEEN_BY_USERS.items()},
        "code": {where: _counts(list(find(texts()))) for where, texts in SEEN_IN_CODE.items()},
        "entries_that_point_back": [_fault(fault) for fault in entries],
        "constants_without_a_docstring": [_fault(fault) for fault in constants],
    }


def _counts(found: list[Found]) -> dict[str, Any]:
    return {
        "total": len(found),
        "of_the_planner": sum(each.in_planning for each in found),
        "distinct": len({each.words for each in found}),
        "by_term": dict(Counter(each.term.old for each in found)),
        "places": [{"place": each.place, "term": each.term.old, "words": each.words} for each in found],
    }


def _fault(fault: Fault) -> dict[str, str]:
    return {"place": fault.place, "name": fault.name, "text": fault.text}
