"""`seatrial up`: both UIs on this machine until stopped; --postgres: on PostgreSQL and S3, with deployments, automations, a worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from infra.servers import USUAL, Ports, ServerError, Stack, stack
from infra.settings import Settings

REGISTER_S = 600.0
LOOK_S = 0.5
POOL = "sea-trial"  # of prefect.yaml
NEVER_SHOWN = ("KEY", "SECRET", "PASSWORD", "AUTH", "WEBHOOK", "CONNECTION_URL")


def up(
    settings: Settings, *, say: Callable[[str], None], postgres: bool = False, into: str = "", ports: Ports = USUAL
) -> dict[str, Any]:  # fmt: skip
    """Start the servers, say where they are, and wait for Ctrl-C or SIGTERM; all have ended when this returns.

    Returns: "ok" (False when a server ended by itself), "ended" (its name, or ""), the addresses, the folder.
    """
    folder = Path(into).expanduser() if into else settings.home / "servers"
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with stack(folder, postgres=postgres, settings=settings, ports=ports) as own:
            try:
                if postgres:
                    set_up(own, say)
                for line in addresses(own, postgres=postgres):
                    say(line)
                ended = _wait(own)
            except KeyboardInterrupt:
                ended = ""
            found = {"prefect": own.prefect_url, "mlflow": own.mlflow_url, "s3": own.s3_url, "folder": str(own.folder)}
    finally:
        signal.signal(signal.SIGTERM, before)
    return {"ok": not ended, "ended": ended, **found}


def lines(document: Mapping[str, Any]) -> list[str]:
    """What became of the servers, for people."""
    if document["ended"]:
        name = document["ended"]
        return [f"{name} ended by itself, so the others were ended too. Its log: {document['folder']}/{name}.log"]
    return ["all servers have ended"]


def set_up(own: Stack, say: Callable[[str], None], *, limit: int = 4) -> None:
    """Register pool, deployments and automations with a stack's Prefect server, and start a worker beside it.

    Args: limit, runs that the worker executes at a time; of those that need the devices, the queue `devices` lets through one.
    Raises: ServerError when the server refuses.
    """
    command = [sys.executable, "-m", "flows.registering"]
    run = subprocess.run(command, env=worker_environment(own), capture_output=True, text=True, timeout=REGISTER_S, cwd=own.folder)
    if run.returncode:
        raise ServerError(f"the Prefect server could not be set up:\n{(run.stdout + run.stderr)[-3000:]}\nAll servers were ended.")
    for line in run.stderr.splitlines():
        say(line)
    start_worker(own, limit=limit)


def start_worker(own: Stack, *, limit: int = 4) -> None:
    """Start the worker; it ends with the stack, and the runs that it executes end with it."""
    own.environment = worker_environment(own)
    prefect = str(Path(sys.executable).with_name("prefect"))
    own.start("worker", [prefect, "worker", "start", "--pool", POOL, "--type", "process", "--name", "sea-trial", "--limit", str(limit)])


def worker_environment(own: Stack) -> dict[str, str]:
    """The stack's environment with the packages on PYTHONPATH: runs are executed in other folders than this one."""
    full = own.full_environment()
    packages = str(Path(__file__).resolve().parents[1])
    paths = [path for path in full.get("PYTHONPATH", "").split(os.pathsep) if path and path != packages]
    return full | {"PYTHONPATH": os.pathsep.join([packages, *paths])}


def addresses(own: Stack, *, postgres: bool) -> list[str]:
    """Where the servers are, and what to set to release against them; keys are not shown."""
    shown = {name: value for name, value in own.environment.items() if name in _TO_SET and not any(word in name for word in NEVER_SHOWN)}
    return [
        f"Prefect  {own.prefect_url}",
        f"MLflow   {own.mlflow_url}",
        *([f"S3       {own.s3_url} (moto's server: all in it is forgotten when it ends)"] if own.s3_url else []),
        *(f"export {name}={value}" for name, value in shown.items() if postgres or name == "PREFECT_API_URL"),
        f"logs     {own.folder}",
        "Ctrl-C ends them all",
    ]


_TO_SET = (
    "PREFECT_API_URL", "SEATRIAL_HOME", "SEATRIAL_MLFLOW_TRACKING_URI", "SEATRIAL_MLFLOW_ARTIFACTS", "SEATRIAL_STORE",
    "SEATRIAL_STORE_ENDPOINT", "SEATRIAL_STORE_REGION",
)  # fmt: skip


def _wait(own: Stack) -> str:
    while not (ended := own.ended()):
        time.sleep(LOOK_S)
    return ended


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
