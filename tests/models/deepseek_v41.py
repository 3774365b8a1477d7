"""DeepSeek-V4.1's text model by its formulas, one sequence at a time: transformers 5.23 has no class for it.

The formulas are those of vLLM 0.33 (`vllm/models/deepseek_v41`).
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.models.formula_model import FormulaModel, Tensors

VOCAB_SIZE = 128
# As published, with fewer and smaller layers and no drafter. Two layers with a window alone, two sources of ratio 2,
# one of ratio 1, which also chooses candidates. Of 20 or 40 entries, a query attends to three.
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
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0],  # the last two are the drafter's
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
    "num_nextn_predict_layers": 2,
}
DRAFTER: dict[str, Any] = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 127,
    "dspark_target_layer_ids": [4, 7, 9],  # 4 has n-grams, which its input does not contain; 9 is the last output
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
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
        streams, weights = self._begin(tokens)
        self.means: list[torch.Tensor] = []  # of all streams, before each layer and behind the last
        self.latents: dict[int, torch.Tensor] = {}  # of sources, before their rotation
        self.keys: dict[int, torch.Tensor] = {}
        self.choices: dict[int, torch.Tensor] = {}  # whether a token attends to an entry
        self.candidates: torch.Tensor | None = None
        for layer in range(config.num_hidden_layers):
            self.means.append(streams.mean(1))
            if layer in config.engram_layer_ids:
                streams = self._engram(streams, tokens, layer)
            attention = partial(self._attention, layer=layer)
            streams, weights = self._layer(streams, weights, f"layers.{layer}", attention, config.num_experts_per_tok)
        self.means.append(streams.mean(1))
        x = self._norm((weights.unsqueeze(-1) * streams).sum(1), "norm.weight")
        return SimpleNamespace(logits=(x @ self.tensors["head.weight"].T)[None])

    def drafts(self, ids: Sequence[int], newest: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, V] and confidences [n] of the drafts behind `ids` and the first of `newest`.

        Each other one of `newest` is the draft before.
        """
        config = self.config
        self(torch.tensor([ids]))
        means = torch.cat([self.means[index] for index in config.dspark_target_layer_ids], -1)
        context = self._norm(self._product(means, "mtp.0.main_proj"), "mtp.0.main_norm.weight")  # [T, D]
        streams, weights = self._begin(
            torch.tensor([newest[0], *[config.dspark_noise_token_id] * (config.dspark_block_size - 1)])
        )
        num_layers, top_k = config.num_nextn_predict_layers, config.dspark_num_experts_per_tok
        for layer in range(num_layers):
            attention = partial(self._block_attention, context=context, name=f"mtp.{layer}.attn")
            streams, weights = self._layer(streams, weights, f"mtp.{layer}", attention, top_k)
        last = f"mtp.{num_layers - 1}"
        mixed = (weights.unsqueeze(-1) * streams).sum(1)[: len(newest)]
        x = self._norm(mixed, f"{last}.norm.weight")
        before = self.tensors[f"{last}.markov_head.embed.weight"][torch.tensor(newest)]
        logits = x @ self.tensors["head.weight"].T + self._product(before, f"{last}.markov_head.head")
        confidences = self._product(torch.cat([mixed, before], -1), f"{last}.confidence_head.proj").sigmoid()
        return logits, confidences.squeeze(-1)

    def _begin(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams before the first layer, and their weights in its input."""
        streams = self.tensors["embed.weight"][tokens][:, None].expand(-1, self.config.hc_mult, -1)  # [T, N, D]
        weights = torch.zeros(streams.shape[:2], dtype=streams.dtype)
        weights[:, 0] = 1
        return streams, weights

    def _layer(
        self,
        streams: torch.Tensor,
        weights: torch.Tensor,
        name: str,
        attention: Callable[[torch.Tensor], torch.Tensor],
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts = partial(self._experts, name=f"{name}.ffn", top_k=top_k)
        for part, module in (("attn", attention), ("ffn", experts)):
            x = self._norm((weights.unsqueeze(-1) * streams).sum(1), f"{name}.{part}_norm.weight")
            weights, gains, shares = self._mixes(streams, f"{name}.hc_{part}")
            streams = gains.unsqueeze(-1) * module(x)[:, None] + shares.mT @ streams
        return streams, weights

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
        keys = self._rows(x, positions, name, scaled=ratio > 0)
        distances = positions[:, None] - positions
        is_seen = (distances >= 0) & (distances < config.sliding_window)
        if ratio:
            entries, chosen = self._entries(x, self._query_latent(x, name), layer, ratio)
            keys, is_seen = torch.cat([keys, entries]), torch.cat([is_seen, chosen], 1)
        return self._attend(x, positions, keys, is_seen, name, scaled=ratio > 0)

    def _block_attention(self, x: torch.Tensor, context: torch.Tensor, name: str) -> torch.Tensor:
        """Each row of a block behind `context` sees a window of it and the whole block."""
        positions = len(context) + torch.arange(len(x))
        before = self._rows(context, torch.arange(len(context)), name, scaled=False)[-self.config.sliding_window :]
        keys = torch.cat([before, self._rows(x, positions, name, scaled=False)])
        is_seen = torch.ones(len(x), len(keys), dtype=torch.bool)
        return self._attend(x, positions, keys, is_seen, name, scaled=False)

    def _query_latent(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm(self._product(x, f"{name}.wq_a"), f"{name}.q_norm.weight")

    def _rows(self, x: torch.Tensor, positions: torch.Tensor, name: str, *, scaled: bool) -> torch.Tensor:
        row = self._norm(self._product(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        return self._rotate(row[:, None], positions, scaled=scaled)[:, 0]  # [T, D]

    def _attend(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        is_seen: torch.Tensor,
        name: str,
        *,
        scaled: bool,
    ) -> torch.Tensor:
        config = self.config
        q = self._product(self._query_latent(x, name), f"{name}.wq_b").unflatten(-1, (-1, config.head_dim))
        q = self._rotate(q, positions, scaled=scaled)  # [T, H, D]
        scores = torch.einsum("thd,kd->htk", q, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~is_seen, -torch.inf)
        sinks = self.tensors[f"{name}.attn_sink"][:, None, None].expand(-1, len(x), 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = self._rotate(torch.einsum("htk,kd->thd", shares, keys), -positions, scaled=scaled)
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

    def _experts(self, x: torch.Tensor, name: str, top_k: int) -> torch.Tensor:
        config = self.config
        scores = functional.softplus(self._product(x, f"{name}.gate")).sqrt()
        chosen = (scores + self.tensors[f"{name}.gate.bias"]).topk(top_k).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        out = self._mlp(x, f"{name}.shared_experts")
        for expert in range(scores.shape[1]):
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
    names = [f"layers.{layer}" for layer in range(config.num_hidden_layers)]
    drafting = getattr(config, "dspark_target_layer_ids", [])
    if drafting:
        names += [f"mtp.{layer}" for layer in range(config.num_nextn_predict_layers)]
        drafter_rank, last = config.dspark_markov_rank, names[-1]
        tensors |= {
            "mtp.0.main_proj.weight": normal(hidden, len(drafting) * hidden),
            "mtp.0.main_norm.weight": vector(hidden),
            f"{last}.norm.weight": vector(hidden),
            f"{last}.markov_head.embed.weight": normal(config.vocab_size, drafter_rank) * 4,
            f"{last}.markov_head.head.weight": normal(config.vocab_size, drafter_rank),
            f"{last}.confidence_head.proj.weight": normal(1, hidden + drafter_rank),
        }
    for layer, name in enumerate(names):
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
        num_experts = config.n_routed_experts
        if layer >= config.num_hidden_layers:
            num_experts = config.dspark_n_routed_experts
        tensors[f"{name}.ffn.gate.weight"] = normal(num_experts, hidden)
        tensors[f"{name}.ffn.gate.bias"] = vector(num_experts) - 0.5
        inner = config.moe_intermediate_size
        experts = [f"experts.{expert}" for expert in range(num_experts)]
        for expert in (*experts, "shared_experts"):
            tensors[f"{name}.ffn.{expert}.w1.weight"] = normal(inner, hidden)
            tensors[f"{name}.ffn.{expert}.w2.weight"] = normal(hidden, inner)
            tensors[f"{name}.ffn.{expert}.w3.weight"] = normal(inner, hidden)
    return tensors
