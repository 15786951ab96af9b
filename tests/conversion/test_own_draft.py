"""Drafts of a target's own: what is asked for, what is made of it, and that nothing half-made is ever found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.conversion import quantize_apart
from paceline.conversion.own_draft import OwnDraft, complete_draft, make_own_draft
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.model_pair import open_pair
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_model import read_gguf_model
from paceline.models.registry import drafts_folder, named_models, remove, resolve_model
from tests.models.helpers import edited_gguf, split_gguf, write_folder, write_gguf
from tests.timing import WAIT_S

DRAFT = embedded_draft()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drafts are to lie, which is not there yet."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafts"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that takes some tenths of a second to quantise."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    quantize_gguf(embedded_target(), path, "F32")
    return path


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file every few milliseconds."""
    monkeypatch.setattr(quantize_apart, "_LOOK_S", 0.002)


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("self", OwnDraft()),
        ("self:Q4_0", OwnDraft("Q4_0")),
        ("self:q2_k", OwnDraft("Q2_K")),
        ("./self", None),
        ("selfish", None),
        ("self.gguf", None),
        (Path("self"), None),
        (None, None),
    ],
)
def test_a_name_asks_for_the_target_s_own_draft_or_for_another_model(name: object, asked: OwnDraft | None) -> None:
    assert OwnDraft.parse(name) == asked


@pytest.mark.parametrize("name", ["self:Q9", "self:", "self:Q4_0:2"])
def test_a_type_that_there_is_none_of_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: '.*' is not a type to quantise to; choose from .*Q4_0.*Q2_K"):
        OwnDraft.parse(name)
    with pytest.raises(InputError, match="is not a type to quantise to"):
        make_own_draft(DRAFT, name.partition(":")[2])


@pytest.mark.parametrize(
    ("target_type", "chosen"),
    [("F32", "Q4_0"), ("F16", "Q4_0"), ("BF16", "Q4_0"), ("Q6_K", "Q4_0"), ("Q5_0", "Q2_K"), ("Q4_K_M", "Q2_K")],
)
def test_the_type_is_chosen_by_how_many_bits_the_target_has(target_type: str, chosen: str, tmp_path: Path) -> None:
    quantize_gguf(embedded_target(), tmp_path / "target.gguf", target_type)
    draft = OwnDraft().of(tmp_path / "target.gguf")
    assert draft.path.name.endswith(f"-{chosen}.gguf")
    assert draft.foreseen_bytes() < 0.75 * (tmp_path / "target.gguf").stat().st_size


def test_a_target_that_is_that_small_already_is_refused_unless_a_type_is_named(tmp_path: Path, folder: Path) -> None:
    target = tmp_path / "target.gguf"
    quantize_gguf(embedded_target(), target, "Q2_K")
    with pytest.raises(InputError, match=r"has 3\.6 bits a weight already, .* name another draft model than self"):
        make_own_draft(target)
    assert not folder.exists()
    assert describe(make_own_draft(target, "TQ1_0")).file_type == "TQ1_0"


# --- what cannot be made ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "file_type", "why"),
    [
        (
            DRAFT,
            "F16",
            r"in F16 has 2\.\d+ MB, and the target has 1\.31 MB: a draft has to be smaller; take a smaller type",
        ),
        (DRAFT, "Q8_0", r"in Q8_0 has 1\.3\d MB, and the target has 1\.31 MB"),
        (embedded_target(), "IQ1_S", r"takes an importance matrix; choose another"),
        (DRAFT, "NVFP4", r"llama\.cpp reads that type and writes none; choose another"),
    ],
)
def test_a_type_that_makes_no_draft_of_this_target_is_refused(
    target: Path, file_type: str, why: str, folder: Path
) -> None:
    with pytest.raises(InputError, match=why):
        make_own_draft(target, file_type)
    assert list(folder.iterdir()) == []


