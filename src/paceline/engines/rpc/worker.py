"""What ``paceline rpc-worker`` runs: one port, and behind it a process of llama.cpp's RPC for each client.

llama.cpp's server takes one client after the other, and ends its process over what it does not understand. So each
client has one of its own, which ends with it::

    client ──RPC──> port ──RPC──> process that serves this client
    client ──RPC──>      ──RPC──> process that serves that client
    client <─status─>             process that is ready for the next

Processes end, too, as soon as nobody holds the pipe to them any more: a worker that was killed leaves none.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

import paceline
from paceline.core import errors
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.rpc.workers import ASK, PING, PONG

_HELLO: Final = 14
"""First byte of llama.cpp's RPC."""

_STDIN: Final = 0
"""File descriptor of standard input."""
_FIRST_BYTE_S: Final = 5.0
"""Seconds in which a connection has to say what it is."""
_START_S: Final = 60.0
"""Seconds in which a process has to be ready."""
_ANSWER_S: Final = 1.0
"""Seconds in which a process has to say how much memory is free."""
_BEAT_S: Final = 0.2
"""Seconds between two questions whether a process lives."""
_SILENCE_S: Final = 0.3
"""Seconds without an answer after which its client's heartbeats are not answered either."""
_MAX_CONNECTIONS: Final = 256
"""Connections of all kinds that are held at once."""
_CHUNK_BYTES: Final = 1 << 20
"""Most bytes that are handed on at once."""
_QUESTIONS_BYTES: Final = 1 << 12
"""Most bytes of a connection that only asked: a client makes some before one that it loads by."""
_QUESTIONERS: Final = 4
"""Connections beyond the clients that may ask."""
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Notices within half a minute that a client's machine is gone."""

_MEMORY: Final = b"m\n"
"""What a process is asked to say how much memory is free."""
_NUDGE: Final = b"n\n"
"""What a process is asked to say that it lives."""
_ALIVE: Final = b"{}\n"
"""How it says so."""

_PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[2:]
from paceline.engines.rpc.worker import serve_as_told
serve_as_told(sys.argv[1])
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is served, by which versions."""

    versions: dict[str, str]
    devices: list[dict[str, Any]]


class Worker:
    """Serves devices of this machine until it is closed.

    Args:
        host: IPv4 address to listen at.
        port: 0 takes a free one.
        devices: by llama.cpp's names; empty for its choice.
        max_clients: most clients at a time.
        say: is told what happens, in one line; by any thread.
        verbose: whether llama.cpp's log goes to standard error.

    Raises:
        InputError: the address cannot be listened at, or there is no such device.
        CapabilityError: llama.cpp was built without RPC.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        threads: int,
        devices: Sequence[str] = (),
        max_clients: int = 8,
        say: Callable[[str], None] = lambda line: None,
        verbose: bool = False,
    ) -> None:
        self._threads = threads
        self._max_clients = max_clients
        self._say = say
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._clients = 0
        self._serving: dict[_Server, str] = {}
        self._silent_hosts: frozenset[str] = frozenset()
        self._ending = threading.Event()
        self._slots = threading.Semaphore(max_clients + _QUESTIONERS)
        self._is_closed = False
        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._pool = _Pool(json.dumps({"threads": threads, "devices": list(devices)}), verbose=verbose)
        try:
            self.facts = self._pool.start()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Let go of all clients, and end all processes."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        self._ending.set()
        _hang_up(self._listener)
        self._listener.close()
        for connection in connections:
            _hang_up(connection)
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # too many open files: others will end
                continue
            with self._lock:
                is_taken = not self._is_closed and len(self._connections) < _MAX_CONNECTIONS
                if is_taken:
                    self._connections.add(connection)
            if not is_taken:
                connection.close()
                continue
            threading.Thread(target=self._attend, args=(connection, host, port), daemon=True).start()

    def _attend(self, connection: socket.socket, host: str, port: int) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                _set_up(connection)
                connection.settimeout(_FIRST_BYTE_S)
                first = connection.recv(1, socket.MSG_PEEK)
                if first == ASK[:1]:
                    self._answer(connection, host)
                elif first == bytes([_HELLO]):
                    connection.settimeout(None)
                    self._serve(connection, host, port)
        finally:
            with self._lock:
                self._connections.discard(connection)

    # --- status -------------------------------------------------------------------------------------------------------

    def _answer(self, connection: socket.socket, host: str) -> None:
        """Answer questions until the other side closes."""
        lines = connection.makefile("rb")
        if lines.readline(len(ASK)) != ASK:
            return
        connection.sendall(json.dumps(self.status()).encode() + b"\n")
        connection.settimeout(None)
        while lines.readline(len(PING)) == PING:
            if host not in self._silent_hosts:
                connection.sendall(PONG)

    def _watch(self) -> None:
        """Note whose process lives no more: a client is to notice that as it would of the whole worker."""
        while not self._ending.wait(_BEAT_S):
            with self._lock:
                serving = list(self._serving.items())
            for server, _ in serving:
                server.nudge()
            self._silent_hosts = frozenset(host for server, host in serving if server.silence_s() > _SILENCE_S)

    def status(self) -> dict[str, Any]:
        """Return what the worker says of itself."""
        return {
            "paceline": paceline.__version__,
            "versions": self.facts.versions,
            "devices": self._pool.ask_memory() or self.facts.devices,
            "threads": self._threads,
            "clients": self._clients,
            "max_clients": self._max_clients,
        }

    # --- llama.cpp's RPC ----------------------------------------------------------------------------------------------

    def _serve(self, client: socket.socket, host: str, port: int) -> None:
        name = f"{host}:{port}"
        # One that asks may come before the last one, of the same client, is quite gone.
        if not self._slots.acquire(timeout=_FIRST_BYTE_S):
            self._say(f"{name} was sent away: {_QUESTIONERS} connections beyond --max-clients are open")
            return
        try:
            server = self._pool.take()
        except EngineError as error:
            self._slots.release()
            self._say(f"{name} was sent away: {error}")
            return
        with self._lock:
            self._serving[server] = host
        begun = time.monotonic()
        traffic = _Traffic(lambda: self._admit(name))
        ended = threading.Event()
        back = threading.Thread(target=_pump_back, args=(server.connection, client, ended), daemon=True)
        back.start()
        try:
            was_lost = _pump(client, server.connection, traffic.count) or ended.is_set()
            # The process hangs up, too, once it has freed what the client held. It may be in the middle of a pass.
            is_idle = not traffic.is_client and ended.wait(_ANSWER_S)
        finally:
            _hang_up(client)
            with self._lock:
                self._clients -= traffic.is_client
                del self._serving[server]
        trouble = self._pool.put_back(server) if is_idle else self._pool.end(server, was_lost=was_lost)
        self._slots.release()
        back.join()
        if traffic.is_client:
            held = f"{traffic.num_bytes / 1e6:,.1f} MB came from it in {time.monotonic() - begun:,.1f} s"
            self._say(f"{name} left: {held}" if trouble is None else f"{name} was lost: {trouble}; {held}")

    def _admit(self, name: str) -> bool:
        """Return whether there is room for a client, and count it."""
        with self._lock:
            is_taken = self._clients < self._max_clients
            self._clients += is_taken
        self._say(f"{name} {'came' if is_taken else f'was sent away: {self._max_clients} clients are the most'}")
        return is_taken


class _Traffic:
    """Counts what came through a connection, and asks for room when that is more than questions.

    Attributes:
        is_client: whether there was room.
    """

    def __init__(self, admit: Callable[[], bool]) -> None:
        self.num_bytes = 0
        self.is_client = False
        self._admit = admit

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > _QUESTIONS_BYTES and not self.is_client:
            self.is_client = self._admit()
            if not self.is_client:
                raise ConnectionRefusedError


