"""Runs the measurements, all or by name; some have options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import typer

from benchmarks import acceptance, lossless, overhead, plain_speed, planning, soak, speed
from benchmarks.alternating import EPILOG as ALTERNATING_EPILOG
from benchmarks.alternating import alternating
from benchmarks.attack.command import EPILOG as ATTACK_EPILOG
from benchmarks.attack.command import attack
from benchmarks.beside_driver import EPILOG as BESIDE_DRIVER_EPILOG
from benchmarks.beside_driver import beside_driver
from benchmarks.beside_server import EPILOG as BESIDE_SERVER_EPILOG
from benchmarks.beside_server import beside_server
from benchmarks.chats import EPILOG as CHATS_EPILOG
from benchmarks.chats import chats
from benchmarks.gpu.command import EPILOG as GPU_EPILOG
from benchmarks.gpu.command import gpu
from benchmarks.inflation import EPILOG as INFLATION_EPILOG
from benchmarks.inflation import inflation
from benchmarks.pair.command import EPILOG, pair
from benchmarks.planner_ab.building import EPILOG as PLANNER_CORPUS_EPILOG
from benchmarks.planner_ab.building import planner_corpus
from benchmarks.planner_ab.command import EPILOG as PLANNER_AB_EPILOG
from benchmarks.planner_ab.command import planner_ab
from benchmarks.planner_ab.statics import EPILOG as PLANNER_STATICS_EPILOG
from benchmarks.planner_ab.statics import planner_statics
from benchmarks.replays import RECORD_EPILOG, REPLAY_EPILOG, record_command, replay_command
from benchmarks.server_soak.command import EPILOG as SERVER_SOAK_EPILOG
from benchmarks.server_soak.command import server_soak
from benchmarks.serving import EPILOG as SERVING_EPILOG
from benchmarks.serving import serving
from benchmarks.streamed.answers import EPILOG as STREAMED_ANSWERS_EPILOG
from benchmarks.streamed.answers import streamed_answers
from benchmarks.streamed.passes import EPILOG as STREAMED_PASSES_EPILOG
from benchmarks.streamed.passes import streamed_passes
from benchmarks.streamed.soak import EPILOG as STREAMED_SOAK_EPILOG
from benchmarks.streamed.soak import streamed_soak
from benchmarks.structured import EPILOG as STRUCTURED_EPILOG
from benchmarks.structured import structured
from benchmarks.sweep import EPILOG as SWEEP_EPILOG
from benchmarks.sweep import sweep
from benchmarks.translation import EPILOG as TRANSLATION_EPILOG
from benchmarks.translation import translation
from paceline.cli import exits
from paceline.core.errors import InputError, PacelineError
from paceline.machine import machine

MEASUREMENTS = {
    "lossless": lossless,
    "acceptance": acceptance,
    "overhead": overhead,
    "planning": planning,
    "plain_speed": plain_speed,
    "speed": speed,
    "soak": soak,
}

app = typer.Typer(
    # Several measurements can be named one after the other.
    chain=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run(name: str) -> None:
    print(f"\n== {name}")
    figures: dict[str, Any] = MEASUREMENTS[name].measure()
    print(json.dumps({"machine": machine(), name: figures}))


def _command(name: str) -> Callable[[], None]:
    return lambda: _run(name)


for _name, _module in MEASUREMENTS.items():
    app.command(_name, help=(_module.__doc__ or "").partition("\n")[0])(_command(_name))
app.command("pair", epilog=EPILOG)(pair)
app.command("inflation", epilog=INFLATION_EPILOG)(inflation)
# This needs two models that are not there everywhere.
app.command("translation", epilog=TRANSLATION_EPILOG)(translation)
# These need a program that is not there everywhere.
app.command("beside-driver", epilog=BESIDE_DRIVER_EPILOG)(beside_driver)
app.command("beside-server", epilog=BESIDE_SERVER_EPILOG)(beside_server)
app.command("chats", epilog=CHATS_EPILOG)(chats)
app.command("attack", epilog=ATTACK_EPILOG)(attack)
app.command("server-soak", epilog=SERVER_SOAK_EPILOG)(server_soak)
app.command("alternating", epilog=ALTERNATING_EPILOG)(alternating)
app.command("structured", epilog=STRUCTURED_EPILOG)(structured)
app.command("serving", epilog=SERVING_EPILOG)(serving)
# This makes what measures elsewhere.
app.command("gpu", epilog=GPU_EPILOG)(gpu)
# These need root, and a disk whose reads can be bounded.
app.command("streamed-passes", epilog=STREAMED_PASSES_EPILOG)(streamed_passes)
app.command("streamed-answers", epilog=STREAMED_ANSWERS_EPILOG)(streamed_answers)
app.command("streamed-soak", epilog=STREAMED_SOAK_EPILOG)(streamed_soak)
# These measure policies on what was recorded before, so they are not among all that runs by itself.
app.command("record", epilog=RECORD_EPILOG)(record_command)
app.command("replay", epilog=REPLAY_EPILOG)(replay_command)
app.command("sweep", epilog=SWEEP_EPILOG)(sweep)
app.command("planner-ab", epilog=PLANNER_AB_EPILOG)(planner_ab)
app.command("planner-statics", epilog=PLANNER_STATICS_EPILOG)(planner_statics)
app.command("planner-corpus", epilog=PLANNER_CORPUS_EPILOG)(planner_corpus)


@app.callback()
def run_all(context: typer.Context) -> None:
    """Measure paceline on this machine: everything, or what is named. Each measurement says what limits its figure."""
    if context.invoked_subcommand is None:
        for name in MEASUREMENTS:
            _run(name)
        print("\n== pair")
        pair()
        print("\n== inflation")
        inflation()


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit status."""
    try:
        app()
    except PacelineError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(exits.BAD_INPUT if isinstance(error, InputError) else exits.FAILURE)


if __name__ == "__main__":
    main()
