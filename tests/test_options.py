"""Options of a call: what is left out or ``None`` has its default, and what cannot be used is one clear line."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import paceline
from paceline.chat.params import ChatParams
from paceline.cli.options import in_flags
from paceline.constraints import Source
from paceline.core.constraint import Constraint
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.logprobs import LogprobParams
from paceline.core.params import (
    MAX_TOKENS,
    TRANSFORMERS_ORDER,
    CacheParams,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from paceline.core.reasoning import ReasoningBudget
from paceline.engines.options import DraftOptions, LoadOptions, ModelOptions
from paceline.environment import Environment, ModelChoice, from_environment, variables_of_the_table
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.hub.reference import HubModel, HubOptions
from paceline.models.registry import CACHE_VARIABLE
from paceline.options import REQUEST_PARTS, GenerateOptions, read_options
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.shared_cache import SHARED_VARIABLE
from paceline.server_options import ServerOptions


def test_every_option_may_be_left_out_or_none() -> None:
    nothing = dict.fromkeys(GenerateOptions.__annotations__.keys() - {"constraint"})
    for options in ({}, nothing):
        params, rules, speculation, cache, logprobs = read_options(options).parts
        assert params == SamplingParams(seed=params.seed)
        assert (rules, speculation, cache) == (StopRules(), SpeculationParams(), CacheParams())
        assert logprobs == LogprobParams(None, False)
    assert len({read_options({}).params.seed for _ in range(5)}) > 1


def test_options_reach_the_part_they_belong_to() -> None:
    params, rules, speculation, cache, logprobs = read_options(
        {
            "temperature": np.float64(0.5),
            "seed": 3,
            "max_tokens": np.int16(9),
            "stop": "a",
            "speculate": False,
            "cache_prompt": False,
            "namespace": "a tenant",
            "logprobs": np.int64(5),
            "post_sampling_probs": np.True_,
            "preserved_ids": np.array([7, 8]),
            "reasoning_budget": ReasoningBudget(5, (7,), (8,)),
        }
    ).parts
    assert cache == CacheParams(False, "a tenant")
    assert logprobs == LogprobParams(5, True)
    budget = ReasoningBudget(5, (7,), (8,))
    assert params == SamplingParams(temperature=0.5, seed=3, reasoning_budget=budget)
    assert rules == StopRules(9, ("a",), preserved_ids=(7, 8))
    assert speculation == SpeculationParams(speculate=False)
    assert read_options({"stop": ["a", "b"]}).rules.stop == ("a", "b")
    assert read_options({"order": list(TRANSFORMERS_ORDER)}).params.order == TRANSFORMERS_ORDER


def test_how_a_request_is_sped_up_is_its_own_to_say() -> None:
    there_are = ("suffix", "draft")
    options = {"drafters": ["draft"], "draft_max": np.int64(3), "verify": "coupled"}
    speculation = read_options(options, verify="rejection", drafters=there_are).speculation
    assert speculation == SpeculationParams(drafters=("draft",), draft_max=3, verify="coupled")
    of_its_own = read_options({"policy": "fixed", "draft_min": np.int8(2), "p_min": np.float32(0.5)}).speculation
    assert of_its_own == SpeculationParams(draft_min=2, p_min=0.5, policy="fixed")
    assert read_options({"verify": None}, verify="rejection").speculation.verify == "rejection"
    for others in (there_are, ()):
        with pytest.raises(InputError, match="unknown drafter 'lookup'"):
            read_options({"drafters": ["lookup"]}, drafters=others)


def test_type_checkers_know_the_options_that_there_are() -> None:
    """Each is of its field's type, or ``None``; several texts or tokens may be any sequence of them."""
    spelled = get_type_hints(GenerateOptions)
    fields = {name: kind for part in REQUEST_PARTS for name, kind in get_type_hints(part).items()}
    assert spelled.pop("constraint") == Source | Constraint | None
    assert spelled.keys() == fields.keys()
    for name, kind in fields.items():
        accepted = kind
        if tuple[str, ...] in (kind, *get_args(kind)):
            accepted = Sequence[str]
        if tuple[int, ...] in (kind, *get_args(kind)):
            accepted = Sequence[int]
        if name == "prediction":
            # A text is read as tokens.
            accepted = str | accepted
        assert spelled[name] == accepted | None, name


