"""docker-compose.yml as Compose itself understands it, and its services as processes of this machine."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
PROFILES = ("cpu", "pd", "gpu")
CHECK_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0


def compose(*arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the real `docker compose` with nothing in its environment but `variables`."""
    spec = importlib.util.find_spec("compose")
    assert spec is not None and spec.origin is not None
    # The package's own command loses the exit status of the binary.
    binary = Path(spec.origin).parent / "docker-compose"
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], **variables}
    command = [str(binary), "--file", str(FILE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def parsed(profile: str, home: Path, **variables: str) -> dict[str, Any]:
    """The configuration of a profile after interpolation, merges and defaults."""
    done = compose("--profile", profile, "config", "--format", "json", home=home, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class LocalServices:
    """The services of a parsed configuration as processes, each with a loopback address of its own instead of a container.

    Ports stay those of the file. What a container would see under a volume's target is read from the volume's source.
    """

    def __init__(self, config: Mapping[str, Any], scratch: Path) -> None:
        self._services = config["services"]
        self._scratch = scratch
        high, low = divmod(os.getpid(), 250)
        self._addresses = {name: f"127.{100 + high % 100}.{1 + low}.{2 + i}" for i, name in enumerate(self._services)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def target(self, service: str) -> str:
        """HOST:PORT of the port that a service publishes."""
        (port,) = self._services[service]["ports"]
        return f"{self._addresses[service]}:{port['target']}"

    def up(self) -> None:
        """Starts every service as soon as all it depends on are healthy."""
        healthy: set[str] = set()
        waiting = dict(self._services)
        while waiting:
            name = next(name for name, service in waiting.items() if healthy >= set(service.get("depends_on", {})))
            del waiting[name]
            self.start(name)
            if any(name in service.get("depends_on", {}) for service in waiting.values()):
                self.until_passes(name, self._services[name]["healthcheck"]["test"][1:])
                healthy.add(name)

    def start(self, name: str) -> None:
        """Starts a service's command; its output goes to NAME.log."""
        command = self.localised(name, self._services[name]["command"])
        own = self._services[name].get("environment") or {}
        environment = os.environ | own | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self._scratch / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=self._scratch, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def localised(self, name: str, words: Sequence[str]) -> list[str]:
        """Words of a service's command with this machine's interpreter, files and addresses."""
        hosts = dict.fromkeys(("0.0.0.0", "127.0.0.1"), self._addresses[name]) | self._addresses
        volumes = {volume["target"] + "/": volume["source"] + "/" for volume in self._services[name]["volumes"]}
        return [_localised(word, before, hosts, volumes) for before, word in zip(("", *words), words, strict=False)]

    def until_passes(self, name: str, test: Sequence[str]) -> None:
        """Repeats a health check of a running service until its exit status is 0."""
        deadline = time.monotonic() + CHECK_DEADLINE_S
        command = self.localised(name, test)
        while True:
            done = subprocess.run(
                command, cwd=self._scratch, capture_output=True, text=True, timeout=CHECK_DEADLINE_S, check=False
            )
            if done.returncode == 0:
                return
            assert self._processes[name].poll() is None, f"{name} has gone\n{self.logs()}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {done.stderr}\n{self.logs()}"

    def send(self, name: str, number: int) -> int:
        """Sends a signal to a service and returns the exit status of its process."""
        self._processes[name].send_signal(number)
        return self.exit_status(name)

    def exit_status(self, name: str) -> int:
        """Waits for the end of a service's process."""
        return self._processes[name].wait(STOP_DEADLINE_S)

    def down(self) -> None:
        """Leaves no process."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(STOP_DEADLINE_S)

    def logs(self) -> str:
        """The last lines of every service."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self._scratch.glob("*.log")))


def _localised(word: str, before: str, hosts: Mapping[str, str], volumes: Mapping[str, str]) -> str:
    if word == "python":
        return sys.executable
    for target, source in volumes.items():
        if word.startswith(target):
            return source + word.removeprefix(target)
    host, colon, port = word.rpartition(":") if ":" in word else (word, "", "")
    return f"{hosts.get(host, host)}{colon}{port}" if colon or before == "--host" else word


@contextmanager
def local_services(config: Mapping[str, Any], scratch: Path) -> Iterator[LocalServices]:
    """Services that have been started in the order of the file's health checks; stopped whatever happens."""
    services = LocalServices(config, scratch)
    try:
        services.up()
        yield services
    finally:
        services.down()
