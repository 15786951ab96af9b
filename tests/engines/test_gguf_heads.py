"""Heads of GGUF models: random ones of every kind, whose answers may have three tokens alone.

What a head says is held to a forward in numpy (``numpy_heads.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
from tests.drafters.helpers import grow
from tests.engines.heads import TOKENS, answers, check_answers, last_row, open_target
from tests.engines.numpy_heads import (
    BLOCK_ROWS,
    NumpyBlock,
    forward_eagle,
    forward_gemma4,
    forward_gemma4_assistant,
    forward_mtp,
)
from tests.engines.tiny_models import (
    write_block_head,
    write_eagle_head,
    write_gemma4,
    write_gemma4_assistant,
    write_model,
)
from tests.helpers import request_of

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.clock import WallClock
from paceline.core.errors import (
    CapabilityError,
    ClosedError,
    EngineError,
    InputError,
    ModelFileError,
    ModelWarning,
    NoRoomError,
)
from paceline.core.params import SamplingParams
from paceline.core.verify import Proposal
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.head import BlockHeadDrafter, CacheHeadDrafter, HeadDrafter
from paceline.drafters.rows import read_row
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.llama_cpp import LlamaCppEngine, heads, open_head
from paceline.engines.llama_cpp.head_engines import BlockEngine
from paceline.engines.loading import foreseen_bytes
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.engines.warming import warm_up
from paceline.lab.replaying.recorder import record
from paceline.planning.costs.meter import Meter, ProfilingBudget
from paceline.planning.costs.subject import open_subject
from paceline.planning.policies.fixed import FixedPolicy

ROUNDING = 1e-4
HALF_ROUNDING = 5e-3
"""Of Gemma 4: some numbers are rounded to half precision, of which one may fall the other way."""
LAYERS = (1, 2, 3)
WIDTH = 32
SOME = [*TOKENS, *range(100, 150)][::-1]
"""Tokens of a head that knows some."""
IN_SECTIONS = {"dflash.rope.dimension_sections": [8, 0, 0, 0]}
BLOCK_FORMS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash of some tokens": {"draft_ids": SOME},
    "DSpark": {"rank": 6},
    "DSpark of some tokens": {"rank": 6, "draft_ids": SOME},
    "DSpark that begins at a mask": {"rank": 6, "metadata": {"dflash.sample_from_anchor": False}},
}


@dataclass(frozen=True)
class Kind:
    """A kind of heads beside a model.

    Attributes:
        write_target: writes the model.
        layers: whose states the heads read.
        drafter: of such a head.
        write_head: writes a head; ``None`` where it is in the model's own file.
        forms: what heads of it are written with.
        depths: drafts to ask for.
    """

    write_target: Callable[[Path], Path]
    layers: tuple[int, ...]
    drafter: Callable[..., Drafter]
    write_head: Callable[..., Path] | None
    forms: dict[str, dict[str, Any]]
    depths: tuple[int, ...]


def _model(architecture: str, **options: Any) -> Callable[[Path], Path]:
    return lambda path: write_model(path, architecture, tokenizer="bytes", **options)


def _eagle(write_target: Callable[[Path], Path], depths: tuple[int, ...] = (1, 4)) -> Kind:
    write = functools.partial(write_eagle_head, target_width=WIDTH)
    return Kind(write_target, LAYERS, HeadDrafter, write, {"of some tokens": {"draft_ids": SOME}}, depths)


def _blocks(write_target: Callable[[Path], Path], forms: dict[str, dict[str, Any]]) -> Kind:
    write = functools.partial(write_block_head, target_width=WIDTH)
    return Kind(write_target, LAYERS, BlockHeadDrafter, write, forms, (4,))


def _gemma4(shared: int) -> Kind:
    write_target = functools.partial(write_gemma4, layers=4 + shared, shared=shared)
    return Kind(write_target, (OUTPUT_STATE,), CacheHeadDrafter, write_gemma4_assistant, {"": {}}, (1, 4))


KINDS = {
    "MTP": Kind(_model("qwen35", mtp=True), (OUTPUT_STATE,), HeadDrafter, None, {"": {}}, (1, 3, 4)),
    "EAGLE-3, llama": _eagle(_model("llama", layers=4)),
    "EAGLE-3, qwen3": _eagle(_model("qwen3", layers=4)),
    "EAGLE-3, recurrent": _eagle(_model("qwen35"), (4,)),
    "DFlash, llama": _blocks(_model("llama", layers=4), BLOCK_FORMS),
    "DFlash, qwen3": _blocks(_model("qwen3", layers=4), BLOCK_FORMS),
    "DFlash, recurrent": _blocks(_model("qwen35"), {"in sections": {"metadata": IN_SECTIONS}}),
    "Gemma 4, own keys": _gemma4(0),
    "Gemma 4, shared keys": _gemma4(2),
}


@dataclass(frozen=True)
class Scene:
    """A model, a head of it in each of its forms, and a folder for more."""

    kind: Kind
    path: Path
    files: dict[str, Path | None]
    folder: Path

    @property
    def file(self) -> Path | None:
        """The first of the heads."""
        return next(iter(self.files.values()))

    @property
    def head_path(self) -> Path:
        assert self.file is not None
        return self.file

    def write_head(self, name: str, **options: Any) -> Path:
        assert self.kind.write_head is not None
        return self.kind.write_head(self.folder / f"{name}.gguf", **options)


@functools.cache
def _scene(name: str, folder: Path) -> Scene:
    kind = KINDS[name]
    files = {
        form: None if kind.write_head is None else kind.write_head(folder / f"head{number}.gguf", **options)
        for number, (form, options) in enumerate(kind.forms.items())
    }
    return Scene(kind, kind.write_target(folder / "model.gguf"), files, folder)


@pytest.fixture(params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.getbasetemp() / "heads" / request.param.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return _scene(request.param, folder)


@pytest.fixture
def target(scene: Scene) -> Iterator[LlamaCppEngine]:
    engine = open_target(scene.path, scene.kind.layers)
    yield engine
    engine.close()


def unmeasured(path: Path | str) -> ModelOptions:
    """Options of a file for which no load finds out first which attention is faster."""
    return ModelOptions(path, threads=1, flash_attention=False)


def of(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with kinds of heads whose names begin so, models of attention alone."""
    names = [name for name in KINDS if name.startswith(kinds) and not name.endswith("recurrent")]
    return pytest.mark.parametrize("scene", names, indirect=True)


