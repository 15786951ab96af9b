"""The beginning of a pack: unpacks itself beside where it is run, and goes on with the packages that it brings.

It is run by whatever Python has torch, and needs nothing but that Python.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Unpack the pack, and measure; return the exit status."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="gpu.pyz", add_help=False, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=Path("gpu-run"))
    parser.add_argument("--seconds", type=float, default=570.0)
    given, others = parser.parse_known_args(arguments)
    folder: Path = given.folder.absolute()
    if not (folder / "site").is_dir():
        pack = zipfile.ZipFile(sys.argv[0])
        with tarfile.open(fileobj=io.BytesIO(pack.read("payload.tar.xz"))) as payload:
            if hasattr(tarfile, "data_filter"):
                payload.extractall(folder, filter="data")
            else:  # the first Pythons of 3.11 know no filters
                payload.extractall(folder)
    made_for = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["python"]
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    if made_for != this:
        print(f"the pack is for Python {made_for}, and this is {this}: make it with --python {this}", file=sys.stderr)
        return 2
    left_s = given.seconds - (time.monotonic() - began_s)
    command = [sys.executable, "-m", "benchmarks.gpu.running", str(folder), "--seconds", f"{left_s:.1f}", *others]
    command += ["--typed", shlex.join(["python3", Path(sys.argv[0]).name, *arguments])]
    # What the pack brings goes before what is there: versions are those that paceline was tried with.
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
