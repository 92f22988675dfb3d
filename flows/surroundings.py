"""What has to stand before a release does anything: settings, a quiet environment, the warm server importing."""

import os

from flows.embedded_server import start_early
from flows.logs import make_quiet
from flows.orphans import mark_process
from infra.settings import Settings, embedded_environment, load_settings
from trainer import ranks
from validation.errors import ConfigError

# what calls of a release and looks into its incidents need, but not its ranks
WHEN_IDLE = (
    "mlflow.pytorch", "mlflow.pyfunc", "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store",
    "torch.export", "torch.export.pt2_archive._package", "torch._inductor.codecache", "sklearn.linear_model", "infra.dumps",
)  # fmt: skip


def make_ready(*, with_server: bool = False) -> Settings:
    """What `make_quiet_place` does, and start the warm server. Repeatable.

    Args: with_server, start a Prefect server for this command, too, unless one is named: it starts while this process still imports.
    """
    settings = make_quiet_place()
    if with_server:
        start_early(settings)
    ranks.warm_up(when_idle=WHEN_IDLE)
    return settings


def make_quiet_place() -> Settings:
    """Read the settings, make the home folder, switch off the telemetry of everything that is started from here. Repeatable."""
    settings = load_settings()
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the home folder {settings.home} cannot be made ({error}). There is no place for local state, so nothing was started. "
            "Set SEATRIAL_HOME to a folder that this user can write."
        ) from None
    os.environ.update(embedded_environment(settings))
    mark_process()
    make_quiet()
    return settings
