"""Nothing in the product runs what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("configs", "storage", "cells", "tasks", "flows", "scripts")

DANGEROUS = {
    "eval": "runs its text",
    "exec": "runs its text",
    "pickle.load": "runs what it is told",
    "pickle.loads": "runs what it is told",
    "pickle.Unpickler": "runs what it is told",
    "cloudpickle.loads": "runs what it is told",
    "marshal.loads": "gives code",
    "shelve.open": "is pickle",
    "torch.load": "is pickle unless weights_only=True",
    "numpy.load": "is pickle with allow_pickle=True",
    "np.load": "is pickle with allow_pickle=True",
    "yaml.load": "makes objects unless its loader is a safe one",
    "yaml.unsafe_load": "makes objects",
    "os.system": "is a shell",
}
METHODS = {"extractall": "writes wherever an archive says"}

ALLOWED = {
    ("cells/gateway/rest.py", "pickle.Unpickler"): "its own memory, packed by itself, never stored",
    ("configs/text.py", "yaml.load"): "with a loader that derives from yaml.SafeLoader",
    ("tasks/rollout/sandboxes/entry.py", "marshal.loads"): "our own program, inside the sandbox",
    ("tasks/rollout/sandboxes/entry.py", "exec"): "our own program, inside the sandbox",
    ("tasks/rollout/harnesses/loop.py", "exec"): "the agent's code, in a child inside the sandbox",
    ("tasks/problems/answerer.py", "exec"): "the agent's code, inside the enclosure",
    ("tasks/problems/answerer.py", "eval"): "inside the enclosure, what our side asks it",
    ("tasks/problems/humaneval.py", "exec"): "the tests of the data set",
    ("tasks/problems/specrepo/operations.py", "eval"): "expressions of our own, without built-ins",
}
"""File and call, to why it may."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Dotted names of what is called, and the calls."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            yield node.func.id, node
        elif isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func), node


def is_dangerous(name: str, call: ast.Call) -> bool:
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if given.get("shell") == "True":
        return True
    if name in ("torch.load",):
        return given.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return given.get("allow_pickle") == "True"
    return name in DANGEROUS or name.rsplit(".", 1)[-1] in METHODS


def found_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for name, call in calls(tree) if is_dangerous(name, call)}


def test_nothing_that_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
        for name in found_in(path)
    }
    new = found - ALLOWED.keys()
    assert not new, "\n".join(f"{path}: {name} {DANGEROUS.get(name, '')}" for path, name in new)
    assert not ALLOWED.keys() - found, "an exception that nothing needs any more"


def test_what_is_dangerous_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "torch.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)\n"
        "np.load(f)\ntar.extractall('.')\nsubprocess.run('x', shell=True)\neval(x)\nm.eval()\n"
    )
    assert found_in(path) == {"torch.load", "np.load", "tar.extractall", "subprocess.run", "eval"}


def test_the_loader_of_settings_is_a_safe_one() -> None:
    import yaml

    from configs.text import _Loader

    assert issubclass(_Loader, yaml.SafeLoader | yaml.CSafeLoader)
