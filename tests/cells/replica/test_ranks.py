"""A replica of several processes computes what one does, and what HF does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cells.replica.passes import cut, share_out
from cells.replica.place import LayoutError, Place, check_layout
from cells.replica.shape import read_shape
from cells.replica.weights import read_weights, write_policy
from configs.layout import LayoutConfig
from tests.cells.replica.conftest import MakeFolder, random_documents
from tests.cells.replica.ranks import run_ranks
from tests.cells.replica.test_parity import hf_logprobs, hf_model

LENGTHS = (33, 6, 70, 9, 41)
LAYOUTS = {
    "tensor": ("qwen3", {"tensor": 2}),
    "sequence": ("qwen3", {"tensor": 2, "sequence_parallel": True, "recompute": True}),
    "pipeline": ("qwen3", {"pipeline": 2}),
    "data": ("qwen3", {"data": 2}),
    "context": ("qwen3", {"context": 2}),
    "tensor-pipeline": ("untied", {"tensor": 2, "pipeline": 2}),
    "llama-tensor": ("llama", {"tensor": 2}),
    "experts": ("moe", {"data": 2, "expert": 2}),
    "experts-tensor": ("moe", {"tensor": 2, "expert": 2, "sequence_parallel": True}),
}


def factors(number: int, count: int) -> torch.Tensor:
    """What a sample's log-probs are multiplied with in the loss: a sample's own, wherever it is."""
    return torch.randn(count, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def gradients(place: Place, folder: Path, out: Path) -> None:
    """Write the gradient of the whole replica as an HF directory, and the log-probs by sample."""
    from cells.replica.optimizer import finish, gradient_norm
    from cells.replica.policy import Policy

    policy = Policy.open(folder, place)
    policy.commit(read_weights(folder, policy.shape, place), 0)
    shares = share_out(random_documents(3, LENGTHS), place, prefixes=True)
    found: dict[str, torch.Tensor] = {}

    def loss(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        share = shares[number]
        if not share.samples:
            return 0 * logprobs.sum()
        total = torch.zeros((), dtype=torch.float64)
        parts = logprobs.double().split(share.row.target_counts)
        for sample, part in zip(share.samples, parts, strict=True):
            found[f"{sample}"] = part.detach()
            total = total + (part * factors(sample, len(part))).sum()
        found[f"entropy-{share.samples[0]}"] = entropies.double()
        return total

    policy.passes.backward([share.row for share in shares], loss)
    still = policy.passes.logprobs([share.row for share in shares])
    if still is not None:
        for share, again in zip(shares, still, strict=True):
            parts = again.double().split(share.row.target_counts)
            for sample, part in zip(share.samples, parts, strict=False):
                assert torch.allclose(part, found[f"{sample}"], atol=1e-6)
    finish(policy.flat, policy.shape, place)
    norm = gradient_norm(policy.flat, policy.shape, place)
    sums = policy.flat.split(policy.flat.gradients)
    write_policy(out / "gradient", sums, policy.shape, {}, place=place, token="x")
    if place.reports and found:
        found["norm"] = torch.tensor(norm, dtype=torch.float64)
        save_file(found, out / f"rank-{place.rank}.safetensors")


def reference(folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs and gradient by HF."""
    model = hf_model(folder)
    documents = random_documents(3, LENGTHS)
    logprobs = [hf_logprobs(model, [document]) for document in documents]
    total = sum((p.double() * factors(i, len(p))).sum() for i, p in enumerate(logprobs))
    total.backward()
    return logprobs, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.real
@pytest.mark.parametrize("name", LAYOUTS)
def test_logprobs_and_gradients_equal_hf(
    model_folder: MakeFolder, tmp_path: Path, name: str
) -> None:
    kind, sizes = LAYOUTS[name]
    folder = model_folder(kind)
    run_ranks(LayoutConfig(**sizes), tmp_path / "ranks", gradients, folder, tmp_path)
    check(folder, tmp_path)


def check(folder: Path, out: Path) -> dict[str, float]:
    expected, wanted = reference(folder)
    found: dict[str, Any] = {}
    for path in out.glob("rank-*.safetensors"):
        found |= load_file(path)
    gap = max(float((found[f"{i}"] - p).abs().max()) for i, p in enumerate(expected))
    assert gap < 1e-4
    gradient = load_file(out / "gradient" / "model.safetensors")
    worst = 0.0
    for tensor, part in gradient.items():
        whole = of(tensor, wanted)
        worst = max(worst, float((part - whole).norm() / whole.norm()))
    assert worst < 1e-5
    norm = float(sum(float(part.double().square().sum()) for part in gradient.values())) ** 0.5
    assert float(found["norm"]) == pytest.approx(norm, rel=1e-6)
    return {"logprob": gap, "gradient": worst}


def of(name: str, model: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor by its name on disk; transformers holds the experts of a layer in one."""
    if name in model:
        return model[name]
    layer, _, rest = name.partition(".experts.")
    number, part, _ = rest.split(".")
    if part == "down_proj":
        return model[f"{layer}.experts.down_proj"][int(number)]
    gate, up = model[f"{layer}.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if part == "gate_proj" else up


def test_samples_are_cut_in_order_and_by_tokens() -> None:
    assert cut([5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    assert cut([10, 1, 1], 3) == [[], [0], [1, 2]]
    assert cut([7], 4) == [[], [], [0], []]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor": 3}, r"kv_heads \(2\) must be a multiple of the layout's tensor \(3\)"),
        ({"pipeline": 3}, r"layers \(2\) must be a multiple of the layout's pipeline \(3\)"),
        ({"data": 2, "expert": 2}, "expert is 2, and the model has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    model_folder: MakeFolder, sizes: dict[str, int], expected: str
) -> None:
    config = model_folder("qwen3") / "config.json"
    with pytest.raises(LayoutError, match=expected) as caught:
        check_layout(LayoutConfig(**sizes), read_shape(config), str(config))
    assert str(config) in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"sequence_parallel": True}, "tensor is 1"),
        ({"data": 3, "expert": 2}, r"expert \(2\) must divide"),
        ({"distributed_optimizer": True}, "there is one"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(sizes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        LayoutConfig(**sizes)