# --- heads of every kind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_plain_decoding(scene: Scene, target: LlamaCppEngine, temperature: float) -> None:
    expected = answers(target, [], 0, temperature)
    for form, file in scene.files.items():
        for depth in scene.kind.depths:
            drafter = scene.kind.drafter(open_head(target, file), target=target.vocabulary)
            check_answers(target, drafter, depth, temperature, expected, f"{form} {depth}")


@of("EAGLE-3", "Gemma 4")
def test_holding_states_changes_no_bit_of_a_row(scene: Scene) -> None:
    """Nor does a head that drafts from the cache between the passes."""
    held, plain = open_target(scene.path, scene.kind.layers), open_target(scene.path, ())
    head = open_head(held, scene.file)
    sequences = held.open(), plain.open()
    for tokens, outputs in (([11, 42, 7, 99], [3]), ([3, 4, 5], [0, 1, 2]), ([6], [0])):
        rows = []
        for engine, sequence in zip((held, plain), sequences, strict=True):
            output = engine.forward([Step(sequence, tokens, range(COMMITTED_END, len(tokens) - 1), outputs)])
            rows.append(np.stack([output.logits(0, index) for index in range(len(outputs))]))
            engine.commit(sequence, range(len(tokens)))
        np.testing.assert_array_equal(rows[0], rows[1])
        if scene.kind.drafter is CacheHeadDrafter:
            drafts(held, head, sequences[0])
    for each in (head, held, plain):
        each.close()


def say(target: LlamaCppEngine, head: Engine) -> Callable[[], FloatArray]:
    """Return what has a head say the same row once more."""
    width = target.capabilities.state_width
    if isinstance(head, BlockEngine):
        sequence = head.open()
        read_states(head, sequence, np.ones((2, width), np.float32))
        return lambda: head.draft_blocks([(sequence, 5)])[0].logits([]).copy()
    sequence = read(target, [11, 42, 7]) if hasattr(head, "lender") else head.open()

    def row() -> FloatArray:
        states = np.ones((1, width), np.float32)
        said = last_row(head, [Step(sequence, [5], [COMMITTED_END], [0], states)])
        head.commit(sequence, ())
        return said

    return row


def test_either_may_be_closed_first(scene: Scene, target: LlamaCppEngine) -> None:
    head, other = open_head(target, scene.file), open_head(target, scene.file)
    row = say(target, head)
    before = row()
    other.close()
    np.testing.assert_array_equal(row(), before)
    target.close()
    if hasattr(head, "lender"):
        with pytest.raises(ClosedError):
            row()
    else:
        np.testing.assert_array_equal(row(), before)
    head.close()


def test_a_head_that_borrows_weights_outlives_its_target(tmp_path: Path) -> None:
    target = open_target(write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes", layers=4), LAYERS)
    head = open_head(target, write_eagle_head(tmp_path / "head.gguf", WIDTH, borrows=True))
    row = say(target, head)
    before = row()
    target.close()
    np.testing.assert_array_equal(row(), before)
    head.close()


@of("")
def test_a_head_is_known_for_what_it_is(scene: Scene) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "allowed_token_ids": TOKENS, "seed": 1}
    with paceline.load(unmeasured(scene.path), drafters=["suffix"]) as model:
        plain = model.generate("a text", speculate=False, **asked)
    is_block = scene.kind.drafter is BlockHeadDrafter
    for file in (scene.files["DFlash"], scene.files["DSpark"]) if is_block else (scene.file,):
        with paceline.load(unmeasured(scene.path), draft=file, policy=FixedPolicy(3)) as model:
            assert [drafter.name for drafter in model.drafters] == ["draft"]
            answer = model.generate("a text", **asked)
        assert answer.text == plain.text
        assert answer.stats.num_accepted > 0
        if file is not None:
            with pytest.raises(ModelFileError, match="a head that drafts for a model"):
                paceline.load(file)
    if is_block:
        with paceline.load(unmeasured(scene.path), draft=scene.file) as model:
            assert model.generate("a text", **asked).text == plain.text


