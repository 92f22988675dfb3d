"""Where things are kept: SEATRIAL_* variables, read once, checked once, frozen. Reading them makes no file and no connection."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from validation.errors import ConfigError

# A SQLite address ends the path at these, and MLflow decodes %xx in artifact addresses.
_UNSAFE_IN_ADDRESS = "?#%"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100  # unlike resolve(), keeps links: people recognise the path they gave


def _endpoint(address: str) -> str:
    if not re.fullmatch(r"https?://[^\s@]+", address):
        raise ValueError("it has to be http://host:port or https://host:port, without user or password: credentials come from AWS_*")
    return address


Endpoint = Annotated[str, AfterValidator(_endpoint)]  # it is shown in messages, so it carries no secret
Made = TypeVar("Made", bound=BaseSettings)
Folder = Annotated[Path, AfterValidator(_absolute)]


class HomeSettings(BaseSettings):
    """The folder that holds all local state of the embedded default."""

    model_config = SettingsConfigDict(env_prefix="SEATRIAL_", frozen=True, env_ignore_empty=True, extra="forbid", validate_default=True)

    home: Folder = Path(".seatrial")
    cache: Path | None = None  # prepared data that can be made again; default <home>/cache

    @model_validator(mode="after")
    def _complete_cache(self) -> Self:
        return _completed(self, cache=_absolute(self.cache) if self.cache else self.home / "cache")


class StoreSettings(HomeSettings):
    """The object store: evidence, journals and pointers."""

    store: str = ""  # a folder, or s3://bucket/prefix; default <home>/store
    store_endpoint: Endpoint | None = None  # of an S3-compatible store; None = the cloud provider's own
    store_region: str | None = None
    store_connect_timeout_s: float = Field(5.0, gt=0, le=300)  # a healthy store answers within milliseconds
    store_read_timeout_s: float = Field(30.0, gt=0, le=3600)  # of one request: a whole small object, or one part of a large one
    store_part_mib: int = Field(64, ge=5, le=5120)  # files from this size on go to S3 in parts of it; S3 takes 5 MiB to 5 GiB, 10,000 parts
    store_attempts: int = Field(4, ge=1, le=20)  # standard mode of botocore: backs off 0-20 s between attempts

    @model_validator(mode="after")
    def _complete_store(self) -> Self:
        if self.store.startswith("s3://"):
            if not self.store.removeprefix("s3://").strip("/"):
                raise ValueError("store names no bucket; write s3://bucket or s3://bucket/prefix")
            return _completed(self, store=self.store.rstrip("/"))
        if "://" in self.store:
            raise ValueError(f"store {self.store!r} is neither a folder nor an s3:// address")
        return _completed(self, store=str(_absolute(Path(self.store)) if self.store else self.home / "store"))


class RegistrySettings(HomeSettings):
    """MLflow: tracking store, artifacts, experiment."""

    mlflow_tracking_uri: str = ""  # default: SQLite at <home>/mlflow.db
    mlflow_artifacts: str = ""  # artifact root of a new experiment: a folder or an address; default <home>/mlartifacts
    experiment: str = Field("sea-trial", min_length=1)

    @model_validator(mode="after")
    def _complete_registry(self) -> Self:
        if not self.mlflow_tracking_uri and (bad := sorted(set(str(self.home)) & set(_UNSAFE_IN_ADDRESS))):
            raise ValueError(
                f"home {str(self.home)!r} contains {' '.join(bad)}, which SQLite addresses cannot carry; choose another folder"
            )
        root = self.mlflow_artifacts or str(self.home / "mlartifacts")
        return _completed(
            self,
            mlflow_tracking_uri=self.mlflow_tracking_uri or f"sqlite:///{self.home}/mlflow.db",
            mlflow_artifacts=root if "://" in root or root.startswith("mlflow-artifacts:") else _absolute(Path(root)).as_uri(),
        )


class SigningSettings(HomeSettings):
    """Who signs evidence, and whose signatures count (docs/evidence.md)."""

    signing_key: Path | None = None  # Ed25519 private key, PEM (PKCS 8); None: a development key is made under <home>/keys
    trusted_keys: Path | None = None  # folder of public keys, *.pem; the signing key's own always counts
    allow_development_key: bool = True  # production says false: neither signs nor is trusted then


class DeviceSettings(HomeSettings):
    """This machine's devices: one release's gate at a time (docs/reruns.md)."""

    # the same file for every home and user of the machine, so not under TMPDIR; one file for each set of devices
    device_lock: Folder = Path("/tmp/sea-trial-devices.lock")
    device_wait_s: float = Field(86_400.0, gt=0, le=604_800)  # for whoever has them; a release takes minutes to hours


class ScheduledSettings(HomeSettings):
    """What scheduled deployments may run."""

    notify_webhook: SecretStr | None = None  # told of refused, failed and crashed runs and of incidents (docs/deployments.md)
    recipes_allowed: str = ""  # import paths or short names, comma-separated, "*" at the end for all below; "" = any (a person's machine)


class Settings(StoreSettings, RegistrySettings, SigningSettings, DeviceSettings, ScheduledSettings):
    """Every setting of a Sea Trial process."""


def load_settings(**given: Any) -> Settings:
    """Read SEATRIAL_* variables; `given` values (by field name) win over them.

    Raises: ConfigError naming every variable that cannot be used.
    """
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = "; ".join(_problem(item["loc"], item["msg"]) for item in error.errors())
        raise ConfigError(f"settings cannot be used: {problems}. Nothing was started. Correct or unset these variables.") from None


def embedded_environment(settings: Settings, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that keep Prefect, MLflow and Great Expectations silent and under `settings.home`.

    Only what `environ` (default: this process's) does not already set; set them before importing those libraries. The SEATRIAL_*
    places are always included, so that a child started in another folder finds the same ones.
    """
    wanted = {
        "DO_NOT_TRACK": "1",
        "PREFECT_HOME": str(settings.home / "prefect"),  # Prefect derives its profiles and SQLite database from it
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start takes 20-26 s, the default gives up at 20
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # our loggers are used outside flows too
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": settings.mlflow_tracking_uri,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",  # a model from a store must not be able to run code
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",  # 60 s of backing off: a server restarts in 10-45 s; the default is minutes
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # the first use tells of every table it makes
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout belongs to --json
        "GX_ANALYTICS_ENABLED": "false",
    }
    if settings.store_endpoint and settings.mlflow_artifacts.startswith("s3://"):
        wanted["MLFLOW_S3_ENDPOINT_URL"] = settings.store_endpoint
    places = {"SEATRIAL_HOME": str(settings.home), "SEATRIAL_CACHE": str(settings.cache), "SEATRIAL_STORE": settings.store}
    present = os.environ if environ is None else environ
    return {name: value for name, value in wanted.items() if name not in present} | places


def _problem(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    return f"SEATRIAL_{str(place[0]).upper()}: {text}" if place else text


def _completed(settings: Made, **values: Any) -> Made:
    # frozen guards users, not the validator that fills in what depends on `home`
    for name, value in values.items():
        object.__setattr__(settings, name, value)
    return settings
