"""``paceline rpc-worker``: this machine's devices, for layers of models that run elsewhere."""

from __future__ import annotations

import ipaddress
import signal
import socket
from types import FrameType
from typing import Annotated

import typer

from paceline.cli.display import error_console
from paceline.cli.interrupts import hold_interrupts
from paceline.core.errors import InputError
from paceline.engines.rpc.addresses import DEFAULT_PORT, is_loopback, is_public
from paceline.engines.threads import usable_cores
from paceline.sizes import format_memory
from paceline.terminal_text import printable_line

EPILOG = """[bold]Examples[/bold]

paceline rpc-worker  [dim]# at 127.0.0.1:50052: for programs of this machine, and for ssh -L[/dim]

paceline rpc-worker --host 10.0.0.2 -t 8  [dim]# in a network that you trust[/dim]

paceline rpc-worker -dev CUDA0 --port 50060

paceline serve -m big.gguf --rpc 10.0.0.2:50052  [dim]# on the machine that answers[/dim]
"""
"""Examples below the command's help."""

_WAY_OUT = "listen at 127.0.0.1 and forward the port by ssh -L, or at an address of a VPN such as WireGuard"


def rpc_worker(
    host: Annotated[
        str, typer.Option("--host", help="IPv4 address to listen at. Whoever reaches it can use the worker.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at; 0 takes a free one.")] = DEFAULT_PORT,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", help="CPU threads of passes. [dim]\\[one for each free core][/dim]")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "-dev",
            "--device",
            help="Devices to serve, by llama.cpp's names. [dim]\\[the GPUs, or else the CPU][/dim]",
            metavar="DEV[,...]",
        ),
    ] = None,
    max_clients: Annotated[int, typer.Option("--max-clients", help="Maximum clients at a time.")] = 8,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Listen at a public address, or at all there are.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log on stderr.")] = False,
) -> None:
    """Lend this machine's memory and processors to models that run on another machine.

    The other machine names this one with --rpc. llama.cpp's RPC has no passwords and no encryption, and its authors
    call it insecure: anyone who can reach the port can use the worker. Several clients are served at once, each by a
    process of its own. Ctrl-C stops the worker.
    """
    from paceline.engines.rpc.worker import Worker

    if port not in range(1 << 16):
        raise InputError(f"--port {port} is no port: give a number from 0 to 65535")
    for option, count in (("--threads", threads), ("--max-clients", max_clients)):
        if count is not None and count < 1:
            raise InputError(f"{option} {count} is too few: give 1 or more")
    address = _find_address(host)
    warning = _check_reach(host, address, allow_public=allow_public)
    console = error_console()
    if warning is not None:
        console.print(f"warning: {warning}", style="yellow", markup=False)

    def say(line: str) -> None:
        console.print(printable_line(line), style="dim", markup=False)

    def end(signum: int, frame: FrameType | None) -> None:
        ended.set()

    with hold_interrupts() as ended:
        previous = signal.signal(signal.SIGTERM, end)
        worker = Worker(
            address,
            port,
            threads=threads or usable_cores(),
            devices=[name for name in (devices or "").split(",") if name],
            max_clients=max_clients,
            say=say,
            verbose=verbose,
        )
        try:
            console.print(_describe(worker.address, worker.status()), style="bold", markup=False)
            ended.wait()
        finally:
            worker.close()
            signal.signal(signal.SIGTERM, previous)


def _find_address(host: str) -> str:
    """Return the IPv4 address that a name stands for."""
    name = host.removeprefix("[").removesuffix("]")
    try:
        is_ipv6 = ipaddress.ip_address(name).version == 6
    except ValueError:
        is_ipv6 = False
    if is_ipv6:
        raise InputError(f"--host {host} is an IPv6 address, and llama.cpp's RPC knows IPv4 alone: name one of those")
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        raise InputError(f"--host {host} is not an address of this machine: give an IPv4 address") from None


def _check_reach(host: str, address: str, *, allow_public: bool) -> str | None:
    """Return what is to be warned of; raise ``InputError`` for public addresses without a flag."""
    if is_loopback(address):
        return None
    anybody = "without a password, and what goes over the network is not encrypted"
    if not is_public(address):
        return f"whoever reaches {address} can use this worker {anybody}"
    what = "stands for all addresses of this machine" if address == "0.0.0.0" else "is a public address"
    if allow_public:
        return f"--host {host} {what}: anybody who reaches it can use this worker {anybody}"
    raise InputError(
        f"--host {host} {what}, and anybody who reaches it could use the worker {anybody}: {_WAY_OUT}; --allow-public "
        "listens there all the same"
    )


def _describe(address: tuple[str, int], status: dict[str, object]) -> str:
    assert isinstance(status["devices"], list)
    assert isinstance(status["versions"], dict)
    devices = ", ".join(
        f"{device['name']} ({printable_line(device['description'])}, {format_memory(device['free_bytes'])} free)"
        for device in status["devices"]
    )
    versions = ", ".join(f"{name} {version}" for name, version in status["versions"].items())
    return f"serving {devices} at {address[0]}:{address[1]}, {status['threads']} threads; {versions}"
