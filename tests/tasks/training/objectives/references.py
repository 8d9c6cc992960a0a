"""Each objective from its paper's formulas: one sequence, plain torch, target by target.

Sums are loops over targets, minima and clips are written out, and gradients that a formula stops
are numbers.
"""

from __future__ import annotations

import math

import torch


def clip(value, low, high):
    return min(max(value, low), high)


def surrogate(ratio, advantage, low, high):
    """min(r A, clip(r) A), r a tensor."""
    bound = clip(ratio.item(), 1 - low, 1 + high) * advantage
    return ratio * advantage if ratio.item() * advantage <= bound else torch.tensor(bound).double()


def gspo(new, old, advantage, low, high):
    """arXiv 2507.18071, equations 5 and 7: s_i = (pi(y)/pi_old(y))^(1/|y|)."""
    likelihood, before = sum(new[1:], new[0]), math.fsum(old)
    s = torch.exp((likelihood - before) / len(old))
    return surrogate(s, advantage, low, high)


def gspo_token(new, old, advantage, low, high):
    """arXiv 2507.18071, equations 13 and 14."""
    s = math.exp(math.fsum(p.item() - q for p, q in zip(new, old, strict=True)) / len(old))
    terms = [surrogate(s * torch.exp(p) / math.exp(p.item()), advantage, low, high) for p in new]
    return sum(terms[1:], terms[0]) / len(terms)


def grpo(new, old, advantage, low, high, weights=None):
    """arXiv 2402.03300, equation 3, without its KL term; weights as in arXiv 2110.00641."""
    weights = weights or [1.0] * len(old)
    terms = [
        w * surrogate(torch.exp(p) / math.exp(q), advantage, low, high)
        for p, q, w in zip(new, old, weights, strict=True)
    ]
    return sum(terms[1:], terms[0]) / len(terms)


def tis_gradient(new, behaviour, advantage, cap):
    """Ionides (2008), equation 2, on the policy gradient: of minus the gain, target by target."""
    worth = [min(math.exp(p - q), cap) for p, q in zip(new, behaviour, strict=True)]
    return [-advantage * w / len(worth) for w in worth], -advantage * math.fsum(worth) / len(worth)


def k3(new, reference):
    """arXiv 2402.03300, equation 4: pi_ref/pi - log(pi_ref/pi) - 1, the mean over targets."""
    terms = [math.exp(q) / torch.exp(p) - (q - p) - 1 for p, q in zip(new, reference, strict=True)]
    return sum(terms[1:], terms[0]) / len(terms)
