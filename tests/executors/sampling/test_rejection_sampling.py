"""Rejection sampling keeps the distribution of the target."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys, split_keys, uniform
from paged.executors.sampling.rejection_sampling import rejection_sample
from paged.kernels.sampling.sample_tokens import sample_tokens
from tests.executors.sampling.statistics import chi_square_p

NUM, VOCAB, WIDTH = 8_000, 6, 3


def _keys(width: int, stream: Stream) -> np.ndarray:
    return noise_keys(hash_seeds(np.arange(NUM, dtype=np.uint64))[:, None], np.arange(width)[None], stream)


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return sample_tokens(logits, keys, torch.ones_like(logits[:, 0]))


@pytest.mark.parametrize("drafts_are_certain", [False, True])
def test_rejection_keeps_the_distribution(
    drafts_are_certain: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position the tokens of 8,000 sequences fit the target as well as plain draws do; accepting a little too
    easily, or replacing a rejected draft by the target's own choice, does not.
    """
    monkeypatch.setenv("PAGED_BACKEND", "torch")  # the interpreter takes 20 ms a row
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(WIDTH + 1, VOCAB, generator=generator).to(device) * 1.2
    q = (torch.randn(WIDTH, VOCAB, generator=generator).to(device) * 1.2).softmax(-1)
    target = logits.double().softmax(-1).tolist()
    draft_keys = torch.from_numpy(split_keys(_keys(WIDTH, Stream.DRAFT))).to(device)
    drafts = torch.stack([draw(q[i].log().expand(NUM, -1), draft_keys[:, i]) for i in range(WIDTH)], 1)
    keys = torch.from_numpy(split_keys(_keys(WIDTH + 1, Stream.TOKEN))).to(device)
    chances = torch.from_numpy(uniform(_keys(WIDTH, Stream.ACCEPT))).to(device)
    num_drafts = torch.arange(NUM, device=device) % (WIDTH + 1)

    def verify(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rejection_sample(
            logits.repeat(NUM, 1),
            torch.arange(NUM, device=device) * (WIDTH + 1),
            drafts,
            num_drafts,
            None if drafts_are_certain else q.expand(NUM, -1, -1),
            uniforms,
            keys,
        )

    def fit(tokens: torch.Tensor, counts: torch.Tensor, position: int) -> float:
        reached = tokens[counts >= position, position].bincount(minlength=VOCAB)
        return chi_square_p(reached.tolist(), target[position])

    tokens, accepted = verify(chances)
    assert (accepted <= num_drafts).all()
    for position in range(WIDTH + 1):
        assert fit(tokens, accepted, position) > 1e-4
        plain = draw(logits[position].expand(NUM, -1), keys[:, position])
        assert chi_square_p(plain.bincount(minlength=VOCAB).tolist(), target[position]) > 1e-4
    biased, too_many = verify(chances * 0.7)
    assert fit(biased, too_many, 0) < 1e-6
    unlike = tokens.clone()
    rejected = (accepted == 0) & (num_drafts > 0)
    unlike[rejected, 0] = draw(logits[0].expand(NUM, -1), keys[:, 0])[rejected]
    assert fit(unlike, accepted, 0) < 1e-6
