"""Tests of tool calls need libraries that come with extras."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") and find_spec("llguidance") else ["test_*.py"]