@pytest.mark.parametrize(
    ("scene", "options", "why"),
    [
        ("EAGLE-3, llama", {"target_width": 48}, "its target's width is 48, not 32; give the head that was made for"),
        ("EAGLE-3, llama", {"target_layers": (1, 2, 4)}, "has layers 0 to 3, and its head reads what layer 4 does"),
        ("EAGLE-3, llama", {"target_layers": (1, 2)}, "names no 3 layers of its target"),
        ("DFlash, qwen3", {"target_width": 48}, "its target's width is 48, not 32"),
        ("DFlash, qwen3", {"target_layers": (1, 2, 4)}, "has layers 0 to 3, and its head reads what layer 4 does"),
        ("DFlash, qwen3", {"target_layers": (1, 1)}, r"names no layers of its target \(dflash.target_layers\)"),
        ("DFlash, qwen3", {"draft_ids": [5, 9, 300]}, "not each is another one of the 300 of its vocabulary"),
        ("DFlash, qwen3", {"draft_ids": [5, 9, 5]}, "not each is another one of the 300 of its vocabulary"),
        ("DFlash, qwen3", {"metadata": {"dflash.block_size": None}}, "has blocks of None rows .*, and 2 to 128"),
        ("DFlash, qwen3", {"metadata": {"dflash.block_size": 1}}, "has blocks of 1 rows"),
        ("DFlash, qwen3", {"metadata": {"tokenizer.ggml.mask_token_id": None}}, "has no token to mask others with"),
        ("DFlash, qwen3", {"metadata": {"tokenizer.ggml.mask_token_id": 300}}, "has no token to mask others with"),
        ("DFlash, qwen3", {"metadata": {"dflash.selector_top_k": 4}}, "is a DFlash2 head"),
        ("DFlash, qwen3", {"metadata": {"dflash.hyper_connection_count": 2}}, "is a DSpark head for DeepSeek V4"),
        ("DFlash, qwen3", {"rank": 6, "without": ["markov_w2.weight"]}, "cannot be loaded|lacks markov_w2"),
        ("Gemma 4, own keys", {"state_width": 48}, "its width is 48, not 32; give the head"),
        (
            "Gemma 4, own keys",
            {"metadata": {"attention.head_count_kv": 2}},
            "keys and values that it reads are not those of the last two",
        ),
        ("Gemma 4, own keys", {"metadata": {"nextn_predict_layers": 1}}, "has 2 layers, and 1 of them draft"),
    ],
    indirect=["scene"],
)
def test_a_head_that_does_not_fit_is_refused(scene: Scene, options: dict[str, Any], why: str) -> None:
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        paceline.load(unmeasured(scene.path), draft=scene.write_head("other", **options))


def test_heads_of_other_architectures_are_refused(tmp_path: Path) -> None:
    def mtp(name: str, **options: Any) -> Path:
        return write_model(tmp_path / f"{name}.gguf", "qwen35", tokenizer="bytes", mtp=True, **options)

    qwen, layer = mtp("qwen35"), mtp("mtp", only_mtp=True)
    gemma3 = write_model(tmp_path / "gemma3.gguf", "gemma3", tokenizer="bytes")
    gemma4, assistant = write_gemma4(tmp_path / "gemma4.gguf"), write_gemma4_assistant(tmp_path / "assistant.gguf")
    of_three_layers = r"models of llama, qwen3, qwen35, qwen35moe, qwen3moe do"
    for model, head, why in (
        (qwen, mtp("mtp-wide", only_mtp=True, heads=4), r"not a head for .*: its width is 64, not 32; give the head"),
        ("target", layer, r"gives no states for this head .* of gemma4, qwen35, qwen35moe do"),
        (gemma4, layer, r"a head for a model of qwen35, and .* is one of gemma4: give the head"),
        (qwen, assistant, r"a head for a model of gemma4, and .* is one of qwen35: give the head"),
        ("target", assistant, r"gives no states for this head .* of gemma4, qwen35, qwen35moe"),
        (write_gemma4(tmp_path / "five.gguf", layers=5), assistant, "are not those of the last two layers"),
        (gemma3, write_eagle_head(tmp_path / "eagle.gguf", WIDTH), of_three_layers),
        (gemma3, write_block_head(tmp_path / "block.gguf", WIDTH), of_three_layers),
    ):
        with pytest.raises(CapabilityError, match=why):
            paceline.load(unmeasured(model), draft=head)


# --- MTP layers -------------------------------------------------------------------------------------------------------


