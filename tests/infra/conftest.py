"""One S3 endpoint and one migrated MLflow database for all tests of this folder: each takes seconds to start."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from helpers_stores import make_store
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

from infra.registry import Registry
from infra.settings import Settings, load_settings
from infra.store import ObjectStore


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A moto server on a free port, with the bucket "trial".

    It answers one request after the other: S3 looks at an ETag and writes in one act, moto's threads may come between the two.
    """
    answer, turn = DomainDispatcherApplication.__call__, threading.Lock()

    def in_turn(app: DomainDispatcherApplication, *request: Any) -> Any:
        with turn:
            return answer(app, *request)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DomainDispatcherApplication, "__call__", in_turn)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with pytest.MonkeyPatch.context() as patch:
            _give_credentials(patch)
            boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="trial")
        yield endpoint
        server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint, with credentials in this test's environment."""
    _give_credentials(monkeypatch)
    return s3_endpoint


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """A fresh store of the kind the test is parametrised with (memory unless it says otherwise)."""
    kind = getattr(request, "param", "memory")
    endpoint = request.getfixturevalue("s3") if kind == "s3" else ""
    return make_store(kind, tmp_path, endpoint, uuid4().hex)


@pytest.fixture(scope="session")
def registry_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings whose home has a space in its path."""
    return load_settings(home=tmp_path_factory.mktemp("registry") / "a home")


@pytest.fixture(scope="session")
def registry(registry_settings: Settings) -> Registry:
    """A registry on SQLite; its first use migrates for some seconds."""
    return Registry(registry_settings)


def _give_credentials(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
