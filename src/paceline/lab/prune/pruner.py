"""From a model and what was asked to a smaller file, and what that costs.

The file is made in a hidden folder beside its place. There it is loaded, reads some tokens and tokenizes texts; only
then does it get its name. What was interrupted, or did not fit on the disk, leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from paceline.atomic_output import check_room, temporary_folder
from paceline.core.errors import InputError, ModelFileError, VocabularyMismatchError
from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.prune.layers import LayerCosts, check_layers, choose_layers
from paceline.lab.prune.measuring import Acceptance, Judge, PassTimes, Tell, check_loads, time_passes
from paceline.lab.prune.vocabulary import (
    MULTIPLE,
    ChosenTokens,
    Respelled,
    TokenTable,
    check_size,
    check_spelling,
    choose_tokens,
    count_tokens,
    read_tokens,
)
from paceline.lab.prune.width import ChosenBlocks, FeedForward, choose_blocks, read_feed_forward
from paceline.lab.prune.writer import (
    PER_TOKEN,
    Cut,
    Part,
    cut_tensors,
    num_layers,
    pass_bytes,
    provenance,
    read_whole,
    write_cut,
)
from paceline.lab.samples import Sample, split_samples
from paceline.models.fingerprints import fingerprint
from paceline.models.gguf_file import GGUFFile
from paceline.vocabularies.relation import relate_vocabularies

KNOWN: Final = {
    "vocab": "Gemma 3 270M cut from 262k to 52k tokens: 3.2 of 4 drafted tokens accepted by its uncut self",
    "layers": "SmolLM2 135M without 4 of 30 layers: 68 % accepted (1 - TV) by its uncut self",
    "width": "SmolLM2 135M without one block of 48 in each layer: 87 % accepted (1 - TV) by its uncut self",
    "type": "SmolLM2 135M, which has 4 bits: 97 % accepted in Q8_0, 86 % in Q3_K_M, 75 % in Q2_K",
}
"""What was measured of each way of cutting, at temperature 0.8, on a model that it names."""


_OUTPUT_BITS: Final = {True: 6.5625, False: 8.5}
"""Bits that llama.cpp leaves each weight of the output at least, whatever the type: those of Q6_K, which packs 256
together, or of Q8_0 where the width is no multiple of 256."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to cut.

    Attributes:
        vocab: tokens that are kept; ``None`` for all.
        layers: number of layers to remove.
        width: feed-forward units of a layer to remove, or their share where it is below 1; ``None`` for none.
        file_type: type to quantise to; ``None`` for the types there are.
    """

    vocab: int | None = None
    layers: int = 0
    width: float | None = None
    file_type: str | None = None

    @property
    def ways(self) -> list[str]:
        """The ways that are asked for, as in :data:`KNOWN`."""
        given = {"vocab": self.vocab, "layers": self.layers, "width": self.width, "type": self.file_type}
        return [name for name, value in given.items() if value]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known before the work.

    Attributes:
        pass_bytes_before: bytes of weights that a pass of one token reads; its time is mostly theirs.
        known: what was measured of such cuts elsewhere, a sentence each.
    """

    bytes_before: int
    bytes_after: int
    pass_bytes_before: int
    pass_bytes_after: int
    known: tuple[str, ...]

    @property
    def pass_share(self) -> float:
        return self.pass_bytes_after / self.pass_bytes_before


