"""Which of llama.cpp's warnings a user hears of: what changes the text, once, and nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from tests.models.helpers import edited_gguf

from paceline.core.errors import ModelWarning
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.llama_cpp.remarks import of_context, of_model
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft, embedded_target

# As llama.cpp 0.3.36 of the binding says them.
HARMLESS = """
load: control-looking token: 128247 '</s>' was not control-type; this is probably a bug in the model. \
its type will be overridden
load: setting token '<|message|>' (200008) attribute to USER_DEFINED (8), old attributes: 4
load: special_eog_ids contains both '<|return|>' and '<|call|>', or '<|calls|>' and '<|flush|>' tokens, \
removing '<|end|>' token from EOG list
load: '</s>' is a normal token here, removing it from EOG list
load: override 'tokenizer.ggml.add_bos_token' to 'true' for Gemma4
load: model vocab missing newline token, using special_pad_id instead
load: SPM vocabulary, but newline token not found: unordered_map::at! Using special_pad_id instead.
load: empty token at index 5
load: adding 64 dummy tokens
model has unused tensor blk.46.attn_norm.weight (size = 16384 bytes) -- ignoring
llama_model_loader: tensor overrides to CPU are used with mmap enabled - consider using --load-mode none
ggml_cuda_host_malloc: failed to allocate 10.00 MiB of pinned memory: out of memory
load:
load: ************************************
"""
TELLING = {
    "load: missing pre-tokenizer type, using: 'default'": "missing pre-tokenizer type, using: 'default'",
    "load: GENERATION QUALITY WILL BE DEGRADED!": "GENERATION QUALITY WILL BE DEGRADED!",
    "load: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect": (
        "special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect"
    ),
    "load: bad special token: 'tokenizer.ggml.bos_token_id' = 999, using default id 1": (
        "bad special token: 'tokenizer.ggml.bos_token_id' = 999, using default id 1"
    ),
    "load_arch_hparams: Phi SWA is currently disabled - results might be suboptimal for some models": (
        "Phi SWA is currently disabled - results might be suboptimal for some models"
    ),
    "of_a_newer_version: something nobody has heard of yet": "something nobody has heard of yet",
}
OF_CONTEXTS = """
llama_context: n_ctx_seq (8192) > n_ctx_train (4096) -- possible training context overflow
llama_kv_cache_iswa: using full-size SWA cache (ref: https://github.com)
llama_kv_cache: the V embeddings have different sizes across layers and FA is not enabled - padding V cache to 512
"""


def test_what_is_known_to_be_harmless_is_kept_back() -> None:
    assert of_model(HARMLESS.strip().splitlines()) == []
    assert of_context(OF_CONTEXTS.strip().splitlines()) == []


def test_what_changes_the_text_and_what_is_unknown_is_passed_on_once() -> None:
    lines = [*TELLING, *HARMLESS.strip().splitlines(), *TELLING]
    assert of_model(lines) == list(TELLING.values())
    dense = "flash attention disabled; MSA requires it -> running DENSE attention (output may be degraded)."
    assert of_context([*OF_CONTEXTS.strip().splitlines(), f"build: {dense}", f"build: {dense}"]) == [dense]


def load(path: Path) -> None:
    LlamaCppEngine(ModelOptions(path, context_length=64, threads=1)).close()


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"tokenizer.ggml.pre": None}, r"missing pre-tokenizer type, using: 'default'; GENERATION QUALITY"),
        ({"tokenizer.ggml.eos_token_id": 5}, "special_eos_id is not in special_eog_ids"),
        ({"tokenizer.ggml.bos_token_id": 999_999}, "bad special token: 'tokenizer.ggml.bos_token_id' = 999999"),
    ],
)
def test_a_model_whose_text_suffers_is_warned_of_once_and_used(
    edits: dict[str, object], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = edited_gguf(tmp_path / "model.gguf", edits)
    with pytest.warns(ModelWarning, match=words) as caught:
        load(path)
    (warning,) = caught
    assert str(warning.message).startswith(f"{path} may write other text")
    assert "\n" not in str(warning.message)
    assert capfd.readouterr() == ("", "")


def test_a_warning_that_is_an_error_frees_the_model(tmp_path: Path) -> None:
    path = edited_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.pre": None})
    with pytest.raises(ModelWarning, match="missing pre-tokenizer"):
        load(path)


def test_good_models_are_not_warned_of() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for path in (embedded_target(), embedded_draft()):
            load(path)
    assert not warned
