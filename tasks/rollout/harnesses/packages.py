"""Released clients on this machine: installed once from a lock, used offline afterwards.

Each version has a folder ``locks/<name>/<version>`` that names every package with its hash. The
installation lies in a folder that is named after the lock's content, so that a changed lock is
another installation, and appears there whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.command import HarnessError

LOCKS = Path(__file__).with_name("locks")
INSTALL_LIMIT_S = 1800.0
_NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
_SHOWN = 1500


@dataclass(frozen=True)
class Package(ABC):
    """One version of a client, and how it is installed."""

    name: str
    version: str

    manager: ClassVar[str]

    def folder(self, cache: Path) -> Path:
        """Where it lies once it is installed."""
        return cache / f"{self.name}-{self.version}-{self._digest()}"

    def is_installed(self, cache: Path) -> bool:
        """Whether it lies there whole."""
        return self.folder(cache).is_dir()

    def install(self, cache: Path) -> Path:
        """Its folder; downloads it unless it is there already. One at a time on a machine.

        Raises:
            HarnessError: the package manager is missing, or it failed.
        """
        target = self.folder(cache)
        if target.is_dir():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with _held(cache / f".{target.name}.lock"):
            if not target.is_dir():  # somebody else has installed it meanwhile
                made = cache / f".{target.name}.part"
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                self._fill(made)
                made.rename(target)
        return target

    @property
    def lock(self) -> Path:
        return LOCKS / self.name / self.version

    def _digest(self) -> str:
        found = blake2b(digest_size=6)
        for path in sorted(self.lock.iterdir()):
            found.update(path.read_bytes())
        return found.hexdigest()

    @abstractmethod
    def _fill(self, folder: Path) -> None:
        """Install into an empty folder, which is renamed afterwards."""

    def _run(self, argv: list[str], folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if name != _NO_BYTE_CODE}
        try:
            done = subprocess.run(
                argv,
                cwd=folder,
                env=kept,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"{self.name} {self.version}: {error}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()[-_SHOWN:]
            raise HarnessError(
                f"{self.name} {self.version} can't be installed: {' '.join(argv[:4])} ended with "
                f"code {done.returncode}: {said}"
            )


@dataclass(frozen=True)
class NpmPackage(Package):
    """From an npm registry. Scripts of packages are not run: a client's binary is a package of its
    own, which the lock names."""

    manager: ClassVar[str] = "npm"

    def _fill(self, folder: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise HarnessError(
                f"harness {self.name}: there is no program npm to install it with: install it "
                f"(Debian: apt-get install npm)"
            )
        for path in self.lock.iterdir():
            shutil.copy(path, folder)
        # Not ``npm ci``: that insists on packages of other machines, which registries may lack.
        self._run([npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        self._compare(folder)

    def _compare(self, folder: Path) -> None:
        """Whether nothing was installed that the lock does not name with this very content."""
        locked = _hashes(self.lock / "package-lock.json")
        found = _hashes(folder / "node_modules" / ".package-lock.json")
        other = sorted(name for name, content in found.items() if locked.get(name) != content)
        if other or not found:
            raise HarnessError(
                f"{self.name} {self.version}: npm installed what its lock does not have: "
                f"{', '.join(other[:5]) or 'nothing'}"
            )


@dataclass(frozen=True)
class PythonPackage(Package):
    """From a Python index, into an environment of its own. ``first_run`` is code that imports what
    the client uses: its byte code is written now, which a sandbox could not keep."""

    first_run: str = ""

    manager: ClassVar[str] = "pip"

    def _fill(self, folder: Path) -> None:
        self._run([sys.executable, "-m", "venv", "--without-pip", "."], folder)
        argv = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        argv += ["install", "--quiet", "--no-input", "--no-compile", "--no-deps"]
        argv += ["--disable-pip-version-check", "--require-hashes", "--requirement"]
        self._run([*argv, str(self.lock / "requirements.txt")], folder)
        self._run([str(folder / "bin" / "python"), "-c", self.first_run], folder)


def default_cache() -> Path:
    """Where clients are installed for this user, unless ``harness.folder`` says otherwise."""
    found = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(found) / "gyre" / "harnesses"


def _hashes(lock: Path) -> dict[str, str]:
    """Hashes of packages by their folders, as npm notes them."""
    packages = json.loads(lock.read_text(encoding="utf-8"))["packages"]
    return {name: one.get("integrity", "") for name, one in packages.items() if name}


@contextmanager
def _held(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
