"""What is checked before anything is done."""

from __future__ import annotations

import sys

import pytest

from paceline.core.errors import CapabilityError, VocabularyMismatchError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.distil.steps import check_installed, check_tokens
from tests.lab.scripted_pairs import bytes_vocabulary


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("accelerate", "torch"), ("peft", "distil")])
def test_what_is_not_installed_is_named_with_its_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("torch", "transformers", "accelerate", "peft"):
        monkeypatch.setitem(sys.modules, each, None if each == package else sys)
    with pytest.raises(CapabilityError, match=rf"{package}.*\[{extra}\]"):
        check_installed(lora=True)


def test_other_tokens_are_refused() -> None:
    target = bytes_vocabulary()
    draft = ScriptedVocabulary([bytes([255 - value]) for value in range(256)])
    with pytest.raises(VocabularyMismatchError, match="pruned"):
        check_tokens(target, draft)
    assert check_tokens(target, target).fit == "as is"