@dataclass(frozen=True, slots=True)
class Made:
    """What was cut and why; what was not asked for is ``None``.

    Attributes:
        pass_share: bytes of weights that a pass of one token reads, over what they were.
        by_itself: layers were measured against the uncut model, as the target has other tokens.
    """

    bytes_after: int
    pass_share: float
    tokens: ChosenTokens | None
    respelled: Respelled | None
    layers: LayerCosts | None
    layers_before: int
    by_itself: bool
    parts: FeedForward | None
    blocks: ChosenBlocks | None
    file_type: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured of the result.

    Attributes:
        accepted: of the cut model by the target; ``None`` where it cannot draft for it.
        uncut: of the model as it was, where the target is another one.
        refusal: why it does not draft for the target, in a line.
    """

    times: PassTimes
    accepted: Acceptance | None
    uncut: Acceptance | None
    refusal: str | None = None


class Pruner:
    """Cuts one model.

    Args:
        model: the GGUF file, and how it runs.
        asked: what to cut.
        target: the model to draft for; ``None`` for the uncut model.
        samples: texts that tokens and layers are chosen by, and the result is measured on.
        temperature: at which the target answers.
        seed: of its answers.
        keep_answers: whether they may be kept on this machine.
        stopped: whether the user wants no more; ``Stopped`` is raised then.
        tell: called with what is being done.

    Raises:
        ModelFileError: the model cannot be cut in a way that is asked for.
        InputError: there is not as much to cut.
    """

    def __init__(
        self,
        model: ModelOptions,
        asked: Asked,
        *,
        target: ModelOptions | None,
        samples: Sequence[Sample],
        temperature: float,
        seed: int,
        keep_answers: bool,
        stopped: Stop,
        tell: Tell,
    ) -> None:
        self._options = model
        self._path = Path(model.path)
        self._asked = asked
        self._target = target
        self._temperature = temperature
        self._stopped = stopped
        self._file = GGUFFile(self._path)
        self._halves = split_samples(samples)
        self._texts = [sample.text for sample in samples]

        def tell_unless_stopped(doing: str, done: int, total: int) -> None:
            if stopped():
                raise Stopped
            tell(doing, done, total)

        self._tell = tell_unless_stopped

        def judge_by(judging: ModelOptions) -> Judge:
            return Judge(
                judging,
                self._halves,
                temperature=temperature,
                seed=seed,
                keep_answers=keep_answers,
                stopped=stopped,
                tell=self._tell,
            )

        self._judge_by = judge_by
        self._judge = judge_by(target or model)
        self._table: TokenTable | None = None
        self._parts: FeedForward | None = None
        self._num_blocks = 0
        # What cannot be cut is refused before anything takes long.
        if asked.layers:
            check_layers(self._file, asked.layers)
        if asked.width is not None:
            self._parts = read_feed_forward(self._file)
            self._num_blocks = self._parts.blocks_to_remove(asked.width)
        if asked.vocab is not None:
            self._table = read_tokens(self._file)
            check_size(self._table, asked.vocab)

    def forecast(self) -> Forecast:
        """Return what the cut will come to, by the sizes alone."""
        asked = self._asked
        token_ids = blocks = None
        if asked.vocab is not None:
            token_ids = np.arange(min(-(-asked.vocab // MULTIPLE) * MULTIPLE, self._size))
        if self._parts is not None:
            left = self._parts.units // self._parts.block_units - self._num_blocks
            blocks = (np.arange(left),) * self._parts.layers
        # Which tokens and layers these will be changes little.
        cut = Cut(token_ids, tuple(range(asked.layers)), blocks, self._parts.block_units if self._parts else 0)
        before, after = cut_tensors(self._file, Cut()), cut_tensors(self._file, cut)
        weights = [sum(tensor.num_bytes for tensor in tensors) for tensors in (before, after)]
        file_bytes = self._path.stat().st_size
        header = (file_bytes - weights[0]) * (1.0 if token_ids is None else len(token_ids) / self._size)
        known = tuple(sentence for name, sentence in KNOWN.items() if name in asked.ways)
        whole, read = weights[1], pass_bytes(after)
        if asked.file_type is not None:
            whole, read = self._bytes_in_type(asked.file_type, before, after)
        return Forecast(file_bytes, round(whole + header), pass_bytes(before), read, known)

    @property
    def _size(self) -> int:
        return 0 if self._table is None else self._table.size

    def _bytes_in_type(self, file_type: str, before: Sequence[Part], after: Sequence[Part]) -> tuple[int, int]:
        """Return the bytes of all tensors and of a pass in another type, by the size of the uncut model in it."""
        from paceline.conversion.quantize import quantized_bytes

        total = quantized_bytes(self._path, file_type)
        if total is None:
            return sum(tensor.num_bytes for tensor in after), pass_bytes(after)
        total -= self._path.stat().st_size - sum(tensor.num_bytes for tensor in before)  # what stands before them
        bits = 8 * total / sum(tensor.num_weights for tensor in before)

        def of_tokens(tensors: Sequence[Part]) -> float:
            outputs = {tensor.name for tensor in read_whole(tensors)}
            return sum(
                tensor.num_weights * max(bits, _OUTPUT_BITS[tensor.shape[-1] % 256 == 0] * (tensor.name in outputs)) / 8
                for tensor in tensors
                if PER_TOKEN.fullmatch(tensor.name)
            )

        def of_layers(tensors: Sequence[Part]) -> int:
            return sum(tensor.num_bytes for tensor in tensors if not PER_TOKEN.fullmatch(tensor.name))

        rest = (total - of_tokens(before)) * of_layers(after) / of_layers(before)
        whole, read = of_tokens(after), of_tokens(read_whole(after))
        return round(rest + whole), round(rest + read)

    def make(self, destination: Path) -> Made:
        """Write the cut model; the file appears when it is complete, and was loaded.

        Raises:
            InputError: the disk is full, or what is left of the model does not run.
            ModelFileError: texts do not come back from the smaller vocabulary.
            Stopped: the user wants no more; nothing is left behind.
        """
        asked, forecast = self._asked, self.forecast()
        steps = 1 + (asked.file_type is not None)
        trial_bytes = forecast.bytes_before if asked.layers else 0
        check_room(destination, max(steps * forecast.bytes_after, trial_bytes), way_out="choose another place")
        with temporary_folder(destination) as folder:
            layers, by_itself = self._choose_layers(folder)
            blocks = self._choose_blocks()
            tokens = self._choose_tokens()
            cut = Cut(
                None if tokens is None else tokens.token_ids,
                () if layers is None else layers.removed,
                None if blocks is None else blocks.blocks,
                0 if blocks is None else blocks.block_units,
            )
            made = folder / "pruned.gguf"
            self._write(folder, made, cut)
            respelled = self._check(made, is_respelled=tokens is not None)
            if self._stopped():
                raise Stopped
            with made.open("r+b") as file:
                os.fsync(file.fileno())
            made.replace(destination)
        after = GGUFFile(destination)
        return Made(
            bytes_after=destination.stat().st_size,
            pass_share=pass_bytes(cut_tensors(after, Cut())) / forecast.pass_bytes_before,
            tokens=tokens,
            respelled=respelled,
            layers=layers,
            layers_before=num_layers(self._file),
            by_itself=by_itself,
            parts=self._parts,
            blocks=blocks,
            file_type=asked.file_type,
        )

    def _choose_layers(self, folder: Path) -> tuple[LayerCosts | None, bool]:
        """Return which layers go, and whether the model itself had to stand for a target with other tokens."""
        if not self._asked.layers:
            return None, False
        judge, by_itself = self._judge, False
        unshared_ids: tuple[int, ...] = ()
        if self._target is not None:
            with open_vocabulary(self._target) as ours, open_vocabulary(self._options) as theirs:
                relation = relate_vocabularies(ours, theirs)
            by_itself = not relation.fits
            unshared_ids = () if by_itself else relation.unshared_ids
        if by_itself:
            judge = self._judge_by(self._options)
        judge.write("choosing")
        trial = folder / "trial.gguf"

        def measure(layer: int) -> float:
            write_cut(self._file, trial, Cut(layers=(layer,)))
            found = judge.overlap(replace(self._options, path=trial), unshared_ids)
            trial.unlink()
            return found

        layers = choose_layers(
            num_layers(self._file),
            self._asked.layers,
            measure,
            lambda done, total: self._tell("each layer taken out alone", done, total),
        )
        return layers, by_itself

    def _choose_blocks(self) -> ChosenBlocks | None:
        if self._parts is None:
            return None
        return choose_blocks(
            self._file,
            self._parts,
            self._num_blocks,
            lambda done, total: self._tell("looking at the feed-forward units", done, total),
        )

    def _choose_tokens(self) -> ChosenTokens | None:
        if self._table is None or self._asked.vocab is None:
            return None
        with open_vocabulary(self._options) as vocabulary:
            counts = count_tokens(vocabulary, (sample.text for sample in self._halves[0]))
            infill = [token_id for token_id in vocabulary.infill_tokens if token_id is not None]
            also = {*vocabulary.end_ids, *infill}
        return choose_tokens(
            self._table,
            self._asked.vocab,
            counts,
            also,
            lambda done, total: self._tell("choosing tokens", done, total),
        )

    def _write(self, folder: Path, path: Path, cut: Cut) -> None:
        file_type = self._asked.file_type
        about = provenance(self._file, self._path, fingerprint(self._path), cut, file_type)
        if file_type is None:
            write_cut(self._file, path, cut, about, self._tell)
            return
        unquantised, packed = folder / "unquantised.gguf", folder / "packed.gguf"
        if cut.is_nothing:  # what is written twice is the smaller file
            self._quantize(self._path, packed, file_type)
            write_cut(GGUFFile(packed), path, cut, about, self._tell)
            packed.unlink()
            return
        write_cut(self._file, unquantised, cut, about, self._tell)
        self._quantize(unquantised, path, file_type)
        unquantised.unlink()

    def _quantize(self, source: Path, path: Path, file_type: str) -> None:
        from paceline.conversion.quantize_apart import quantize_apart

        quantize_apart(
            source,
            path,
            file_type,
            begin=lambda num_bytes: check_room(path, num_bytes, way_out="choose another place"),
            report=lambda done, total: self._tell(f"quantising to {file_type}", done, total),
        )

    def _check(self, path: Path, *, is_respelled: bool) -> Respelled | None:
        """Refuse a file that does not load, or whose vocabulary changes texts."""
        self._tell("loading what was written", 0, 1)
        cut = replace(self._options, path=path)
        try:
            check_loads(cut)
        except ModelFileError as error:
            raise InputError(f"the cut model does not load: {error}") from None
        if not is_respelled:
            return None
        with open_vocabulary(self._options) as before, open_vocabulary(cut) as after:
            return check_spelling(before, after, self._texts)

    def measure(self, destination: Path) -> Verdict:
        """Time passes and measure drafts of the cut model; raise ``Stopped`` where the user wants no more."""
        after = replace(self._options, path=destination)
        times = time_passes(self._options, after, stopped=self._stopped, tell=self._tell)
        accepted = uncut = refusal = None
        try:
            accepted = self._judge.accept(destination)
        except VocabularyMismatchError as error:
            refusal = str(error)
        if self._target is not None and accepted is not None:
            with contextlib.suppress(VocabularyMismatchError):
                uncut = self._judge.accept(self._path)
        return Verdict(times, accepted, uncut, refusal)
