"""Policies as the command line names them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from benchmarks.planner_ab.scenes import Build
from paceline.core.errors import InputError
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy

POLICY_HELP: Final = f"{', '.join(ADAPTIVE_POLICIES)}, 'fixed N', or FILE.py:NAME, which returns one of its own"

_FIXED: Final = re.compile(r"fixed (\d+)")


def builder(spec: str) -> Build:
    """Return what builds a policy.

    Args:
        spec: a name, ``fixed N``, or ``FILE.py:NAME``; the function of that name is given what passes cost and what an
            earlier process learned, or ``None``.
    """
    if spec in ADAPTIVE_POLICIES:
        return lambda costs, learned: build_policy(spec, costs=costs, learned=learned)
    if fixed := _FIXED.fullmatch(spec):
        policy = FixedPolicy(int(fixed[1]))
        return lambda costs, learned: policy
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise InputError(f"unknown policy {spec!r}: choose from {POLICY_HELP}")
    return _own(Path(file), name)


def _own(path: Path, name: str) -> Build:
    found = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or found is None or found.loader is None:
        raise InputError(f"{path} of policy {path}:{name} is no Python file: give the file that has {name}")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        raise InputError(f"{path} has no function {name}: it is given costs and what was learned, and returns a policy")
    return build  # type: ignore[no-any-return]