@of("MTP")
def test_what_an_mtp_layer_says_is_what_it_computes(scene: Scene, target: LlamaCppEngine) -> None:
    """Beside a forward of the layer in numpy, of tokens and states of anything."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(3, 259, 12).tolist()
    states = rng.standard_normal((12, target.capabilities.state_width)).astype(np.float32)
    head = open_head(target)
    sequence = head.open()
    output = head.forward([Step(sequence, tokens, range(COMMITTED_END, 11), range(12), states)])
    said = np.stack([output.logits(0, index) for index in range(12)])
    own_states, expected = forward_mtp(scene.path, tokens, states)
    np.testing.assert_allclose(said, expected, rtol=0, atol=ROUNDING)
    # A draft is read with the state that the layer left before it.
    head.commit(sequence, range(12))
    drafted = last_row(head, [Step(sequence, [9], [COMMITTED_END], [0])])
    _, expected = forward_mtp(scene.path, [*tokens, 9], np.concatenate((states, own_states[-1:])))
    np.testing.assert_allclose(drafted, expected[-1], rtol=0, atol=ROUNDING)
    head.close()


@of("MTP")
def test_a_row_without_a_state_to_be_read_with_is_refused(target: LlamaCppEngine) -> None:
    head = open_head(target)
    sequence, width = head.open(), target.capabilities.state_width
    with pytest.raises(ValueError, match="none of its own"):
        head.forward([Step(sequence, [5], [COMMITTED_END], [0])])
    with pytest.raises(ValueError, match=rf"states \(1, 3\), not \(1, {width}\)"):
        head.forward([Step(sequence, [5], [COMMITTED_END], [0], np.ones((1, 3), np.float32))])
    head.forward([Step(sequence, [5], [COMMITTED_END], [0], np.ones((1, width), np.float32))])
    head.close()


@of("MTP")
def test_a_layer_in_a_file_of_its_own_says_the_same(scene: Scene, target: LlamaCppEngine, tmp_path: Path) -> None:
    alone = write_model(tmp_path / "mtp-qwen35.gguf", "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    rows = [say(target, open_head(target, where))() for where in (None, alone)]
    np.testing.assert_array_equal(rows[0], rows[1])
    with pytest.raises(ModelFileError, match="not a model but a head"):
        paceline.load(alone)
    options = ModelOptions(scene.path, threads=2, context_length=128, cache_type_k="f32", flash_attention=False)
    for draft in (alone, "mtp", paceline.DraftOptions(alone)):
        with paceline.load(options, draft=draft, policy=FixedPolicy(3)) as model:
            assert "draft" in [drafter.name for drafter in model.drafters]


def test_a_layer_in_a_file_beside_the_model_drafts_where_it_is_named(tmp_path: Path) -> None:
    without = write_model(tmp_path / "plain-Q8_0.gguf", "qwen35", tokenizer="bytes")
    with pytest.raises(InputError, match=r"no MTP layer that drafts here .*, and no mtp-\*\.gguf lies beside it"):
        paceline.load(unmeasured(without), draft="mtp")
    for name in ("mtp-plain-F16.gguf", "mtp-plain-Q8_0.gguf"):
        beside = write_model(tmp_path / name, "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    with paceline.load(unmeasured(without), draft="mtp", policy=FixedPolicy(3)) as model:
        (drafter,) = model.drafters
        assert isinstance(drafter, HeadDrafter)
        assert beside.name in drafter.engine.description
    with paceline.load(unmeasured(without), policy=FixedPolicy(3)) as model:
        assert [drafter.name for drafter in model.drafters] == ["suffix"]


@of("MTP")
def test_a_layer_that_nobody_named_and_finds_no_memory_is_gone_without(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*arguments: object) -> NoReturn:
        raise InputError("no memory for the cache")

    monkeypatch.setattr(heads, "create_context", without_memory)
    with pytest.raises(InputError, match="no memory"):
        paceline.load(unmeasured(scene.path), draft="mtp")
    with pytest.warns(ModelWarning, match="no memory for the cache"):
        model = paceline.load(unmeasured(scene.path), policy=FixedPolicy(3))
    with model:
        assert "draft" not in [drafter.name for drafter in model.drafters]
        assert len(model.generate("a text", max_tokens=4, allowed_token_ids=TOKENS).token_ids) == 4


@of("MTP")
def test_what_a_head_cannot_have_otherwise_than_its_target_is_told(scene: Scene) -> None:
    asked = paceline.DraftOptions("mtp", cache_type_k="q8_0", threads=2)
    with pytest.warns(ModelWarning, match="threads.*cache_type_k.*changes nothing"):
        paceline.load(unmeasured(scene.path), draft=asked, policy=FixedPolicy(3)).close()


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


@of("EAGLE-3")
def test_states_of_a_tree_follow_its_path(target: LlamaCppEngine) -> None:
    sequence, fresh = read(target, [11, 42, 7]), target.open()
    #   0 ─┬─ 1 ─── 3
    #      └─ 2
    target.forward([Step(sequence, [20, 21, 22], [-1, 0, 0], [2])])
    target.forward([Step(sequence, [23], [1], [0])])
    target.commit(sequence, [0, 2])
    target.forward([Step(fresh, [11, 42, 7, 20, 22], [-1, 0, 1, 2, 3], [])])
    target.commit(fresh, range(5))
    np.testing.assert_allclose(target.states(sequence, 0, 5), target.states(fresh, 0, 5), rtol=0, atol=ROUNDING)


@of("EAGLE-3")
@pytest.mark.parametrize("known", [None, [5, 9, 7, 200, 3]], ids=["all tokens", "some tokens"])
def test_what_an_eagle_head_says_is_what_its_layer_computes(
    target: LlamaCppEngine, tmp_path: Path, known: list[int] | None
) -> None:
    """Beside a forward in numpy, of tokens and states of anything: all rows, some rows, and rows of two sequences."""
    rng = np.random.default_rng(4)
    file = write_eagle_head(tmp_path / "head.gguf", WIDTH, draft_ids=known)
    head = open_head(target, file)
    tokens = rng.integers(3, 259, 12).tolist()
    states = rng.standard_normal((12, 3 * WIDTH)).astype(np.float32)
    own, expected = forward_eagle(file, tokens, states)
    sequence, other = head.open(), head.open()
    output = head.forward(
        [
            Step(sequence, tokens[:7], range(COMMITTED_END, 6), [1, 6], states[:7]),
            Step(other, tokens[:3], range(COMMITTED_END, 2), [2], states[:3]),
        ]
    )
    said = [output.logits(0, 0).copy(), output.logits(0, 1).copy(), output.logits(1, 0).copy()]
    np.testing.assert_allclose(said, expected[[1, 6, 2]], rtol=0, atol=ROUNDING)
    head.commit(sequence, range(7))
    head.commit(other, [])
    # A pass without outputs, of which the state is read all the same.
    head.forward([Step(sequence, tokens[7:], range(COMMITTED_END, 4), [], states[7:])])
    head.commit(sequence, range(5))
    drafted = last_row(head, [Step(sequence, [9], [COMMITTED_END], [0])])
    # A draft takes the head's own state in the place of what the encoder makes of the target's.
    _, expected = forward_eagle(file, [*tokens, 9], states, fed_back=own[-1:])
    np.testing.assert_allclose(drafted, expected[-1], rtol=0, atol=ROUNDING)
    head.close()


# --- heads that say a block: DFlash, DSpark ---------------------------------------------------------------------------


def open_block_head(target: LlamaCppEngine, file: Path) -> BlockEngine:
    head = open_head(target, file)
    assert isinstance(head, BlockEngine)
    return head


def read_states(head: BlockEngine, sequence: int, states: FloatArray) -> None:
    rows = len(states)
    head.forward([Step(sequence, [0] * rows, range(COMMITTED_END, rows - 1), (), states)])
    head.commit(sequence, range(rows))


@of("DFlash")
@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_what_a_block_head_says_is_what_its_layers_compute(
    scene: Scene, target: LlamaCppEngine, form: str, sections: bool
) -> None:
    """Beside a forward in numpy, of states of anything: read in parts, blocks of two sequences, and once more."""
    options = dict(BLOCK_FORMS[form])
    if sections:
        options["metadata"] = {**options.get("metadata", {}), **IN_SECTIONS}
    file = scene.write_head("block", **options)
    head = open_block_head(target, file)
    states = np.random.default_rng(4).standard_normal((12, 3 * WIDTH)).astype(np.float32)
    sequence, other = head.open(), head.open()
    read_states(head, sequence, states[:7])
    read_states(head, other, states[:3])
    read_states(head, sequence, states[7:])
    first = 0 if form.startswith("DSpark") and "mask" not in form else 1
    assert head.block_size == BLOCK_ROWS - first
    expected = [NumpyBlock(file, scene.path, read, root) for read, root in ((states, 9), (states[:3], 20))]
    for _ in range(2):
        blocks = head.draft_blocks([(sequence, 9), (other, 20)])
        for block, numpy_block, root in zip(blocks, expected, (9, 20), strict=True):
            likeliest: list[int] = []
            for _ in range(head.block_size):
                row, _ = numpy_block.row(first + len(likeliest), [root, *likeliest])
                likeliest.append(int(np.argmax(row)))
            # What llama.cpp took the drafts for, and others.
            for drafted in (likeliest, [TOKENS[0], likeliest[1], TOKENS[1]]):
                for count in range(len(drafted) + (len(drafted) < len(likeliest))):
                    row, confidence = numpy_block.row(first + count, [root, *drafted[:count]])
                    np.testing.assert_allclose(block.logits(drafted[:count]), row, rtol=0, atol=ROUNDING)
                    said = block.confidence(drafted[:count])
                    assert (said is None) == (confidence is None)
                    assert abs((said or 0.0) - (confidence or 0.0)) < ROUNDING
    head.close()


@of("DFlash")
def test_drafts_follow_the_states_of_the_layers_in_their_order(scene: Scene, target: LlamaCppEngine) -> None:
    head = open_block_head(target, scene.head_path)
    drafter = BlockHeadDrafter(head, target=target.vocabulary)
    text = [(7 * place + 5) % 250 + 3 for place in range(20)]
    request = request_of(text, SamplingParams(0.0), target=target)
    assert read(target, text[:-1]) == request.sequence
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(8))

    def first_row(states: FloatArray) -> FloatArray:
        return NumpyBlock(scene.head_path, scene.path, states, text[-1]).row(1, [text[-1]])[0]

    states = target.states(request.sequence, 0, 19).copy()
    # What the drafter has had the head read lies in the first of its sequences.
    (block,) = head.draft_blocks([(0, text[-1])])
    said = block.logits([]).copy()
    assert tree.token_ids[1] == said.argmax()
    np.testing.assert_allclose(said, first_row(states), rtol=0, atol=ROUNDING)
    layers = np.split(states, 3, axis=1)
    for number, layer in enumerate(LAYERS):
        alone = open_target(scene.path, (layer,))
        np.testing.assert_allclose(alone.states(read(alone, text[:-1]), 0, 19), layers[number], rtol=0, atol=ROUNDING)
        alone.close()
    # Such mistakes would be seen.
    for wrong in (states[:-1], np.roll(states, 1, axis=0), np.concatenate([layers[1], layers[0], layers[2]], axis=1)):
        assert np.abs(said - first_row(wrong)).max() > 100 * ROUNDING
    drafter.close()


@of("DFlash")
def test_what_a_block_head_cannot_be_asked_for_is_refused(scene: Scene, target: LlamaCppEngine) -> None:
    """llama.cpp would say something else, or end the process."""
    head = open_block_head(target, scene.head_path)
    states = np.ones((2, 3 * WIDTH), np.float32)
    sequence, other = head.open(), head.open()
    with pytest.raises(ValueError, match="a block follows one or more"):
        head.draft_blocks([(sequence, 5)])
    for step in (
        Step(sequence, [0, 0], [-1, 0], []),
        Step(sequence, [0, 0], [-1, 0], [1], states),
        Step(sequence, [0, 0], [-1, -1], [], states),
        Step(sequence, [0, 0], [-1, 0], [], states[:, 1:]),
    ):
        with pytest.raises(ValueError, match=r"reads states|branches off|has states"):
            head.forward([step])
    head.forward([Step(sequence, [0, 0], [-1, 0], [], states)])
    with pytest.raises(ValueError, match="none that is pending"):
        head.draft_blocks([(sequence, 5)])
    head.commit(sequence, [0, 1])
    read_states(head, other, states)
    for roots in ([], [(sequence, 5)] * 2, [(sequence, 300)], [(sequence, 5)] * 100):
        with pytest.raises(ValueError, match=r"blocks have|one block a sequence|not in a vocabulary"):
            head.draft_blocks(roots)
    (block,) = head.draft_blocks([(sequence, 5)])
    with pytest.raises(IndexError, match="none follows 4 drafts"):
        block.logits([1, 2, 3, 4])
    before = block.logits([]).copy()
    head.draft_blocks([(other, 5)])
    with pytest.raises(EngineError, match="these logits are gone"):
        block.logits([])
    # What a block left behind would be seen by the next.
    for handle in (sequence, head.fork(sequence)):
        np.testing.assert_array_equal(head.draft_blocks([(handle, 5)])[0].logits([]), before)
    head.close()


# --- assistants of Gemma 4, which read their target's cache -----------------------------------------------------------


def drafts(target: LlamaCppEngine, head: Engine, sequence: int) -> FloatArray:
    """Return the rows of two levels of drafts behind a sequence of the target."""
    end = target.length(sequence)
    rows = [last_row(head, [Step(sequence, [7], [COMMITTED_END], [0], target.states(sequence, end - 1, end))])]
    rows.append(last_row(head, [Step(sequence, [9], [0], [0])]))
    head.commit(sequence, ())
    return np.stack(rows)


def read(target: LlamaCppEngine, tokens: Sequence[int]) -> int:
    sequence = target.open()
    target.forward([Step(sequence, tokens, range(COMMITTED_END, len(tokens) - 1), ())])
    target.commit(sequence, range(len(tokens)))
    return sequence


@of("Gemma 4")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_any_number_are_accepted_and_refused(
    scene: Scene, target: LlamaCppEngine, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that says now and then what the target will: every chain of up to 4 drafts ends everywhere."""
    expected = answers(target, [], 0, temperature)
    texts = {tuple(answer.prompt_ids): answer.token_ids for answer in expected}
    drafter = CacheHeadDrafter(open_head(target, scene.file), target=target.vocabulary)
    rng = np.random.default_rng(5)

    def read_knowing(job: DraftJob, frontier: int, logits: FloatArray) -> tuple[list[Proposal], float | None]:
        proposals, probability = read_row(job, frontier, logits)
        request, tree = job.request, job.tree
        known = texts[tuple(request.token_ids[: request.num_prompt])]
        place = request.num_output + tree.depths[frontier]
        is_on_path = [*request.output_ids, *tree.path_tokens(frontier)] == known[:place]
        if is_on_path and place < len(known) and rng.random() < 0.7:
            proposals = [dataclasses.replace(proposals[0], token_id=known[place])]
        return proposals, probability

    monkeypatch.setattr("paceline.drafters.draft_model.read_row", read_knowing)
    actual = answers(target, [drafter], 4, temperature)
    drafter.close()
    counts: Counter[int] = Counter()
    for one, other in zip(actual, expected, strict=True):
        assert one.token_ids == other.token_ids
        counts.update(one.request.stats.accepted_by_depth)
    assert counts[0] > counts[1] > counts[2] > counts[3] > 5