def _pump(source: socket.socket, destination: socket.socket, count: Callable[[int], None] = lambda num: None) -> bool:
    """Hand on bytes until one side closes; then the other is told. Returns whether it was the destination that did."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while num_bytes := source.recv_into(buffer):
            count(num_bytes)
            try:
                destination.sendall(buffer[:num_bytes])
            except OSError:
                return True
    with contextlib.suppress(OSError):
        destination.shutdown(socket.SHUT_WR)
    return False


def _pump_back(server: socket.socket, client: socket.socket, ended: threading.Event) -> None:
    """Hand on what a process says; when it hangs up, so does its client's connection."""
    _pump(server, client)
    ended.set()
    _hang_up(client)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    return listener


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hang_up(connection: socket.socket) -> None:
    """End a connection that another thread may wait for."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# --- processes --------------------------------------------------------------------------------------------------------


class _Pool:
    """Processes that serve: one is always ready, or being started, for the next client."""

    def __init__(self, task: str, *, verbose: bool) -> None:
        self._task = task
        self._verbose = verbose
        self._changed = threading.Condition()
        self._alive: list[_Server] = []
        self._ready: list[_Server] = []
        self._starting = 0
        self._is_closed = False
        self._failure: Exception | None = None

    def start(self) -> Facts:
        """Start the first process, and return what it says is served."""
        self._starting += 1
        self._start_one()
        if self._failure is not None:
            raise self._failure
        return self._ready[0].facts

    def take(self) -> _Server:
        """Return a process that waits for a client, and start the next."""
        with self._changed:
            while True:
                while self._ready:
                    server = self._ready.pop()
                    if server.is_alive():
                        self._start_more()
                        return server
                    self._forget(server)
                    server.end()
                if self._is_closed:
                    raise EngineError("the worker is being ended")
                self._failure = None
                self._start_more()
                self._changed.wait_for(lambda: self._ready or self._is_closed or self._failure)
                if not self._ready and (why := self._failure):
                    raise EngineError(str(why))

    def put_back(self, server: _Server) -> str | None:
        """Have a process that has nothing of its client's left wait for the next one. Returns why it cannot."""
        try:
            server.connect()
        except EngineError:
            return self.end(server)
        with self._changed:
            if len(self._ready) < 2 and not self._is_closed:
                self._ready.append(server)
                self._changed.notify_all()
                return None
        return self.end(server)

    def end(self, server: _Server, *, was_lost: bool = False) -> str | None:
        """End a process, and return why it had ended by itself, in one line."""
        with self._changed:
            self._forget(server)
        return server.end(was_lost=was_lost)

    def ask_memory(self) -> list[dict[str, Any]] | None:
        """Return devices with the memory that is free on them; ``None`` where no process answers."""
        with self._changed:
            server = next((each for each in reversed(self._alive) if each.is_ready and each.is_alive()), None)
        return None if server is None else server.ask_memory()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            alive, self._alive, self._ready = self._alive, [], []
            self._changed.notify_all()
        for server in alive:
            server.end()

    def _start_more(self) -> None:
        if not self._ready and not self._starting and not self._is_closed:
            self._starting += 1
            threading.Thread(target=self._start_one, daemon=True).start()

    def _start_one(self) -> None:
        server, failure = None, None
        try:
            server = _Server(self._task, verbose=self._verbose)
            with self._changed:
                self._alive.append(server)
                is_late = self._is_closed
            if is_late:
                self.end(server)
                return
            server.wait_until_ready()
        except (errors.PacelineError, OSError, ValueError) as error:
            failure = error
            if server is not None:
                self.end(server)
        with self._changed:
            self._starting -= 1
            self._failure = failure
            if server is not None and failure is None:
                self._ready.append(server)
            self._changed.notify_all()

    def _forget(self, server: _Server) -> None:
        if server in self._alive:
            self._alive.remove(server)


