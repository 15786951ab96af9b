"""Names of models: what is listed, what a name leads to, and what may be removed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import platformdirs
import pytest

import paceline
from paceline.core.errors import InputError, ModelFileError
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.registry import complete_model, models_folder, named_models, remove, resolve_model
from tests.models.helpers import write_folder, write_gguf

WAY_OUT = "give the path of a GGUF file or Hugging Face model folder;"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an empty folder to be in."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "cache" / "models"
    made.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return made


def names() -> list[str]:
    return [model.name for model in named_models()]


def test_the_folder_is_the_users_cache_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "~/elsewhere")
    assert models_folder() == Path.home() / "elsewhere" / "models"
    for nothing in ("", None):
        if nothing is None:
            monkeypatch.delenv("PACELINE_CACHE")
        else:
            monkeypatch.setenv("PACELINE_CACHE", nothing)
        assert models_folder() == Path(platformdirs.user_cache_dir("paceline", appauthor=False)) / "models"


def test_without_a_cache_there_is_the_embedded_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "nowhere"))
    assert [(model.name, model.path, model.embedded) for model in named_models()] == [
        ("target", embedded_target(), True),
        ("draft", embedded_draft(), True),
    ]
    assert not (tmp_path / "nowhere").exists()


def test_cached_files_and_folders_have_names(folder: Path) -> None:
    write_gguf(folder / "b-1.5b.gguf")
    write_gguf(folder / "a.GGUF")
    write_folder(folder / "c")
    (folder / ".b.gguf.17.partial").write_bytes(b"")
    (folder / ".hidden.gguf").write_bytes(b"")
    (folder / "notes.md").write_text("not a model")
    assert names() == ["target", "draft", "a", "b-1.5b", "c"]
    assert resolve_model("b-1.5b") == folder / "b-1.5b.gguf"
    assert resolve_model("b-1.5b.gguf") == folder / "b-1.5b.gguf"
    assert resolve_model(Path("c")) == folder / "c"


def test_a_path_that_is_mistyped_is_not_taken_for_a_name_of_the_hub(folder: Path) -> None:
    (folder.parent.parent / "here" / "models").mkdir()
    for path in ("elsewhere/tiny.gguf", "models/tiny"):
        with pytest.raises(ModelFileError) as raised:
            resolve_model(path)
        assert str(raised.value).startswith(f"there is no file {path}: give the path of a GGUF file")
    with pytest.raises(
        ModelFileError, match=r"fetch it from the hub with `repo=.elsewhere/tiny-GGUF.`, or give the path"
    ):
        resolve_model("elsewhere/tiny-GGUF")


def test_every_model_has_a_name_of_its_own(folder: Path) -> None:
    write_gguf(folder / "target.gguf")
    write_gguf(folder / "same.gguf")
    write_folder(folder / "same")
    write_folder(folder / "draft")
    assert len(set(names())) == 6
    assert {resolve_model(name) for name in names()} == {
        embedded_target(),
        embedded_draft(),
        folder / "target.gguf",
        folder / "same.gguf",
        folder / "same",
        folder / "draft",
    }
    assert resolve_model("target") == embedded_target()
    assert resolve_model("target.gguf") == folder / "target.gguf"


def test_a_model_at_the_path_wins_over_a_name(folder: Path) -> None:
    write_gguf(folder / "mine.gguf")
    write_gguf(Path("target"))
    assert resolve_model("target") == Path("target")
    write_folder(Path("mine"))
    assert resolve_model("mine") == Path("mine")
    assert resolve_model(folder / "mine.gguf") == folder / "mine.gguf"


def test_a_folder_without_a_model_does_not_hide_a_name(folder: Path) -> None:
    Path("target").mkdir()
    assert resolve_model("target") == embedded_target()
    assert resolve_model("./target") == Path("target")  # what opens it says that it holds no model
    Path("other").mkdir()
    assert resolve_model("other") == Path("other")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("targte", "there is no file or model targte: did you mean target?"),
        ("./target", "there is no file ./target: did you mean target?"),
        ("mien", "there is no file or model mien: did you mean mine?"),
        ("here.gguf", f"there is no file here.gguf: {WAY_OUT}"),
        ("nobody", f"there is no file or model nobody: {WAY_OUT}"),
        ("a/b.gguf", f"there is no file a/b.gguf: {WAY_OUT}"),
        ("models/lama-1b.gguf", "there is no file models/lama-1b.gguf: did you mean models/Llama-1B-Q4.gguf?"),
        ("models/llama-1b", "there is no file models/llama-1b: did you mean models/Llama-1B-Q4.gguf?"),
        ("models/sptil.gguf", "there is no file models/sptil.gguf: did you mean models/split-00001-of-00002.gguf?"),
        ("models/flder", "there is no file models/flder: did you mean models/folder?"),
        ("models/notes.gguf", f"there is no file models/notes.gguf: {WAY_OUT}"),
    ],
)
def test_what_is_neither_gets_one_line_that_says_what_was_meant(folder: Path, wrong: str, says: str) -> None:
    write_gguf(folder / "mine.gguf")
    Path("models").mkdir()
    for name in ("Llama-1B-Q4.gguf", "split-00001-of-00002.gguf", "split-00002-of-00002.gguf"):
        write_gguf(Path("models", name))
    write_folder(Path("models/folder"))
    Path("models/notes.md").write_text("no model")
    with pytest.raises(ModelFileError) as caught:
        resolve_model(wrong)
    assert str(caught.value) == f"{says} paceline models lists the names that there are"


def test_a_name_that_no_file_can_have_gets_one_line(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^x{300} cannot be read: .*name too long"):
        resolve_model("x" * 300)


def test_loading_takes_names_for_target_and_draft(folder: Path) -> None:
    (folder / "small.gguf").write_bytes(embedded_draft().read_bytes())
    options = paceline.ModelOptions("target", context_length=64, flash_attention=False)
    with paceline.load(options, draft="small", policy=paceline.FixedPolicy(3)) as model:
        assert model.generate("def f", max_tokens=4, seed=1).token_ids
        assert [drafter.name for drafter in model.drafters] == ["draft"]
    with paceline.load(dataclasses.replace(options, path="small"), drafters=["lookup"]) as model:
        assert model.generate("def f", max_tokens=4, seed=1).token_ids


def test_both_names_are_looked_up_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr("paceline.model_pair.open_engine", opened.append)
    with pytest.raises(ModelFileError, match="no file or model nobody"):
        paceline.load("target", draft="nobody")
    assert opened == []


def test_removing(folder: Path) -> None:
    write_gguf(folder / "a.gguf")
    write_folder(folder / "b")
    assert remove("a") == folder / "a.gguf"
    assert remove("b") == folder / "b"
    assert list(folder.iterdir()) == []
    for name, words in (
        ("target", "part of paceline"),
        ("a", "no model named 'a' is cached: there is none in"),
    ):
        with pytest.raises(InputError, match=words):
            remove(name)
    assert embedded_target().is_file()


def test_removing_a_link_keeps_what_it_points_to(folder: Path, tmp_path: Path) -> None:
    elsewhere = write_folder(tmp_path / "elsewhere")
    (folder / "linked").symlink_to(elsewhere)
    remove("linked")
    assert names() == ["target", "draft"]
    assert (elsewhere / "config.json").is_file()


def test_a_folder_is_gone_from_the_list_even_if_its_removal_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(folder / "b")

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.models.registry.shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove("b")
    assert names() == ["target", "draft"]


def test_completion_offers_names_and_leaves_paths_to_the_shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(folder / "target-1b-q4_0.gguf")
    assert complete_model("") == ["target", "draft", "target-1b-q4_0"]
    assert complete_model("tar") == ["target", "target-1b-q4_0"]
    assert complete_model("./") == []
    monkeypatch.setenv("PACELINE_CACHE", str(folder / "target-1b-q4_0.gguf"))
    assert complete_model("d") == ["draft"]


def test_a_cache_in_the_home_of_nobody_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "~no-such-user/models")
    with pytest.raises(ModelFileError, match="PACELINE_CACHE is ~no-such-user/models, and there is no home folder"):
        models_folder()
    assert resolve_model(embedded_target()) == embedded_target()
    assert complete_model("d") == []
