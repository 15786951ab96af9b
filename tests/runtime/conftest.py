"""What proofs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.tiny_models import write_model
from tests.runtime.scenes import HEAD_SIZE
from tests.runtime.twins import Twins


@pytest.fixture(autouse=True, scope="package")
def small_head() -> Iterator[None]:
    """Let vocabularies of some hundreds have a tail, which otherwise takes thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.core.sampling.HEAD_SIZE", HEAD_SIZE)
        yield


@pytest.fixture(scope="module", params=["qwen35", "lfm2"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    pytest.importorskip("llama_cpp")
    made = Twins(write_model(tmp_path_factory.mktemp("model") / "model.gguf", request.param))
    yield made
    made.close()
