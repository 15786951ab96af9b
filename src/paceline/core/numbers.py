"""Checks callers' numbers and makes them Python's own: numpy's and torch's are taken, texts and booleans are not."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Final

from paceline.core.errors import InputError

_LONGEST_SHOWN: Final = 60


def whole_number(value: object, name: str, error: type[InputError] = InputError) -> int:
    """Return an ``int``, or what says of itself that it is one, such as ``numpy.int64``; raise ``error`` otherwise.

    A float is refused even where it is whole. ``name`` is what the message calls the value.
    """
    if not _is_truth_value(value):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise error(f"{name} is {shown(value)}, which is not a whole number")


def token_ids(value: object, name: str, error: type[InputError] = InputError) -> tuple[int, ...]:
    """Return token ids as a tuple of ``int``: what can be iterated for whole numbers of 0 or more."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise error(f"{name} is {shown(value)}: give a sequence of token ids")
    numbers = tuple(whole_number(number, f"a token id in {name}", error) for number in value)
    for number in numbers:
        if number < 0:
            raise error(f"{name} has token id {number}: give ids of 0 or more")
    return numbers


def real_number(value: object, name: str, error: type[InputError] = InputError) -> float:
    """Return a ``float``, an ``int``, or what can be taken for one, such as ``numpy.float32``, as ``float``.

    An ``int`` beyond every ``float`` is refused.
    """
    # Strings have no such method: float() reads them, too.
    if not _is_truth_value(value) and (hasattr(value, "__float__") or hasattr(value, "__index__")):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors of several numbers, 10**400
            pass
    raise error(f"{name} is {shown(value)}, which is not a number")


def truth_value(value: object, name: str, error: type[InputError] = InputError) -> bool:
    """Return a ``bool``, or numpy's, as ``bool``: the text "false" is refused, which Python takes for true."""
    if _is_truth_value(value):
        return bool(value)
    raise error(f"{name} is {shown(value)}; give True or False")


def shown(value: object) -> str:
    """Return a value as a message shows it: spelled out where that is short, else its type."""
    text = "" if _is_long(value) else repr(value)
    return text if 0 < len(text) <= _LONGEST_SHOWN and "\n" not in text else f"of type {type(value).__name__}"


def _is_long(value: object) -> bool:
    """Return whether a value is too long to be spelled out; in no time, where spelling it out may take seconds."""
    left, rest = _LONGEST_SHOWN, [value]
    while rest:
        item = rest.pop()
        left -= 1
        if isinstance(item, int):
            # Python refuses to spell out integers of thousands of digits.
            size = item.bit_length() // 3
        elif isinstance(item, str | bytes | bytearray | list | tuple | set | frozenset | dict):
            size = len(item)
        else:
            size = 0
        if left < 0 or size > _LONGEST_SHOWN:
            return True
        if isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            rest += item
    return False


def _is_truth_value(value: object) -> bool:
    # By name, as numpy's bool is no bool, and core does not ask which numpy there is.
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