def test_type_checkers_know_what_load_takes_by_name() -> None:
    spelled, fields = get_type_hints(LoadOptions), get_type_hints(ModelOptions)
    assert spelled.keys() == {field.name for field in fields_of(ModelOptions)} - {"path"} | {"cells"}
    for name, kind in spelled.items():
        assert kind == (Sequence[str] if fields[name] == tuple[str, ...] else fields[name]) | None, name


def test_what_a_call_may_set_is_in_its_docstring() -> None:
    described = inspect.getdoc(paceline.Model.generate) or ""
    for name in GenerateOptions.__annotations__:
        assert re.search(rf"^    {name}: \S", described, re.MULTILINE), name


@pytest.mark.parametrize(
    "options",
    [
        {"tempratur": None},
        {"max_tokens": "5"},
        *({"stop": stop} for stop in (5, ["a", 5], b"a")),
        {"speculate": "no"},
        {"ignore_end": 1},
        {"order": 5},
        {"drafters": []},
        {"draft_max": 0},
        {"draft_min": -1},
        {"draft_max": 3, "draft_min": 4},
        {"p_min": 1.5},
        {"policy": "fast"},
        {"preserved_ids": "[THINK]"},
        {"preserved_ids": [3, -1]},
        {"reasoning_budget": 5},
        *({"logprobs": number} for number in (1001, -1, True)),
        {"post_sampling_probs": 1},
        {"verify": "trust"},
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_named(options: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        read_options(options)
    assert caught.value.field in options
    assert "\n" not in str(caught.value)


def test_a_context_of_0_is_all_that_the_target_was_made_for() -> None:
    models = ModelChoice.of({"path": "target", "context_length": 0, "threads": 1}, {"path": "draft"})
    assert (models.target, models.draft.path) == ("target", "draft")
    target = models.target_options(embedded_target())
    trained = describe(embedded_target()).context_length
    assert target == ModelOptions(embedded_target(), context_length=trained, threads=1)
    draft = models.draft_options(target, embedded_draft())
    assert (draft.path, draft.threads, draft.context_may_shrink) == (embedded_draft(), 1, True)


def test_models_may_be_named_by_where_the_hub_has_them() -> None:
    models = ModelChoice.of({"threads": 1}, {"threads": 2}, {"repo": "u/m:Q8_0", "draft_repo": "u/d", "offline": True})
    assert models.target == HubModel("u/m", "Q8_0", offline=True)
    assert models.named_draft == HubModel("u/d", offline=True)
    assert models.draft_options(models.target_options(embedded_target()), embedded_draft()).threads == 2
    assert ModelChoice.of({}, {"path": "small"}).named_draft == "small"
    with pytest.raises(InputError, match=r"unset PACELINE_MODEL or PACELINE_HF_REPO$"):
        ModelChoice.of({"path": "big"}, {}, {"repo": "u/m"})
    with pytest.raises(InputError, match=r"unset PACELINE_DRAFT_MODEL or PACELINE_DRAFT_HF_REPO$"):
        ModelChoice.of({}, {"path": "small"}, {"draft_repo": "u/m"})


def test_a_token_of_the_hub_is_not_shown() -> None:
    options = HubOptions(repo="u/m", token="hf_secret")
    assert "hf_secret" not in repr(options)
    assert "hf_secret" not in repr(ModelChoice.of({}, {}, {"repo": "u/m", "token": "hf_secret"}))
    with pytest.raises(InputError) as caught:
        HubOptions(repo="u/m", token="hf secret").target()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"reference": 5},
        {"reference": None},
        {"reference": "u/m", "token": 5},
        {"reference": "u/m", "file": Path("a.gguf")},
    ],
)
def test_what_names_a_model_of_the_hub_is_text(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        HubModel.parse(**given)


def test_the_environment_may_name_models_of_the_hub() -> None:
    environment = from_environment(
        {"PACELINE_HF_REPO": "u/m", "PACELINE_HF_FILE": "a.gguf", "PACELINE_DRAFT_HF_REPO": "u/d:q8_0"}
    )
    assert environment.models.target == HubModel("u/m", file="a.gguf")
    assert environment.models.named_draft == HubModel("u/d", "q8_0")


def test_single_options_of_a_request_are_replaced_in_their_parts() -> None:
    request = read_options({"temperature": 0.5, "seed": 3, "stop": "a", "drafters": ["suffix"], "logprobs": 2})
    changed = request.replaced({"choice": 1, "preserved_ids": [7], "client": "c"})
    assert changed.params == SamplingParams(temperature=0.5, seed=3, choice=1)
    assert (changed.rules, changed.cache) == (StopRules(stop=("a",), preserved_ids=(7,)), CacheParams(client="c"))
    assert (changed.speculation, changed.logprobs) == (request.speculation, request.logprobs)
    with pytest.raises(InputError, match="choice -1"):
        request.replaced({"choice": -1})


def test_the_environment_sets_what_the_table_has() -> None:
    environment = from_environment(
        {
            "PACELINE_TEMPERATURE": "0",
            "PACELINE_LOGIT_BIAS": "3=-inf, 4=1.5",
            "PACELINE_ORDER": "transformers",
            "PACELINE_MAX_TOKENS": "-1",
            "PACELINE_STOP": "a, b",
            "PACELINE_IGNORE_END": "yes",
            "PACELINE_SPECULATE": "off",
            "PACELINE_DRAFTERS": "suffix,draft",
            "PACELINE_DRAFT_MAX": "3",
            "PACELINE_TOP_K": "",
            "PACELINE_MODEL": "big",
            "PACELINE_CONTEXT_LENGTH": "0",
            "PACELINE_FLASH_ATTENTION": "off",
            "PACELINE_OVERRIDE_TENSORS": "a=B,exps=CPU",
            "PACELINE_DRAFT_MODEL": "small",
            "PACELINE_DRAFT_CONTEXT_LENGTH": "64",
            "PACELINE_DRAFT_DEVICES": "none",
            "PACELINE_CACHE": "elsewhere",
            "TEMPERATURE": "hot",
        }
    )
    assert environment.request == {
        "temperature": 0.0,
        "logit_bias": {3: -math.inf, 4: 1.5},
        "order": TRANSFORMERS_ORDER,
        "max_tokens": MAX_TOKENS,
        "stop": ("a, b",),
        "ignore_end": True,
        "speculate": False,
        "drafters": ("suffix", "draft"),
        "draft_max": 3,
    }
    models = environment.models
    assert (models.target, models.whole_context) == ("big", True)
    assert models.settings == ModelOptions("", flash_attention=False, override_tensors=(("a", "B"), ("exps", "CPU")))
    assert models.draft == DraftOptions("small", 64, devices=("none",))
    assert from_environment({}) == Environment({}, {}, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TEMPERATURE", "hot"),
        ("TEMPERATURE", "200"),
        ("TOP_K", "6.5"),
        ("VERIFY", "trust"),
        ("EXACT", "perhaps"),
        ("DRAFTERS", ","),
        ("LOGIT_BIAS", "seven"),
        ("MAX_SEQUENCES", "0"),
        ("CONTEXT_LENGTH", "-5"),
        ("DRAFT_CONTEXT_LENGTH", "1"),
        ("HF_REPO", "m"),
    ],
)
def test_what_the_environment_sets_wrongly_is_named(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        from_environment({f"PACELINE_{name}": text})
    line = str(caught.value)
    assert line.startswith(f"PACELINE_{name} is {text!r}: ")
    assert line.endswith(", or unset it")
    assert "\n" not in line


def test_the_library_asks_the_environment_for_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEMPERATURE", "0.25")
    assert read_options({}).params.temperature == SamplingParams().temperature
    assert from_environment().request == {"temperature": 0.25}


def test_every_variable_is_of_one_field_and_none_of_them_is_taken() -> None:
    fields = [
        field
        for part in (*REQUEST_PARTS, ModelOptions, DraftOptions, HubOptions, ChatParams, ServerOptions)
        for field in fields_of(part)
        if field.option.variable is not None
    ]
    table = variables_of_the_table()
    assert len(table) == len(fields)
    assert not {CACHE_VARIABLE, SHARED_VARIABLE} & table.keys()


def test_the_guide_lists_every_variable() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(PACELINE_\w+)` \| (?:`([-\w]+)`)?", guide, re.MULTILINE)
    flags = {name: next(iter(field.flags), "").partition("/")[0] for name, field in variables_of_the_table().items()}
    assert dict(rows) == flags | {CACHE_VARIABLE: "", SHARED_VARIABLE: ""}


class TestWhatOptionsAreCalled:
    """The library's messages call an option as Python does; whoever shows them says it as it is called there."""

    @pytest.mark.parametrize(
        ("named", "flag"),
        [
            ("`temperature`", "--temp"),
            ("`max_tokens=2`", "-n 2"),
            ("`speculate=False`", "--no-speculation"),
            ("`forget=True`", "without --no-forget"),
            ("`draft_max`", "--draft-max"),
            ("`drafters=['suffix', 'lookup']`", "--drafters suffix,lookup"),
            ("`stream=False`", "--stream off"),
            ("`flash_attention=False`", "-fa off"),
            ("`gpu_layers=0`", "-ngl 0"),
            ("`engine='llama_cpp'`", "--engine llama_cpp"),
            ("`context_length`", "-c"),
            ("`DraftOptions.context_length`", "-cd"),
            ("`DraftOptions.vocab='translate'`", "--draft-vocab translate"),
            ("`policy=NO_SPECULATION`", "--no-speculation"),
            ("`draft`", "-md"),
            ("`draft='self'`", "-md self"),
            ("`slots`", "--slots"),
            ("`namespace`", "namespace"),
            ("`no such`", "`no such`"),
            # what a user wrote, and a message quotes
            ("`drafters=[1, None]`", "--drafters 1,None"),
            ("`temperature={[]: 1}`", "--temp {[]: 1}"),
            ("`temperature=((`", "--temp (("),
            ("'a`temperature`b', `top_k`", "'a`temperature`b', --top-k"),
            ('"it\'s `stop`", `stop`', '"it\'s `stop`", --stop'),
            (r"'\'`stop`\'', `stop`", r"'\'`stop`\'', --stop"),
            ("the model's `top_k` and the drafts' `threads`", "the model's --top-k and the drafts' -t"),
            ("an open ' and `stop`", "an open ' and --stop"),
        ],
    )
    def test_on_the_command_line(self, named: str, flag: str) -> None:
        assert in_flags(f"give ({named}), or not") == f"give ({flag}), or not"

    @pytest.mark.parametrize(
        "options",
        [
            {field.name: value}
            for part in REQUEST_PARTS
            for field in fields_of(part)
            if field.option.kind in ("whole", "real")
            for value in (field.option.low, field.option.high)
            if value is not None
        ],
        ids=str,
    )
    def test_every_value_out_of_range_names_its_own_field(self, options: dict[str, Any]) -> None:
        ((name, bound),) = options.items()
        (field,) = [field for part in REQUEST_PARTS for field in fields_of(part) if field.name == name]
        beyond = bound - 1 if bound == field.option.low else bound * 2 + 1
        with pytest.raises(InputError, match=f"`{name}`") as caught:
            read_options({name: beyond})
        assert caught.value.field == name
        assert not re.search(r"(?<![\w-])--?[a-z]", str(caught.value)), "flags are the command line's"
        if field.flags:
            assert field.flags[0] in in_flags(str(caught.value))

    @pytest.mark.parametrize(("slip", "meant"), [("max_token", "max_tokens"), ("Temperature", "temperature")])
    def test_a_slip_is_answered_with_what_was_meant(self, slip: str, meant: str) -> None:
        with pytest.raises(InputError, match=f"there is no option {slip}: did you mean {meant}"):
            read_options({slip: 5})


# What a program prints, and what only the command line can have said.
FLAGS_ARE_SAID_IN = ("cli", "lab", "environment.py")


def test_no_message_of_the_library_names_a_flag() -> None:
    sources = Path(paceline.__file__).parent
    flags = {
        flag
        for part in (*REQUEST_PARTS, ModelOptions, DraftOptions, HubOptions, ChatParams, ServerOptions, FixedPolicy)
        for field in fields_of(part)
        for flag in field.flags
    } - {"-s", "-v", "-m"}  # of Python, too
    found = []
    for path in sorted(sources.rglob("*.py")):
        if path.relative_to(sources).parts[0] in FLAGS_ARE_SAID_IN:
            continue
        for raised in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(raised, ast.Raise):
                texts = [each.value for each in ast.walk(raised) if isinstance(each, ast.Constant)]
                words = {word for text in texts if isinstance(text, str) for word in re.findall(r"--?[a-z-]+", text)}
                found += [f"{path.name}:{raised.lineno}: {word}" for word in words & flags]
    assert not found
