"""``-md self`` on the command line: made once, said in two lines, used everywhere, and nothing left of an interrupt."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from paceline.conversion.quantize import quantize_gguf
from paceline.environment import from_environment
from paceline.models.embedded import embedded_target
from tests.cli.invoking import FAST, Invoke
from tests.cli.terminal import CTRL_C, Terminal
from tests.models.helpers import write_folder
from tests.serving.processes import served
from tests.timing import WAIT_S

RUN = ("run", "-p", "def f(x):", "-c", "128", *FAST)
MADE = re.compile(
    r"quantising target-q8_0\.gguf to Q4_0 as its own draft, once for this model: 8\.05 MB\n"
    r"quantised target-q8_0\.gguf to Q4_0: 8\.05 MB in \d+\.\d s\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafts"


def test_run_makes_it_once_and_says_the_same_text(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.loads(invoke(*RUN, "--no-speculation", "--json").out)
    made = invoke(*RUN, "-m", "target", "-md", "self", "--draft-max", "4", "--json")
    assert made.status == 0, made.err
    assert MADE.fullmatch(made.err)
    answer = json.loads(made.out)
    assert (answer["text"], answer["drafters"]) == (plain["text"], ["draft"])
    assert len(list(folder.iterdir())) == 1
    for name in ("self", "self:q4_0", "target-q8_0-340fed0c799f-Q4_0"):
        again = invoke(*RUN, "-m", "target", "-md", name, "--draft-max", "4", "--json")
        assert (again.status, again.err) == (0, "")
        assert json.loads(again.out)["text"] == plain["text"]
    monkeypatch.setenv("PACELINE_DRAFT_MODEL", "self:Q2_K")
    by_environment = invoke(*RUN, "--draft-max", "4", "--json")
    assert by_environment.err.startswith("quantising target-q8_0.gguf to Q2_K as its own draft")
    assert json.loads(by_environment.out)["text"] == plain["text"]
    assert from_environment().models.named_draft == "self:Q2_K"


@pytest.mark.long
def test_profile_takes_it_as_bench_does(invoke: Invoke) -> None:
    profiled = invoke("profile", "-m", "target", "-md", "self", "-c", "256", "--budget-s", "0.2", "--json")
    assert profiled.status == 0, profiled.err
    assert MADE.match(profiled.err)
    assert "Q4_0" in json.loads(profiled.out)["draft"]


@pytest.mark.long
def test_serve_takes_it_too() -> None:
    with served("-m", "target", "-md", "self") as server:
        assert MADE.match("\n".join(server.said) + "\n")
        timings = httpx.post(
            f"{server.url}/completion", json={"prompt": "def f(x):", "n_predict": 24}, timeout=WAIT_S
        ).json()["timings"]
        assert timings["draft_n_accepted"] > 0


@pytest.mark.parametrize(
    ("target", "draft", "why"),
    [
        ("target", "self:Q9", r"self:Q9: 'Q9' is not a type to quantise to; choose from .*"),
        ("target", "self:F16", r".* in F16 has 26\.\d MB, and the target has 14\.1 MB: a draft has to be smaller; .*"),
        ("target", "self:IQ2_XS", r".* takes an importance matrix; choose another, such as Q2_K or Q4_0"),
        ("hf", "self", r"a draft of its own \(-md self\) is quantised from a GGUF file, and hf is a folder: .*"),
        ("target", "./self", r"there is no file \./self: .*"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    target: str, draft: str, why: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "hf")
    refused = invoke(*RUN, "-m", target, "-md", draft)
    assert (refused.status, refused.out) == (2, "")
    assert re.fullmatch(f"paceline: {why}\n", refused.err), refused.err
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_full_disk_is_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    refused = invoke(*RUN, "-md", "self")
    assert (refused.status, refused.out) == (2, "")
    assert re.fullmatch(
        r"paceline: .*/drafts/.* needs 8\.05 MB, and 1\.00 MB are free there: free some, .*\n", refused.err
    )
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")
def test_what_the_target_cannot_have_is_told_before_its_draft_is_made(invoke: Invoke, folder: Path) -> None:
    refused = invoke(*RUN, "-m", "target", "-md", "self", "--memory", "1G", "-ot", "exps=CPU")
    assert (refused.status, refused.out) == (2, "")
    assert re.fullmatch(r"paceline: tensors placed by hand \(-ot\) are not streamed: .*\n", refused.err), refused.err
    assert not folder.exists()


def test_drafts_are_listed_apart_and_removed_by_name(invoke: Invoke, folder: Path) -> None:
    assert invoke(*RUN, "-md", "self", "--draft-max", "4").status == 0
    (made,) = folder.iterdir()
    listed = invoke("models").out
    heading, entry = f"\nmade of targets to be their drafts (-md self), {folder}\n", f"  {made.stem}  "
    assert listed.index("nothing yet") < listed.index(heading) < listed.index(entry)
    as_json = json.loads(invoke("models", "--json").out)
    assert as_json["drafts_folder"] == str(folder)
    assert {model["name"]: model["own_draft"] for model in as_json["models"]} == {
        "target": False,
        "draft": False,
        made.stem: True,
    }
    removed = invoke("models", "remove", made.stem, "--yes")
    assert (removed.status, removed.err) == (0, f"deleted {made}\n")
    assert list(folder.iterdir()) == []
    assert "made of targets" not in invoke("models").out


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that takes a second or so to quantise to this."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    quantize_gguf(embedded_target(), path, "F32")
    return path


_INTERRUPTED = """
import signal
from paceline.cli.main import main
from paceline.conversion import quantize_apart

size = quantize_apart._size
def interrupted(path):
    done = size(path)
    if done:
        signal.raise_signal(signal.SIGINT)
    return done

quantize_apart._LOOK_S = 0.002
quantize_apart._size = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_an_interrupt_ends_quietly_and_leaves_nothing(large: Path, folder: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, *RUN, "-m", str(large), "-md", "self:Q2_K"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == "quantising large.gguf to Q2_K as its own draft, once for this model: 5.86 MB\n"
    assert list(folder.iterdir()) == []


def test_a_terminal_sees_how_far_it_is_and_ctrl_c_ends_it(large: Path, folder: Path) -> None:
    # This type takes seconds.
    with Terminal([*RUN, "-m", str(large), "-md", "self:IQ3_S"], columns=100) as terminal:
        terminal.wait_for("as its own draft, once for this model: ")
        terminal.wait_for(r"large-\S+ .*\d%")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    assert list(folder.iterdir()) == []
