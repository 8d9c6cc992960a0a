"""Workspaces in storage: compressed archives of what is safe to keep, and fresh copies of them."""

# Plain texts for paths: a Path object for each file of every workspace would be felt.
# ruff: noqa: PTH101, PTH112, PTH114, PTH115
from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import zstandard

ENTRIES = 20_000
PATH_BYTES = 1024
CACHES = frozenset(
    ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache")
)
SECRETS = frozenset(
    (".ssh", ".aws", ".gnupg", ".netrc", ".git-credentials", ".npmrc", ".pypirc", ".docker")
)
_LINKS = 40
"""Most links on the way of a link, as the kernel has it."""
_LEVEL = 3
_BLOCK = 1 << 20


class SnapshotError(RuntimeError):
    """An archive that can't be read back; the text says what is wrong with it."""


@dataclass(frozen=True)
class Snapshot:
    """A frozen workspace."""

    data: bytes
    """A tar archive, compressed with zstandard. Equal workspaces give equal bytes."""
    files: int
    left_out: tuple[str, ...]
    """What was not kept and why, at most ten lines; empty when all was. Caches are not told."""
    digest: str
    """Of the content: equal for equal workspaces, and for no others."""


def freeze(folder: Path, limit_bytes: int) -> Snapshot:
    """Archive a folder in which nothing runs any more.

    Kept are folders, regular files and relative links that stay inside, with their permissions, in
    the order of their paths. Caches and what usually holds secrets (``CACHES``, ``SECRETS``) are
    not. A file that does not fit into what is left of ``limit_bytes``, and whatever comes after
    ``ENTRIES`` entries, is left out: an agent that fills its workspace has done so itself, and what
    fits is scored.
    """
    archive = io.BytesIO()
    left_out: list[str] = []
    left = limit_bytes
    files = 0
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for number, (name, path) in enumerate(_entries(folder, left_out)):
            if number >= ENTRIES:
                left_out.append(f"{name} and what follows: more than {ENTRIES} entries")
                break
            found = os.lstat(path)
            entry = tarfile.TarInfo(name)
            entry.mode = stat.S_IMODE(found.st_mode) & 0o777
            if stat.S_ISDIR(found.st_mode):
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            elif stat.S_ISLNK(found.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
                if len(os.fsencode(entry.linkname)) > PATH_BYTES:
                    left_out.append(f"{name}: a link of more than {PATH_BYTES} bytes")
                elif _stays_inside(folder, name, entry.linkname):
                    tar.addfile(entry)
                else:
                    left_out.append(f"{name}: a link to the outside")
            elif not stat.S_ISREG(found.st_mode):
                left_out.append(f"{name}: not a regular file")
            elif found.st_size > left:
                left_out.append(f"{name}: {found.st_size} bytes, {left} were left")
            else:
                data = _content(path, found)
                entry.size = len(data)
                left -= len(data)
                files += 1
                tar.addfile(entry, io.BytesIO(data))
    if len(left_out) > 10:
        left_out[9:] = [f"and {len(left_out) - 9} more"]
    plain = archive.getvalue()
    digest = blake2b(plain, digest_size=20).hexdigest()
    return Snapshot(_compressed(plain), files, tuple(left_out), digest)


def thaw(data: bytes, folder: Path, limit_bytes: int) -> None:
    """Write a snapshot into ``folder``, which must not exist.

    Raises:
        SnapshotError: the archive is damaged, holds more than ``limit_bytes`` of files, or an entry
            that ``freeze`` never writes. Links that lead outside are not made.
    """
    most = limit_bytes + ENTRIES * (PATH_BYTES + 4 * tarfile.BLOCKSIZE) + tarfile.RECORDSIZE
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            plain = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"not a snapshot: {error}") from error
    if len(plain) > most:
        raise SnapshotError(f"more than {limit_bytes} bytes")
    folder.mkdir(parents=True)
    folders: list[tuple[Path, int]] = []
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            for entry in tar:
                if not _is_plain(entry.name):
                    raise SnapshotError(f"{entry.name!r}: not a path inside")
                path = folder / entry.name
                if entry.isdir():
                    path.mkdir()
                    folders.append((path, entry.mode))
                elif entry.issym():
                    links.append((path, entry.linkname))
                elif entry.isreg():
                    content = tar.extractfile(entry)
                    assert content is not None
                    _write(path, content.read(), entry.mode)
                else:
                    raise SnapshotError(f"{entry.name!r}: an entry of a kind that is never kept")
    except (tarfile.TarError, OSError) as error:
        raise SnapshotError(f"not a snapshot: {type(error).__name__}: {error}") from error
    # Last, so that nothing is ever written through a link or into a folder that forbids it.
    for path, target in links:
        path.symlink_to(target)
    for path, target in links:
        # Not an error: in the workspace it may have led through something that was left out, which
        # is not for an agent to make its workspace unreadable with.
        if not _stays_inside(folder, str(path.relative_to(folder)), target):
            path.unlink()
    for path, mode in reversed(folders):
        path.chmod(mode & 0o777)


def remove_tree(folder: Path) -> None:
    """Delete a folder whatever an agent made of it: forbidden modes, any depth."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    if folder.exists():
        subprocess.run(
            ["chmod", "-R", "u+rwX", "--", str(folder)], capture_output=True, timeout=300
        )
        subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, timeout=300)


def _entries(folder: Path, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Name relative to ``folder`` and path of everything below it, parents first, sorted."""
    waiting = [""]
    while waiting:
        name = waiting.pop()
        path = os.path.join(folder, name)
        if name:
            yield name, path
            if os.path.islink(path) or not os.path.isdir(path):
                continue
        for child in _names(path):
            if child in CACHES or child.endswith(".pyc"):
                continue
            if child in SECRETS:
                left_out.append(f"{name}/{child}: may hold a secret".lstrip("/"))
                continue
            below = f"{name}/{child}" if name else child
            if len(os.fsencode(below)) > PATH_BYTES:
                left_out.append(f"{below[:80]}...: a path of more than {PATH_BYTES} bytes")
            else:
                waiting.append(below)


def _names(path: str) -> list[str]:
    """What is in a folder, last one first; not more than could be kept, however many there are."""
    try:
        names = os.scandir(path)
    except PermissionError:
        os.chmod(path, 0o700)
        names = os.scandir(path)
    with names:
        some = [entry.name for entry in islice(names, ENTRIES + 1)]
    return sorted(some, key=os.fsencode, reverse=True)


def _stays_inside(folder: Path, name: str, target: str) -> bool:
    """Whether a link at ``name`` to ``target`` ends inside, other links on its way included. Never
    looks at anything outside."""
    at = name.split("/")[:-1]
    left = target.split("/")[::-1]
    if not target or target.startswith("/"):
        return False
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not at:
                return False
            at.pop()
            continue
        try:
            further = os.readlink(os.path.join(folder, *at, part))
        except OSError:  # not a link, or not there
            at.append(part)
            continue
        links += 1
        if further.startswith("/") or links > _LINKS or len(left) > PATH_BYTES:
            return False
        left += further.split("/")[::-1]
    return True


def _is_plain(name: str) -> bool:
    return bool(name) and not any(part in ("", ".", "..") for part in name.split("/"))


def _content(path: str, found: os.stat_result) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except PermissionError:
        os.chmod(path, 0o600)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(file, "rb") as opened:
        return opened.read(found.st_size)


def _write(path: Path, data: bytes, mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(file, "wb") as opened:
        opened.write(data)
        os.fchmod(file, mode & 0o777)


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
