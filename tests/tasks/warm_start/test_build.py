"""The warm start as a run uses it: made once, found again, whole or not there."""

import subprocess
import sys

import pytest

from configs import load_config
from storage.objects import Store
from tasks.warm_start import build, outfit, policies
from tasks.warm_start.build import WarmStartError, build_policy, policy_key
from tasks.warm_start.policies import PolicyError, PolicyManifest, import_policy, keep_policy

TINY = (
    "model.shape.layers=1",
    "model.shape.hidden=32",
    "model.shape.heads=2",
    "model.shape.kv_heads=1",
    "model.shape.head_dim=16",
    "model.shape.ffn=64",
    "warm_start.drill_steps=2",
    "warm_start.clean_steps=2",
    "warm_start.full_steps=3",
    "warm_start.histories=4",
)


def config(*overrides):
    return load_config("quickstart", overrides, environment={})


@pytest.mark.real
def test_a_tiny_policy_is_made_once_and_found_again(tmp_path, monkeypatch):
    store, told = Store(tmp_path), []
    key = build_policy(store, config(*TINY), told.append)
    folder = store.local_path(key)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} < names
    manifest = store.read_record(f"{key}/{policies.MANIFEST}", PolicyManifest)
    assert set(manifest.files) == names - {policies.MANIFEST}
    assert any("full 3/3" in line for line in told)

    monkeypatch.setattr(build, "run_fit", None)
    assert build_policy(store, config(*TINY), told.append) == key
    assert told[-1].endswith("is there already")

    # A copy of its files is a policy of its own, keyed by content, wherever it lies.
    moved = load_config(
        "quickstart",
        ["model.source=hf_directory", f"model.path={folder}"],
        environment={},
    )
    other = import_policy(store, moved)
    assert other != key
    assert import_policy(store, moved) == other
    again = store.read_record(f"{other}/{policies.MANIFEST}", PolicyManifest)
    assert again.files == manifest.files


@pytest.mark.real
def test_a_failed_fit_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    plan_fit = outfit.plan_fit

    def spoiled(scratch, policy, config):
        plan = plan_fit(scratch, policy, config)
        (scratch / "full.safetensors").write_bytes(b"not a corpus")
        return plan

    monkeypatch.setattr(outfit, "plan_fit", spoiled)
    with pytest.raises(WarmStartError, match=r"full\.safetensors"):
        build_policy(Store(tmp_path), config(*TINY), lambda line: None)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_key_is_the_same_in_another_process():
    script = (
        "from configs import load_config; from tasks.warm_start.build import policy_key;"
        "print(policy_key(load_config('quickstart', environment={})))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert found.stdout.strip() == policy_key(config())


@pytest.mark.parametrize(
    "override",
    [
        "model.shape.layers=2",
        "model.context=800",
        "warm_start.full_steps=5",
        "warm_start.error_share=0",
        "problems.specrepo.difficulty=2",
        "problems.specrepo.functions_max=5",
        "harness.context_budget=200",
        "harness.sub_agents=0",
    ],
)
def test_what_enters_the_warm_start_changes_the_key(override):
    assert policy_key(config(override)) != policy_key(config())


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "problems.seed=9",
        "training.steps=1",
        "warm_start.limit_s=99",
        "warm_start.processes=1",
        "problems.specrepo.slow_share=0.5",
        "rollout.queries=30",
    ],
)
def test_what_does_not_enter_it_leaves_the_key(override):
    assert policy_key(config(override)) == policy_key(config())


def write_policy(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def from_folder(folder):
    return config("model.source=hf_directory", f"model.path={folder}")


@pytest.mark.parametrize("missing", ["config_json", "tokenizer_json", "model_safetensors"])
def test_a_folder_without_a_policy_is_refused_by_name(tmp_path, missing):
    files = {"config_json": "{}", "tokenizer_json": "{}", "model_safetensors": "x"}
    del files[missing]
    write_policy(tmp_path / "hf", **files)
    with pytest.raises(PolicyError, match="lacks"):
        import_policy(Store(tmp_path / "store"), from_folder(tmp_path / "hf"))
    with pytest.raises(PolicyError, match="can't be read"):
        import_policy(Store(tmp_path / "store"), from_folder(tmp_path / "nowhere"))


def test_a_policy_is_whole_only_with_its_manifest(tmp_path):
    store = Store(tmp_path / "store")
    write_policy(tmp_path / "hf", config_json="{}", tokenizer_json="{}", model_safetensors="x")
    keep_policy(store, "policies/p", tmp_path / "hf", "a test")
    assert policies.has_policy(store, "policies/p")
    store.delete(f"policies/p/{policies.MANIFEST}")
    assert not policies.has_policy(store, "policies/p")


def test_whoever_comes_first_is_kept(tmp_path):
    store = Store(tmp_path / "store")
    write_policy(tmp_path / "one", config_json="{}", tokenizer_json="{}", model_safetensors="1")
    write_policy(tmp_path / "two", config_json="{}", tokenizer_json="{}", model_safetensors="2")
    for name in ("one", "two"):
        keep_policy(store, "policies/p", tmp_path / name, name)
    assert store.read("policies/p/model.safetensors") == b"1"
    manifest = store.read_record(f"policies/p/{policies.MANIFEST}", PolicyManifest)
    assert manifest.origin == "one"
