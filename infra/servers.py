"""Prefect's and MLflow's servers on this machine: on the embedded SQLite files, or on PostgreSQL with S3 beside them. Loopback only.

All of them end when the `with` block does, or when this process dies, SIGKILL included (infra/server_keeper.py).
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from infra.server_postgres import Cluster, prepare_cluster, start_cluster
from infra.server_process import LOOPBACK, Command, Server, answers_http, answers_tcp, require_port
from infra.server_process import ServerError as ServerError
from infra.settings import Settings, embedded_environment, load_settings
from validation.errors import ConfigError

START_S = 180.0  # the first start migrates an empty database; an idle machine needs 10-25 s
BUCKET = "sea-trial"
HEARTBEAT_S = 30  # of a flow run; flows/automations.py calls a run crashed after three that are missing
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
_REGION = "us-east-1"
_FOREIGN = ("PREFECT_PROFILE", "PREFECT_API_KEY", "PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where to listen on loopback; 0 = any free port."""

    prefect: int = 0
    mlflow: int = 0
    postgres: int = 0
    s3: int = 0


USUAL = Ports(prefect=4200, mlflow=5000)  # what people expect of both UIs


@dataclass(kw_only=True)
class Stack:
    """Servers that answer, and the variables with which a release finds them."""

    folder: Path
    environment: Mapping[str, str] = field(repr=False)  # beside this process's own; holds passwords
    prefect_url: str
    mlflow_url: str
    s3_url: str = ""
    cluster: Cluster | None = None
    servers: dict[str, Server] = field(default_factory=dict)

    def full_environment(self) -> dict[str, str]:
        """This process's environment with the stack's variables over it."""
        return _ours() | dict(self.environment)

    def start(self, name: str, words: Sequence[str]) -> Server:
        """Start one more command that ends with the stack: a worker."""
        self.servers[name] = Server(Command(name=name, words=words, environment=self.full_environment(), folder=self.folder, grace_s=30.0))
        return self.servers[name]

    def stop(self, name: str) -> None:
        """End one server."""
        self.servers[name].end()

    def start_again(self, name: str) -> Server:
        """Start a server that was stopped, at the same port on the same data; returns when it answers."""
        if name == "postgres" and self.cluster is not None:
            self.servers[name] = start_cluster(self.cluster)
        else:
            self.servers[name] = Server(self.servers[name].command)
            self._await(name)
        return self.servers[name]

    def end(self) -> None:
        """End all servers, the database last."""
        for server in reversed(self.servers.values()):
            server.end()

    def ended(self) -> str:
        """The name of a server that ended by itself, or ""."""
        return next((name for name, server in self.servers.items() if not server.is_alive), "")

    def _await(self, name: str) -> None:
        health = {"prefect": f"{self.prefect_url}/api/health", "mlflow": f"{self.mlflow_url}/health"}.get(name, "")
        port = int(self.s3_url.rpartition(":")[2]) if name == "s3" else 0
        self.servers[name].wait(lambda: answers_http(health) if health else answers_tcp(port), START_S)


@contextmanager
def stack(folder: Path, *, postgres: bool = False, settings: Settings | None = None, ports: Ports = Ports()) -> Iterator[Stack]:
    """Start the servers; yields when all answer, ends them all afterwards.

    Args: folder, for logs and for what the servers keep; postgres, False: the SQLite files of `settings.home`, as `seatrial release` uses
    them; True: a PostgreSQL cluster of its own, and S3 (the endpoint of the settings if their store is s3://, else moto's server, which
    forgets all when it ends).
    Raises: ConfigError when a port is taken, or PostgreSQL or moto is not installed; ServerError when a server does not start.
    """
    folder = folder.absolute()
    settings = settings or load_settings(home=folder / "home")
    ports = Ports(
        prefect=require_port(ports.prefect, "Prefect"), mlflow=require_port(ports.mlflow, "MLflow"), postgres=ports.postgres, s3=ports.s3
    )
    _make(folder)
    with ExitStack() as ending:
        own = _on_postgres(folder, settings, ports) if postgres else _embedded(folder, settings, ports)
        ending.callback(own.end)
        if own.cluster is not None:
            own.servers["postgres"] = start_cluster(own.cluster)
        for command in _commands(own, settings):
            own.servers[command.name] = Server(command)
        for name in own.servers:
            if name != "postgres":
                own._await(name)
        if "s3" in own.servers:
            _make_bucket(own)
        yield own


def _embedded(folder: Path, settings: Settings, ports: Ports) -> Stack:
    _make(settings.home)
    return _stack(folder, settings, ports, {"SEATRIAL_MLFLOW_ARTIFACTS": settings.mlflow_artifacts})


