"""Heads of Hugging Face models: random EAGLE-3 heads in each form that is published, and MTP layers.

What a head says is held to a forward that is written down here once more, without a cache and transformers' layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drafters.helpers import grow
from tests.engines.heads import TOKENS, check_answers
from tests.engines.numpy_heads import attend, by_target_ids, norm, turn
from tests.helpers import request_of

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError, ModelFileError, ModelWarning
from paceline.core.params import SamplingParams
from paceline.drafters.base import DraftBudget
from paceline.drafters.head import CacheHeadDrafter, HeadDrafter
from paceline.engines.base import COMMITTED_END, Step
from paceline.models.description import describe
from paceline.planning.policies.fixed import FixedPolicy

torch = pytest.importorskip("torch", reason="needs paceline[torch]")
transformers = pytest.importorskip("transformers", reason="needs paceline[torch]")

from safetensors.torch import load_file, save_file  # noqa: E402
from tests.engines.tiny_torch import ARCHITECTURES, SHAPE, VOCAB_SIZE, WINDOW, build, start, tiny, tiny_tokenizer  # noqa: E402
from transformers.cache_utils import MtpCache  # noqa: E402
from transformers.modeling_layers import MtpModel  # noqa: E402

from paceline.engines.loading import foreseen_bytes  # noqa: E402
from paceline.engines.options import OUTPUT_STATE, ModelOptions, engine_for  # noqa: E402
from paceline.engines.torch_hf.assistants import TorchAssistant  # noqa: E402
from paceline.engines.torch_hf.engine import TorchHFEngine  # noqa: E402
from paceline.engines.torch_hf.head_files import read_eagle  # noqa: E402
from paceline.engines.torch_hf.heads import TorchHead  # noqa: E402

LAYERS, WIDTH, OWN = 8, 64, 32
ROUNDING = 1e-5
KNOWN = [*range(290, 150, -1), *TOKENS, 3, 9]
"""Tokens of a head that knows some, in no order."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("LlamaConfig", SHAPE | {"num_hidden_layers": LAYERS})


FORMS: dict[str, dict[str, Any]] = {
    "SafeAILab": {"architectures": ["LlamaForCausalLM"]},
    "SpecForge": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "head_dim": 24,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "NVIDIA": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "use_aux_hidden_state": True},
        "norm_before_fc": True,
        "num_hidden_layers": 2,
    },
    "speculators": {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        "norm_before_residual": True,
    },
    "speculators 3.1": {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": [0, 3, 4, 5],
        "fc_norm": True,
        "norm_output": True,
        "model_type": "qwen3",
        "head_dim": 16,
        "layer_types": ["sliding_attention"],
        "sliding_window": WINDOW,
        "attention_bias": True,
    },
}
READS = {
    "SafeAILab": (2, 4, 5),
    "SpecForge": (2, 4, 5),
    "NVIDIA": (2, 4, 8),
    "speculators": (1, 2, 5),
    "speculators 3.1": (0, 3, 4, 5),
}


