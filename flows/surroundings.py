"""What has to stand before a release does anything: settings, a quiet environment, the warm server importing."""

import os

from infra.settings import Settings, embedded_environment, load_settings
from trainer import ranks

# what calls of a release need, but not its ranks
WHEN_IDLE = ("mlflow.pytorch", "mlflow.pyfunc", "sklearn.linear_model", "torch.export")


def make_ready() -> Settings:
    """Read the settings, switch off the telemetry of everything that is started from here, start the warm server. Repeatable."""
    settings = load_settings()
    os.environ.update(embedded_environment(settings))
    ranks.warm_up(when_idle=WHEN_IDLE)
    return settings
