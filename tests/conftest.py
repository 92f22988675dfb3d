"""What holds for every test: no telemetry, a key of its own, and no warm server left behind."""

import os
import sys
import tempfile

# before anything imports prefect, mlflow or great_expectations
os.environ |= {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "SEATRIAL_DEVICE_LOCK": f"{tempfile.gettempdir()}/sea-trial-tests-{os.getpid()}.lock",  # a test waits for no release on this machine
    "SEATRIAL_SEAL_KEY": "5e" * 32,  # else the first checkpoint of a test would leave a key under the current folder
}

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer import ranks


@pytest.fixture(autouse=True, scope="session")
def _no_warm_server_left() -> Iterator[None]:
    """The first group starts the warm server, the last test ends it."""
    yield
    ranks.shut_down()
    Path(os.environ["SEATRIAL_DEVICE_LOCK"]).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A command run in this process sets variables for its children, and where MLflow looks; the next test does not see them."""
    before = dict(os.environ)
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)  # what was set in the process would win over the next test's environment
    os.environ.clear()
    os.environ.update(before)
