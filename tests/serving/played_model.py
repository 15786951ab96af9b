"""A program that plays a model's process: it speaks with its router, and answers what a test asks for.

Fields of a body: ``fifo`` waits until somebody has written to it, ``chunks`` is how many events a stream has, ``die``
ends the process after so many of them and ``half`` another one, ``size`` makes the answer so long, ``refuse`` is the
status of an error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    told = json.loads(sys.stdin.buffer.readline())
    if "--broken" in sys.argv:
        sys.exit("paceline: the file is damaged: fetch it again")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"path": self.path, "is": told["name"]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked: dict[str, Any] = json.loads(body)
            if "fifo" in asked:
                Path(asked["fifo"]).read_text()
            if "refuse" in asked:
                self._answer({"error": {"type": "invalid_request_error", "message": "played"}}, asked["refuse"])
                return
            if asked.get("stream"):
                self._stream(asked)
                return
            if asked.get("die") == 0:
                os._exit(9)
            self._answer(
                {
                    "model": told["name"],
                    "bytes": len(body),
                    "path": self.path,
                    "pid": os.getpid(),
                    "text": "x" * asked.get("size", 0),
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                },
                asked.get("status", 200),
            )

        def _stream(self, asked: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(asked.get("chunks", 3)):
                if number == asked.get("die"):
                    if "half" in asked:
                        self._chunk(asked["half"].encode())
                    os._exit(9)
                self._chunk(b"data: %d %b\n\n" % (number, b"x" * asked.get("size", 0)))
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def _answer(self, value: object, status: int = 200) -> None:
            content = json.dumps(value).encode()
            if self.headers["Authorization"] != f"Bearer {told['key']}":
                status = 401
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name in ("X-Request-Id", "Request-Id"):
                self.send_header(name, "not the router's")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            pass

    class Web(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    web = Web(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()

    def tell(**news: object) -> None:
        print(json.dumps(news), flush=True)

    tell(state="listening", port=web.server_address[1])
    if "--slow" in sys.argv:
        Path(sys.argv[sys.argv.index("--slow") + 1]).read_text()
    tell(state="loaded", info={"id": told["name"], "meta": {"n_ctx": 512}, "tags": told["tags"]})
    while os.read(0, 1024):
        pass


if __name__ == "__main__":
    main()