@of("Gemma 4")
def test_what_an_assistant_says_is_what_its_layers_compute(scene: Scene, target: LlamaCppEngine) -> None:
    """Beside a forward in numpy of both, of two sequences at once, behind drafts, and of some rows alone."""
    rng = np.random.default_rng(4)
    file, path = scene.head_path, scene.path
    head = open_head(target, file)
    texts = [rng.integers(3, 259, count).tolist() for count in (40, 11)]
    known = [forward_gemma4(path, text) for text in texts]
    sequences = [read(target, text) for text in texts]
    for sequence, text, (states, _) in zip(sequences, texts, known, strict=True):
        first = target.first_state(sequence)
        assert first <= len(text) - 5
        held = target.states(sequence, first, len(text))
        np.testing.assert_allclose(held, states[first:], rtol=0, atol=HALF_ROUNDING)
    drafted = [forward_gemma4_assistant(file, path, cache, [7], states[-1:]) for states, cache in known]
    output = head.forward(
        [
            Step(sequence, [7], [COMMITTED_END], [0], target.states(sequence, len(text) - 1, len(text)))
            for sequence, text in zip(sequences, texts, strict=True)
        ]
    )
    said = [output.logits(row, 0) for row in (0, 1)]
    np.testing.assert_allclose(said, np.concatenate([logits for _, logits in drafted]), rtol=0, atol=HALF_ROUNDING)
    # Drafts, two of one token, are read at the same place, with the head's own state.
    own = drafted[0][0]
    _, expected = forward_gemma4_assistant(file, path, known[0][1], [9, 8], own.repeat(2, 0))
    _, expected_other = forward_gemma4_assistant(file, path, known[1][1], [9], drafted[1][0])
    output = head.forward([Step(sequences[0], [9, 8], [0, 0], [0, 1]), Step(sequences[1], [9], [0], [0])])
    said = [output.logits(0, 0), output.logits(0, 1), output.logits(1, 0)]
    np.testing.assert_allclose(said, np.concatenate((expected, expected_other)), rtol=0, atol=HALF_ROUNDING)
    head.commit(sequences[0], ())
    given = np.concatenate((known[0][0][-1:], own))
    some = head.forward([Step(sequences[0], [9, 8], [COMMITTED_END, 0], [1], given)])
    np.testing.assert_allclose(some.logits(0, 0), expected[1], rtol=0, atol=HALF_ROUNDING)
    head.close()


