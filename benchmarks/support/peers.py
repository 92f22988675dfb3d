"""Peers that are not among the project's packages: an environment of their own beside it, and the warm interpreter that runs them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from support.output import progress

from trainer.wires import WARM_ENVIRON

PEERS = Path(__file__).parents[1] / "peers"
REQUIREMENTS = PEERS / "requirements.txt"
ENVIRONMENT = PEERS.parents[1] / ".venv-peers"


class PeersMissing(Exception):
    """The peers' environment could not be made; says why."""


def peers_python(requirements: Path = REQUIREMENTS, environment: Path = ENVIRONMENT) -> Path:
    """Interpreter that sees this project's packages and the pinned peers; the environment is made when it is not there yet.

    Raises: PeersMissing when the packages cannot be installed.
    """
    mark = environment / "installed"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.executable.encode()).hexdigest()
    python = environment / "bin" / "python"
    if mark.exists() and mark.read_text() == wanted:
        return python
    progress(f"installing {requirements.name} into {environment.name} ...")
    shutil.rmtree(environment, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")  # torch and all else
    _run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "-r", str(requirements)])
    mark.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeersMissing(f"'{' '.join(command[1:4])} ...' ended with code {done.returncode}: {done.stderr.strip()[-400:]}")


class StepServer:
    """A process of benchmarks/peers/step_server.py; use it in a `with`."""

    def __init__(self, python: Path, *sides: str) -> None:
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(PEERS / "step_server.py"), *sides], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | WARM_ENVIRON,  # the allocator's settings, too: without them a process is up to a tenth slower by luck
        )  # fmt: skip
        if self._line() != "ready":
            self.__exit__()
            raise PeersMissing(f"{', '.join(sides)} cannot be imported by {python}; see above")

    def seconds(self, request: dict[str, Any]) -> float:
        """Time of the requested steps. Raises RuntimeError when a rank fails."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._line() or '{"error": "the server died"}')
        if "error" in answer:
            raise RuntimeError(f"{request['side']} failed at W = {request['world_size']}: {answer['error']}")
        return float(answer["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> "StepServer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()
