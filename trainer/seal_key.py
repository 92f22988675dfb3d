"""The key that checkpoints are sealed with: $SEATRIAL_SEAL_KEY, else the file seal.key in $SEATRIAL_HOME (default ./.seatrial). Torch-free.

Whoever has it can write checkpoints that this installation trusts, and a checkpoint is only readable where the same key is. Nodes that are
to take over each other's runs need the same key: set the variable, or copy the file.
"""

import os
import secrets
import stat
from pathlib import Path

from validation.errors import ConfigError

VARIABLE = "SEATRIAL_SEAL_KEY"
MIN_BYTES = 32


def seal_key() -> bytes:
    """This installation's key; the file is made, with a random key, when there is neither variable nor file.

    Raises: ConfigError when what is there is no key, can be read by others, or cannot be made.
    """
    if text := os.environ.get(VARIABLE):
        return _parsed(text, f"the variable {VARIABLE}")
    path = Path(os.environ.get("SEATRIAL_HOME") or ".seatrial").expanduser().absolute() / "seal.key"
    try:
        if not path.exists():
            _create(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(
                f"the seal key {path} can be read by others than its owner. They could sign checkpoints that hold code, so it is not used. "
                f"Run chmod 600 {path} if they are to be trusted so far; otherwise remove it and start new runs."
            )
        text = path.read_text("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"the seal key {path} cannot be read or made ({error}). No checkpoint could be sealed or verified, so nothing was started. "
            f"Set SEATRIAL_HOME to a folder that can be written, or {VARIABLE} to a key."
        ) from None
    return _parsed(text, str(path))


def _create(path: Path) -> None:
    """Put a key there whole, unless another process was faster: then its key is the key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(MIN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)  # fails when the name is taken, and never shows half a key
    except FileExistsError:
        return
    finally:
        fresh.unlink()


def _parsed(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) < MIN_BYTES:
        raise ConfigError(
            f"{where} holds no seal key: {2 * MIN_BYTES} hex digits or more are needed. No checkpoint could be sealed, so nothing "
            "was started. Make a key with `openssl rand -hex 32`; runs that were sealed with another key cannot be resumed with it."
        )
    return key
