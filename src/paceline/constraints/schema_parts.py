"""The parts of a JSON schema that are schemas themselves, and where in it they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

from paceline.core.errors import ConstraintError

Path: TypeAlias = tuple[str, ...]
"""Keys from the whole schema to a part of it."""

_ONE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema", "extends", "disallow"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "extends", "disallow")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_INNER = frozenset((*_ONE, *_LISTS, *_MAPPINGS))

_SHARED = ("$defs", "definitions")
_IDS = ("$id", "id")

_MAX_LOOKED_UP = 20_000
"""References times parts with an ``$id``: each pointer is looked for in each of these."""


def iter_subschemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and all in it that are schemas themselves, each with where it is.

    Where a reference may lead into anything, such as ``#/components/a`` or ``#/default``, all objects are yielded.
    """
    anywhere = any(_leads_anywhere(part.get("$ref")) for _, part in iter_standard_subschemas(schema))
    yield from _walk(schema, anywhere=anywhere)


def iter_standard_subschemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and all in it that stands where the standard has schemas, each with where it is."""
    yield from _walk(schema, anywhere=False)


def iter_reachable(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the parts of a schema that JSON is held against, each with where it is: of definitions, those in use."""
    parts = list(iter_subschemas(schema))
    paths = {id(part): path for path, part in parts}
    references = References(schema, parts)
    rest, known = [schema], set[int]()
    while rest:
        part = rest.pop()
        if not isinstance(part, dict) or id(part) in known:
            continue
        known.add(id(part))
        yield paths.get(id(part), ()), part
        inner = [inside for path, inside in _children((), part) if path[0] not in _SHARED]
        rest += reversed([*inner, *references.targets(part.get("$ref"))])


def map_subschemas(part: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema in which each that stands right in it is what a function returns for it."""
    found = dict(part)
    for key, value in part.items():
        if key in _LISTS and isinstance(value, list):
            found[key] = [change(one) for one in value]
        elif key in _MAPPINGS and isinstance(value, dict):
            found[key] = {name: change(one) for name, one in value.items()}
        elif key in _ONE:
            found[key] = change(value)
    return found


def as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shorten_pointer(path: Path) -> str:
    """Return a JSON pointer of at most 80 characters."""
    pointer = "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)
    return pointer if len(pointer) <= 80 else f"{pointer[:40]}...{pointer[-37:]}"


class References:
    """Finds what the ``$ref`` of a schema may stand for.

    Which of several it stands for depends on the ``$id`` around it, so all are told.

    Args:
        parts: as :func:`iter_subschemas` yields them.

    Raises:
        ConstraintError: it has too many references for its number of ``$id``.
    """

    def __init__(self, schema: Any, parts: Iterable[tuple[Path, dict[str, Any]]]) -> None:
        self._roots: list[Any] = [schema]
        self._named: dict[str, list[Any]] = {}
        refs = set()
        for _, part in parts:
            for key in _IDS:
                if isinstance(part.get(key), str):
                    self._roots.append(part)
                    self._named.setdefault(_last_segment(part[key]), []).append(part)
            if isinstance(part.get("$anchor"), str):
                self._named.setdefault(part["$anchor"], []).append(part)
            if isinstance(part.get("$ref"), str):
                refs.add(part["$ref"])
        if len(self._roots) > 1 and len(refs) * len(self._roots) > _MAX_LOOKED_UP:
            raise ConstraintError(
                f"the JSON schema has {len(refs):,} different $ref and {len(self._roots) - 1:,} $id, and the most is "
                f"{_MAX_LOOKED_UP:,} for both multiplied: leave each $id out that no $ref names"
            )

    def targets(self, ref: Any) -> list[Any]:
        """Return what a reference may stand for; nothing for what leads out of the schema."""
        if not isinstance(ref, str):
            return []
        before, _, fragment = ref.partition("#")
        if fragment.startswith("/"):
            found = [_resolve_pointer(root, fragment) for root in self._roots]
            return [one for one in found if one is not None]
        if fragment or before:
            return self._named.get(fragment or _last_segment(before), self._roots)
        return self._roots


def _leads_anywhere(ref: Any) -> bool:
    if not isinstance(ref, str):
        return False
    fragment = ref.partition("#")[2]
    keys = fragment.split("/")
    return fragment.startswith("/") and not (len(keys) == 3 and keys[1] in _SHARED)


def _walk(schema: Any, *, anywhere: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    rest: list[tuple[Path, Any]] = [((), schema)]
    while rest:
        path, part = rest.pop()
        if isinstance(part, list) and anywhere:
            rest += reversed([((*path, str(i)), each) for i, each in enumerate(part)])
        if not isinstance(part, dict):
            continue
        yield path, part
        if anywhere:
            rest += reversed([((*path, key), each) for key, each in part.items()])
            continue
        rest += reversed(_children(path, part))


def _children(path: Path, part: dict[str, Any]) -> list[tuple[Path, Any]]:
    if _INNER.isdisjoint(part):
        return []
    inner: list[tuple[Path, Any]] = [((*path, key), part[key]) for key in _ONE if key in part]
    for key in _LISTS:
        inner += [((*path, key, str(i)), each) for i, each in enumerate(as_list(part.get(key)))]
    for key in _MAPPINGS:
        inner += [((*path, key, name), each) for name, each in as_mapping(part.get(key)).items()]
    return inner


def _resolve_pointer(root: Any, pointer: str) -> Any:
    found = root
    for key in unquote(pointer).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _last_segment(uri: str) -> str:
    """Return the last part of a URI, by which any URI that leads to the same place ends."""
    before, _, fragment = uri.partition("#")
    return before.rstrip("/").rpartition("/")[2] or fragment
