"""The programs of a run: Python, packages, libraries, the sandbox."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from cells.serving.cpu_support.conditions import SGLANG_VERSION
from configs.cells import Device
from configs.problems import SandboxKind
from configs.run import RunConfig
from flows.doctor.finding import Finding, fail, ok, warn
from flows.tracking.remote import missing
from tasks.rollout.harnesses.command import HarnessError
from tasks.rollout.harnesses.launch import BUILT_IN, cache_of, find_client
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.sandbox import SandboxError

PROJECT = "gyre-rl"
LOCKS = Path(__file__).parents[2] / "requirements"
LOCK_FILES = ("cpu.txt", "torch.txt", "engines.txt")

OTHER_BUILDS = {"mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda"}
"""The same package for machines without CUDA, under a name of its own."""
ENGINES = ("sglang", "megatron-core", "mooncake-transfer-engine", "prefect", "torch", "renderers")

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""What Mooncake links, and the Debian packages that have it."""

_SHOWN = 5
_VERSION_LIMIT_S = 10


def python() -> Finding:
    """The interpreter that everything runs in."""
    found = f"{sys.version.split()[0]} at {sys.prefix}"
    if (3, 11) <= sys.version_info < (3, 13):
        return ok("python", found)
    return fail("python", found, "use Python 3.11 or 3.12: make setup")


def declared_packages() -> Finding:
    """Whether what Gyre declares to need is installed, in a version that it takes."""
    try:
        needed = metadata.requires(PROJECT) or []
    except metadata.PackageNotFoundError:
        return fail("packages", f"{PROJECT} is not installed", "make setup")
    wrong = []
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed {requirement.specifier}")
    if wrong:
        return fail("packages", some(wrong), "make setup")
    engines = ", ".join(f"{name} {installed(name)}" for name in ENGINES)
    return ok("packages", engines)


def locked_packages(locks: Path = LOCKS) -> Finding:
    """Whether the versions are those that the tests ran with."""
    if not locks.is_dir():
        return ok("locks", "none: installed as a package, without the repository")
    differing = []
    count = 0
    for name, locked in _locked(locks).items():
        count += 1
        version = installed(name)
        if version is None:
            differing.append(f"{name} is missing (locked {locked})")
        elif Version(version).public != Version(locked).public:
            differing.append(f"{name} is {version} (locked {locked})")
    if differing:
        return warn("locks", some(differing), "make setup installs the locked versions")
    return ok("locks", f"{count} packages as locked")


def engine_fits(config: RunConfig) -> Finding:
    """Whether this SGLang was seen to run on what ``cells.device`` says."""
    version = installed("sglang")
    if config.cells.device is Device.CPU and version != SGLANG_VERSION:
        return fail(
            "sglang",
            f"version {version or 'none'}; on a CPU only {SGLANG_VERSION} was seen to run",
            f"pip install --no-deps sglang=={SGLANG_VERSION}",
        )
    return ok("sglang", f"{version} for {config.cells.device}")


def libraries(names: Mapping[str, str] = LIBRARIES) -> Finding:
    """Whether the system libraries that Mooncake links are there."""
    missing = []
    for name, package in names.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append((name, package))
    if missing:
        packages = " ".join(package for _, package in missing)
        return fail(
            "libraries",
            f"{', '.join(name for name, _ in missing)} can't be loaded",
            f"apt-get install {packages}, or what your system calls them",
        )
    return ok("libraries", ", ".join(names))


def programs(config: RunConfig) -> Iterator[Finding]:
    """The programs that a run starts besides Python."""
    if shutil.which("prlimit") is None:
        yield fail("prlimit", "not found", "apt-get install util-linux")
    if shutil.which("git") is None:
        yield warn(
            "git", "not found", "apt-get install git, where problems are made from repositories"
        )
    yield sandbox(config)
    yield harness(config)


def harness(config: RunConfig) -> Finding:
    """Whether the agent program is here, or can be installed when the run starts."""
    wanted = config.harness
    if wanted.name == BUILT_IN:
        return ok("harness", "built in")
    try:
        client = find_client(wanted.name)
        package = client.package(client.choose_version(wanted.version))
    except HarnessError as error:
        return fail("harness", str(error))
    found = f"{package.name} {package.version}"
    if package.is_installed(cache_of(wanted)):
        return ok("harness", f"{found} in {package.folder(cache_of(wanted))}")
    if package.manager == "npm" and shutil.which("npm") is None:
        return fail("harness", f"{found} is not installed", "apt-get install npm")
    return warn(
        "harness",
        f"{found} is not installed: it is downloaded when the run starts",
        f"gyre harness install {package.name}",
    )


def sandbox(config: RunConfig) -> Finding:
    """Whether the agents' sandbox works here, seen by starting something in it."""
    kind = config.rollout.sandbox
    try:
        make_sandbox(kind)
    except SandboxError as error:
        return fail("sandbox", str(error))
    if kind is SandboxKind.PROCESS:
        return warn(
            "sandbox",
            "process isolates nothing: agents can do what you can",
            "set rollout.sandbox=bubblewrap, unless you trust the agents",
        )
    return ok("sandbox", f"{kind} works{_bubblewrap(kind)}")


def installed(name: str) -> str | None:
    """Version of a package, or of its build for machines without CUDA."""
    for candidate in (name, OTHER_BUILDS.get(name)):
        try:
            if candidate is not None:
                return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def some(texts: list[str]) -> str:
    """The first few of a list."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _locked(locks: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in LOCK_FILES:
        text = (locks / name).read_text(encoding="utf-8") if (locks / name).is_file() else ""
        found |= dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))
    return found


def _bubblewrap(kind: SandboxKind) -> str:
    if kind is not SandboxKind.BUBBLEWRAP:
        return ""
    done = subprocess.run(
        ["bwrap", "--version"],
        capture_output=True,
        text=True,
        timeout=_VERSION_LIMIT_S,
        check=False,
    )
    return f": {done.stdout.strip()}, with namespaces of its own"


def trackers(config: RunConfig) -> Finding:
    """Whether the packages of the trackers that the settings name are installed."""
    if lacking := missing(config.tracking):
        extras = ",".join(lacking)
        return fail(
            "trackers",
            f"{' and '.join(f'tracking.{name}' for name in lacking)} set, and not installed",
            f"pip install 'gyre-rl[{extras}]', or leave the setting empty",
        )
    return ok("trackers", "all that the settings name are there")