@of("Gemma 4")
def test_what_is_drafted_depends_on_the_text_alone(scene: Scene, target: LlamaCppEngine) -> None:
    """Of sequences that were forked, trimmed, stepped back or saved, whatever was drafted before."""
    head = open_head(target, scene.file)
    tokens = np.random.default_rng(3).integers(3, 259, 60).tolist()
    expected = drafts(target, head, read(target, tokens[:30]))
    longer = read(target, tokens)
    drafts(target, head, longer)
    target.trim(longer, 29)
    with pytest.raises(ValueError, match="are not held"):
        drafts(target, head, longer)
    target.forward([Step(longer, tokens[29:30], [COMMITTED_END], ())])
    target.commit(longer, [0])
    fork = target.fork(longer)
    target.close_sequence(longer)
    saved = target.save(fork)
    target.forward([Step(fork, [5, 6, 7], [-1, 0, 0], [2])])
    target.commit(fork, [0, 2])
    drafts(target, head, fork)
    target.trim(fork, 30)
    restored = target.restore(saved)
    for sequence in (fork, restored):
        np.testing.assert_allclose(drafts(target, head, sequence), expected, rtol=0, atol=HALF_ROUNDING)
    # Files hold no states: the next pass leaves one.
    target.trim(fork, 29)
    data = target.export_state(target.save(fork)).copy()
    target.close_sequence(fork)
    loaded = target.restore(target.import_state(data, 29, 29))
    assert target.first_state(loaded) == 29
    target.forward([Step(loaded, tokens[29:30], [COMMITTED_END], ())])
    target.commit(loaded, [0])
    np.testing.assert_allclose(drafts(target, head, loaded), expected, rtol=0, atol=HALF_ROUNDING)
    head.close()


