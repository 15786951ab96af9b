"""Models of the hub, fetched from a hub on loopback: what is asked of it, what is resumed, and what goes wrong."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock, close_session

import paceline
from paceline.core.errors import InputError, ModelFileError, ModelWarning
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from paceline.models.hub import transfer
from paceline.models.hub.fetch import fetch_head, fetch_model
from paceline.models.hub.local_cache import display_name, hub_folder
from paceline.models.hub.reference import HubModel
from paceline.models.registry import find_head_beside, named_models, remove, resolve_model
from tests.models.helpers import split_gguf, write_folder, write_gguf
from tests.models.hub_server import LARGE_BYTES, Hub, Repo, digest_of, running_hub
from tests.timing import WAIT_S

DRAFT = embedded_draft().read_bytes()
assert len(DRAFT) > LARGE_BYTES
QUANT = "tiny-Q8_0.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and a cache of its own that is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "paceline"))
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.0, 0.0))
    with running_hub(tiny=Repo({QUANT: DRAFT, "README.md": b"a card"})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running
        close_session()


def names() -> list[str]:
    return [model.name for model in named_models() if model.of_hub]


def partials() -> list[Path]:
    return sorted(hub_folder().rglob("*.incomplete"))


def test_a_model_is_fetched_once_and_starts_without_a_network_from_then_on(hub: Hub) -> None:
    heard: list[tuple[str, int, int]] = []
    path = paceline.from_hub("user/tiny", report=lambda *said: heard.append(said))
    assert path.read_bytes() == DRAFT
    assert path.name == QUANT
    assert path.is_relative_to(hub_folder())
    assert {said[0] for said in heard} == {QUANT}
    assert [said[1] for said in heard] == sorted(said[1] for said in heard)
    assert heard[-1] == (QUANT, len(DRAFT), len(DRAFT))
    assert [asked.range for asked in hub.bodies()] == [None]
    assert partials() == []
    hub.asked.clear()
    # One look, at whether there is a newer one.
    assert paceline.from_hub("user/tiny:q8_0") == path
    assert [asked.path for asked in hub.looks()] == [asked.path for asked in hub.asked]
    assert len(hub.asked) == 1
    hub.asked.clear()
    assert paceline.from_hub("user/tiny", offline=True) == path
    assert paceline.from_hub("user/tiny", file=QUANT, offline=True) == path
    assert resolve_model("user/tiny:Q8_0") == resolve_model("user/tiny") == resolve_model("user/tiny:q8_0") == path
    assert hub.asked == []


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_by_the_environment(variable: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = paceline.from_hub("user/tiny")
    hub.asked.clear()
    monkeypatch.setenv(variable, "yes")
    assert paceline.from_hub("user/tiny") == path
    with pytest.raises(ModelFileError, match=r"user/tiny:Q4_K_M is not in the hub's cache .*: leave out `offline`"):
        paceline.from_hub("user/tiny:Q4_K_M")
    with pytest.raises(ModelFileError, match="user/other is not in the hub's cache"):
        paceline.from_hub("user/other")
    assert hub.asked == []


@pytest.mark.parametrize("ignores_ranges", [False, True], ids=["", "a server that gives whole files alone"])
def test_a_connection_that_breaks_is_taken_up_where_it_broke(ignores_ranges: bool, hub: Hub) -> None:
    hub.breaks_after, hub.ignores_ranges = [300_000] if ignores_ranges else [300_000, 500_000], ignores_ranges
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT
    asked = [None, "bytes=300000-", "bytes=800000-"]
    assert [each.range for each in hub.bodies()] == asked[: 1 + (1 if ignores_ranges else 2)]


def test_what_an_earlier_start_has_got_is_not_fetched_again(hub: Hub) -> None:
    hub.breaks_after = [300_000, 0, 0, 0]
    with pytest.raises(ModelFileError, match=r"cannot be reached \(.*\): check the network"):
        paceline.from_hub("user/tiny")
    assert [path.stat().st_size for path in partials()] == [300_000]
    assert names() == []
    with pytest.raises(ModelFileError, match="not all of it"):
        paceline.from_hub("user/tiny", offline=True)
    with pytest.raises(ModelFileError, match=r"fetch it from the hub with `repo=.user/tiny.`, or"):
        resolve_model("user/tiny")
    hub.asked.clear()
    heard: list[int] = []
    path = paceline.from_hub("user/tiny", report=lambda what, done, total: heard.append(done))
    assert path.read_bytes() == DRAFT
    assert [asked.range for asked in hub.bodies()] == ["bytes=300000-"]
    assert heard[0] == 300_000
    assert partials() == []


def test_a_file_that_was_whole_but_had_no_name_yet_is_not_fetched_again(hub: Hub) -> None:
    blobs = hub_folder() / "models--user--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest_of(DRAFT)}.incomplete").write_bytes(DRAFT)
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT
    assert hub.bodies() == []


def test_what_is_not_what_the_hub_says_is_never_a_model(hub: Hub) -> None:
    hub.damages = True
    with pytest.raises(ModelFileError, match=f"{QUANT} arrived damaged from http.*: start again"):
        paceline.from_hub("user/tiny")
    assert (names(), partials()) == ([], [])
    # What lies there of an earlier try may be damaged as well.
    blobs = hub_folder() / "models--user--tiny" / "blobs"
    (blobs / f"{digest_of(DRAFT)}.incomplete").write_bytes(bytes(300_000))
    hub.damages = False
    with pytest.raises(ModelFileError, match="arrived damaged"):
        paceline.from_hub("user/tiny")
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT


def test_a_split_model_is_fetched_whole(hub: Hub, tmp_path: Path) -> None:
    parts = split_gguf(embedded_draft(), tmp_path)
    hub.repos["user/split"] = Repo({f"Q8_0/{part.name}": part.read_bytes() for part in parts})
    path = paceline.from_hub("user/split")
    assert path.name == parts[0].name
    assert describe(path).num_parts == 3
    assert names() == ["user/split:Q8_0"]
    assert resolve_model(names()[0]) == path
    # Of a model that is not whole there is nothing.
    path.with_name(parts[1].name).unlink()
    assert names() == []
    with pytest.raises(ModelFileError, match="or not all of it"):
        paceline.from_hub("user/split", offline=True)
    hub.asked.clear()
    assert describe(paceline.from_hub("user/split")).num_parts == 3
    assert hub.bodies() == []


def folder_repo(tmp_path: Path, **more: bytes) -> Repo:
    folder = write_folder(tmp_path / "folder", architectures=["LlamaForCausalLM"])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Repo({**files, "pytorch_model.bin": b"x", "onnx/config.json": b"{}", "tokenizer.json": b"{}", **more})


def test_a_folder_is_fetched_without_what_it_is_not_loaded_from(hub: Hub, tmp_path: Path) -> None:
    hub.repos["user/folder"] = folder_repo(tmp_path)
    path = paceline.from_hub("user/folder")
    assert sorted(file.name for file in path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert describe(path).license == "apache-2.0"
    assert names() == [display_name(path)] == ["user/folder"]
    hub.asked.clear()
    assert paceline.from_hub("user/folder") == path
    assert len(hub.asked) == 1
    assert paceline.from_hub("user/folder", offline=True) == resolve_model("user/folder") == path
    (path / "model.safetensors").unlink()
    assert names() == []


def test_of_a_repository_with_both_kinds_the_gguf_file_is_the_model(hub: Hub, tmp_path: Path) -> None:
    hub.repos["user/both"] = folder_repo(tmp_path, **{QUANT: DRAFT})
    assert paceline.from_hub("user/both").name == QUANT
    assert names() == ["user/both:Q8_0"]
    folder = paceline.from_hub("user/both:safetensors")
    assert (folder / "model.safetensors").is_file()
    assert names() == ["user/both:Q8_0", "user/both:safetensors"]
    assert resolve_model("user/both:safetensors") == folder


HEAD = "mtp-tiny-Q8_0.gguf"


def test_a_head_is_fetched_from_beside_its_model(hub: Hub) -> None:
    hub.repos["user/tiny"].files |= {HEAD: b"a head", "eagle3-tiny.gguf": b"another"}
    model = HubModel.parse("user/tiny")
    heard: list[tuple[str, int, int]] = []
    fetched = fetch_model(model)
    head = fetch_head(model, fetched, ("mtp-", "eagle3-"), lambda *said: heard.append(said))
    assert head is not None
    assert head == fetched.path.with_name(HEAD) == find_head_beside(fetched.path, ("mtp-",))
    assert head.read_bytes() == b"a head"
    # Its own bytes are told, and the hub is asked once for both.
    assert heard[-1] == (HEAD, 6, 6)
    assert len(hub.looks()) == 1
    assert [asked.path.rpartition("/")[2] for asked in hub.bodies()] == [QUANT, HEAD]
    assert fetch_head(model, fetched, ("dflash-",)) is None
    assert find_head_beside(fetched.path, ("eagle3-",)) is None
    assert names() == ["user/tiny/mtp-tiny-Q8_0.gguf", "user/tiny:Q8_0"]
    hub.asked.clear()
    offline = HubModel.parse("user/tiny", offline=True)
    assert fetch_head(offline, fetch_model(offline), ("mtp-",)) == head
    assert fetch_head(offline, fetch_model(offline), ("eagle3-",)) is None
    assert hub.asked == []


@pytest.mark.parametrize("links", [True, False])
def test_a_head_that_comes_later_leaves_the_model_where_it_is_found(
    hub: Hub, links: bool, request: pytest.FixtureRequest
) -> None:
    if not links:
        request.getfixturevalue("no_links")
    model = HubModel.parse("user/tiny")
    old = fetch_model(model).path
    repo = hub.repos["user/tiny"]
    repo.files[HEAD], repo.commit = b"a head", "b" * 40
    hub.asked.clear()
    fetched = fetch_model(model)
    head = fetch_head(model, fetched, ("mtp-",))
    assert head is not None
    assert [asked.path.rpartition("/")[2] for asked in hub.bodies()] == [HEAD]
    # One revision has both now, and a draft that may be a head is the model there.
    assert head.with_name(QUANT).read_bytes() == old.read_bytes() == DRAFT
    draft = replace(model, heads=("mtp-",), offline=True)
    assert fetch_model(draft).path.name == QUANT
    assert find_head_beside(old, ("mtp-",)) == head
    repo.files[HEAD], repo.commit = b"a better head", "c" * 40
    head = fetch_head(model, fetch_model(model), ("mtp-",))
    assert head is not None
    assert head.read_bytes() == b"a better head"


def test_a_newer_revision_is_fetched_and_is_the_one_that_counts(hub: Hub) -> None:
    first = paceline.from_hub("user/tiny")
    repo = hub.repos["user/tiny"]
    repo.commit = "b" * 40
    repo.files["README.md"] = b"another card"
    hub.asked.clear()
    assert paceline.from_hub("user/tiny") == first  # the model is the same
    assert len(hub.asked) == 1
    repo.files[QUANT] = DRAFT + bytes(32)
    second = paceline.from_hub("user/tiny")
    assert (second.read_bytes(), second.parent.name) == (DRAFT + bytes(32), "b" * 40)
    assert names() == ["user/tiny:Q8_0"]
    assert resolve_model("user/tiny") == paceline.from_hub("user/tiny", offline=True) == second
    repo.files[QUANT] = DRAFT
    assert paceline.from_hub("user/tiny") == first
    assert paceline.from_hub("user/tiny", offline=True) == first  # the change was taken back
    repo.files[QUANT] = DRAFT + bytes(64)
    hub.breaks_after = [0, 0, 0]
    with pytest.raises(ModelFileError, match="start again; the older one in the cache is used with `offline=True`"):
        paceline.from_hub("user/tiny")
    assert paceline.from_hub("user/tiny", offline=True) == first


def test_what_is_asked_as_a_whole_is_not_asked_otherwise(hub: Hub) -> None:
    with pytest.raises(InputError, match="file, token and offline are for models given as text: user/tiny has its own"):
        paceline.from_hub(HubModel("user/tiny"), offline=True)
    assert paceline.from_hub(HubModel("user/tiny", "q8_0")).read_bytes() == DRAFT
    assert len(hub.looks()) == 1


def test_a_token_is_given_to_the_hub_and_to_nobody_else(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["user/tiny"].private = True
    with running_hub() as cdn:
        cdn.repos, hub.cdn = {"user/tiny": Repo(hub.repos["user/tiny"].files)}, cdn.endpoint
        assert paceline.from_hub("user/tiny", token="hf_right").read_bytes() == DRAFT
        assert [(asked.path, asked.authorization) for asked in cdn.bodies()] == [(hub.bodies()[0].path, None)]
    assert {asked.authorization for asked in (*hub.looks(), *hub.bodies())} == {"Bearer hf_right"}
    shutil.rmtree(hub_folder())
    hub.cdn = ""
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT


def test_the_hubs_other_protocol_is_not_needed(hub: Hub) -> None:
    hub.xet = True
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT
    assert [asked.path for asked in hub.asked if "xet" in asked.path] == []


@pytest.mark.parametrize("token", [None, "hf_right", "hf_wrong"])
@pytest.mark.parametrize("of_environment", [False, True])
def test_what_the_hub_refuses_is_one_line_with_the_way_out(
    token: str | None, of_environment: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["user/gated"] = Repo({QUANT: DRAFT}, gated=True)
    whose = "the token (`token`)"
    if of_environment and token is not None:
        whose = "the token of HF_TOKEN"
        monkeypatch.setenv("HF_TOKEN", token)
        token, sent = None, token
    else:
        sent = token
    wrong = f"{hub.endpoint} does not accept {whose}: give another, log in with hf auth login, or leave it out"
    login = "log in with hf auth login, or set HF_TOKEN"
    expected = {
        "user/nobody": {
            None: f"{hub.endpoint} has no model user/nobody, or a private one: check the name, or {login}",
            "hf_right": f"has no model user/nobody, or a private one that {whose} does not open: check the name",
        },
        "user/gated": {
            None: f"user/gated is gated: accept its terms at {hub.endpoint}/user/gated, then {login}",
            "hf_right": f"user/gated is gated, and {whose} has no access: accept its terms",
        },
    }
    for repo, lines in expected.items():
        with pytest.raises(ModelFileError) as raised:
            paceline.from_hub(repo, token=token)
        assert lines.get(sent, wrong) in str(raised.value)
        assert "\n" not in str(raised.value)
        assert "hf_" not in str(raised.value)
    assert (names(), partials()) == ([], [])


def test_a_hub_that_fails_or_is_none_is_said_to(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, words in ((503, "answered 503"), (429, "takes no more requests"), (403, "may not read user/tiny")):
        hub.status = status
        with pytest.raises(ModelFileError, match=words):
            paceline.from_hub("user/tiny")
    hub.status = 200  # an answer that is an error's
    with pytest.raises(ModelFileError, match="did not answer about user/tiny as a hub does"):
        paceline.from_hub("user/tiny")
    hub.status = 0
    hub.repos["user/tiny"].commit = "../../x"
    with pytest.raises(ModelFileError, match=r"did not answer about user/tiny as a hub does .*: check HF_ENDPOINT"):
        paceline.from_hub("user/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    with pytest.raises(InputError, match=r"HF_ENDPOINT is hub\.example: give an address"):
        paceline.from_hub("user/tiny")


def test_where_the_hub_cannot_be_asked_the_cached_model_is_used_with_a_warning(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = paceline.from_hub("user/tiny")
    hub.status = 503
    with pytest.warns(ModelWarning, match="answered 503 about user/tiny: user/tiny is used from the cache"):
        assert paceline.from_hub("user/tiny") == path
    with running_hub() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.endpoint)
    with pytest.warns(ModelWarning, match="cannot be reached") as said:
        assert paceline.from_hub("user/tiny") == path
    assert "\n" not in str(said[0].message)
    with pytest.raises(ModelFileError, match=r"cannot be reached \(.*\): check the network, HTTPS_PROXY and HF_ENDPO"):
        paceline.from_hub("user/other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paceline.from_hub("user/tiny", offline=True) == path


def test_a_model_that_has_no_room_is_not_begun(hub: Hub) -> None:
    hub.repos["user/tiny"].sizes[QUANT] = 10**18
    with pytest.raises(ModelFileError, match=r"by HTTP the hub gives 50.0 GB at most: fetch it with hf download user"):
        paceline.from_hub("user/tiny")
    parts = {f"m-Q8_0-{number:05}-of-00400.gguf": b"x" for number in range(1, 401)}
    hub.repos["user/big"] = Repo(parts, sizes=dict.fromkeys(parts, 49 * 10**9))
    with pytest.raises(ModelFileError, match=r"user/big needs 19,600 GB more, and .*B are free for the hub's cac"):
        paceline.from_hub("user/big")
    assert hub.bodies() == []
    assert not hub_folder().exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_disk_that_becomes_full_is_said_to_be(hub: Hub) -> None:
    blobs = hub_folder() / "models--user--tiny" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{digest_of(DRAFT)}.incomplete"
    partial.symlink_to("/dev/full")
    with pytest.raises(ModelFileError, match=r"the disk of the hub's cache .* is full: free some room and start again"):
        paceline.from_hub("user/tiny")
    assert names() == []
    partial.unlink(missing_ok=True)
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that root cannot write to")
def test_a_cache_that_cannot_be_written(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/sys/hub")
    with pytest.raises(ModelFileError, match=r"the hub's cache /sys/hub cannot be written \(.*\): set HF_HUB_CACHE to"):
        paceline.from_hub("user/tiny")
    assert hub.bodies() == []


def test_a_process_that_fetches_the_same_file_is_waited_for(hub: Hub) -> None:
    lock = hub_folder() / ".locks" / "models--user--tiny" / f"{digest_of(DRAFT)}.lock"
    lock.parent.mkdir(parents=True)
    waits = threading.Event()
    fetched: list[Path] = []

    def report(what: str, done: int, total: int) -> None:
        if what.startswith("waiting for another process to fetch"):
            waits.set()

    with WeakFileLock(lock):
        thread = threading.Thread(target=lambda: fetched.append(paceline.from_hub("user/tiny", report=report)))
        thread.start()
        assert waits.wait(WAIT_S)
        assert hub.bodies() == []
    thread.join(WAIT_S)
    assert [path.read_bytes() for path in fetched] == [DRAFT]


def test_names_lead_to_their_own_model(hub: Hub) -> None:
    hub.repos["user/several"] = Repo({"a-Q8_0.gguf": DRAFT, "b-Q8_0.gguf": DRAFT + b"1", "model!.gguf": DRAFT + b"2"})
    for file in hub.repos["user/several"].files:
        paceline.from_hub("user/several", file=file)
    assert names() == ["user/several/a-Q8_0.gguf", "user/several/b-Q8_0.gguf", "user/several/model!.gguf"]
    for name in names():
        assert resolve_model(name).name == name.rpartition("/")[2]
    with pytest.raises(InputError, match="user/several is the name of 2 files"):
        paceline.from_hub("user/several", offline=True)
    # The hub may have what the name stands for, where the cache does not.
    hub.repos["user/several"].files["c-Q4_K_M.gguf"] = DRAFT
    assert paceline.from_hub("user/several").name == "c-Q4_K_M.gguf"


def test_the_cache_may_hold_what_is_no_model(hub: Hub, tmp_path: Path) -> None:
    for name in ("datasets--user--data", "models--user--tiny", "models--bert", ".locks"):
        (hub_folder() / name / "snapshots" / ("c" * 40)).mkdir(parents=True)
    encoder = hub_folder() / "models--bert" / "snapshots" / ("c" * 40)
    encoder.rmdir()
    write_folder(encoder, architectures=["BertModel"])
    (hub_folder() / "datasets--user--data" / "snapshots" / ("c" * 40) / "x.gguf").write_bytes(b"")
    (hub_folder() / "models--user--tiny" / "snapshots" / ("c" * 40) / QUANT).symlink_to("nowhere")
    (hub_folder() / "version.txt").write_text("1")
    assert names() == []
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT
    assert names() == ["user/tiny:Q8_0"]


def test_removing_a_model_keeps_what_others_share(hub: Hub, tmp_path: Path) -> None:
    small = write_gguf(tmp_path / "small.gguf").read_bytes()
    hub.repos["user/shared"] = folder_repo(
        tmp_path, **{"a-Q8_0.gguf": DRAFT, "b-Q8_0.gguf": DRAFT, "a-F16.gguf": small}
    )
    a, b = (paceline.from_hub("user/shared", file=file) for file in ("a-Q8_0.gguf", "b-Q8_0.gguf"))
    paceline.from_hub("user/shared:F16")
    folder = paceline.from_hub("user/shared:safetensors")
    assert names()[-1] == "user/shared:safetensors"
    assert remove("user/shared/a-Q8_0.gguf") == a
    assert b.read_bytes() == DRAFT
    assert remove("user/shared:Q8_0") == b
    assert not (hub_folder() / "models--user--shared" / "blobs" / digest_of(DRAFT)).exists()
    remove("user/shared:safetensors")
    assert names() == ["user/shared:F16"]
    assert not (folder / "config.json").exists()
    remove("user/shared:F16")
    assert not (hub_folder() / "models--user--shared").exists()


def test_removing_a_model_keeps_a_copy_of_its_repository(hub: Hub) -> None:
    """Copies have the same commits, by which the library tells what to delete."""
    for number in range(8):
        hub.repos[f"user/copy{number}"] = Repo({QUANT: DRAFT})
        paceline.from_hub(f"user/copy{number}")
    for number in range(8):
        remove(f"user/copy{number}:Q8_0")
        assert names() == [f"user/copy{left}:Q8_0" for left in range(number + 1, 8)]


def test_removing_a_model_removes_it_from_every_revision(hub: Hub) -> None:
    paceline.from_hub("user/tiny")
    hub.repos["user/tiny"].commit = "b" * 40
    hub.repos["user/tiny"].files[QUANT] = DRAFT + b"1"
    paceline.from_hub("user/tiny")
    remove("user/tiny:Q8_0")
    assert names() == []
    assert not (hub_folder() / "models--user--tiny").exists()


def test_errors_of_the_system_are_said_with_what_they_hit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "blob")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ModelFileError, match=r"user/tiny cannot be fetched \(blob: Input/output error\)"):
        paceline.from_hub("user/tiny")
    assert names() == []


@pytest.mark.parametrize("file", ["../../../evil-Q4_K_M.gguf", "/evil-Q4_K_M.gguf"])
def test_a_hub_cannot_write_elsewhere(file: str, hub: Hub, tmp_path: Path) -> None:
    hub.repos["user/tiny"].files[file] = b"x" * 10
    with pytest.raises(ModelFileError):
        paceline.from_hub("user/tiny")
    assert [path for path in tmp_path.rglob("*") if path.name == "evil-Q4_K_M.gguf"] == []
    assert not Path("/evil-Q4_K_M.gguf").exists()


def test_a_cache_that_cannot_be_read_is_in_nobodys_way(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_folder().write_text("no folder")
    assert names() == []
    assert resolve_model("draft") == embedded_draft()
    with pytest.raises(ModelFileError, match=r"cannot be read: Not a directory; look at its .* or set HF_HUB_CACHE"):
        paceline.from_hub("user/tiny", offline=True)
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-of-this-name/hub")
    assert names() == []


def test_a_hub_that_lists_what_it_does_not_have(hub: Hub) -> None:
    listed = hub.repos["user/tiny"]

    class Gone(dict[str, bytes]):
        def get(self, key: str, default: object = None) -> None:  # type: ignore[override]
            return None

    listed.files = Gone(listed.files)
    with pytest.raises(ModelFileError, match=r"user/tiny no longer has a file that it listed .*: start again"):
        paceline.from_hub("user/tiny")


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no symbolic links."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)


def held_bytes() -> int:
    return sum(path.stat().st_size for path in hub_folder().rglob("*") if path.is_file() and not path.is_symlink())


def test_where_the_system_has_no_links_a_model_takes_its_size_once(hub: Hub, no_links: None) -> None:
    path = paceline.from_hub("user/tiny")
    assert not path.is_symlink()
    assert len(DRAFT) <= held_bytes() < len(DRAFT) + 1000
    hub.asked.clear()
    assert paceline.from_hub("user/tiny") == paceline.from_hub("user/tiny", offline=True) == path
    assert not hub.bodies()
    remove("user/tiny:Q8_0")
    assert held_bytes() < 1000


def test_what_has_its_name_is_not_fetched_again_where_the_system_has_no_links(
    hub: Hub, no_links: None, tmp_path: Path
) -> None:
    parts = split_gguf(embedded_draft(), tmp_path)
    hub.repos["user/split"] = Repo({part.name: part.read_bytes() for part in parts})
    path = paceline.from_hub("user/split")
    path.with_name(parts[1].name).unlink()
    hub.asked.clear()
    assert describe(paceline.from_hub("user/split")).num_parts == 3
    assert [asked.path.rpartition("/")[2] for asked in hub.bodies()] == [parts[1].name]
    # Two names of one content.
    hub.repos["user/folder"] = folder_repo(tmp_path, **{"vocab.json": b"{}"})
    folder = paceline.from_hub("user/folder")
    assert (folder / "vocab.json").read_bytes() == (folder / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_what_another_revision_has_is_not_fetched_again_where_the_system_has_no_links(
    has_hard_links: bool, hub: Hub, no_links: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paceline.from_hub("user/tiny")
    hub.repos["user/tiny"].commit = "b" * 40
    if not has_hard_links:
        monkeypatch.setattr(Path, "hardlink_to", Path.symlink_to)
    hub.asked.clear()
    for _ in range(2):
        second = paceline.from_hub("user/tiny")
        assert (second.parent.name, second.read_bytes()) == ("b" * 40, DRAFT)
    assert first.samefile(second) == has_hard_links
    assert hub.bodies() == []
    # What only has the same size is something else.
    hub.repos["user/tiny"].commit = "c" * 40
    hub.repos["user/tiny"].files[QUANT] = DRAFT[:-1] + b"x"
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT[:-1] + b"x"
    assert first.read_bytes() == second.read_bytes() == DRAFT


def test_what_another_revision_has_a_link_to_stays_where_links_are_switched_off(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paceline.from_hub("user/tiny")
    hub.repos["user/tiny"].commit = "b" * 40
    hub.repos["user/tiny"].files["more-Q4_0.gguf"] = DRAFT
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    second = paceline.from_hub("user/tiny:Q4_0")
    assert not second.is_symlink()
    assert first.read_bytes() == second.read_bytes() == DRAFT


def test_a_copy_that_was_interrupted_is_made_again(hub: Hub, no_links: None) -> None:
    path = paceline.from_hub("user/tiny")
    path.write_bytes(DRAFT[:100])
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT
    assert len(hub.bodies()) == 2


@pytest.mark.parametrize("kind", ["redirects", "forgets the revision", "answers no HEAD", "lies in a folder"])
def test_mirrors_of_the_hub_need_to_list_and_to_give_and_nothing_else(
    kind: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["user/folder"] = folder_repo(tmp_path)
    with running_hub() as mirror:
        mirror.repos = hub.repos
        match kind:
            case "redirects":
                mirror.moved_to = hub.endpoint
            case "forgets the revision":
                mirror.names_commits = False
            case "answers no HEAD":
                mirror.answers_head = False
            case _:
                mirror.folder = "/artifacts/hub"
        monkeypatch.setenv("HF_ENDPOINT", f"{mirror.endpoint}{mirror.folder}")
        path, folder = paceline.from_hub("user/tiny"), paceline.from_hub("user/folder")
        assert path.read_bytes() == DRAFT
        assert describe(folder).license == "apache-2.0"
        assert {asked.method for asked in mirror.asked} == {"GET"}
        for running in (mirror, hub):
            running.asked.clear()
        assert (paceline.from_hub("user/tiny"), paceline.from_hub("user/folder")) == (path, folder)
        assert len(mirror.asked) == len(mirror.looks()) == 2
        assert hub.bodies() == []
    assert paceline.from_hub("user/tiny", offline=True) == path
    assert names() == ["user/folder", "user/tiny:Q8_0"]


@pytest.mark.parametrize("end", ["\r", " ", "\r\n", "/ ", "\t"])
def test_blanks_around_the_hubs_address_are_left_out(end: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f" {hub.endpoint}{end}")
    assert paceline.from_hub("user/tiny").read_bytes() == DRAFT


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://hub.example/a b", "http://hub.example/a b"),
        ("http://hub.example/\r/x", r"http://hub\.example/\\r/x"),
        ("https://", "https:"),
        ("http://hub.example:70000", "http://hub.example:70000"),
        ("http://hub.example:port", "http://hub.example:port"),
        ("http://[::1", r"http://\[::1"),
    ],
)
def test_what_is_no_address_of_a_hub_is_refused(address: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(InputError, match=f"^HF_ENDPOINT is {shown}: give an address that begins with https://, or un"):
        paceline.from_hub("user/tiny")


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:port", "socks5://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_said(proxy: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    close_session()
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(ModelFileError, match=r"cannot be reached \(.*\): check the network, HTTPS_PROXY and HF_ENDPOI"):
        paceline.from_hub("user/tiny")


def test_a_cache_on_a_drive_that_is_not_there_is_said_to_be(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    monkeypatch.setattr(transfer, "fetch_blob", out_of_reach)
    with pytest.raises(ModelFileError, match=r"the hub's cache .* cannot be written"):
        paceline.from_hub("user/tiny")


def out_of_reach(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_password_in_the_hubs_address_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("//", "//someone:secret@"))
    for status in (503, 404, 401, 429, 200):
        hub.status = status
        with pytest.raises(ModelFileError, match=hub.endpoint) as raised:
            paceline.from_hub("user/tiny")
        assert "secret" not in str(raised.value)
    monkeypatch.setenv("HF_ENDPOINT", "ftp://someone:secret@example/hub")
    with pytest.raises(InputError, match=r"^HF_ENDPOINT is ftp://example/hub: give an address"):
        paceline.from_hub("user/tiny")
