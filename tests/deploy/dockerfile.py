"""Just enough of the Dockerfile's grammar to check it without a container engine."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it; `steps` are (INSTRUCTION, rest of the line)."""

    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """Arguments of an instruction of this stage, in order."""
        return [rest for word, rest in self.steps if word == instruction]


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name, in the order of the file."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = current = Stage(name, parent)
        else:
            current.steps.append((word, " ".join(rest.split())))
    return found


def copied_from_the_context(stage: Stage) -> list[str]:
    """Paths of the build context that a stage copies."""
    copies = [shlex.split(rest) for rest in stage.all("COPY")]
    return [path for words in copies if not words[0].startswith("--from=") for path in words[:-1]]


def in_the_context(path: str) -> bool:
    """Whether .dockerignore, a list of exceptions from `*`, lets a path through."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
    return any(path == line[1:] or path.startswith(f"{line[1:]}/") for line in lines if line.startswith("!"))
