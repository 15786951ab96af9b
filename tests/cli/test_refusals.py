"""What cannot be done is one line and status 2, in every command, before a model is loaded where that can be.

Further command lines, whose whole answer is held, are in ``tests/surface`` and in ``test_commands``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.models.embedded import embedded_draft, embedded_target
from tests.cli.invoking import Invoke
from tests.models.helpers import write_folder, write_gguf

SEED = 2**64
# {target}, {draft} and {silent} are GGUF files, {hf} a folder with a model; EMPTY is a folder, TEXT a file of none.
BEFORE_LOADING = [
    ("run -m . -p x", "config.json"),
    ("run -m TEXT -p x", "TEXT is not a GGUF file"),
    ("run -m {target}", "no prompt"),
    ("run -p ''", "prompt is empty"),
    ("run -p x --sample code", "leave out"),
    ("run --sample poems", "code, prose, json, logs"),
    ("run --sample code:0", "code:1 to code:"),
    ("run --sample code:x", "code:1 to code:"),
    ("run -p x -n 0", "0 tokens"),
    ("run -p x --top-p 0", "top-p 0"),
    ("run -p x --top-k -3", "top-k -3"),
    ("run -p x --temp nan", "temperature nan"),
    (f"run -p x --seed {SEED}", f"seed {SEED}: the most is"),
    ("run -p x --drafters ,", "no drafter"),
    ("run -p x --draft-max 1000", "1000"),
    ("run -p x --draft-min 9", "draft-min 9"),
    ("run -p x --draft-p-min 2", "draft-p-min 2"),
    ("run -p x --no-speculation --drafters suffix", "--drafters has no effect without speculation"),
    ("run -p x --no-speculation -md {draft}", "-md has no effect without speculation"),
    ("run -p x --no-speculation -ngld 3", "-ngld has no effect without speculation"),
    ("run -p x --no-speculation --draft-max 5", "--draft-max has no"),
    ("run -p x --no-speculation --compare", "--compare has no effect without speculation"),
    ("run -p x --no-speculation --policy auto", "--policy has no effect without speculation"),
    ("run -p x --draft-max 0 --compare", "--compare has no effect without speculation"),
    ("run -p x --drafters suffix --draft-siblings 2", "--draft-siblings has no effect without a draft model"),
    ("run -p x --drafters suffix -cd 64", "-cd has no effect without a draft model"),
    ("run -p x --drafters suffix -tbd 1", "-tbd has no effect"),
    ("run -p x -td 0", "-t (-td of a draft model) is 0, but must be from 1"),
    ("run -p x --engine torch_hf -td 1", "give those of both (-t)"),
    ("run -p x --policy heuristic --remember", "--remember applies to policy auto"),
    ("run -p x --repeats 9", "--repeats has no effect without --compare"),
    ("run -p x -cd 1", "-cd 1: the least is 2"),
    ("run -p x -cd -3", "-cd -3: the least is 2"),
    ("run -p x -c -5", "-c (-cd of a draft model) is -5, but must be from 1"),
    ("run -p x -c 0 -m {silent}", "-c 0 is the model's own context"),
    ("run -p x -cd 0 -md {silent}", "-cd 0 is the model's own context"),
    ("run -p x -t 0", "-t (-td of a draft model) is 0, but must be from 1 to 512"),
    ("run -p x -t 99999 --engine torch_hf", "-t (-td of a draft model)"),
    ("run -p x -tb -1", "-tb (-tbd of a draft model) is -1"),
    ("run -p x -ngl -2", "-ngl (-ngld of a draft model) is -2"),
    ("run -p x -m ''", "the name of the model is empty"),
    ("run -p x -md ''", "the name of the model is empty"),
    ("run -p x -m targte", "there is no file or model targte: did you mean target? paceline models lists"),
    ("run -p x -md targte", "there is no file or model targte: did you mean target? paceline models lists"),
    ("run -p x -ot a\udcff=CPU", "-ot is not UTF-8: byte 1 is 0xff"),
    ("run -p x -ot nonsense", "-ot 'nonsense' is not PATTERN=BUFFER"),
    ("run Say hello -t 1", "unexpected argument 'Say hello': give the prompt with -p"),
    ("run -p Say hello", "unexpected argument 'hello'"),
    ("run -p x --engine abacus", "abacus"),
    (r"run -p \\xE9", "-p is not UTF-8: byte 0 is 0xe9"),
    (r"run -p x --stop \\xE9", "--stop is not UTF-8: byte 0 is 0xe9"),
    ("run -p x -j {{}} --grammar x", "-j and --grammar both constrain the answer"),
    ("run -p x -jf /nowhere/schema.json", "/nowhere/schema.json"),
    *(
        (f"run -p x {words}", f"{words.split()[-2]} has no effect without --chat: add that, or use paceline chat")
        for words in (
            *("-sys a", "-sysf a", "--no-chat -sys a", "--chat-template-file a", "--reasoning off"),
            *(
                "--reasoning-effort high",
                "--reasoning-budget 0",
                "--reasoning-format none",
                "--chat-template-kwargs {{}}",
            ),
        )
    ),
    ("run -p x --no-forget", "--no-forget has no effect without --chat"),
    ("run -p x --chat", "no model is named (-m FILE), and the small built-in one cannot chat: name one with -m"),
    ("run -p x --chat -m {target}", "has no chat template, as models without one only"),
    ("chat -m {target}", "has no chat template, as models without one only"),
    ("chat", "the small built-in one cannot chat: name one with -m, or have one fetched with -hf"),
    ("chat -m {target} --chat-template-file no.jinja", "there is no file no.jinja (--chat-template-file)"),
    ("chat -m {target} --chat-template-file .", "there is no file . (--chat-template-file)"),
    ("chat -m {target} -sys a -sysf b", "-sys and -sysf both give the system prompt"),
    ("chat -m {target} -sysf nowhere.txt", "nowhere.txt (-sysf)"),
    ("chat -m {target} -sysf -", "-sysf - is standard input, which is for messages"),
    (r"chat -m {target} -sys \\xE9", "-sys is not UTF-8: byte 0 is 0xe9"),
    ("chat -m {target} --chat-template-kwargs {{", "--chat-template-kwargs '{{' is not JSON"),
    ("chat -m {target} --chat-template-kwargs [1]", "'[1]' is not a JSON object, such as"),
    ("""chat -m {target} --chat-template-kwargs '{{"messages": 1}}'""", "have 'messages', which"),
    ("chat -m {target} --reasoning maybe", "maybe"),
    ("chat -m {target} --reasoning-budget -2", "reasoning budget -2"),
    ("chat -m {target} --reasoning-format xml", "xml"),
    ("bench --workloads prose", "unknown workload 'prose': choose from new-code, "),
    ("bench --workloads ,", "no workload is named"),
    ("bench --workloads hard,hard", "twice"),
    ("bench --variants magic", "unknown variant 'magic': choose from static, "),
    ("bench --variants plain", "plain always runs"),
    ("bench --drafters oracle", "unknown drafter 'oracle'"),
    ("bench --repeats 0", "--repeats 0: the least is 1"),
    ("bench --tokens 3", "--tokens 3: the least is 16"),
    ("bench --temp -1", "temperature -1.0 is out of range"),
    ("bench --time-limit 0", "more than 0 seconds"),
    ("bench -c 100", "answers of 256 tokens leave 0 for prompts in a context of 100: ask for fewer (--tokens)"),
    ("bench --quick -m target -c 64 --tokens 60 --workloads hard", "leave 4 for prompts in a context of 64"),
    ("bench -c 99999999", "99999999 tokens is more than the"),
    ("bench --quick --time-limit 60", "leave out --quick or --time-limit"),
    ("bench --against vllm=x", "write --against llama-server=PATH"),
    ("bench --against llama-server=./true", "/true does not exist"),  # not a program of that name in the system
    ("bench --against llama-server=x --workloads mixed,editing-forced", "--against cannot run forced"),
    ("bench --against llama-server=/", "/ is a folder: give the path of llama-server"),
    ("bench --json=EMPTY", "EMPTY is a folder: give the path of a file"),
    ("bench --json=", "is a folder"),
    ("bench --html nowhere/all.html", "there is no directory"),
    ("bench -m nowhere/model.gguf", "model.gguf"),
    ("bench -md nowhere/draft.gguf --drafters suffix", "'draft' is not among --drafters"),
    ("bench --variants static --remember", "--remember applies to auto, which is not among --variants"),
    ("bench --drafters suffix -cd 512", "-cd has no effect without a draft model"),
    ("bench -m TEXT --drafters draft", "needs a draft model: name one with -md"),
    ("plan --rate 1 --users 5", "--users and --rate both set the load: leave out one of them"),
    ("plan --rate 0", "--rate is 0: give a finite number above 0"),
    ("plan --users nan", "--users nan: give a finite number above 0"),
    ("plan --replicas 1,x", "--replicas '1,x': 'x' is no number from 1 to 1024"),
    ("plan --replicas 0", "'0' is no number from 1 to 1024"),
    ("plan --replicas ''", "'' is no number from 1 to 1024"),
    ("plan --target-ttft 0", "--target-ttft 0: give a finite number of seconds above 0"),
    ("plan --target-tpot inf", "--target-tpot inf: give a finite number of seconds above 0"),
    ("plan --budget-s 1", "--budget-s 1: give a finite number of seconds from 5 on"),
    ("plan --balance-abs-threshold -1", "--balance-abs-threshold -1: give 0 or more"),
    ("plan --prompt-tokens 100 --prefix-tokens 100", "of a prompt at least the last token is its own"),
    ("plan --prefixes 0", "--prefixes is 0: give 1 or more"),
    ("plan --requests 0", "--requests is 0: give 1 or more"),
    ("plan -n 0", "-n is 0: give 1 or more"),
    ("plan --burstiness 0", "--burstiness is 0: give a finite number above 0"),
    ("plan --temp -1", "temperature"),
    ("plan --text absent.txt", "absent.txt cannot be read"),
    ("plan -m {target} -cd 64", "-cd has no effect without a draft model"),
    ("plan -m nothing", "there is no file or model nothing"),
    ("plan --json=same --html ./same", "--json and --html are the same file"),
    (
        "plan -t 1 -c 256 --prompt-tokens 250 -n 20",
        "prompts of 250 tokens and answers of up to 30 need a context of 280",
    ),
    ("profile -m nothing", "there is no file or model nothing"),
    ("profile -md nothing", "there is no file or model nothing"),
    ("profile --widths 0-4", "'0-4' is not within 1 to 1024"),
    ("profile --widths 4-2", "the lower end first"),
    ("profile --widths 2,x", "'x' is neither a number nor a range"),
    ("profile --widths ''", "'' is neither a number nor a range"),
    ("profile --widths -3", "neither a number nor a range"),
    ("profile --widths 1-99999999999", "1 to 1024"),
    ("profile --budget-s 0", "more than 0"),
    ("profile --budget-s nan", "more than 0"),
    ("profile --budget-s inf", "--budget-s inf: give a finite number of seconds, more than 0"),
    ("profile --json=same --html ./same", "--json and --html are the same file"),
    ("profile -m {target} -cd 64", "-cd has no effect without a draft model"),
    ("profile -m {target} -td 1", "-td has no effect without a draft model"),
    ("profile --engine torch_hf -td 1", "(-td) mean nothing to torch_hf"),
    ("profile -np 0", "the least is 1"),
    ("doctor absent.gguf", "there is no file absent.gguf"),
    ("doctor {target} absent.gguf", "there is no file absent.gguf"),
    ("doctor {target} EMPTY", "holds no model"),
    ("doctor {target} TEXT", "is not a GGUF file"),
    ("doctor {target} {draft} --budget-s 1", "--budget-s 1: give a finite number of seconds from 5 on"),
    ("doctor {target} {draft} --budget-s nan", "--budget-s nan"),
    ("doctor {target} {draft} --export ollama", "--export ollama: choose from llama-server, ik_llama"),
    ("doctor {target} {draft} --temp -1", "temperature"),
    ("doctor {target} {draft} --text absent.txt", "absent.txt cannot be read"),
    ("doctor {target} {draft} -md draft", "the target is the first argument"),
    ("doctor {target} {draft} -hf some/model", "the target is the first argument"),
    ("doctor target self:Q9", "is not a type to quantise to"),
    ("demo --type Q9_9", "Q9_9"),
    ("inflate", "there is no shape to inflate to: name one of 0.3b"),
    ("inflate 2b", "'2b' is no preset (0.3b, 1b, 3b, 8b)"),
    ("inflate target 2b", "there is no preset '2b'"),
    ("inflate target 1b 8b", "at most a source and a preset"),
    ("inflate 1b --type Q9", "file type 'Q9'"),
    ("inflate 1b --vocab lots", "--vocab 'lots'"),
    ("inflate 1b --vocab 100", "vocabulary 100 is less than the source's"),
    ("inflate 1b --layers 20", "-o"),
    ("inflate 1b --layers 1 -o x.gguf", "layers 1 is less than the source's"),
    ("inflate 1b --width 2000 -o x.gguf", "take 1792 or 2048"),
    ("inflate 1b -o nowhere/x.gguf", "no directory nowhere"),
    ("inflate 1b -o x --type Q4_0", "'Q4_0'"),
    ("convert {draft} ''", "the destination is empty: give the path"),
    ("convert '' out", "the name of the model is empty"),
    ("convert {draft} out.gguf", "is converted to a folder"),
    ("convert {draft} out --type Q8_0", "cannot hold weights of type Q8_0 (--type); choose from F32, F16, BF16"),
    ("convert {draft} out --name x", "--name has no effect on a folder"),
    ("convert {hf} out", "a folder is converted to a .gguf file"),
    ("convert {hf} out.gguf --type Q9", "file type 'Q9' (--type) is unknown; choose from"),
    ("convert {hf} no/such/out.gguf --type Q8_0", "there is no directory no/such; make it first"),
    ("convert EMPTY out.gguf", "has no config.json"),
    ("convert TEXT out", "is not a GGUF file"),
    ("prune {draft} out.gguf", "there is nothing to cut: give --vocab, --layers, --width or --type"),
    ("prune {draft} out.gguf --vocab lots", "'lots' is not a count"),
    ("prune {draft} out.gguf --vocab 0", "1 at least"),
    ("prune {draft} out.gguf --vocab 5k", "the model has 4096 tokens, so nothing"),
    ("prune {draft} out.gguf --vocab 100", "give 257 or more"),
    ("prune {draft} out.gguf --layers 0", "1 at least"),
    ("prune {draft} out.gguf --layers 3", "of 3 layers 1 to 2 can be removed"),
    ("prune {draft} out.gguf --width 0", "give a share"),
    ("prune {draft} out.gguf --width 120%", "give a share"),
    ("prune {draft} out.gguf --width 1000", "32 to 352 units"),
    ("prune {draft} out.gguf --type Q9", "file type 'Q9' (--type) is unknown"),
    ("prune {draft} {draft} --layers 1", "is the model itself"),
    ("prune {draft} out --layers 1", "is no name of a .gguf file"),
    ("prune {draft} no/such/out.gguf --layers 1", "there is no directory no/such"),
    ("prune {hf} out.gguf --layers 1", "paceline convert"),
    ("prune TEXT out.gguf --layers 1", "is not a GGUF file"),
    ("prune nobody out.gguf --layers 1", "nobody"),
    ("models show .", "is a folder that has no config.json"),
    ("models remove nobody --yes", "no model named 'nobody' is cached: there is none in"),
    ("models remove target --yes", "part of paceline"),
]
BY_LOADING = [
    ("run -md TEXT -p x", "TEXT is not a GGUF file"),
    ("run -p x --drafters suffix,suffix", "twice"),
    ("run -m {target} -p x --drafters draft", "-md"),
    ("run -md {draft} -p x --drafters suffix", "-md"),
    ("run -p x --verify rejection --draft-min 3", "bias"),
    ("run -p x -c 1000000 --engine torch_hf", "1000000 tokens is more"),
    ("run -p x -ot [=CPU", "among [ (-ot) is not a regular expression"),
    ("run -p x --logit-bias 999999=1", "999999"),
    ("run -p x --compare -n 1", "1 token"),
    ("run -p x --draft-max 3 -cd 1000000", "(-c, or -cd for a draft model)"),
    ("run -p x -dev abacus", "device 'abacus' is not available; choose from none (-dev)"),
    ("run -p x --dtype float16", "float16"),
]


@pytest.fixture
def refused(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Check that a command line is refused in a line, and leaves nothing behind."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here" / "EMPTY").mkdir(parents=True)
    (tmp_path / "here" / "TEXT").write_text("nothing")
    monkeypatch.chdir(tmp_path / "here")

    def check(words: str, said: str) -> None:
        models = {"target": embedded_target(), "draft": embedded_draft()}
        if "{silent}" in words:
            models["silent"] = write_gguf(tmp_path / "silent.gguf")
        if "{hf}" in words:
            models["hf"] = write_folder(tmp_path / "hf")
        status, out, err = invoke(*shlex.split(words.format(**models)))
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("paceline: ")
        assert said.format() in err
        assert {path.name for path in (tmp_path / "here").iterdir()} == {"EMPTY", "TEXT"}
        assert not [path for path in (tmp_path / "cache" / "models").rglob("*") if path.is_file()]

    return check


@pytest.mark.parametrize(("words", "said"), BEFORE_LOADING)
def test_what_cannot_be_done_is_one_line(
    refused: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    def load(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a model is loaded")

    for name in ("cli.setup.load", "model_pair.open_engine", "planning.costs.attention.open_engine"):
        monkeypatch.setattr(f"paceline.{name}", load)
    refused(words, said)


@pytest.mark.parametrize(("words", "said"), BY_LOADING)
def test_what_loading_finds_is_one_line_too(refused: Callable[[str, str], None], words: str, said: str) -> None:
    refused(words, said)
