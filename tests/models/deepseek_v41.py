"""DeepSeek-V4.1's text model by its formulas, one sequence at a time: transformers 5.23 has no class for it.

The formulas are those of vLLM 0.33 (`vllm/models/deepseek_v41`).
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.models.formula_model import FormulaModel, Tensors

VOCAB_SIZE = 128
# As published, with fewer and smaller layers. Two layers with a window alone, two sources of ratio 2, one of ratio 1,
# which also chooses candidates. Of 20 or 40 entries, a query attends to three.
SETTINGS: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 32,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0],  # the last is the drafter's
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 16,  # of 16 heads, all products of a key and a query are negative once in 65,536
    "index_head_dim": 32,
    "index_topk": 3,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [400, 560],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 100,
    "num_nextn_predict_layers": 1,
}
# Each of the tokens from 100 on shares an id with one before: their texts differ in case, accents or spaces.
SHARED = [token % 100 for token in range(VOCAB_SIZE)]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token i + 100 is token i in other letters."""
    words: dict[str, int] = {}
    for token in range(VOCAB_SIZE):
        word = f"word {token % 100} e"
        if token >= 100:
            word = (word.upper(), f" {word}", word.replace("e", "\u00e9"))[token % 3]
        words[word] = token
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word 0 e"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


class DeepseekV41(FormulaModel):
    """settings: the text model's section of config.json."""

    architecture = "DeepseekV41ForCausalLM"

    def __init__(self, settings: dict[str, Any], tensors: Tensors | None = None) -> None:
        super().__init__(SimpleNamespace(**settings), tensors or _drawn(SimpleNamespace(**settings)))
        self.settings = settings

    def save_pretrained(self, folder: Path) -> None:
        super_values = {"model_type": "deepseek_v41", "text_config": self.settings, "dtype": "float32"}
        values = super_values | {"architectures": [self.architecture], "tie_word_embeddings": False}
        _save(folder, self.tensors, values)
        write_tokenizer(folder)

    def __call__(self, ids: torch.Tensor) -> Any:
        config, tokens = self.config, ids[0]
        embedded = self.tensors["embed.weight"][tokens]  # [T, D]
        streams = embedded[:, None].expand(-1, config.hc_mult, -1)
        weights = torch.zeros(config.hc_mult, dtype=embedded.dtype)
        weights[0] = 1
        weights = weights.expand(len(tokens), -1)
        self.latents: dict[int, torch.Tensor] = {}  # of sources, before their rotation
        self.keys: dict[int, torch.Tensor] = {}
        self.choices: dict[int, torch.Tensor] = {}  # whether a token attends to an entry
        self.candidates: torch.Tensor | None = None
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            if layer in config.engram_layer_ids:
                streams = self._engram(streams, tokens, layer)
            for part, module in (("attn", self._attention), ("ffn", self._experts)):
                x = self._norm((weights.unsqueeze(-1) * streams).sum(1), f"{name}.{part}_norm.weight")
                weights, gains, shares = self._mixes(streams, f"{name}.hc_{part}")
                output = module(x, layer)
                streams = gains.unsqueeze(-1) * output[:, None] + shares.mT @ streams
        x = self._norm((weights.unsqueeze(-1) * streams).sum(1), "norm.weight")
        return SimpleNamespace(logits=(x @ self.tensors["head.weight"].T)[None])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[name], self.config.rms_norm_eps)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _mixes(self, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, eps = self.config.hc_mult, self.config.hc_eps
        flat = functional.rms_norm(streams.flatten(1), (streams[0].numel(),), eps=self.config.rms_norm_eps)
        logits, base, scale = (
            flat @ self.tensors[f"{name}_fn"].T,
            self.tensors[f"{name}_base"],
            self.tensors[f"{name}_scale"],
        )
        pre = (logits[:, :count] * scale[0] + base[:count]).sigmoid() + eps
        post = 2 * (logits[:, count : 2 * count] * scale[1] + base[count : 2 * count]).sigmoid()
        shares = (logits[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(-1, (count, count)).softmax(-1) + eps
        shares = shares / (shares.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            shares = shares / (shares.sum(-1, keepdim=True) + eps)
            shares = shares / (shares.sum(-2, keepdim=True) + eps)
        return pre, post, shares

    def _engram(self, streams: torch.Tensor, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.engram"
        place = config.engram_layer_ids.index(layer)
        num_heads, order = config.engram_n_heads, config.engram_max_ngram_size
        primes = [
            number for number in range(config.engram_vocab_size, 1000) if all(number % i for i in range(2, number))
        ]
        primes = primes[place * (order - 1) * num_heads :]
        bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=order, dtype=np.int64)
        rows: list[list[int]] = []
        for position in range(len(tokens)):
            mixed, columns, offset = 0, [], 0
            for shift in range(order):
                token = int(tokens[position - shift]) if shift <= position else config.engram_pad_token_id
                mixed ^= SHARED[token] * (2 * int(drawn[shift]) + 1)
                for head in range(num_heads * (shift > 0)):
                    prime = primes[(shift - 1) * num_heads + head]
                    columns.append(offset + mixed % prime)
                    offset += prime
            rows.append(columns)
        features = self.tensors[f"{name}.embed.weight"][torch.tensor(rows)].flatten(1)
        size = config.hidden_size
        keys, values = self._product(features, f"{name}.wkv").split((config.hc_mult * size, size), -1)
        keys = functional.rms_norm(keys.view_as(streams), (size,), eps=config.rms_norm_eps)
        queries = functional.rms_norm(streams, (size,), eps=config.rms_norm_eps)
        products = queries * self.tensors[f"{name}.q_weight"] * self.tensors[f"{name}.k_weight"] * keys
        scores = products.sum(-1) / math.sqrt(size)
        gates = torch.where(scores < 0, -1, 1) * scores.abs().clamp_min(1e-6).sqrt()
        return streams + gates.sigmoid().unsqueeze(-1) * values[:, None]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """Rotate neighbouring pairs of the last numbers of each head [T, H, D]."""
        config, size = self.config, self.config.qk_rope_head_dim
        theta = config.compress_rope_theta if scaled else config.rope_theta
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        if scaled:
            yarn = config.rope_scaling
            most = yarn["original_max_position_embeddings"]

            def place(rotations: float) -> float:
                return size * math.log(most / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            low = max(math.floor(place(yarn["beta_fast"])), 0)
            high = min(math.ceil(place(yarn["beta_slow"])), size - 1)
            ramp = ((torch.arange(size // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            frequencies = frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)
        turns = torch.polar(torch.ones(()).double(), positions[:, None, None] * frequencies)  # [T, 1, size / 2]
        pairs = torch.view_as_complex(x[..., -size:].double().unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
        return torch.cat([x[..., :-size], rotated], -1)

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.attn"
        positions = torch.arange(len(x))
        ratio = config.compress_ratios[layer]
        q_latent = self._norm(self._product(x, f"{name}.wq_a"), f"{name}.q_norm.weight")
        q = self._product(q_latent, f"{name}.wq_b").unflatten(-1, (-1, config.head_dim))
        q = self._rotate(q, positions, scaled=ratio > 0)  # [T, H, D]
        row = self._norm(self._product(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        keys = self._rotate(row[:, None], positions, scaled=ratio > 0)[:, 0]  # [T, D]
        distances = positions[:, None] - positions
        is_seen = (distances >= 0) & (distances < config.sliding_window)
        if ratio:
            entries, chosen = self._entries(x, q_latent, layer, ratio)
            keys, is_seen = torch.cat([keys, entries]), torch.cat([is_seen, chosen], 1)
        scores = torch.einsum("thd,kd->htk", q, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~is_seen, -torch.inf)
        sinks = self.tensors[f"{name}.attn_sink"][:, None, None].expand(-1, len(x), 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = self._rotate(torch.einsum("htk,kd->thd", shares, keys), -positions, scaled=ratio > 0)
        groups = out.flatten(1).unflatten(-1, (config.o_groups, -1))  # [T, G, H / G * D]
        down = self.tensors[f"{name}.wo_a.weight"].unflatten(0, (config.o_groups, -1))
        return self._product(torch.einsum("tgi,goi->tgo", groups, down).flatten(1), f"{name}.wo_b")

    def _entries(
        self, x: torch.Tensor, q_latent: torch.Tensor, layer: int, ratio: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that a layer reads, and whether each token attends to each of them."""
        config, name = self.config, f"layers.{layer}.attn"
        source = max(other for other in config.kv_source_layer_ids if other <= layer)
        num_entries = len(x) // ratio
        places = torch.arange(num_entries) * ratio
        if source == layer:
            values = self._product(x, f"{name}.compressor.wkv")[: num_entries * ratio].unflatten(0, (-1, ratio))
            pooled = values[:, 0]
            if ratio > 1:
                gates = self._product(x, f"{name}.compressor.wgate")[: num_entries * ratio].unflatten(0, (-1, ratio))
                pooled = (gates.softmax(1) * values).sum(1)
            self.latents[layer] = self._norm(pooled, f"{name}.compressor.norm.weight")
            index_keys = self._norm(
                self._product(self.latents[layer], f"{name}.indexer.wk"), f"{name}.indexer.k_norm.weight"
            )
            self.keys[layer] = self._rotate(index_keys[:, None], places, scaled=True)[:, 0]
        entries = self._rotate(self.latents[source][:, None], places, scaled=True)[:, 0]
        if layer in config.index_source_layer_ids:
            self.choices[layer] = self._choice(x, q_latent, layer, source, ratio)
        return entries, self.choices[max(other for other in config.index_source_layer_ids if other <= layer)]

    def _choice(self, x: torch.Tensor, q_latent: torch.Tensor, layer: int, source: int, ratio: int) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.attn.indexer"
        positions, size = torch.arange(len(x)), config.candidate_block_size
        q = self._product(q_latent, f"{name}.wq_b").unflatten(-1, (-1, config.index_head_dim))
        q = self._rotate(q, positions, scaled=True)
        scores = torch.einsum("thd,sd->ths", q, self.keys[source]).relu()
        scores = torch.einsum("th,ths->ts", self._product(x, f"{name}.weights_proj"), scores)
        num_seen = (positions + 1) // ratio
        is_seen = torch.arange(scores.shape[1]) < num_seen[:, None]
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if layer == config.candidate_source_layer_id:
            blocks = (
                functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size)).amax(-1)
            )
            blocks[positions, (num_seen - 1) // size] = torch.inf  # the newest one
            self.candidates = _largest(blocks, config.candidate_topk_blocks)
        elif layer > config.candidate_source_layer_id >= 0:
            assert self.candidates is not None
            is_candidate = self.candidates.repeat_interleave(size, 1)[:, : scores.shape[1]]
            scores = scores.masked_fill(~is_candidate, -torch.inf)
        return _largest(scores, config.index_topk)

    def _experts(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.ffn"
        scores = functional.softplus(self._product(x, f"{name}.gate")).sqrt()
        chosen = (scores + self.tensors[f"{name}.gate.bias"]).topk(config.num_experts_per_tok).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        out = self._mlp(x, f"{name}.shared_experts")
        for expert in range(config.n_routed_experts):
            out = out + weights[:, expert, None] * self._mlp(x, f"{name}.experts.{expert}")
        return out

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        limit = self.config.swiglu_limit
        gate, up = self._product(x, f"{name}.w1").clamp(max=limit), self._product(x, f"{name}.w3").clamp(-limit, limit)
        return self._product(functional.silu(gate) * up, f"{name}.w2")


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each finite score, or one of +inf, is among the largest of its row."""
    top = scores.topk(min(count, scores.shape[1]))
    is_largest = torch.zeros_like(scores, dtype=torch.bool).scatter(1, top.indices, value=True)
    return is_largest & (scores > -torch.inf)


def _save(folder: Path, tensors: Tensors, values: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    Path(folder).mkdir(exist_ok=True)
    save_file(tensors, Path(folder) / "model.safetensors")
    (Path(folder) / "config.json").write_text(json.dumps(values))


def _drawn(config: Any) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def vector(*shape: int) -> torch.Tensor:
        return 0.5 + torch.rand(shape, generator=generator)

    hidden, head, rank, count = config.hidden_size, config.head_dim, config.q_lora_rank, config.hc_mult
    tensors = {"embed.weight": normal(config.vocab_size, hidden) * 4, "head.weight": normal(config.vocab_size, hidden)}
    tensors["norm.weight"] = vector(hidden)
    heads, groups, group_rank = config.num_attention_heads * head, config.o_groups, config.o_lora_rank
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        for part in ("attn", "ffn"):
            tensors[f"{name}.{part}_norm.weight"] = vector(hidden)
            tensors[f"{name}.hc_{part}_fn"] = normal((2 + count) * count, count * hidden)
            tensors[f"{name}.hc_{part}_base"] = normal((2 + count) * count) * 2
            tensors[f"{name}.hc_{part}_scale"] = vector(3)
        attention = f"{name}.attn"
        tensors |= {
            f"{attention}.wq_a.weight": normal(rank, hidden),
            f"{attention}.wkv.weight": normal(head, hidden),
            f"{attention}.q_norm.weight": vector(rank),
            f"{attention}.kv_norm.weight": vector(head),
            f"{attention}.wq_b.weight": normal(heads, rank),
            f"{attention}.wo_a.weight": normal(groups * group_rank, heads // groups),
            f"{attention}.wo_b.weight": normal(hidden, groups * group_rank),
            f"{attention}.attn_sink": vector(config.num_attention_heads),
        }
        ratio = config.compress_ratios[layer]
        if layer in config.kv_source_layer_ids:
            tensors[f"{attention}.compressor.wkv.weight"] = normal(head, hidden)
            tensors[f"{attention}.compressor.norm.weight"] = vector(head)
            if ratio > 1:
                tensors[f"{attention}.compressor.wgate.weight"] = normal(head, hidden)
            tensors[f"{attention}.indexer.wk.weight"] = normal(config.index_head_dim, head)
            tensors[f"{attention}.indexer.k_norm.weight"] = vector(config.index_head_dim)
        if layer in config.index_source_layer_ids:
            tensors[f"{attention}.indexer.wq_b.weight"] = normal(config.index_n_heads * config.index_head_dim, rank)
            tensors[f"{attention}.indexer.weights_proj.weight"] = normal(config.index_n_heads, hidden)
        if layer in config.engram_layer_ids:
            engram, rows = f"{name}.engram", config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
            size = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
            tensors[f"{engram}.embed.weight"] = normal(rows, config.engram_head_dim) * 4
            tensors[f"{engram}.wkv.weight"] = normal((count + 1) * hidden, size)
            tensors[f"{engram}.q_weight"], tensors[f"{engram}.k_weight"] = vector(count, hidden), vector(count, hidden)
        tensors[f"{name}.ffn.gate.weight"] = normal(config.n_routed_experts, hidden)
        tensors[f"{name}.ffn.gate.bias"] = vector(config.n_routed_experts) - 0.5
        inner = config.moe_intermediate_size
        experts = [f"experts.{expert}" for expert in range(config.n_routed_experts)]
        for expert in (*experts, "shared_experts"):
            tensors[f"{name}.ffn.{expert}.w1.weight"] = normal(inner, hidden)
            tensors[f"{name}.ffn.{expert}.w2.weight"] = normal(hidden, inner)
            tensors[f"{name}.ffn.{expert}.w3.weight"] = normal(inner, hidden)
    return tensors
