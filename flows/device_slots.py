"""The machine's devices, held by one release at a time, and one release a model, wherever the Prefect server knows such limits."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

DEVICES = "sea-trial-devices"  # a global concurrency limit; its slots are the machines that the server's workers have
LEASE_S = 120.0  # a holder that died gives its slot back after this


@contextmanager
def slots_held(model: str) -> Iterator[None]:
    """Wait for a slot of "sea-trial-devices", and for other releases of this model to end; hold both until the block ends.

    Nothing is held on a server without that limit: an embedded one has one process to serve. To be called in a flow.
    """
    names = _limits(model)
    with concurrency(names, occupy=1, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False):
        yield


def ensure_limit(client: SyncPrefectClient, name: str, limit: int) -> None:
    """Make a global concurrency limit if it is not there; one that a person changed stays."""
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        try:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit, active=True))
        except (ObjectAlreadyExists, PrefectHTTPStatusError):  # another process made it meanwhile
            client.read_global_concurrency_limit_by_name(name)


def _limits(model: str) -> list[str]:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(DEVICES)
        except ObjectNotFound:
            return []
        ensure_limit(client, f"sea-trial-model-{model}", 1)
    return [DEVICES, f"sea-trial-model-{model}"]
