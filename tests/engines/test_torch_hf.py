"""The torch engine against transformers itself: however its tokens got into the pool, the logits of a row are those
of a plain forward, without any cache, over that row's path.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engines.tiny_torch import (
    ARCHITECTURES,
    ENDS,
    SHAPE,
    VOCAB_SIZE,
    build,
    byte_level_backend,
    start,
    tiny,
    tiny_tokenizer,
    tokenizers,
    torch,
    transformers,
    wrapped,
)
from tests.timing import WAIT_S

from paceline.core.arrays import FloatArray
from paceline.core.errors import (
    CapabilityError,
    ClosedError,
    ContextLengthError,
    EngineError,
    InputError,
    ModelFileError,
    NoRoomError,
)
from paceline.core.vocabulary import InfillTokens
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.engines.torch_hf import engine as torch_engine
from paceline.engines.torch_hf.engine import TorchHFEngine
from paceline.engines.torch_hf.loading import longest_context
from paceline.engines.torch_hf.vocabulary import TokenizerVocabulary
from paceline.models.embedded import embedded_draft

TOLERANCE = 1e-5
"""In float32, for logits of about 5."""


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small to gain from more, and threads that wait for a busy core cost far more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(model: Any, token_ids: Sequence[int]) -> FloatArray:
    """The logits after ``token_ids``, from a forward without a cache."""
    with torch.inference_mode():
        logits: FloatArray = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1].numpy()
    return logits


def assert_plain(logits: FloatArray, model: Any, token_ids: Sequence[int]) -> None:
    np.testing.assert_allclose(logits, plain(model, token_ids), rtol=0, atol=TOLERANCE)


def chain(sequence: int, token_ids: Sequence[int]) -> Step:
    """A step that feeds ``token_ids`` one after the other and wants the last row."""
    return Step(sequence, token_ids, range(-1, len(token_ids) - 1), [len(token_ids) - 1])


def prefilled(engine: Engine, token_ids: Sequence[int]) -> int:
    sequence = engine.open()
    engine.forward([chain(sequence, token_ids)])
    engine.commit(sequence, range(len(token_ids)))
    return sequence


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_trees_give_the_logits_of_a_plain_forward(architecture: str) -> None:
    model = tiny(architecture)
    engine: Engine = start(model)
    prompts = [[5, 6, 7, 8, 9], list(range(40, 62))]
    sequences = [prefilled(engine, prompt) for prompt in prompts]
    #   0 ─┬─ 1 ─── 3
    #      └─ 2 ─┬─ 4
    #            └─ 5
    tokens, parents = [20, 21, 22, 23, 24, 25], [COMMITTED_END, 0, 0, 1, 2, 2]
    paths = [[20], [20, 21], [20, 22], [20, 21, 23], [20, 22, 24], [20, 22, 25]]
    output = engine.forward([Step(sequence, tokens, parents, range(6)) for sequence in sequences])
    for step, prompt in enumerate(prompts):
        for node, path in enumerate(paths):
            assert_plain(output.logits(step, node), model, prompt + path)
    # Rows now land in the cells that the dropped branches leave, below their ancestors'.
    for sequence in sequences:
        engine.commit(sequence, [0, 2, 5])
    output = engine.forward([Step(sequence, [30, 31], [COMMITTED_END, COMMITTED_END], [1]) for sequence in sequences])
    for step, prompt in enumerate(prompts):
        assert_plain(output.logits(step, 0), model, [*prompt, 20, 22, 25, 31])
    engine.close()


@dataclass
class Text:
    """What a sequence should hold. Each row fed has a serial number, which forks share as they share its cell."""

    committed: list[tuple[int, int]] = field(default_factory=list)  # (serial number, token)
    pending: list[tuple[int, int]] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # of each pending node: the nodes down to it, itself last

    def tokens_to(self, node: int) -> list[int]:
        rows = self.committed + [self.pending[i] for i in self.paths[node]]
        return [token for _, token in rows]

    def drop_pending(self) -> None:
        self.pending, self.paths = [], []


class RandomHistory(RuleBasedStateMachine):
    """Any order of passes, commits, trims, forks, saves and closings; each pass is compared with the plain forward."""

    model_name = "llama"

    @initialize()
    def load(self) -> None:
        self.model = tiny(self.model_name)
        self.engine = start(self.model, context_length=64, max_rows=16, max_sequences=3)
        self.texts: dict[int, Text] = {}
        self.serial_numbers = itertools.count()

    def teardown(self) -> None:
        self.engine.close()

    def pick(self, data: st.DataObject, among: Callable[[Text], bool] = lambda _: True) -> int:
        return data.draw(st.sampled_from([sequence for sequence, text in self.texts.items() if among(text)]))

    @rule(prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=16))
    @precondition(lambda self: len(self.texts) < 3)
    def open(self, prompt: list[int]) -> None:
        sequence = prefilled(self.engine, prompt) if prompt else self.engine.open()
        self.texts[sequence] = Text([(next(self.serial_numbers), token) for token in prompt])

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def forward(self, data: st.DataObject) -> None:
        steps = []
        for sequence in data.draw(st.lists(st.sampled_from(list(self.texts)), min_size=1, unique=True)):
            text = self.texts[sequence]
            deepest = max(map(len, text.paths), default=0)
            first = len(text.pending)
            parents = []
            for _ in range(min(data.draw(st.integers(1, 5)), 64 - len(text.committed) - deepest, 20 - first)):
                parent = data.draw(st.integers(-1, len(text.pending) - 1))
                text.paths.append([*(text.paths[parent] if parent >= 0 else []), len(text.pending)])
                text.pending.append((next(self.serial_numbers), data.draw(st.integers(0, VOCAB_SIZE - 1))))
                parents.append(parent)
            if parents:
                tokens = [token for _, token in text.pending[first:]]
                steps.append(Step(sequence, tokens, parents, range(len(parents))))
        if not steps:
            return
        output = self.engine.forward(steps)
        for index, step in enumerate(steps):
            text = self.texts[step.sequence]
            first = len(text.pending) - len(step.token_ids)
            for row in step.outputs:
                assert_plain(output.logits(index, row), self.model, text.tokens_to(first + row))

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def commit(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        text = self.texts[sequence]
        path = data.draw(st.sampled_from([[], *text.paths]))
        self.engine.commit(sequence, path)
        text.committed += [text.pending[node] for node in path]
        text.drop_pending()

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def trim(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        text = self.texts[sequence]
        length = data.draw(st.integers(0, len(text.committed)))
        self.engine.trim(sequence, length)
        del text.committed[length:]
        text.drop_pending()

    @rule(data=st.data())
    @precondition(lambda self: len(self.texts) < 3 and not all(text.pending for text in self.texts.values()))
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data, lambda text: not text.pending)
        self.texts[self.engine.fork(sequence)] = Text(list(self.texts[sequence].committed))

    @rule(data=st.data())
    @precondition(lambda self: not all(text.pending for text in self.texts.values()))
    def save_and_restore(self, data: st.DataObject) -> None:
        sequence = self.pick(data, lambda text: not text.pending)
        committed = self.texts.pop(sequence).committed
        saved = self.engine.save(sequence)
        self.engine.close_sequence(sequence)
        # In cells of its own, whatever shared the others.
        self.texts[self.engine.restore(saved)] = Text([(next(self.serial_numbers), token) for _, token in committed])

    @rule(data=st.data())
    @precondition(lambda self: self.texts)
    def close_sequence(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.engine.close_sequence(sequence)
        del self.texts[sequence]

    @invariant()
    def lengths_and_cells_agree(self) -> None:
        for sequence, text in self.texts.items():
            assert self.engine.length(sequence) == len(text.committed)
        held = {serial for text in self.texts.values() for serial, _ in text.committed + text.pending}
        assert self.engine._pool.used == len(held)


class RandomHistoryWithWindows(RandomHistory):
    model_name = "gemma3, one layer slides"


HISTORY_SETTINGS = settings(max_examples=25, stateful_step_count=30)
TestRandomHistory = RandomHistory.TestCase
TestRandomHistory.settings = HISTORY_SETTINGS
TestRandomHistoryWithWindows = RandomHistoryWithWindows.TestCase
TestRandomHistoryWithWindows.settings = HISTORY_SETTINGS


def test_the_pool_is_read_beyond_its_first_bucket_of_cells() -> None:
    model = tiny()
    engine = start(model)
    long_texts = [[(7 * i + 3 * sequence) % VOCAB_SIZE for i in range(100)] for sequence in range(3)]
    sequences = [prefilled(engine, text) for text in long_texts]
    output = engine.forward([chain(sequence, [9]) for sequence in sequences])
    for step, text in enumerate(long_texts):
        assert_plain(output.logits(step, 0), model, [*text, 9])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_within_the_stated_tolerance(dtype: str) -> None:
    model = build(*ARCHITECTURES["llama"]).to(getattr(torch, dtype))
    engine = start(model)
    text = list(range(30, 50))
    sequence = prefilled(engine, text)
    wide = engine.forward([Step(sequence, [1, 2, 3], [COMMITTED_END] * 3, range(3))])
    rows = [wide.logits(0, row) for row in range(3)]
    for token, row in zip([1, 2, 3], rows, strict=True):
        engine.commit(sequence, [])
        narrow = engine.forward([chain(sequence, [token])]).logits(0, 0)
        assert row.dtype == np.float32
        assert np.abs(narrow - row).max() <= engine.capabilities.logit_tolerance


def test_outputs_outlive_the_pass_and_are_read_only() -> None:
    engine = start()
    sequence = engine.open()
    output = engine.forward([Step(sequence, [4, 5], [-1, 0], [0, 1])])
    first = output.logits(0, 0)
    before = first.copy()
    engine.forward([Step(sequence, [6], [1], [0])])
    np.testing.assert_array_equal(first, before)
    assert not first.flags.writeable
    with pytest.raises(IndexError, match="2 outputs"):
        output.logits(0, 2)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "granite, scaled logits"])
def test_states_are_what_the_output_layer_reads(architecture: str) -> None:
    model = tiny(architecture)
    engine = start(model, hold_states=(OUTPUT_STATE,))
    sequence = prefilled(engine, [5, 6, 7])
    engine.forward([Step(sequence, [8, 9], [COMMITTED_END, COMMITTED_END], [])])
    engine.commit(sequence, [1])
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([[5, 6, 7, 9]]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(engine.states(sequence, 0, 4), states[-1][0].numpy(), rtol=0, atol=TOLERANCE)


# --- failures leave everything as it was ------------------------------------------------------------------------------


def test_a_full_pool_refuses_the_pass_and_changes_nothing() -> None:
    model = tiny()
    engine = start(model, cells=12)
    first, second = prefilled(engine, [5, 6, 7, 8]), prefilled(engine, [9, 10, 11])
    engine.forward([Step(first, [20, 21], [COMMITTED_END, COMMITTED_END], [])])
    with pytest.raises(NoRoomError, match="3 of 12"):
        engine.forward([chain(second, [1, 2]), Step(first, [22, 23], [0, 1], [])])
    # The pending nodes are still 0 and 1, and the last three cells can still be had.
    output = engine.forward([Step(first, [24], [1], [0]), Step(second, [30, 31], [-1, 0], [1])])
    assert_plain(output.logits(0, 0), model, [5, 6, 7, 8, 21, 24])
    assert_plain(output.logits(1, 0), model, [9, 10, 11, 30, 31])


@pytest.mark.parametrize("layer", [0, 1])
def test_an_exception_in_the_model_changes_nothing(layer: int) -> None:
    model = build(*ARCHITECTURES["llama"])
    engine = start(model, cells=8)
    sequence = prefilled(engine, [5, 6, 7])
    engine.forward([Step(sequence, [20], [COMMITTED_END], [])])

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(EngineError, match=r"2 rows failed: out of luck$"):
        engine.forward([Step(sequence, [21, 22], [0, 0], [])])
    hook.remove()
    output = engine.forward([Step(sequence, [23, 24, 25, 26], [0, 1, 2, 3], [3])])
    assert_plain(output.logits(0, 0), model, [5, 6, 7, 20, 23, 24, 25, 26])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_passed_by_the_name_that_the_model_takes(name: str) -> None:
    base = type(tiny())
    own = inspect.signature(base.forward).parameters
    (installed,) = {"cache", "past_key_values"} & set(own)

    def forward(self: Any, **values: Any) -> Any:
        given = values.pop(name, None)
        return base.forward(self, **values, **{installed: given})

    renamed = [parameter.replace(name=name) if parameter.name == installed else parameter for parameter in own.values()]
    vars(forward)["__signature__"] = inspect.Signature(renamed)
    model = type("Renamed", (base,), {"forward": forward})(tiny().config).eval()
    engine = start(model)
    sequence = prefilled(engine, [1, 2, 3])
    assert_plain(engine.forward([chain(sequence, [4])]).logits(0, 0), model, [1, 2, 3, 4])
    engine.close()


def test_closing_leaves_the_model_of_the_caller_as_it_was() -> None:
    model = build(*ARCHITECTURES["llama"])
    before = plain(model, [1, 2, 3])
    engine = start(model)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.open()
    assert not model.get_output_embeddings()._forward_pre_hooks
    np.testing.assert_array_equal(plain(model, [1, 2, 3]), before)


# --- what the engine refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "values", "reason"),
    [
        ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "position_ids"),
        ("MambaConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}, "recurrent"),
        ("Llama4TextConfig", SHAPE | {"head_dim": 16}, "chunked_attention"),
        # Takes a mask and positions, but masks by column in its local layers.
        (
            "GPTNeoConfig",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_heads": 4, "max_position_embeddings": 256}
            | {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
            "plain forward",
        ),
        # Takes positions, but turns them into ALiBi biases by column.
        (
            "FalconConfig",
            {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "alibi": True,
            },
            "pool of cells",
        ),
    ],
)
def test_models_that_cannot_run_over_a_pool_are_refused(config_class: str, values: dict[str, Any], reason: str) -> None:
    model = build(config_class, values | ENDS)
    with pytest.raises(CapabilityError, match=reason) as caught:
        start(model)
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert "GGUF" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(CapabilityError, match="encoder-decoder"):
        start(transformers.T5ForConditionalGeneration(config))


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = build(*ARCHITECTURES["llama"])
    model.set_attn_implementation("flex_attention")
    with pytest.raises(CapabilityError, match="flex_attention"):
        start(model)


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="257 tokens is more than the 256"):
        start(context_length=257)


def test_the_longest_context_is_what_the_config_says() -> None:
    assert longest_context(transformers.LlamaConfig(max_position_embeddings=131072)) == 131072
    assert start(context_length=None).capabilities.context_length == 256


def test_longrope_ends_where_its_rotation_would_change() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = transformers.Phi3Config(
        **(SHAPE | {"max_position_embeddings": 512}), rope_parameters=rope, original_max_position_embeddings=128
    )
    assert longest_context(config) == 128


@pytest.mark.parametrize("setting", ["context_length", "max_rows", "max_sequences", "cells"])
def test_numbers_below_sense_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match=rf"`?{setting}`?( \(`.*\))? is 0"):
        start(**{setting: 0})


def test_without_torch_the_package_reads_and_the_engine_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.engines.torch_hf.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "paceline.engines.torch_hf")
    monkeypatch.setitem(sys.modules, "torch", None)
    import paceline.engines.torch_hf as package

    with pytest.raises(CapabilityError, match=r"needs torch.*pip install '\.\[torch\]'"):
        _ = package.TorchHFEngine


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with its tokenizer."""
    path = tmp_path / "model"
    build(*ARCHITECTURES["llama"]).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def load(path: Path, **values: Any) -> TorchHFEngine:
    options = ModelOptions(path, **{"devices": ("cpu",), "context_length": 64, **values})
    return TorchHFEngine(options)