def write_head(
    folder: Path,
    form: str,
    *,
    known: list[int] | None = KNOWN,
    borrows: bool = False,
    own_width: int = OWN,
    pickled: bool = False,
    said: dict[str, Any] | None = None,
    layers: int = 3,
) -> dict[str, Any]:
    """Write a head with random weights, and return these by the names that the reference has."""
    config = {
        "model_type": "llama",
        "hidden_size": own_width,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": VOCAB_SIZE if known is None else len(known),
        **FORMS[form],
        **(said or {}),
    }
    speculators = "speculators_model_type" in config
    size = config.get("head_dim", own_width // 4)
    generator = torch.Generator().manual_seed(10)

    def drawn(*shape: int) -> Any:
        return torch.normal(0.0, 0.15, shape, generator=generator)

    def gain(size: int) -> Any:
        return 0.5 + torch.rand(size, generator=generator)

    count = len(config.get("eagle_aux_hidden_state_layer_ids", range(layers)))
    weights = {"fc.weight": drawn(own_width, count * WIDTH), "norm.weight": gain(own_width)}
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = gain(count * WIDTH)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{index}.weight": gain(WIDTH) for index in range(count)}
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}" if speculators or index else "midlayer"
        read = 2 * own_width if index == 0 else own_width
        for name, rows in (("q", 4 * size), ("k", 2 * size), ("v", 2 * size)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = drawn(rows, read)
            if config.get("attention_bias"):
                weights[f"{layer}.self_attn.{name}_proj.bias"] = drawn(rows)
        weights[f"{layer}.self_attn.o_proj.weight"] = drawn(own_width, 4 * size)
        if config.get("attention_bias"):
            weights[f"{layer}.self_attn.o_proj.bias"] = drawn(own_width)
        if config["model_type"] == "qwen3":
            weights |= {f"{layer}.self_attn.{name}_norm.weight": gain(size) for name in "qk"}
        weights |= {f"{layer}.mlp.{name}_proj.weight": drawn(48, own_width) for name in ("gate", "up")}
        weights[f"{layer}.mlp.down_proj.weight"] = drawn(own_width, 48)
        for name in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if index == 0 else [])):
            weights[f"{layer}.{name}.weight"] = gain(own_width)
    if not borrows:
        weights["embed_tokens.weight"] = drawn(VOCAB_SIZE, own_width)
        weights["lm_head.weight"] = drawn(VOCAB_SIZE if known is None else len(known), own_width)
    stored = dict(weights)
    if known is not None:
        stored["d2t"] = torch.tensor(known) - torch.arange(len(known))
        stored["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, torch.tensor(known), value=True)
    folder.mkdir()
    if pickled:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    if speculators:
        shape = {name: config.pop(name) for name in list(config) if name in SHAPE or name in _OF_LAYERS}
        config = {**config, "transformer_layer_config": shape}
    (folder / "config.json").write_text(json.dumps(config))
    return {name.replace("midlayer", "layers.0"): tensor.double().numpy() for name, tensor in weights.items()} | {
        "config": {**config, **config.get("transformer_layer_config", {}), "head_dim": size}
    }


_OF_LAYERS = (
    *("model_type", "hidden_act", "rms_norm_eps", "head_dim", "attention_bias"),
    *("layer_types", "sliding_window"),
)


def forward(
    weights: dict[str, Any],
    tokens: list[int],
    states: FloatArray,
    known: list[int] | None,
    fed_back: FloatArray | None = None,
    *,
    feeds_back_the_other: bool = False,
) -> tuple[FloatArray, FloatArray]:
    """Return what a head makes of rows: what it feeds back, and logits by the target's ids, ``-inf`` where unknown.

    Source: https://arxiv.org/abs/2503.01840, section 3.
    """
    config = weights["config"]
    size, rows = config["head_dim"], len(tokens)
    frequencies = config.get("rope_theta", 10000.0) ** (-np.arange(size // 2) * 2 / size)
    if "rope_scaling" in config:
        # Llama 3.1: slow turns are slowed down, and those between in part.
        kept = ((64 * frequencies / (2 * np.pi) - 1) / (4 - 1)).clip(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / 8)
    back = np.arange(rows)[:, None] - np.arange(rows)
    seen = (back >= 0) & (back < config.get("sliding_window", rows))

    def normed(values: FloatArray, name: str) -> FloatArray:
        return norm(values, weights[f"{name}.weight"])

    def times(values: FloatArray, name: str) -> FloatArray:
        product: FloatArray = values @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
        return product

    def heads(values: FloatArray, name: str) -> FloatArray:
        found = times(values, f"{name}_proj").reshape(rows, -1, size)
        return normed(found, f"{name}_norm") if f"{name}_norm.weight" in weights else found

    def layer(name: str, hidden: FloatArray, read: FloatArray) -> FloatArray:
        queries, keys = (turn(heads(read, f"{name}.self_attn.{each}"), range(rows), frequencies) for each in "qk")
        mixed = attend(queries, keys, heads(read, f"{name}.self_attn.v"), seen, size**-0.5)
        hidden = hidden + times(mixed, f"{name}.self_attn.o_proj")
        inner = normed(hidden, f"{name}.post_attention_layernorm")
        gate = times(inner, f"{name}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * times(inner, f"{name}.mlp.up_proj")
        return hidden + times(gated, f"{name}.mlp.down_proj")

    read: FloatArray = np.asarray(states, np.float64)
    if config.get("norm_before_fc"):
        read = normed(read, "input_norm")
    if config.get("fc_norm"):
        chunks = np.split(read, read.shape[-1] // WIDTH, -1)
        read = np.concatenate([normed(each, f"fc_norm.{index}") for index, each in enumerate(chunks)], -1)
    fused = times(read, "fc")
    if fed_back is not None:
        fused = np.concatenate((fused, fed_back))
    of_state = normed(fused, "layers.0.hidden_norm")
    embedded = normed(weights["embed_tokens.weight"][tokens], "layers.0.input_layernorm")
    both = np.concatenate([embedded, of_state], -1)
    hidden = layer("layers.0", of_state if config.get("norm_before_residual") else fused, both)
    for index in range(1, config["num_hidden_layers"]):
        hidden = layer(f"layers.{index}", hidden, normed(hidden, f"layers.{index}.input_layernorm"))
    own = normed(hidden, "norm")
    feeds_normed = bool(config.get("norm_output")) != feeds_back_the_other
    return own if feeds_normed else hidden, by_target_ids(times(own, "lm_head"), known)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_head_says_is_what_its_layers_compute(model: Any, tmp_path: Path, form: str) -> None:
    """Of tokens and states of anything: all rows, some rows, rows of two sequences, and drafts with its own states."""
    weights = write_head(tmp_path / "head", form)
    target = start(model, hold_states=READS[form])
    head = TorchHead(target, tmp_path / "head")
    rng = np.random.default_rng(4)
    tokens = rng.integers(3, VOCAB_SIZE, 12).tolist()
    states = rng.standard_normal((12, target.capabilities.state_width)).astype(np.float32)
    own, expected = forward(weights, tokens, states, KNOWN)
    sequence, other = head.open(), head.open()
    output = head.forward(
        [
            Step(sequence, tokens[:7], range(COMMITTED_END, 6), [1, 6], states[:7]),
            Step(other, tokens[:3], range(COMMITTED_END, 2), [2], states[:3]),
        ]
    )
    said = [output.logits(0, 0), output.logits(0, 1), output.logits(1, 0)]
    np.testing.assert_allclose(said, expected[[1, 6, 2]], rtol=0, atol=ROUNDING)
    head.commit(sequence, range(7))
    head.commit(other, [0])
    head.forward([Step(sequence, tokens[7:], range(COMMITTED_END, 4), [], states[7:])])
    head.commit(sequence, range(5))
    # A draft beside tokens of another sequence, then one that follows it.
    output = head.forward(
        [
            Step(sequence, [9], [COMMITTED_END], [0]),
            Step(other, tokens[1:3], [COMMITTED_END, 0], [1], states[1:3]),
        ]
    )
    own, drafted = forward(weights, [*tokens, 9], states, KNOWN, own[-1:])
    np.testing.assert_allclose(output.logits(0, 0), drafted[-1], rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(output.logits(1, 0), expected[2], rtol=0, atol=ROUNDING)
    followed = head.forward([Step(sequence, [72], [0], [0])]).logits(0, 0)
    _, drafted = forward(weights, [*tokens, 9, 72], states, KNOWN, own[-2:])
    np.testing.assert_allclose(followed, drafted[-1], rtol=0, atol=ROUNDING)
    head.close()


@pytest.mark.parametrize(
    "how",
    [{"known": None}, {"borrows": True, "own_width": WIDTH}, {"pickled": True}],
    ids=["all", "borrows", "pickled"],
)
def test_a_head_may_know_all_tokens_and_borrow_weights(model: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    weights = write_head(tmp_path / "head", "SafeAILab", **how)
    known = how.get("known", KNOWN)
    if how.get("borrows"):
        weights["embed_tokens.weight"] = model.get_input_embeddings().weight.double().detach().numpy()
        weights["lm_head.weight"] = (
            model.get_output_embeddings().weight.double().detach().numpy()[slice(None) if known is None else known]
        )
    target = start(model, hold_states=READS["SafeAILab"])
    head = TorchHead(target, tmp_path / "head")
    target.close()  # either may be closed first
    states = np.ones((2, 3 * WIDTH), np.float32)
    said = head.forward([Step(head.open(), [7, 8], [-1, 0], [1], states)]).logits(0, 0)
    _, expected = forward(weights, [7, 8], states, known)
    np.testing.assert_allclose(said, expected[1], rtol=0, atol=ROUNDING)
    head.close()
    assert all(parameter.requires_grad for parameter in model.parameters())


def drafts(weights: dict[str, Any], text: list[int], hidden: Any, layers: Any, count: int, **wiring: Any) -> list[int]:
    """Return the chain that the reference drafts after a text, of the states that transformers says its layers read."""
    shift = wiring.pop("shift", 0)
    states = np.concatenate([hidden[layer] for layer in layers], -1)
    states = np.concatenate((states[:1].repeat(shift, 0), states))[: len(text) - 1]
    tokens, fed, own = text[1:], None, None
    found: list[int] = []
    for _ in range(count):
        own, logits = forward(weights, [*tokens, *found], states, KNOWN, fed, **wiring)
        found.append(int(logits[-1].argmax()))
        fed = own[len(tokens) - 1 :]
    return found


MISWIRED: dict[str, dict[str, Any]] = {
    "layers one too low": {"layers": (1, 3, 4)},
    "layers one too high": {"layers": (3, 5, 6)},
    "layers in another order": {"layers": (5, 4, 2)},
    "a state of the token before": {"shift": 1},
    "feedback after the norm": {"feeds_back_the_other": True},
}


def test_a_head_is_wired_to_its_target_as_it_was_trained(model: Any, tmp_path: Path) -> None:
    """From texts to drafts, beside the reference on transformers' own hidden states; and every mistake shows."""
    weights = write_head(tmp_path / "head", "SpecForge")
    target = start(model, hold_states=READS["SpecForge"])
    drafter = HeadDrafter(TorchHead(target, tmp_path / "head"), target=target.vocabulary)
    rng = np.random.default_rng(8)
    told_apart = dict.fromkeys(MISWIRED, 0)
    for number in range(8):
        text = rng.integers(3, VOCAB_SIZE, 9 + number).tolist()
        sequence = target.open()
        request = request_of(text, SamplingParams(0.0), request_id=number, target=target, sequence=sequence)
        target.forward([Step(request.sequence, text[:-1], range(COMMITTED_END, len(text) - 2), [])])
        target.commit(request.sequence, range(len(text) - 1))
        drafter.begin(request)
        (tree,) = grow(drafter, [request], DraftBudget(4))
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        hidden = [each[0].double().numpy() for each in hidden]
        right: dict[str, Any] = {"layers": READS["SpecForge"], "count": 4}
        assert tree.token_ids[1:] == drafts(weights, text, hidden, **right)
        for mistake, wiring in MISWIRED.items():
            told_apart[mistake] += tree.token_ids[1:] != drafts(weights, text, hidden, **(right | wiring))
        drafter.end(request)
        target.close_sequence(request.sequence)
    drafter.close()
    assert min(told_apart.values()) >= 6, told_apart


@pytest.mark.parametrize(
    ("form", "depth", "temperature"),
    [("SpecForge", 1, 0.0), ("SpecForge", 4, 0.8), ("NVIDIA", 4, 0.0), ("speculators 3.1", 4, 0.8)],
)
def test_answers_are_those_of_plain_decoding(
    model: Any, tmp_path: Path, form: str, depth: int, temperature: float
) -> None:
    """Several at once, of which not all have room to the end."""
    write_head(tmp_path / "head", form)
    target = start(model, hold_states=READS[form], context_length=256, max_sequences=3, cells=200)
    drafter = HeadDrafter(TorchHead(target, tmp_path / "head"), target=target.vocabulary)
    check_answers(target, drafter, depth, temperature, max_tokens=35)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_states_are_what_layers_read_and_change_no_bit_of_a_row(architecture: str) -> None:
    """Of a tree's path, beside transformers' hidden states; of the last layer, whose norm must give its last ones."""
    model = tiny(architecture)
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([[4, 5, 6, 8]]), output_hidden_states=True).hidden_states
    hooks = count_hooks(model)  # transformers leaves some of its own
    engine, unarmed = start(model, hold_states=(0, 1, 2)), start(model)
    rows, sequences = [], []
    for each in (engine, unarmed):
        sequence = each.open()
        sequences.append(sequence)
        #   4, 5 ─┬─ 6 ─── 8
        #         └─ 7
        each.forward([Step(sequence, [4, 5], [-1, 0], [])])
        each.commit(sequence, [0, 1])
        output = each.forward([Step(sequence, [6, 7, 8], [-1, -1, 0], [1, 2])])
        rows.append(np.stack([output.logits(0, 0), output.logits(0, 1)]))
        each.commit(sequence, [0, 2])
    np.testing.assert_array_equal(rows[0], rows[1])
    unarmed.close()
    with torch.inference_mode():
        first, second, last = torch.from_numpy(engine.states(sequences[0], 0, 4).copy()).chunk(3, -1)
        norm = [each for name, each in model.get_decoder().named_children() if "norm" in name or name == "ln_f"][-1]
        for states, expected in ((first, hidden[0]), (second, hidden[1]), (norm(last), hidden[2])):
            np.testing.assert_allclose(states, expected[0], rtol=0, atol=ROUNDING)
    engine.close()
    assert count_hooks(model) == hooks


def test_states_come_along_with_copies_of_a_sequence() -> None:
    engine = start(tiny(), hold_states=(0, 1))
    sequence = engine.open()
    engine.forward([Step(sequence, [4, 5, 6], range(COMMITTED_END, 2), [])])
    engine.commit(sequence, [0, 1, 2])
    expected = engine.states(sequence, 0, 3).copy()
    saved, fork = engine.save(sequence), engine.fork(sequence)
    assert saved.num_bytes == engine.saved_bytes(sequence)
    engine.trim(sequence, 1)
    engine.close_sequence(sequence)
    for copy in (fork, engine.restore(saved)):
        np.testing.assert_array_equal(engine.states(copy, 0, 3), expected)
    engine.close()


def count_hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_a_head_is_known_for_what_it_is(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = tmp_path / "head"
    write_head(head, "SpecForge", said={"max_position_embeddings": 40})
    capfd.readouterr()
    with paceline.load(folder, draft=head, policy=FixedPolicy(3), context_length=128) as model:
        answer = model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1)
        plain = model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1, speculate=False)
    assert answer.text == plain.text
    assert answer.stats.num_accepted > 0
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    with pytest.raises(ModelFileError, match=r"not a model but a head that drafts for one \(eagle3\): give the folder"):
        paceline.load(head)
    assert describe(head, may_be_head=True).architecture == "eagle3"
    assert engine_for(head) == "torch_hf"
    assert foreseen_bytes(ModelOptions(head)) > 100_000


@pytest.mark.parametrize(
    ("form", "said", "why"),
    [
        ("SafeAILab", {"target_hidden_size": 48}, "its target's width is 48, not 64; give the head that was made for"),
        (
            "speculators",
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            "reads what layers 1, 2, 9 of its target read",
        ),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [5, 2, 1]}, "name the layers in ascending order"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 2, "5"]}, "layers have whole numbers"),
        ("speculators", {"speculators_model_type": "peagle"}, "a head of the kind peagle, and EAGLE-3 and assistants"),
        ("SafeAILab", {"architectures": ["DFlashDraftModel"]}, "a head of the kind dflash"),
        ("SafeAILab", {"architectures": None, "draft_vocab_size": None}, "a head of the kind eagle, and EAGLE-3"),
        ("SafeAILab", {"medusa_num_heads": 5}, "a head of the kind medusa"),
        ("NVIDIA", {"eagle_config": {"parallel_draft_step": 3}}, r"another form \(parallel_draft_step is 3, and"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_what_it_says(
    folder: Path, tmp_path: Path, form: str, said: dict[str, Any], why: str
) -> None:
    write_head(tmp_path / "head", "SafeAILab")
    config = {**json.loads((tmp_path / "head" / "config.json").read_text()), **FORMS[form], **said}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        paceline.load(folder, draft=tmp_path / "head", context_length=128)


def change(head: Path, *, drop: str | None = None, **tensors: Any) -> None:
    weights = {**load_file(head / "model.safetensors"), **tensors}
    weights.pop(drop or "", None)
    save_file(weights, head / "model.safetensors")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"drop": "fc.weight"}, "lacks 1 weights of an EAGLE-3 head, such as fc.weight; fetch it again"),
        ({"drop": "d2t"}, "knows 145 tokens and does not say which of the target's 300 these are"),
        ({"input_norm.weight": torch.ones(192)}, "an EAGLE-3 head with its settings has no input_norm.weight"),
        ({"d2t": torch.zeros(145, dtype=torch.int64) - 1}, "are not all among the 300 that this has, each once"),
        ({"d2t": torch.arange(0, -145, -1)}, "are not all among the 300 that this has, each once"),
        ({"fc.weight": torch.ones(32, 96)}, r"fc.weight is \(32, 96\), and \(32, 192\) would fit"),
        ({"drop": "embed_tokens.weight"}, r"embed_tokens.weight is \(300, 64\), and \(300, 32\) would fit"),
        ({"norm.weight": torch.full((32,), float("nan"))}, "has weights that make no numbers: fetch it again"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_weights(
    model: Any, tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    write_head(tmp_path / "head", "SafeAILab")
    change(tmp_path / "head", **changed)
    target = start(model, hold_states=READS["SafeAILab"])
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        TorchHead(target, tmp_path / "head")


def test_a_head_of_the_other_engine_is_refused(folder: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    del gguf
    from tests.engines.tiny_models import write_eagle_head, write_model

    head = write_eagle_head(tmp_path / "head.gguf", 64)
    with pytest.raises(CapabilityError, match="no head for target under torch_hf: give the folder of a head"):
        paceline.load(folder, draft=head, context_length=128)
    write_head(tmp_path / "head", "SafeAILab")
    target = write_model(tmp_path / "llama.gguf", "llama", tokenizer="bytes")
    with pytest.raises(CapabilityError, match=r"no head for llama\.gguf under llama_cpp: give a head in a GGUF file"):
        paceline.load(target, draft=tmp_path / "head")


def test_a_target_has_the_states_that_its_head_reads(model: Any, tmp_path: Path) -> None:
    write_head(tmp_path / "head", "SafeAILab")
    with pytest.raises(
        CapabilityError, match=r"reads the states of layers \[2, 4, 5\], and the target was loaded with"
    ):
        TorchHead(start(model, hold_states=(1, 4, 5)), tmp_path / "head")
    with pytest.raises(CapabilityError, match="has layers 0 to 7, and its head reads what layer 9 does"):
        start(model, hold_states=(9,))


def test_a_row_without_a_state_is_refused_and_changes_nothing(model: Any, tmp_path: Path) -> None:
    write_head(tmp_path / "head", "SafeAILab")
    head = TorchHead(start(model, hold_states=READS["SafeAILab"]), tmp_path / "head")
    sequence, states = head.open(), np.ones((1, 3 * WIDTH), np.float32)
    before = head.forward([Step(sequence, [5], [COMMITTED_END], [0], states)]).logits(0, 0).copy()
    head.commit(sequence, [0])
    for step in (
        Step(sequence, [6, 7], [COMMITTED_END, 0], []),
        Step(sequence, [6], [COMMITTED_END], [], states[:, 1:]),
    ):
        with pytest.raises(ValueError, match=r"no state to be read with|not \(1, 192\)"):
            head.forward([step])
    head.trim(sequence, 0)
    after = head.forward([Step(sequence, [5], [COMMITTED_END], [0], states)]).logits(0, 0)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_counted_by_what_they_read(tmp_path: Path, form: str) -> None:
    write_head(tmp_path / "head", form)
    assert read_eagle(tmp_path / "head", num_layers=LAYERS, width=WIDTH).layers == READS[form]


# --- assistants of Gemma 4 --------------------------------------------------------------------------------------------

GEMMA: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
OF_E2B = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}


@pytest.fixture(scope="module", params=["31B", "E2B"])
def gemma(request: pytest.FixtureRequest) -> Any:
    """A model of which all layers write keys and values, or some read those of others."""
    pytest.importorskip("transformers", minversion="5.24", reason="its assistants cannot be built before")
    return build("Gemma4TextConfig", GEMMA | (OF_E2B if request.param == "E2B" else {}))


def write_assistant(path: Path, **said: Any) -> Any:
    """Write a random assistant, and return transformers' own."""
    of_layers = {
        **GEMMA,
        **{"model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        **{name: value for name, value in said.items() if name in GEMMA},
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=of_layers, backbone_hidden_size=said.get("backbone_hidden_size", WIDTH)
    )
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.12, generator=generator)
    model.save_pretrained(path)
    return model


def test_what_an_assistant_says_is_what_transformers_makes_of_it(gemma: Any, tmp_path: Path) -> None:
    """Of texts within its window, several at once: transformers sees two tokens more of longer ones, with its mask."""
    reference = write_assistant(tmp_path / "head")
    target = start(gemma, hold_states=(OUTPUT_STATE,), max_sequences=3)
    head = TorchAssistant(target, tmp_path / "head")
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (6, 2, WINDOW)]
    sequences = [target.open() for _ in texts]
    target.forward(
        [Step(each, text[:-1], range(-1, len(text) - 2), []) for each, text in zip(sequences, texts, strict=True)]
    )
    for each, text in zip(sequences, texts, strict=True):
        target.commit(each, range(len(text) - 1))
    drafted: list[list[int]] = [[] for _ in texts]
    for level in range(3):
        steps = [
            Step(each, [text[-1]], [COMMITTED_END], [0], target.states(each, len(text) - 2, len(text) - 1))
            if level == 0
            else Step(each, [its[-1]], [level - 1], [0])
            for each, text, its in zip(sequences, texts, drafted, strict=True)
        ]
        output = head.forward(steps)
        for index, (text, its) in enumerate(zip(texts, drafted, strict=True)):
            expected = draft_as_transformers(gemma, reference, text, its)
            np.testing.assert_allclose(output.logits(index, 0), expected, rtol=0, atol=ROUNDING)
            its.append(int(expected.argmax()))
    for each in sequences:
        head.commit(each, ())
    assert head._pool.used == 0
    head.close()
    target.close()


def draft_as_transformers(gemma: Any, assistant: Any, text: list[int], drafted: list[int]) -> Any:
    with torch.inference_mode():
        read = gemma(
            input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True
        )
        state = read.hidden_states[-1][:, -1:]
        for token_id in [text[-1], *drafted]:
            embedded = gemma.get_input_embeddings()(torch.tensor([[token_id]]))
            output = assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=read.shared_kv_states,
            )
            state = output.last_hidden_state
    return output.logits[0, -1].numpy()


def test_answers_with_an_assistant_are_those_of_plain_decoding(gemma: Any, tmp_path: Path) -> None:
    temperature = 0.8 if gemma.config.num_kv_shared_layers else 0.0
    write_assistant(tmp_path / "head")
    target = start(gemma, hold_states=(OUTPUT_STATE,), context_length=256, max_sequences=3, cells=200)
    head = TorchAssistant(target, tmp_path / "head")
    check_answers(target, CacheHeadDrafter(head, target=target.vocabulary), 3, temperature, max_tokens=35)


@pytest.mark.parametrize("gemma", ["31B"], indirect=True)
def test_a_model_is_loaded_with_its_assistant(gemma: Any, tmp_path: Path) -> None:
    gemma.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_assistant(tmp_path / "head")
    with paceline.load(tmp_path / "target", draft=tmp_path / "head", context_length=128) as model:
        answer = model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1)
        plain = model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1, speculate=False)
    assert answer.text == plain.text
    write_assistant(tmp_path / "other", backbone_hidden_size=48)
    with pytest.raises(CapabilityError, match="its backbone_hidden_size is 48, not 64; give the assistant"):
        paceline.load(tmp_path / "target", draft=tmp_path / "other", context_length=128)
    write_assistant(tmp_path / "another", global_head_dim=16)
    with pytest.raises(CapabilityError, match="its head_dim is 16, not 32; give the assistant"):
        paceline.load(tmp_path / "target", draft=tmp_path / "another", context_length=128)
    with pytest.raises(CapabilityError, match=r"or its target is no Gemma 4 .* but llama"):
        TorchAssistant(start(hold_states=(OUTPUT_STATE,)), tmp_path / "head")