@of("Gemma 4")
def test_an_assistant_is_opened_before_the_target_has_read_anything(scene: Scene, target: LlamaCppEngine) -> None:
    """Its context would empty the target's cache; where nothing is open, there is nothing to lose."""
    tokens, file = [11, 42, 7], scene.head_path
    sequence = read(target, tokens)
    before = last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])])
    target.commit(sequence, ())
    with pytest.raises(EngineError, match=r"while 1 sequences of .* are: that would empty their cache"):
        open_head(target, file)
    np.testing.assert_array_equal(last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])]), before)
    target.close_sequence(sequence)
    two = open_head(target, file), open_head(target, file)
    sequence = read(target, tokens)
    np.testing.assert_array_equal(drafts(target, two[0], sequence), drafts(target, two[1], sequence))
    np.testing.assert_array_equal(last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])]), before)
    for head in two:
        head.close()


@of("Gemma 4")
def test_drafts_follow_committed_tokens_alone(scene: Scene, target: LlamaCppEngine) -> None:
    head = open_head(target, scene.file)
    step = Step(target.open(), [7], [COMMITTED_END], [0], np.ones((1, target.capabilities.state_width), np.float32))
    with pytest.raises(ValueError, match="0 committed tokens"):
        head.forward([step])
    target.forward([Step(step.sequence, [5], [COMMITTED_END], ())])
    with pytest.raises(ValueError, match="1 pending nodes"):
        head.forward([step])
    target.commit(step.sequence, [0])
    with pytest.raises(ValueError, match="none of its own to follow"):
        head.forward([dataclasses.replace(step, states=None)])
    assert np.isfinite(last_row(head, [step])).all()
    target.close_sequence(step.sequence)
    with pytest.raises(ClosedError, match="is not open"):
        head.forward([step])
    head.close()


