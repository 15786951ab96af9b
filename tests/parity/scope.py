"""Which of llama.cpp's server tests paceline is to pass, and why it need not pass the others."""

from __future__ import annotations

import re
from dataclasses import dataclass

IN_SCOPE = "in scope"
OUT_OF_SCOPE = "out of scope"

EMBEDDINGS, RERANK = "embeddings", "rerank"
WITH_OWN_MODELS = (EMBEDDINGS, RERANK)


@dataclass(frozen=True)
class Rule:
    """What holds for some cases.

    Attributes:
        cases: a regular expression; it must match the beginning of what follows ``unit/`` in a case's name.
        group: ``OUT_OF_SCOPE``, or one of ``WITH_OWN_MODELS``.
        reason: why the cases are not in scope.
    """

    cases: str
    group: str
    reason: str


_SAID = "what large models say; what is asked of them is asked as pairs"
_UNKNOWN_CALLS = "a family unknown to paceline: the model writes plain objects, and this one comes to no end"
_SHORT = "a prompt of 7 tokens, of which paceline keeps nothing; slot files are asked as pairs"
_SAME = "the same as another case, once the model is replaced"
_OWN = "needs a model of its own kind, which the command may name"
_MODEL = "needs a model that is not a text model, or not here"

# The first rule that matches a case holds for it. A case that no rule matches is in scope.
RULES = (
    Rule(r"test_embedding\.py", EMBEDDINGS, _OWN),
    Rule(r"test_metrics\.py::test_metrics_embedding_", EMBEDDINGS, _OWN),
    Rule(r"test_rerank\.py", RERANK, _OWN),
    Rule(r"test_lora\.py", OUT_OF_SCOPE, "LoRA"),
    Rule(r"test_vision_api\.py", OUT_OF_SCOPE, "vision"),
    Rule(r"test_security\.py::test_local_media_file", OUT_OF_SCOPE, "vision"),
    Rule(r"test_compat_anthropic\.py::test_anthropic_vision_", OUT_OF_SCOPE, "vision"),
    Rule(r"test_compat_anthropic\.py::test_anthropic_tool_result_with_image", OUT_OF_SCOPE, "vision"),
    Rule(r"test_mcp_servers\.py", OUT_OF_SCOPE, "MCP"),
    Rule(r"test_tools_builtin\.py", OUT_OF_SCOPE, "built-in tools"),
    Rule(r"test_security\.py::test_cors_origins_defaults_to_localhost_with_tools", OUT_OF_SCOPE, "built-in tools"),
    Rule(r"test_router\.py::test_router_(remote_preset|download_model|delete_model)", OUT_OF_SCOPE, "the hub"),
    Rule(r"test_router\.py::test_router_dedup_cache_models", OUT_OF_SCOPE, "a cache as a folder of models"),
    Rule(r"test_router\.py::test_router_queue_client_disconnect", OUT_OF_SCOPE, "delays that llama-server has for it"),
    Rule(r"test_proxy\.py", OUT_OF_SCOPE, "proxies"),
    Rule(r"test_security\.py::test_cors_proxy_", OUT_OF_SCOPE, "proxies"),
    Rule(r"test_compat_gcp\.py", OUT_OF_SCOPE, "GCP"),
    Rule(r"test_kv_keep_only_active\.py", OUT_OF_SCOPE, "tags in the log"),
    Rule(r"test_ctx_shift\.py::test_ctx_shift_enabled", OUT_OF_SCOPE, "context shift"),
    Rule(r"test_speculative\.py::test_with_ctx_shift", OUT_OF_SCOPE, "context shift"),
    Rule(r"test_slot_save\.py::test_slot_(save_restore|erase)$", OUT_OF_SCOPE, _SHORT),
    Rule(r"test_slot_save\.py", OUT_OF_SCOPE, "llama-server's own slot files, or images in them"),
    Rule(r"test_stream\.py", OUT_OF_SCOPE, "resumable streams"),
    Rule(r"test_speculative\.py::test_synth_", OUT_OF_SCOPE, "invented acceptance: the text is not the model's"),
    Rule(r"test_basic\.py::test_load_split_model", OUT_OF_SCOPE, _MODEL),
    Rule(r"test_infill\.py::test_with_qwen_model", OUT_OF_SCOPE, _MODEL),
    Rule(r"test_completion\.py::test_cache_vs_nocache_prompt", OUT_OF_SCOPE, "skipped by llama.cpp itself"),
    Rule(r"test_tool_call\.py::test_\w+_real_model\[tool25-code-", OUT_OF_SCOPE, _UNKNOWN_CALLS),
    Rule(r"test_tool_call\.py::test_(weather|calc_result|thoughts|hello_world)\[", OUT_OF_SCOPE, _SAID),
    Rule(r"test_tool_call\.py::test_\w+_real_model\[tool(?!2-)\d+-code-.*-chatml-", OUT_OF_SCOPE, _SAME),
    Rule(
        r"test_tool_call\.py::test_\w+_real_model\[.*(Qwen2\.5-Coder|Qwen2\.5-7B|Llama-3\.2-1B)-", OUT_OF_SCOPE, _SAME
    ),
)

# Checks that hold for the tests' own model alone: its words, and how many tokens its vocabulary makes of a text. A case
# that fails at one of these is said to fail by text; what was asked in it is asked again of both servers, as pairs.
TEXT_CHECKS = (
    r"match_regex\(",
    r"== n_prompt\b",
    r"== n_predicted\b",
    r"== n_token_output\b",
    r"== n_cache\b",
    r"== batch_count\b",
    r'== "<s> ',
    r"== bosId\b",
)

# Cases whose checks name no word and no number, and that hold for the tests' own model alone all the same.
TEXT_CASES = {
    "test_completion.py::test_nocache_long_input_prompt": "a larger vocabulary makes fewer tokens of the prompt",
    "test_ctx_shift.py::test_ctx_shift_disabled_long_prompt": "as above",
    "test_ctx_shift.py::test_ctx_shift_disabled_stream": "a model that knows how to end does not fill the context",
    "test_compat_anthropic.py::test_anthropic_tool_result": "a model may have nothing to say",
}


def rule_of(case: str) -> Rule | None:
    """Return the rule that keeps ``case`` out of scope, None where it is in scope.

    Args:
        case: as pytest names it, ``unit/test_basic.py::test_no_ui``.
    """
    name = case.removeprefix("unit/")
    return next((rule for rule in RULES if re.match(rule.cases, name)), None)


def group_of(case: str) -> str:
    """Return ``IN_SCOPE``, ``OUT_OF_SCOPE`` or one of ``WITH_OWN_MODELS``."""
    rule = rule_of(case)
    return IN_SCOPE if rule is None else rule.group


def fails_by_text(case: str, line: str) -> bool:
    """Return whether ``case``, which failed at ``line``, failed for what the model says alone."""
    return case.removeprefix("unit/") in TEXT_CASES or any(re.search(check, line) for check in TEXT_CHECKS)
