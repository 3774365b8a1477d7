"""Train the bundled recall checkpoint by GRPO (Shao et al., 2024), with rollouts of an engine; needs PyTorch alone.

    python examples/grpo.py

Asked for a key that is not in its line, the model answers with words of other keys. The reward is 1 for an answer of
one noun. 50 steps of 8 prompts with 8 answers each take 13 s of a core. The engine gets the new weights before every
step, and its log probabilities are those of the trainer's own forward, to float32's precision: with logits up to 23,
either is up to 3e-5 from a forward in float64.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch.nn import functional

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.executors.command_line.cli import RECALL
from paged.interop.trl import RolloutFunction
from paged.models.recall.task import _IDS, KEYS, NOUNS, TERMINATOR, sample_pairs

STEPS, PROMPTS, GROUP, LENGTH, RATE = 50, 8, 8, 24, 2e-3
NOUN_IDS = {_IDS[noun] for noun in NOUNS}
CONFIG = json.loads((RECALL / "config.json").read_text())


def logits_of(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, n, vocab_size] of a Qwen3-MoE (Qwen Team, 2025) for tokens [rows, n]."""

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], CONFIG["rms_norm_eps"])

    half = CONFIG["head_dim"] // 2
    angles = torch.arange(tokens.shape[1])[:, None] * CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    stream = functional.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in (f"model.layers.{index}" for index in range(CONFIG["num_hidden_layers"])):
        x = norm(stream, f"{layer}.input_layernorm")
        parts = {}
        for name in "qkv":
            part = project(x, f"{layer}.self_attn.{name}_proj").unflatten(-1, (-1, 2 * half)).transpose(1, 2)
            if name != "v":
                a, b = norm(part, f"{layer}.self_attn.{name}_norm").split(half, -1)
                part = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            parts[name] = part
        attended = functional.scaled_dot_product_attention(*parts.values(), is_causal=True, enable_gqa=True)
        stream = stream + project(attended.transpose(1, 2).flatten(2), f"{layer}.self_attn.o_proj")
        x = norm(stream, f"{layer}.post_attention_layernorm")
        best, chosen = project(x, f"{layer}.mlp.gate").softmax(-1).topk(CONFIG["num_experts_per_tok"])
        shares = torch.zeros(*x.shape[:-1], CONFIG["num_experts"]).scatter(-1, chosen, best / best.sum(-1, True))
        for index, share in enumerate(shares.split(1, -1)):
            expert = f"{layer}.mlp.experts.{index}"
            gated = functional.silu(project(x, f"{expert}.gate_proj")) * project(x, f"{expert}.up_proj")
            stream = stream + share * project(gated, f"{expert}.down_proj")
    return norm(stream, "model.norm") @ weights["model.embed_tokens.weight"].T


def new_prompt(rng: random.Random) -> list[int]:
    """Return a line of pairs, then a key that is in none of them."""
    pairs = sample_pairs(rng, LENGTH)
    absent = rng.choice([key for key in KEYS if key not in {pair[0] for pair in pairs}])
    return [*(_IDS[word] for pair in pairs for word in pair), _IDS[absent]]


def train(steps: int) -> tuple[list[float], float, float]:
    """Return the mean reward of each step, and how far log probabilities and importance ratios of the engine and the
    trainer were apart at most."""
    weights = {name: weight.requires_grad_() for name, weight in load_file(RECALL / "model.safetensors").items()}
    optimizer = torch.optim.Adam(weights.values(), lr=RATE)
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=256)
    engine = Engine(executor, EngineConfig(logprobs_mode="processed"))
    roll_out = RolloutFunction(
        engine, SamplingParams(max_tokens=4, seed=1), weights=lambda trainer: trainer.weights.items()
    )
    trainer = SimpleNamespace(weights=weights, state=SimpleNamespace(global_step=0))
    rng, rewards, apart, ratios_apart = random.Random(0), [], 0.0, 0.0
    for trainer.state.global_step in range(steps):
        prompts = [prompt for _ in range(PROMPTS) for prompt in [new_prompt(rng)] * GROUP]
        found = roll_out(prompts, trainer)
        answers = found["completion_ids"]
        reward = torch.tensor([float(ids[0] in NOUN_IDS and ids[1:] == [_IDS[TERMINATOR]]) for ids in answers])
        groups = reward.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        longest = max(map(len, answers))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in answers])
        mask = torch.arange(longest) < torch.tensor([[len(ids)] for ids in answers])
        sampled = torch.tensor([row + [0.0] * (longest - len(row)) for row in found["logprobs"]])
        logits = logits_of(weights, torch.cat([torch.tensor(found["prompt_ids"]), padded], 1))[:, LENGTH:-1]
        logprobs = logits.log_softmax(-1).gather(-1, padded[..., None])[..., 0]
        ratios = (logprobs - sampled).exp()
        apart = max(apart, (logprobs - sampled).abs()[mask].max().item())
        ratios_apart = max(ratios_apart, (ratios - 1).abs()[mask].max().item())
        # Weights change after every rollout, so nothing is clipped: ratios are 1.
        loss = -(ratios * advantages)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(float(reward.mean()))
    return rewards, apart, ratios_apart


if __name__ == "__main__":
    rewards, apart, ratios_apart = train(STEPS)
    first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
    print(f"reward {first:.2f} -> {last:.2f}, mean of 5 steps")
    print(f"log probabilities differ by at most {apart:.1e}, importance ratios from 1 by {ratios_apart:.1e}")
    assert last > first + 0.2, "GRPO did not improve the reward"
    assert apart < 1e-4, "the engine's log probabilities are not the trainer's"
    print("the reward improved; the engine's log probabilities are the trainer's")
