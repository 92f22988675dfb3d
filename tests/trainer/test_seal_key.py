"""The seal key: made once, the same for everybody, and refused when it is none."""

import threading

import pytest

from trainer.seal_key import seal_key
from validation.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SEATRIAL_SEAL_KEY", raising=False)
    return tmp_path / "home"


def test_key_is_made_once(home):
    """The first call makes a random key that only its owner can read; the next one finds it."""
    key = seal_key()

    assert len(key) == 32
    assert seal_key() == key
    assert [path.name for path in home.iterdir()] == ["seal.key"]
    assert (home / "seal.key").stat().st_mode & 0o777 == 0o600


def test_racing_ranks_get_one_key(home):
    """Eight at once agree, and no half-made key is left behind."""
    keys, start = [], threading.Barrier(8)

    def ask():
        start.wait()
        keys.append(seal_key())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert [path.name for path in home.iterdir()] == ["seal.key"]


def test_variable_comes_first(home, monkeypatch):
    """A key in the environment is used, and no file is made."""
    monkeypatch.setenv("SEATRIAL_SEAL_KEY", "ab" * 40)

    assert seal_key() == bytes([0xAB] * 40)
    assert not home.exists()


@pytest.mark.parametrize("text", ["ab" * 31, "zz" * 32, "abc", "é" * 64], ids=["short", "no-hex", "odd", "no-ascii"])
def test_bad_keys_are_refused(home, monkeypatch, text):
    """A key that is too short or no hex is refused, from the variable and from the file."""
    home.mkdir()
    (home / "seal.key").write_text(text)
    (home / "seal.key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"seal\.key holds no seal key: .*openssl rand -hex 32"):
        seal_key()
    monkeypatch.setenv("SEATRIAL_SEAL_KEY", text)
    with pytest.raises(ConfigError, match="the variable SEATRIAL_SEAL_KEY holds no seal key"):
        seal_key()


def test_readable_key_is_refused(home):
    """A key that others can read is not trusted until its owner says so."""
    seal_key()
    (home / "seal.key").chmod(0o644)

    with pytest.raises(ConfigError, match="Run chmod 600"):
        seal_key()


def test_home_that_cannot_be_made_is_told(home):
    """A file where the folder should be: the message says what to set."""
    home.write_text("")

    with pytest.raises(ConfigError, match="Set SEATRIAL_HOME to a folder that can be written"):
        seal_key()
    assert [path.name for path in home.parent.iterdir()] == ["home"]