def test_a_folder_and_what_is_no_whole_model_are_refused_in_one_line(tmp_path: Path, folder: Path) -> None:
    model = write_folder(tmp_path / "hf")
    with pytest.raises(ModelFileError, match=r"is a folder: convert it with paceline convert .* or name another draft"):
        make_own_draft(model)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DRAFT.read_bytes()[:200_000])
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        make_own_draft(cut)
    # Its header says what llama.cpp knows nothing of.
    with pytest.raises(ModelFileError, match="unknown model architecture"):
        make_own_draft(write_gguf(tmp_path / "other.gguf", "nosuch"))
    with pytest.raises(ModelFileError, match=r"there is no file"):
        make_own_draft(tmp_path / "none.gguf")
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    usage = shutil.disk_usage(folder.anchor)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    shares: list[float] = []
    with pytest.raises(InputError, match=r"needs 1\.0\d MB, and 200 kB are free there: free some, .*PACELINE_CACHE"):
        make_own_draft(DRAFT, report=shares.append)
    assert set(shares) <= {0.0}
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line_with_the_way_out(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be kept in .*drafts: .*; set PACELINE_CACHE to another folder"):
        make_own_draft(DRAFT)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_draft_is_made_once_and_found_by_content(
    tmp_path: Path, folder: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    target = tmp_path / "mine.gguf"
    shutil.copy(DRAFT, target)
    shares: list[float] = []
    made = make_own_draft(target, report=shares.append)
    assert list(folder.iterdir()) == [made]
    assert made.name.startswith("mine-")
    assert made.name.endswith("-Q4_0.gguf")
    assert describe(made).file_type == "Q4_0"
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)

    shares.clear()
    target.rename(tmp_path / "moved.gguf")
    assert make_own_draft(tmp_path / "moved.gguf", report=shares.append) == made
    assert make_own_draft(DRAFT, "Q4_0") == made
    assert (shares, len(processes)) == ([], 1)

    other_type = make_own_draft(DRAFT, "Q2_K")
    changed = make_own_draft(edited_gguf(tmp_path / "mine.gguf", {"general.name": "changed"}))
    assert changed.name.startswith("mine-")
    assert len({made, other_type, changed}) == len(list(folder.iterdir())) == len(processes) == 3


def test_a_target_of_any_name_has_a_draft(tmp_path: Path, folder: Path) -> None:
    long = tmp_path / f"{'模' * 80}.gguf"
    shutil.copy(DRAFT, long)
    made = make_own_draft(long, "q4_0")
    assert made.name.startswith("模模模")
    assert made.name.endswith("-Q4_0.gguf")
    assert list(folder.iterdir()) == [made]


def test_a_kept_draft_that_is_damaged_is_made_again() -> None:
    made = make_own_draft(DRAFT)
    content = made.read_bytes()
    made.write_bytes(content[:-1000])
    assert make_own_draft(DRAFT) == made
    assert made.read_bytes() == content


def test_a_split_target_gives_the_draft_of_the_whole_one(tmp_path: Path) -> None:
    parts = split_gguf(DRAFT, tmp_path)
    made = make_own_draft(parts[0])
    assert made.name.startswith(f"{DRAFT.stem}-")
    assert "-of-" not in made.name
    model, whole = read_gguf_model(made), read_gguf_model(make_own_draft(DRAFT))
    assert len(model.paths) == 1
    assert model.weights_by_type == whole.weights_by_type
    assert model.header.spans.keys() == whole.header.spans.keys()
    with pytest.raises(ModelFileError, match="give the first part"):
        make_own_draft(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelFileError, match="is missing"):
        make_own_draft(parts[0])


def test_kept_drafts_have_names_and_can_be_removed(folder: Path) -> None:
    made = make_own_draft(DRAFT)
    (named,) = [model for model in named_models() if model.own_draft]
    assert (named.name, named.path) == (made.stem, made)
    assert resolve_model(made.stem) == made
    assert remove(made.stem) == made
    assert list(folder.iterdir()) == []


def test_completion_offers_it_where_a_draft_is_named() -> None:
    assert complete_draft("") == ["self", "target", "draft"]
    assert complete_draft("se") == ["self"]
    assert complete_draft("./se") == []


# --- interrupts, and others at work -----------------------------------------------------------------------------------


def at(place: Callable[[float], bool]) -> Callable[[float], None]:
    """Return what interrupts where a share is as wanted."""

    def report(share: float) -> None:
        if place(share):
            raise KeyboardInterrupt

    return report


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("place", [lambda share: True, lambda share: 0 < share < 1], ids=["start", "middle"])
def test_an_interrupt_leaves_nothing(
    place: Callable[[float], bool], large: Path, folder: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_own_draft(large, report=at(place))
    assert list(folder.iterdir()) == []
    (process,) = processes
    assert process.returncode is not None
    assert make_own_draft(large).is_file()


_KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.conversion import quantize_apart
from paceline.conversion.own_draft import make_own_draft

start = quantize_apart.subprocess.Popen
def noted(*arguments, **options):
    process = start(*arguments, **options)
    print(process.pid, flush=True)
    return process

def report(share):
    if 0 < share < 1:
        os.kill(os.getpid(), signal.SIGKILL)

quantize_apart._LOOK_S = 0.002
quantize_apart.subprocess.Popen = noted
make_own_draft(Path(sys.argv[1]), report=report)
"""


@pytest.mark.skipif(os.name != "posix", reason="a pipe tells the other process")
def test_a_process_that_is_killed_leaves_nothing_at_work_and_no_half_file(large: Path, folder: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(large)], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(timeout=WAIT_S)
    assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []
    made = make_own_draft(large)
    assert list(folder.iterdir()) == [made]


def test_what_was_left_behind_is_removed_and_what_is_being_written_is_not(folder: Path) -> None:
    name = OwnDraft().of(DRAFT).path.name
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder.mkdir(parents=True)
    dead, alive = (folder / f".{name}.{process}.1.partial" for process in (ended.pid, os.getppid()))
    for partial in (dead, alive):
        partial.write_bytes(b"half")
    made = make_own_draft(DRAFT)
    assert set(folder.iterdir()) == {made, alive}


@pytest.mark.parametrize("gives_up", [False, True])
def test_of_two_at_once_one_makes_it_and_the_other_waits_and_makes_it_where_that_gives_up(
    gives_up: bool, processes: list[subprocess.Popen[bytes]]
) -> None:
    begun, waited = threading.Event(), threading.Event()
    found: list[Path | ModelFileError] = []

    def first() -> None:
        def report(done_bytes: int, num_bytes: int) -> None:
            begun.set()
            assert waited.wait(WAIT_S)
            if gives_up:
                raise ModelFileError("given up")

        try:
            found.append(OwnDraft().of(DRAFT).make(report))
        except ModelFileError as error:
            found.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(WAIT_S)
    made_here: list[int] = []
    made = OwnDraft().of(DRAFT).make(lambda done, total: made_here.append(done), waiting=waited.set)
    thread.join()
    (other,) = found
    assert str(other) == ("given up" if gives_up else str(made))
    assert (bool(made_here), len(processes)) == (gives_up, 1 + gives_up)
    assert list(made.parent.iterdir()) == [made]


# --- in the library ---------------------------------------------------------------------------------------------------


def test_load_takes_it_for_the_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(DRAFT, tmp_path / "self")  # ./self would be this one
    monkeypatch.chdir(tmp_path)
    policy, asked = paceline.FixedPolicy(4), {"max_tokens": 24, "temperature": 0.8, "seed": 3}
    target = ModelOptions("target", context_length=128, threads=1, flash_attention=False)
    with paceline.load(target, policy="fixed", drafters=["suffix"]) as model:
        plain = model.generate("def f(x):", speculate=False, **asked)  # type: ignore[arg-type]
    shares: list[float] = []
    with paceline.load(target, draft="self", policy=policy, report=shares.append) as model:
        answer = model.generate("def f(x):", **asked)  # type: ignore[arg-type]
    assert answer.token_ids == plain.token_ids
    assert answer.stats.num_accepted > answer.stats.num_drafted / 2 > 0
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [path.name for path in drafts_folder().iterdir()] == [OwnDraft("Q4_0").of(embedded_target()).path.name]

    target = dataclasses.replace(target, path=embedded_target())
    beside = DraftOptions("self:Q2_K", context_length=64).beside(target)
    for draft in (ModelOptions("self:Q2_K", context_length=64), beside):
        with paceline.load(target, draft=draft, policy=policy) as model:
            assert model.generate("def f(x):", **asked).token_ids == plain.token_ids  # type: ignore[arg-type]


def test_load_refuses_what_has_no_draft_of_its_own_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.api._open", lambda *arguments, **options: pytest.fail("it was loaded"))
    with pytest.raises(ModelFileError, match="is a folder: convert it"):
        paceline.load(write_folder(tmp_path / "hf"), draft="self")
    with pytest.raises(InputError, match="is not a type to quantise to"):
        paceline.load(draft="self:Q9")


@pytest.mark.usefixtures("often")
def test_an_error_of_the_report_gives_the_load_up(large: Path, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        paceline.load(large, draft="self", report=at(lambda share: 0 < share < 1))
    assert list(folder.iterdir()) == []


def test_its_options_beside_a_target_are_those_of_that_target() -> None:
    target = ModelOptions(embedded_target(), context_length=256, threads=2)
    beside = DraftOptions("self", context_length=0, threads=1).beside(target)
    assert (beside.path, beside.context_length, beside.threads) == ("self", 4096, 1)
    with pytest.raises(InputError, match="is not a type to quantise to"):
        open_pair(target, DraftOptions("self:Q9").beside(target))