def _on_postgres(folder: Path, settings: Settings, ports: Ports) -> Stack:
    cluster = prepare_cluster(folder / "postgres", port=ports.postgres)
    own_s3 = settings.store.startswith("s3://")
    s3_url = "" if own_s3 else f"http://{LOOPBACK}:{_moto_port(ports)}"
    store = settings.store if own_s3 else f"s3://{BUCKET}/evidence"
    artifacts = settings.mlflow_artifacts if settings.mlflow_artifacts.startswith("s3://") else f"s3://{store.split('/')[2]}/mlflow"
    places = {
        "SEATRIAL_MLFLOW_ARTIFACTS": artifacts,
        "SEATRIAL_STORE": store,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if endpoint := s3_url or settings.store_endpoint:
        places |= {"SEATRIAL_STORE_ENDPOINT": endpoint, "MLFLOW_S3_ENDPOINT_URL": endpoint}
    if region := settings.store_region or (_REGION if s3_url else ""):
        places |= {"SEATRIAL_STORE_REGION": region, "AWS_DEFAULT_REGION": region}
    if s3_url:  # moto takes any
        places |= {"AWS_ACCESS_KEY_ID": "sea-trial", "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(16)}
    made = _stack(folder, settings, ports, places)
    made.s3_url, made.cluster = s3_url, cluster
    return made


def _stack(folder: Path, settings: Settings, ports: Ports, places: dict[str, str]) -> Stack:
    prefect, mlflow = f"http://{LOOPBACK}:{ports.prefect}", f"http://{LOOPBACK}:{ports.mlflow}"
    places = {"PREFECT_API_URL": f"{prefect}/api", "SEATRIAL_MLFLOW_TRACKING_URI": mlflow, "MLFLOW_TRACKING_URI": mlflow, **places}
    present = {name: value for name, value in _ours().items() if name != "PREFECT_HOME"} | places
    return Stack(folder=folder, environment=embedded_environment(settings, present) | places, prefect_url=prefect, mlflow_url=mlflow)


def _commands(own: Stack, settings: Settings) -> list[Command]:
    """Prefect, MLflow and, when the stack has one of its own, the S3 endpoint."""
    prefect = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_UI_URL": own.prefect_url,  # links in notifications
        "PREFECT_UI_API_URL": f"{own.prefect_url}/api",  # else its pages look for it at port 4200
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,  # in memory they are forgotten at a restart, and runs that hold one are ended
    }
    mlflow = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # else seven consumers of 270 MB each
        "MLFLOW_BACKEND_STORE_URI": own.cluster.address("postgresql+psycopg2", "mlflow") if own.cluster else settings.mlflow_tracking_uri,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": own.environment["SEATRIAL_MLFLOW_ARTIFACTS"],
    }
    if own.cluster:
        prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = own.cluster.address("postgresql+asyncpg", "prefect")
    base = own.full_environment()
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):  # these are the servers
        base.pop(name, None)
    return [
        *([_moto_command(own, base)] if own.s3_url else []),
        Command(
            name="prefect", environment=base | prefect, folder=own.folder,
            words=[_script("prefect"), "server", "start", "--host", LOOPBACK, "--port", own.prefect_url.rpartition(":")[2]],
        ),
        Command(
            name="mlflow", environment=base | mlflow, folder=own.folder,
            words=[
                _script("mlflow"), "server", "--host", LOOPBACK, "--port", (port := own.mlflow_url.rpartition(":")[2]), "--workers", "1",
                "--allowed-hosts", f"{LOOPBACK}:{port},localhost:{port}", "--no-serve-artifacts",
            ],
        ),
    ]  # fmt: skip


def _moto_command(own: Stack, base: Mapping[str, str]) -> Command:
    words = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", own.s3_url.rpartition(":")[2]]
    return Command(name="s3", environment=base, folder=own.folder, words=words)


def _moto_port(ports: Ports) -> int:
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise ConfigError(
            "moto's server, which stands in for S3 here, is not installed, so nothing was started. Install it (pip install 'moto[server]') "
            "or name an endpoint of your own: SEATRIAL_STORE=s3://BUCKET/PREFIX, SEATRIAL_STORE_ENDPOINT=https://..., AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY."
        )
    return require_port(ports.s3, "S3")


def _make_bucket(own: Stack) -> None:
    import boto3

    session = boto3.session.Session(
        aws_access_key_id=own.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=own.environment["AWS_SECRET_ACCESS_KEY"],
        region_name=_REGION,
    )
    session.client("s3", endpoint_url=own.s3_url).create_bucket(Bucket=BUCKET)


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN}


def _script(name: str) -> str:
    """A program of this Python's environment. Raises ConfigError when it is not there."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise ConfigError(f"{path} is not there, so no server was started. Install Sea Trial with its dependencies into this environment.")
    return str(path)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made ({error}), so nothing was started. Choose another: --into FOLDER.") from None