# --- MTP layers -------------------------------------------------------------------------------------------------------

MIXTURE = SHAPE | {"num_hidden_layers": 3, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
WITH_MTP: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", MIXTURE | ROUTED | {"head_dim": 16}),
    "deepseek_v3": ("DeepseekV3Config", MIXTURE | ROUTED | LATENT | {"num_key_value_heads": 4}),
    "mellum": (
        "MellumConfig",
        MIXTURE
        | {"num_experts": 4, "head_dim": 16, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
OF_MELLUM = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


@pytest.fixture(params=WITH_MTP)
def with_mtp(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two layers whose third one became its MTP layer, in its publisher's names."""
    path: Path = tmp_path / request.param
    whole = build(*WITH_MTP[request.param])
    whole.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(6)
    for name, shape in {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}.items():
        drawn = torch.normal(0.0 if name == "eh_proj" else 1.0, 0.12, shape, generator=generator)
        weights[f"model.layers.2.{name}.weight"] = drawn
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    if request.param == "mellum":
        for name in [name for name in weights if "layers.2" in name]:
            its = name.removeprefix("model.layers.2.").removesuffix(".weight")
            weights[f"mtp.{OF_MELLUM.get(its, f'layers.0.{its}')}.weight"] = weights.pop(name)
        config |= {"layer_types": config["layer_types"][:2], "mlp_layer_types": ["sparse"] * 2}
    else:
        # transformers knows the numbers of layers of the models that were published.
        monkeypatch.setattr(type(whole), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def open_with_mtp(path: Path) -> TorchHFEngine:
    options = ModelOptions(path, context_length=256, max_sequences=3, cells=200, threads=1, hold_states=(OUTPUT_STATE,))
    return TorchHFEngine(options)


def test_what_an_mtp_layer_says_is_what_transformers_makes_of_it(with_mtp: Path) -> None:
    """Beside its own cache and masks, tokens and states of anything; and a draft with the layer's own state."""
    target = open_with_mtp(with_mtp)
    main = transformers.AutoModelForCausalLM.from_pretrained(with_mtp).eval()
    reference = MtpModel.from_pretrained(main).eval()

    def say(token_ids: list[int], states: Any) -> tuple[Any, Any]:
        with torch.inference_mode():
            positions = torch.arange(len(token_ids))[None]
            cache = MtpCache(config=main.config.get_mtp_config())
            own = reference.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([token_ids]))
            return own[0], reference._project_to_logits(own)[0]

    rng = np.random.default_rng(4)
    tokens = rng.integers(3, VOCAB_SIZE, 20).tolist()
    states = rng.standard_normal((20, WIDTH)).astype(np.float32)
    own, expected = say(tokens, torch.from_numpy(states))
    head = TorchHead(target)
    sequence, other = head.open(), head.open()
    head.forward([Step(other, tokens[:3], range(COMMITTED_END, 2), [], states[:3])])
    head.forward([Step(sequence, tokens[:11], range(COMMITTED_END, 10), [], states[:11])])
    head.commit(sequence, range(11))
    output = head.forward([Step(sequence, tokens[11:], range(COMMITTED_END, 8), [0, 8], states[11:])])
    said = [output.logits(0, 0).copy(), output.logits(0, 1).copy()]
    np.testing.assert_allclose(said, expected[[11, 19]], rtol=0, atol=ROUNDING)
    head.commit(sequence, range(9))
    output = head.forward([Step(sequence, [9], [COMMITTED_END], [0])])
    _, expected = say([*tokens, 9], torch.cat((torch.from_numpy(states), own[-1:])))
    np.testing.assert_allclose(output.logits(0, 0), expected[-1], rtol=0, atol=ROUNDING)
    head.close()


def test_answers_with_an_mtp_layer_are_those_of_plain_decoding(with_mtp: Path) -> None:
    temperature = 0.0 if with_mtp.name == "mellum" else 0.8
    target = open_with_mtp(with_mtp)
    check_answers(target, HeadDrafter(TorchHead(target), target=target.vocabulary), 3, temperature, max_tokens=35)


def test_a_model_drafts_with_its_mtp_layer_where_it_has_one(with_mtp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    with paceline.load(with_mtp, policy=FixedPolicy(3), context_length=128) as model:
        answer = model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1)
    assert answer.stats.num_drafted > 0
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    weights = load_file(with_mtp / "model.safetensors")
    weights = {name: each for name, each in weights.items() if "eh_proj" not in name and name != "mtp.fc.weight"}
    save_file(weights, with_mtp / "model.safetensors", {"format": "pt"})
    with paceline.load(with_mtp, policy=FixedPolicy(3), context_length=128) as model:
        assert model.generate("a text", max_tokens=30, allowed_token_ids=TOKENS, seed=1).text == answer.text
    with pytest.raises(InputError, match="has no MTP layer that drafts here"):
        paceline.load(with_mtp, draft="mtp", context_length=128)


@pytest.mark.parametrize("with_mtp", ["glm4_moe"], indirect=True)
def test_a_model_goes_on_without_an_mtp_layer_that_finds_no_memory(
    with_mtp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(MtpModel, "from_pretrained", fail)
    with (
        pytest.warns(ModelWarning, match="there is no memory for the MTP layer"),
        paceline.load(with_mtp, context_length=128, policy=FixedPolicy(3)) as model,
    ):
        assert model.generate("a text", max_tokens=5).token_ids