def test_a_folder_loads_silently(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = load(folder)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = engine.vocabulary.tokenize("naïve")
    assert_plain(engine.forward([chain(engine.open(), text)]).logits(0, 0), model, text)
    assert engine.vocabulary.size == VOCAB_SIZE
    assert engine.vocabulary.end_ids == {2}
    assert engine.capabilities.context_length == 64
    assert re.fullmatch(r"model \(llama, float32\) on cpu, \d+ threads, torch", engine.description)


def test_a_containers_quota_limits_torchs_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_own_threads", lambda: 8)
    monkeypatch.setattr(torch_engine, "usable_cores", lambda: 3)
    # What its costs are kept under says it too.
    assert "on cpu, 3 threads" in load(folder).description
    monkeypatch.setattr(torch_engine, "usable_cores", lambda: 16)
    assert "on cpu, 8 threads" in load(folder).description
    assert "on cpu, 1 threads" in load(folder, threads=1).description


def test_the_generation_configuration_says_where_answers_end(folder: Path) -> None:
    path = folder / "generation_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "eos_token_id": [3, 4, VOCAB_SIZE]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert load(folder).vocabulary.end_ids == {3, 4}
    path.write_text(json.dumps({**said, "eos_token_id": None}))
    assert load(folder).vocabulary.end_ids == {7}
    path.unlink()
    assert load(folder).vocabulary.end_ids == {7}


@pytest.mark.parametrize(
    ("template", "is_control", "ends"),
    [
        ("{{ messages[0].content }}<|im_end|>", True, True),
        ("{{ messages[0].content }}<|im_end|>", False, False),
        ("{{ messages[0].content }}<|im_end|>{{ eos_token }}", True, False),
        (None, True, False),
    ],
)
def test_a_token_that_closes_turns_ends_an_answer_where_none_that_is_named_does(
    template: str | None, is_control: bool, ends: bool, folder: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<|im_end|>", special=is_control)], special_tokens=is_control)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_id < VOCAB_SIZE
    assert load(folder).vocabulary.end_ids == ({2, token_id} if ends else {2})


def test_settings_of_the_tokenizer_that_mean_nothing_change_nothing(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text())
    # No template, and a token that neither the tokenizer nor the model has.
    path.write_text(json.dumps({**said, "chat_template": 513, "bos_token": "\0nowhere"}))
    vocabulary = load(folder).vocabulary
    assert vocabulary.end_ids == {2}
    assert max(vocabulary.control_ids) < VOCAB_SIZE


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_the_dtype_is_float32_on_a_cpu_unless_asked_for(folder: Path, dtype: Any, expected: str) -> None:
    build(*ARCHITECTURES["llama"]).to(torch.float16).save_pretrained(folder)
    assert expected in load(folder, dtype=dtype).description


def _config(**changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def _write(name: str, content: bytes | slice) -> Callable[[Path], object]:
    """Write a file anew, or a part of what is there."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[content])

    return damage


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (_write("config.json", b'{"model_type": "llama",'), "config.json"),
        (_config(model_type="abacus"), "abacus"),
        (_config(model_type="vit"), "no causal language model"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"has no weights; get its \*\.safetensors files"),
        (_write(WEIGHTS, b""), r"model\.safetensors holds no weights: it is empty"),
        (
            lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin").write_bytes(b"weights"),
            "pickled weights that cannot be read; copy or download",
        ),
        (_write(WEIGHTS, slice(5000)), "cannot be loaded"),
        (_config(num_hidden_layers=3), r"lacks \d+ weights .*layers\.2\."),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "cannot be loaded"),
        (
            _write("generation_config.json", b'{"eos_token_id": "x"}'),
            "eos_token_id 'x', and token ids are whole numbers",
        ),
        (
            _config(rope_scaling={"rope_type": "longrope"}),
            "cannot be loaded|entry that is not what it should be",
        ),
    ],
)
def test_a_damaged_folder_is_one_clear_line(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelFileError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_path_to_nothing_or_to_another_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"there is no file .*nowhere; give a model folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ModelFileError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "model.bin")
    (tmp_path / "model.gguf").write_bytes(b"weights")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load(tmp_path / "model.gguf")


def test_devices_that_are_not_there_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="abacus"):
        load(folder, devices=("abacus",))
    if not torch.xpu.is_available():
        with pytest.raises(CapabilityError, match="'xpu' cannot be used"):
            load(folder, devices=("xpu",))
    if not torch.cuda.is_available():
        with pytest.raises(CapabilityError, match="no CUDA"):
            load(folder, devices=("cuda",))


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_support() -> None:
    pytest.importorskip("gguf", reason="needs paceline[torch]")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate only")


@pytest.mark.usefixtures("gguf_support")
def test_a_gguf_file_agrees_with_its_plain_forward_and_ends_where_it_ends_in_llama_cpp(tmp_path: Path) -> None:
    from tests.models.helpers import with_last_tokens

    from paceline.engines.llama_cpp.ends import read_end_ids

    path = with_last_tokens(tmp_path / "model.gguf", ["<|im_end|>"])
    engine = load(path, context_length=256)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    vocabulary = engine.vocabulary
    text = vocabulary.tokenize("def mean(values):\n    return sum(values) / len(values)\n")
    sequence = prefilled(engine, text)
    output = engine.forward([Step(sequence, [40, 41, 42], [COMMITTED_END, COMMITTED_END, 0], range(3))])
    for row, path_tokens in enumerate([[40], [41], [40, 42]]):
        expected = plain(model, text + path_tokens)
        np.testing.assert_allclose(output.logits(0, row), expected, rtol=0, atol=engine.capabilities.logit_tolerance)
    assert (vocabulary.kind, vocabulary.size) == ("bpe", 4096)
    assert vocabulary.end_ids == read_end_ids(path) == {0, 4095}
    assert {vocabulary.token_bytes(token_id) for token_id in vocabulary.end_ids} == {b""}
    for spelled in ("for i in range(10):\n\tprint(i)", "naïve 🙂 \x00 <|endoftext|>", "日本語"):
        assert b"".join(map(vocabulary.token_bytes, vocabulary.tokenize(spelled))) == spelled.encode()


def test_a_gguf_file_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_accelerate_available", lambda: False)
    with pytest.raises(CapabilityError, match=r"needs (gguf|accelerate).*pip install '\.\[torch\]'"):
        load(embedded_draft())


@pytest.mark.usefixtures("gguf_support")
def test_a_truncated_gguf_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    whole = embedded_draft().read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"half\.gguf is truncated or damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)


# --- vocabulary -------------------------------------------------------------------------------------------------------


def sentencepiece_backend() -> Any:
    """Like Llama 2: BPE with spaces as ▁ and unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("▁h", "i")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def spelled(vocabulary: TokenizerVocabulary, token_ids: Sequence[int]) -> bytes:
    return b"".join(map(vocabulary.token_bytes, token_ids))


def test_byte_level_tokens_spell_every_byte() -> None:
    vocabulary = TokenizerVocabulary(tiny_tokenizer(), size=VOCAB_SIZE)
    assert vocabulary.kind == "bpe"
    assert sorted(vocabulary.token_bytes(token_id) for token_id in range(256)) == [bytes([b]) for b in range(256)]
    for text in ("plain", "naïve 🙂\n\t\x00\x7f", "日本語", " "):
        assert spelled(vocabulary, vocabulary.tokenize(text)) == text.encode()


def test_nobody_waits_for_anothers_text(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = TokenizerVocabulary(tiny_tokenizer(), size=VOCAB_SIZE)
    expected = [vocabulary.tokenize("abc", parse_special=special) for special in (False, True)]
    begun, go_on = threading.Event(), threading.Event()
    encode = type(tiny_tokenizer()).encode

    def slow(tokenizer: Any, text: str, **options: Any) -> Any:
        if text == "slow":
            begun.set()
            assert go_on.wait(WAIT_S)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(type(tiny_tokenizer()), "encode", slow)
    reader = threading.Thread(target=vocabulary.tokenize, args=("slow",))
    reader.start()
    try:
        assert begun.wait(WAIT_S)
        found: list[list[int]] = []
        other = threading.Thread(
            target=lambda: found.extend(vocabulary.tokenize("abc", parse_special=each) for each in (False, True))
        )
        other.start()
        other.join(WAIT_S)
        assert found == expected
    finally:
        go_on.set()
        reader.join(WAIT_S)


def test_ids_beyond_the_tokenizer_are_padding_and_beyond_the_model_an_error() -> None:
    vocabulary = TokenizerVocabulary(tiny_tokenizer(), size=VOCAB_SIZE)
    assert vocabulary.token_bytes(VOCAB_SIZE - 1) == b""
    assert vocabulary.token_spelling(VOCAB_SIZE - 1) is None
    for read in (vocabulary.token_bytes, vocabulary.token_spelling):
        for token_id in (-1, VOCAB_SIZE):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                read(token_id)


def test_control_tokens_are_silent_and_other_added_tokens_are_text() -> None:
    tokenizer = wrapped(byte_level_backend(), eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.add_tokens(["<think> ☺"])
    vocabulary = TokenizerVocabulary(tokenizer, size=VOCAB_SIZE, end_ids=[7, 9999])
    end, turn, think = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|turn|>", "<think> ☺"))
    assert [vocabulary.token_bytes(token_id) for token_id in (end, turn, think)] == [b"", b"", "<think> ☺".encode()]
    spellings = [vocabulary.token_spelling(token_id) for token_id in (end, turn, think)]
    assert spellings == [b"<|end|>", b"<|turn|>", "<think> ☺".encode()]
    assert vocabulary.end_ids == {end, 7}
    text = "a<|turn|>b<think> ☺"
    assert spelled(vocabulary, vocabulary.tokenize(text)) == text.encode()
    assert turn not in vocabulary.tokenize(text)
    assert turn in vocabulary.tokenize(text, parse_special=True)


def test_tokens_for_gaps_are_found_by_their_names() -> None:
    tokenizer = wrapped(byte_level_backend(), eos_token="<|end|>")
    assert TokenizerVocabulary(tokenizer, size=VOCAB_SIZE).infill_tokens == InfillTokens()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fim_suffix>", "<fim_prefix>", "<|fim_middle|>"]})
    vocabulary = TokenizerVocabulary(tokenizer, size=VOCAB_SIZE)
    names = [vocabulary.token_spelling(token_id) for token_id in vocabulary.infill_tokens if token_id is not None]
    assert names == [b"<fim_prefix>", b"<fim_suffix>", b"<|fim_middle|>"]


def test_special_tokens_open_a_text_and_never_close_it() -> None:
    tokenizer = wrapped(byte_level_backend(), bos_token="<|start|>", eos_token="<|end|>")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        special_tokens=[
            ("<|start|>", tokenizer.bos_token_id),
            ("<|end|>", tokenizer.eos_token_id),
        ],
    )
    vocabulary = TokenizerVocabulary(tokenizer, size=VOCAB_SIZE)
    plain_ids = vocabulary.tokenize("hi", add_special=False)
    assert vocabulary.tokenize("hi") == [tokenizer.bos_token_id, *plain_ids]
    assert vocabulary.tokenize("") == [tokenizer.bos_token_id]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    spelled_out = vocabulary.tokenize("<|start|>hi<|end|>", parse_special=True)
    assert spelled_out == [begin, begin, *plain_ids, end], "what the caller wrote stays"


def test_sentencepiece_tokens_keep_their_space_and_fall_back_to_bytes() -> None:
    vocabulary = TokenizerVocabulary(wrapped(sentencepiece_backend(), bos_token="<s>"), size=VOCAB_SIZE)
    assert vocabulary.kind == "spm"
    text = "hi hi🙂\n"
    assert spelled(vocabulary, vocabulary.tokenize(text)) == b" " + text.encode()
    assert vocabulary.token_bytes(3 + 0x0A) == b"\n"


def test_unigram_tokens_are_their_own_kind() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("▁hi", -1.0), ("!", -1.0)], unk_id=0))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    vocabulary = TokenizerVocabulary(wrapped(backend, unk_token="<unk>"), size=3)
    assert vocabulary.kind == "ugm"
    assert spelled(vocabulary, vocabulary.tokenize("hi!")) == b" hi!"


@pytest.mark.parametrize("decoder", ["WordPiece", None])
def test_tokenizers_that_decode_in_unknown_ways_are_refused(decoder: str | None) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = getattr(tokenizers.decoders, decoder)()
    with pytest.raises(CapabilityError, match=f"decodes by {decoder}"):
        TokenizerVocabulary(wrapped(backend), size=2)


def test_half_a_surrogate_pair_is_an_input_error() -> None:
    vocabulary = TokenizerVocabulary(tiny_tokenizer(), size=VOCAB_SIZE)
    with pytest.raises(InputError, match="surrogate"):
        vocabulary.tokenize("\ud83d")
