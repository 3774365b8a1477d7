"""Train a draft head for the bundled recall checkpoint: an EAGLE-3 head, or the checkpoint with a multi-token head.

    python examples/train_draft_head.py eagle3|mtp FOLDER

Takes a minute of one core, needs transformers, and writes what `--draft FOLDER` or `--draft mtp` loads. The head is
dense PyTorch, written from its papers (Li et al., 2025; DeepSeek-AI, 2024), so it is also a reference for `DraftHead`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from paged.models.recall.task import _IDS, sample_pairs
from paged.serving.command_line.cli import RECALL

ROWS, UNROLLED, RATE = 8, 2, 4e-3
Weights = dict[str, torch.Tensor]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def new_weights(
    kind: str,
    config: dict[str, Any],
    generator: torch.Generator,
    reader: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Weights:
    """Return the weights of an untrained head of the recall checkpoint's sizes, by their names in a checkpoint.

    reader: for a multi-token head, maps that make the same of a token's embedding and of its final hidden state, each
    [hidden_size / 2, hidden_size].
    """
    size, width = config["hidden_size"], config["moe_intermediate_size"]
    q_size, k_size = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    is_mtp = kind == "mtp"
    layer = "mtp.layers.0" if is_mtp else "midlayer"
    shapes = {"q": q_size, "k": k_size, "v": k_size}
    shape_of: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.{name}_proj": (rows, size if is_mtp else 2 * size) for name, rows in shapes.items()
    }
    shape_of |= {f"{layer}.self_attn.o_proj": (size, q_size)}
    norms = {f"{layer}.input_layernorm": size, f"{layer}.post_attention_layernorm": size}
    mlps = [f"mlp.experts.{index}" for index in range(config["num_experts"])] if is_mtp else ["mlp"]
    for mlp in mlps:
        shape_of |= {f"{layer}.{mlp}.{name}_proj": (width, size) for name in ("gate", "up")}
        shape_of[f"{layer}.{mlp}.down_proj"] = size, width
    if is_mtp:
        shape_of |= {"mtp.fc": (size, 2 * size), f"{layer}.mlp.gate": (config["num_experts"], size)}
        norms |= {f"{layer}.self_attn.{name}_norm": config["head_dim"] for name in "qk"}
        norms |= dict.fromkeys(("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), size)
    else:
        shape_of |= {"fc": (size, 3 * size), "lm_head": (config["vocab_size"], size)}
        norms |= {f"{layer}.hidden_norm": size, "norm": size}
    weights = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shape_of.items()}
    # Begin as an induction head, which random weights take thousands of steps to find: queries are tokens, keys are the
    # tokens before, and values are tokens.
    q, k, v, o = (weights[f"{layer}.self_attn.{name}_proj"] for name in "qkvo")
    part, groups = (size // 2 if is_mtp else size), q_size // k_size
    to_part = torch.linalg.qr(torch.randn(size, part, generator=generator)).Q.T
    to_part, to_own = (to_part, to_part) if reader is None else reader
    join = weights["mtp.fc" if is_mtp else "fc"].mul_(0.1)
    if is_mtp:  # one half for the token, the other for the token before
        join += torch.block_diag(to_part, to_own)
    else:
        join[:, :size] += torch.eye(size)
    match = 2 * part**-0.5 * torch.randn(k_size, part, generator=generator)
    q[:, :part] += match.unflatten(0, (-1, config["head_dim"])).repeat_interleave(groups, 0).flatten(0, 1)
    k[:, part:] += match
    values = torch.linalg.qr(torch.randn(k_size, part, generator=generator)).Q
    v[:, :part] += values
    back = values.unflatten(0, (-1, config["head_dim"])).repeat_interleave(groups, 0).flatten(0, 1).T
    o += (to_part.T if is_mtp else torch.eye(size)) @ back
    # Norms of heads set how sharp attention is.
    weights |= {
        name: torch.full((width,), 2.0 if name.endswith(("q_norm", "k_norm")) else 1.0) for name, width in norms.items()
    }
    return {f"{name}.weight": one for name, one in weights.items()}


def run_head(
    weights: Weights,
    config: dict[str, Any],
    tokens: torch.Tensor,
    features: torch.Tensor,
    past: KeysAndValues | None = None,
) -> tuple[torch.Tensor, torch.Tensor, KeysAndValues]:
    """Run a head over embedded tokens [rows, n, size] and the features of the token before each.

    Returns hidden states after the final norm, the features for the next token, and keys and values. past: those of
    earlier positions, if they are not the ones computed here.
    """
    is_mtp = "mtp.fc.weight" in weights
    layer, norm = ("mtp.layers.0", "mtp.norm") if is_mtp else ("midlayer", "norm")

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T

    if is_mtp:
        pair = rms(tokens, "mtp.pre_fc_norm_embedding"), rms(features, "mtp.pre_fc_norm_hidden")
        stream = project(torch.cat(pair, -1), "mtp.fc")
        x = rms(stream, f"{layer}.input_layernorm")
    else:
        stream = features
        x = torch.cat([rms(tokens, f"{layer}.input_layernorm"), rms(features, f"{layer}.hidden_norm")], -1)
    q, k, v = (
        project(x, f"{layer}.self_attn.{name}_proj").unflatten(-1, (-1, config["head_dim"])).transpose(1, 2)
        for name in "qkv"
    )
    if is_mtp:
        q, k = rms(q, f"{layer}.self_attn.q_norm"), rms(k, f"{layer}.self_attn.k_norm")
    q, k = _rotated(q, config), _rotated(k, config)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    old_k, old_v = past or (k, v)
    scores = (q @ old_k.transpose(-1, -2)).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu().bool(), -torch.inf)
    own = (q * k).sum(-1, keepdim=True)
    shares = (torch.cat([scores, own], -1) * config["head_dim"] ** -0.5).softmax(-1)
    attended = shares[..., :-1] @ old_v + shares[..., -1:] * v
    stream = stream + project(attended.transpose(1, 2).flatten(2), f"{layer}.self_attn.o_proj")
    x, mixed = rms(stream, f"{layer}.post_attention_layernorm"), torch.zeros_like(stream)
    mlps: list[tuple[str, torch.Tensor | float]] = [("mlp", 1.0)]
    if is_mtp:
        best, chosen = project(x, f"{layer}.mlp.gate").softmax(-1).topk(config["num_experts_per_tok"])
        routed = torch.zeros(*x.shape[:-1], config["num_experts"]).scatter(-1, chosen, best / best.sum(-1, True))
        mlps = [(f"mlp.experts.{index}", share) for index, share in enumerate(routed.split(1, -1))]
    for mlp, share in mlps:
        gate, up = project(x, f"{layer}.{mlp}.gate_proj"), project(x, f"{layer}.{mlp}.up_proj")
        mixed = mixed + share * project(functional.silu(gate) * up, f"{layer}.{mlp}.down_proj")
    normed = rms(stream + mixed, norm)
    return normed, normed if is_mtp else stream + mixed, (old_k, old_v)


def _rotated(x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def target_states(target: Any, tokens: torch.Tensor, kind: str, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of each token and the target's logits."""
    streams: list[torch.Tensor] = []
    hooks = [one.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for one in target.model.layers]
    hooks.append(target.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
    with torch.no_grad():
        output = target(tokens, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    hidden = output.hidden_states[-1]
    return hidden if kind == "mtp" else torch.cat(streams, -1) @ weights["fc.weight"].T, output.logits


def sample_batch(rng: random.Random, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows that list pairs and then repeat them in random order, and where the context tells the next token."""
    context = rng.randint(10, longest)
    rows, masks = [], []
    for _ in range(ROWS):
        pairs = [[_IDS[word] for word in pair] for pair in sample_pairs(rng, context)]
        row, mask = [token for pair in pairs for token in pair], [False] * context
        while len(row) < context + 60:
            for pair in rng.sample(pairs, len(pairs)):
                row += pair
                mask += [False, *[True] * (len(pair) - 1)]
        rows.append(row[: context + 60])
        masks.append(mask[: context + 60])
    return torch.tensor(rows), torch.tensor(masks)


def train(kind: str, *, steps: int = 300, longest: int = 256, seed: int = 0) -> tuple[Weights, dict[str, Any]]:
    """Return the weights of a head after training, and the target's configuration."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(RECALL, attn_implementation="eager").requires_grad_(False)
    config = json.loads((RECALL / "config.json").read_text())
    embedding = target.model.embed_tokens.weight
    rng, reader = random.Random(seed), None
    if kind == "mtp":  # final hidden states tell two of three tokens apart
        tokens, _ = sample_batch(rng, longest)
        hidden, _ = target_states(target, tokens, kind, {})
        solution = torch.linalg.lstsq(hidden.flatten(0, 1), embedding[tokens.flatten()]).solution
        told = hidden.flatten(0, 1) @ solution
        best = torch.linalg.eigh(told.T @ told).eigenvectors[:, -hidden.shape[-1] // 2 :].T
        reader = best, best @ solution.T
    weights = new_weights(kind, config, torch.Generator().manual_seed(seed), reader)
    if kind == "eagle3":
        weights["lm_head.weight"] = embedding.clone()
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    for step in range(steps):
        tokens, mask = sample_batch(rng, 16 + (longest - 16) * step // steps)
        features, logits = target_states(target, tokens, kind, weights)
        embedded, past, losses = embedding[tokens[:, 1:]], None, []
        features, wanted, known = features[:, :-1], logits[:, 1:].softmax(-1), mask[:, 2:]
        for _ in range(UNROLLED):
            hidden, following, past = run_head(weights, config, embedded, features, past)
            own = hidden @ weights.get("lm_head.weight", embedding).T
            losses.append(functional.cross_entropy(own[:, :-1][known], wanted[:, :-1][known]))
            # The next draft reads the head's own hidden state of the token before.
            features = torch.cat([features[:, :1], following[:, :-1]], 1)
        optimizer.zero_grad()
        sum(losses, torch.zeros(())).backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            right = (own[:, :-1].argmax(-1) == tokens[:, 2:])[known].float().mean().item()
            print(f"step {step}: losses {[round(one.item(), 3) for one in losses]}, last draft right {right:.3f}")
    return {name: weight.detach() for name, weight in weights.items()}, config


def save(kind: str, weights: Weights, config: dict[str, Any], folder: Path) -> None:
    """Write the head as the folder of a checkpoint: for "mtp" the recall checkpoint, with the head's tensors."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    if kind == "mtp":
        for file in RECALL.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        weights = {**load_file(RECALL / "model.safetensors"), **weights}
    else:
        ids = torch.arange(config["vocab_size"])
        weights = {**weights, "d2t": torch.zeros_like(ids), "t2d": torch.ones_like(ids, dtype=torch.bool)}
        names = "hidden_size num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta vocab_size dtype"
        own = {name: config[name] for name in names.split()}
        own |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        own |= {"intermediate_size": config["moe_intermediate_size"], "draft_vocab_size": config["vocab_size"]}
        own |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "max_position_embeddings": 1024}
        (folder / "config.json").write_text(json.dumps(own, indent=2))
    save_file(weights, folder / "model.safetensors")


if __name__ == "__main__":
    save(sys.argv[1], *train(sys.argv[1]), Path(sys.argv[2]))