@of("Gemma 4")
def test_a_full_cache_leaves_no_room_for_drafts(scene: Scene, target: LlamaCppEngine) -> None:
    head = open_head(target, scene.file)
    others, sequence = [read(target, [5] * 250) for _ in range(2)], read(target, [5])
    while True:
        try:
            target.forward([Step(sequence, [5], [COMMITTED_END], ())])
        except NoRoomError:
            break
        target.commit(sequence, [0])
    with pytest.raises(NoRoomError):
        drafts(target, head, sequence)
    head.commit(sequence, ())
    target.trim(others[0], 50)
    assert np.isfinite(drafts(target, head, sequence)).all()
    head.close()


@of("Gemma 4")
def test_a_pass_that_fails_leaves_target_and_head_as_they_were(
    scene: Scene, target: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head(target, scene.file)
    sequence = read(target, [11, 42, 7])
    expected = drafts(target, head, sequence)
    states = target.states(sequence, 2, 3)
    last_row(head, [Step(sequence, [7], [COMMITTED_END], [0], states)])
    with monkeypatch.context() as patch:
        patch.setattr("llama_cpp.llama_cpp.llama_decode", lambda context, batch: -3)
        with pytest.raises(EngineError, match="failed a pass of 1 rows"):
            head.forward([Step(sequence, [9], [0], [0])])
    np.testing.assert_array_equal(last_row(head, [Step(sequence, [9], [0], [0])]), expected[1])
    head.commit(sequence, ())
    np.testing.assert_array_equal(drafts(target, head, sequence), expected)
    head.close()


@of("Gemma 4")
def test_passes_are_measured_where_all_sequences_are_open(scene: Scene, target: LlamaCppEngine) -> None:
    """In one of the target's own beside them, which has as many tokens as are wanted."""
    head = open_head(target, scene.file)
    sequences = [read(target, [5, 6, 7 + index]) for index in range(target.capabilities.max_sequences)]
    before = [drafts(target, head, sequence) for sequence in sequences]
    warm_up(head, [1, 4, 16])
    meter = Meter(WallClock(), ProfilingBudget(), lambda share: None)
    with open_subject(head, meter, Random(0), verifies=False) as subject:
        subject.warm_up()
        subject.fill_to(120)
        assert head.length(subject.sequence) == target.length(subject.sequence) == subject.context == 120
        assert subject.time_pass(4) > 0
        subject.rewind(32)
        assert target.length(subject.sequence) == 32
        with pytest.raises(CapabilityError, match="sequences are open, which is the most"):
            head.open()
    np.testing.assert_array_equal([drafts(target, head, sequence) for sequence in sequences], before)
    head.close()


@of("Gemma 4")
def test_levels_with_siblings_are_planned_and_recorded(scene: Scene) -> None:
    """With the only sequence of the target in use, measured ones and recorded ones have room all the same."""
    file = scene.head_path
    assert foreseen_bytes(ModelOptions(file, context_length=200)) == file.stat().st_size
    options: dict[str, Any] = {"allowed_token_ids": TOKENS, "seed": 1, "temperature": 0.8}
    with paceline.load(unmeasured(scene.path), draft=file, policy="auto") as model:
        assert model.target.capabilities.max_sequences == 1
        recording = record(model, "a text", depth=3, siblings=2, max_tokens=30, **options)
        (trace,) = (trace for trace in recording.traces if trace.name == "draft")
        assert trace.is_model
        assert [len(level.token_ids) for level in trace.chains[9]] == [2, 2, 2]
    with paceline.load(unmeasured(scene.path), draft=file, policy=FixedPolicy(3, siblings=2)) as model:
        drafted = model.generate("a text", max_tokens=30, **options)
        plain = model.generate("a text", max_tokens=30, speculate=False, **options)
    assert drafted.token_ids == plain.token_ids == list(recording.token_ids)
    assert drafted.stats.num_accepted > 0