class _Server:
    """A process that serves one client.

    Attributes:
        connection: to its server, for a client that may not be there yet. Whoever connects first is served first.
        facts: what it serves.
        is_ready: whether it said that.
    """

    connection: socket.socket
    facts: Facts
    is_ready = False

    def __init__(self, task: str, *, verbose: bool) -> None:
        self._trouble: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # Isolated (-I), as a file in the current folder may have the name of a module; and in a session of its own, as
        # Ctrl-C in the terminal would reach it before its client is told.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, task, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else self._trouble,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            start_new_session=os.name == "posix",
        )
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._nudged = self._heard = time.monotonic()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until the process serves.

        Raises:
            InputError: it cannot, and why.
            EngineError: it ended, or takes too long.
        """
        said = self._hear(_START_S)
        if "error" in said:
            raise getattr(errors, said["error"], CapabilityError)(said["message"])
        self._port: int = said["port"]
        self.facts = Facts(said["versions"], said["devices"])
        self.connect()
        self.is_ready = True

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> None:
        """Connect to the server. It listens soon, or the process has ended."""
        if hasattr(self, "connection"):
            self.connection.close()
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.connection = socket.create_connection(("127.0.0.1", self._port), timeout=_ANSWER_S)
            except OSError:
                if not self.is_alive() or time.monotonic() > deadline:
                    raise EngineError(f"a serving process does not start: {self._last_words()}") from None
                time.sleep(0.01)
            else:
                self.connection.settimeout(None)
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return

    def nudge(self) -> None:
        """Ask whether it lives, unless it was asked and did not say yet."""
        if self._nudged <= self._heard:
            self._nudged = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                assert self._process.stdin is not None
                os.write(self._process.stdin.fileno(), _NUDGE)

    def silence_s(self) -> float:
        """Return for how long it has not said that it lives."""
        return 0.0 if self._nudged <= self._heard else time.monotonic() - self._nudged

    def ask_memory(self) -> list[dict[str, Any]] | None:
        with self._asking:
            try:
                assert self._process.stdin is not None
                os.write(self._process.stdin.fileno(), _MEMORY)
                devices: list[dict[str, Any]] = self._hear(_ANSWER_S)["devices"]
            except (EngineError, OSError, ValueError):
                return None
            return devices

    def end(self, *, was_lost: bool = False) -> str | None:
        """End the process, and return why it had ended by itself, in one line.

        Args:
            was_lost: whether it hung up before its client did, as it does while it ends.
        """
        with self._ending:
            if self._trouble.closed:
                return None
            if was_lost:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ANSWER_S)
            ended = self._process.poll() is not None
            self._process.kill()
            status = self._process.wait()
            words = f"its process ended with status {status}: {self._last_words()}" if ended else None
            if hasattr(self, "connection"):
                _hang_up(self.connection)
                self.connection.close()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    if pipe is not None:
                        pipe.close()
            self._trouble.close()
            return words

    def _listen(self, pipe: IO[bytes]) -> None:
        """Hand on what the process says line by line, and an empty line at its end."""
        with contextlib.suppress(OSError, ValueError):
            for line in pipe:
                self._heard = time.monotonic()
                if line != _ALIVE:
                    self._said.put(line)
        self._said.put(b"")

    def _hear(self, patience_s: float) -> dict[str, Any]:
        try:
            line = self._said.get(timeout=patience_s)
        except queue.Empty:
            raise EngineError(f"a serving process has not answered for {patience_s:g} s") from None
        if not line:
            self._process.wait()
            raise EngineError(f"a serving process ended: {self._last_words()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _last_words(self) -> str:
        self._trouble.seek(0)
        *_, last = self._trouble.read().decode("utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        return last


# --- the other process ------------------------------------------------------------------------------------------------


def serve_as_told(task: str) -> None:
    """Be the other process: say what is served and where, and serve it."""
    from paceline.engines.llama_cpp import native, rpc

    # llama.cpp prints to standard output.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = json.loads(task)
    try:
        native.initialize()
        rpc.check_rpc()
        names = rpc.choose_devices(told["devices"])
    except InputError as error:
        _say(channel, {"error": type(error).__name__, "message": str(error)})
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    devices = [asdict(device) for device in rpc.device_memory(names)]
    _say(channel, {"port": port, "versions": rpc.library_versions(), "devices": devices})
    threading.Thread(target=_answer_parent, args=(channel, names), daemon=True).start()
    rpc.serve(f"127.0.0.1:{port}", told["threads"], names, None)


def _answer_parent(channel: IO[str], names: Sequence[str]) -> None:
    """Say what is asked until the parent lets go of the pipe; then end."""
    from paceline.engines.llama_cpp import rpc

    # Not sys.stdin, whose lock no thread may hold when the interpreter ends.
    while asked := os.read(_STDIN, 64):
        for line in asked.splitlines(keepends=True):
            is_nudge = line == _NUDGE
            _say(channel, {} if is_nudge else {"devices": [asdict(each) for each in rpc.device_memory(names)]})
    os._exit(0)


def _say(channel: IO[str], what: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        channel.write(json.dumps(what) + "\n")
        channel.flush()
