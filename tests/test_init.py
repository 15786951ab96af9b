"""The names that the package exports."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest

import paceline


def test_every_public_name_is_that_of_its_module() -> None:
    modules: dict[str, tuple[str, ...]] = vars(paceline)["_MODULES"]
    for module, names in modules.items():
        for name in names:
            value = getattr(paceline, name)
            assert value is getattr(import_module(module), name)
            if isinstance(value, type):
                # Where it is defined, and not where it happens to be imported too.
                assert value.__module__ == module
    assert set(paceline.__all__) <= set(dir(paceline))


def test_type_checkers_see_what_there_is() -> None:
    tree = ast.parse(inspect.getsource(paceline))
    (condition,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in condition.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    modules: dict[str, tuple[str, ...]] = vars(paceline)["_MODULES"]
    assert imported == {name: module for module, names in modules.items() for name in names}
    assert sorted(imported) == sorted(paceline.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'laod'"):
        vars(paceline)["__getattr__"]("laod")
