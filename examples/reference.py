"""A paged-attention engine on one page, in plain PyTorch: what the rest of this project does fast.

    python examples/reference.py

It answers questions with the bundled checkpoint, and runs any of the Llama, Qwen3 or Qwen3-MoE kind in float32. The
page reads from the bottom of a serving stack to its top: the cache, attention, the model, the engine. Its greedy tokens
are those of `paged.Engine`. `docs/how-it-works.md` walks through it and names the file that does each part there.

Letters of shapes: T tokens of a step, L tokens of a sequence, H query heads, G key heads, D the size of a head.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

# The cache: who holds which block.


class BlockPool:
    """Block ids, their holders, and which full blocks can serve another request that begins with the same tokens.

    A released block keeps its keys and values until it is taken again. Until then a match can bring it back.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_holders = [0] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))  # in the order of release
        # The key of a full block is all tokens up to its end: its keys and values depend on every one of them.
        self.block_of_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of_block: dict[int, tuple[int, ...]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return math.ceil(num_tokens / self.block_size)

    def match(self, tokens: list[int]) -> list[int]:
        """Hold the cached blocks of the longest prefix of `tokens`.

        The last token is never matched: the model must run on it, for the logits after it are wanted.
        """
        blocks: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self.block_of_prefix.get(tuple(tokens[:end]))
            if block is None:
                break
            self.free.pop(block, None)
            self.num_holders[block] += 1
            blocks.append(block)
        return blocks

    def take(self) -> int:
        """Take the block that was released longest ago. What it cached is lost: this is eviction."""
        block = next(iter(self.free))
        del self.free[block]
        self.num_holders[block] = 1
        prefix = self.prefix_of_block.pop(block, None)
        if prefix is not None:
            del self.block_of_prefix[prefix]
        return block

    def publish(self, tokens: list[int], blocks: list[int]) -> None:
        """Let others find the full blocks of `tokens`, whose keys and values are all written."""
        for index in range(len(tokens) // self.block_size):
            prefix = tuple(tokens[: (index + 1) * self.block_size])
            if prefix not in self.block_of_prefix:
                self.block_of_prefix[prefix] = blocks[index]
                self.prefix_of_block[blocks[index]] = prefix

    def release(self, blocks: list[int]) -> None:
        """Stop holding `blocks`. The last one becomes the oldest: the beginning of a prompt is shared most."""
        for block in reversed(blocks):
            self.num_holders[block] -= 1
            if self.num_holders[block] == 0:
                self.free[block] = None


# Attention, by definition.


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D] and the log-sum-exp of the scores [T, H] of queries over some keys.

    Shapes: query [T, H, D]; keys and values [L, G, D]; visible [T, L], bool. A row that sees no key returns 0 and -inf.
    """
    heads_of_a_key = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(heads_of_a_key, dim=1)  # [L, H, D]
    values = values.repeat_interleave(heads_of_a_key, dim=1)
    scores = torch.einsum("thd,lhd->thl", query, keys) / math.sqrt(query.shape[2])
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    log_sum = scores.logsumexp(dim=2)  # [T, H]
    weights = (scores - log_sum.clamp(min=-1e30)[:, :, None]).exp()  # [T, H, L]
    return torch.einsum("thl,lhd->thd", weights, values), log_sum


def merge(outputs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """Return the attention over all keys, [T, H, D], from that over parts of them: a weighted mean."""
    total = torch.stack(log_sums).logsumexp(dim=0)
    merged = torch.zeros_like(outputs[0])
    for output, log_sum in zip(outputs, log_sums, strict=True):
        merged += (log_sum - total).exp()[:, :, None] * output
    return merged


def paged_attention(query: Tensor, cache: Tensor, blocks: list[int], start: int, split_size: int) -> Tensor:
    """Attend from the tokens of one sequence at positions `start` and on to all tokens up to each: [T, H, D].

    Work over many keys is cut into splits, which can run at once, and merged.
    Shapes: query [T, H, D]; cache [2, num_blocks, block_size, G, D], keys then values.
    """
    length = start + len(query)
    keys, values = cache[:, blocks].flatten(1, 2)[:, :length]  # each [L, G, D], in the order of the block table
    query_positions = torch.arange(start, length)
    outputs = []
    log_sums = []
    for first in range(0, length, split_size):
        key_positions = torch.arange(first, min(first + split_size, length))
        visible = key_positions[None, :] <= query_positions[:, None]
        output, log_sum = attend(query, keys[key_positions], values[key_positions], visible)
        outputs.append(output)
        log_sums.append(log_sum)
    return merge(outputs, log_sums)


# The model: a decoder over the tokens of all sequences of a step, without padding.


@dataclass
class Chunk:
    """Tokens of one sequence that run in a step: a prompt, a part of one, or the last token (a decode)."""

    tokens: list[int]
    start: int  # position of the first one
    blocks: list[int]


class Decoder:
    """Embedding, layers of attention and MLP or experts, norm and output projection, as Qwen3 and Llama have them."""

    def __init__(self, folder: Path, num_blocks: int, block_size: int, split_size: int = 64) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.weights.update(load_file(path))
        self.block_size = block_size
        self.split_size = split_size
        self.num_heads = self.config["num_attention_heads"]
        self.num_kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.num_heads
        rope = self.config.get("rope_parameters") or self.config
        pairs = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = rope["rope_theta"] ** -pairs  # [D / 2]
        shape = (self.config["num_hidden_layers"], 2, num_blocks, block_size, self.num_kv_heads, self.head_dim)
        self.cache = torch.zeros(shape)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Project with the matrix `name`, and with its bias if it has one."""
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension."""
        weight = self.weights[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, eps=self.config["rms_norm_eps"])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate each pair (i, i + D / 2) by position times frequency i. x is [T, heads, D]."""
        angles = positions[:, None, None] * self.frequencies  # [T, 1, D / 2]
        first, second = x.chunk(2, dim=2)
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

    def attention(self, x: Tensor, layer: int, positions: Tensor, slots: Tensor, chunks: list[Chunk]) -> Tensor:
        """Write the keys and values of all tokens to their slots, then attend sequence by sequence."""
        name = f"model.layers.{layer}.self_attn"
        query = self.linear(x, f"{name}.q_proj").unflatten(1, (self.num_heads, self.head_dim))
        key = self.linear(x, f"{name}.k_proj").unflatten(1, (self.num_kv_heads, self.head_dim))
        value = self.linear(x, f"{name}.v_proj").unflatten(1, (self.num_kv_heads, self.head_dim))
        if f"{name}.q_norm.weight" in self.weights:
            query = self.norm(query, f"{name}.q_norm")
            key = self.norm(key, f"{name}.k_norm")
        by_slot = self.cache[layer].flatten(1, 2)  # [2, num_blocks * block_size, G, D], a view
        by_slot[0, slots] = self.rotate(key, positions)
        by_slot[1, slots] = value
        query = self.rotate(query, positions)
        outputs = []
        first = 0
        for chunk in chunks:
            rows = query[first : first + len(chunk.tokens)]
            first += len(chunk.tokens)
            outputs.append(paged_attention(rows, self.cache[layer], chunk.blocks, chunk.start, self.split_size))
        return self.linear(torch.cat(outputs).flatten(1), f"{name}.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """Gated MLP: down(silu(gate(x)) * up(x))."""
        return self.linear(
            silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def experts(self, x: Tensor, name: str) -> Tensor:
        """Run each token through the experts with its largest router weights, and add what they return."""
        weights = self.linear(x, f"{name}.gate").softmax(dim=1)  # [T, num_experts]
        weights, chosen = weights.topk(self.config["num_experts_per_tok"])
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(dim=1, keepdim=True)
        output = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            output[token] += weights[token, rank, None] * self.mlp(x[token], f"{name}.experts.{expert}")
        return output

    def forward(self, chunks: list[Chunk]) -> Tensor:
        """Return the logits after the last token of each chunk, [len(chunks), vocab_size]."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            tokens += chunk.tokens
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                block = chunk.blocks[position // self.block_size]
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
        x = self.weights["model.embed_tokens.weight"][tokens]  # [T, hidden_size]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            x = x + self.attention(normed, layer, torch.tensor(positions), torch.tensor(slots), chunks)
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            if f"{name}.mlp.gate.weight" in self.weights:
                x = x + self.experts(normed, f"{name}.mlp")
            else:
                x = x + self.mlp(normed, f"{name}.mlp")
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0)
        last = self.norm(x[ends - 1], "model.norm")
        if "lm_head.weight" in self.weights:
            return self.linear(last, "lm_head")
        return self.linear(last, "model.embed_tokens")


# The engine: who runs, with which blocks, and what comes next.


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens generated after it."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    noise: torch.Generator
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # the block table
    num_computed: int = 0  # tokens whose keys and values are in these blocks
    num_cached: int = 0  # of those, the ones that a match brought
    num_preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was generated."""
        return self.prompt + self.generated

    def choose(self, logits: Tensor) -> int:
        """Return the next token: the most probable one at temperature 0, else one drawn at that temperature."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits / self.temperature).softmax(dim=0)
        return int(probabilities.multinomial(1, generator=self.noise))


class Engine:
    """Runs requests together: a step is one forward over decodes and prompt chunks, of up to `token_budget` tokens."""

    def __init__(self, folder: Path, num_blocks: int, block_size: int = 16, token_budget: int = 64) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.model = Decoder(folder, num_blocks, block_size)
        self.token_budget = token_budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # oldest first

    def add(self, prompt: list[int], max_tokens: int, temperature: float = 0, seed: int = 0) -> Request:
        """Queue a request. One that fits the cache alone always ends: the others make room for it."""
        num_blocks = self.pool.blocks_for(len(prompt) + max_tokens)
        if num_blocks > len(self.pool.num_holders):
            raise ValueError(f"the request needs {num_blocks} blocks, the cache has {len(self.pool.num_holders)}")
        request = Request(prompt, max_tokens, temperature, torch.Generator().manual_seed(seed))
        self.waiting.append(request)
        return request

    def preempt(self, request: Request) -> None:
        """Take all blocks of a running request. It becomes the first that waits, and computes its tokens anew."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Add blocks until `num_tokens` more fit. Where none are free, the youngest running requests are preempted."""
        target = self.pool.blocks_for(request.num_computed + num_tokens)
        while request in self.running and target - len(request.blocks) > len(self.pool.free):
            self.preempt(self.running[-1])
        while request in self.running and len(request.blocks) < target:
            request.blocks.append(self.pool.take())

    def admit(self) -> bool:
        """Start the first request that waits, if there are blocks for all its tokens. Return whether it started."""
        if not self.waiting:
            return False
        request = self.waiting[0]
        matched = self.pool.match(request.tokens)
        if self.pool.blocks_for(len(request.tokens)) - len(matched) > len(self.pool.free):
            self.pool.release(matched)
            return False
        request.blocks = matched
        request.num_computed = len(matched) * self.pool.block_size
        request.num_cached = request.num_computed
        self.running.append(self.waiting.pop(0))
        return True

    def schedule(self) -> list[tuple[Request, int]]:
        """Return who runs in this step, with the number of their tokens: decodes and older requests first."""
        scheduled: list[tuple[Request, int]] = []
        budget = self.token_budget
        index = 0
        while budget > 0 and (index < len(self.running) or self.admit()):
            request = self.running[index]
            num_tokens = min(budget, len(request.tokens) - request.num_computed)
            self.grow(request, num_tokens)
            if request not in self.running:
                break  # it was the youngest itself
            scheduled.append((request, num_tokens))
            budget -= num_tokens
            index += 1
        return scheduled

    def step(self) -> list[tuple[Request, int]]:
        """Run one forward over everything that can run, and return who ran how many tokens."""
        scheduled = self.schedule()
        chunks = []
        for request, num_tokens in scheduled:
            end = request.num_computed + num_tokens
            chunks.append(Chunk(request.tokens[request.num_computed : end], request.num_computed, request.blocks))
        logits = self.model.forward(chunks)
        for (request, num_tokens), row in zip(scheduled, logits, strict=True):
            request.num_computed += num_tokens
            self.pool.publish(request.tokens[: request.num_computed], request.blocks)
            if request.num_computed == len(request.tokens):  # the prompt is complete, so the row chooses a token
                token = request.choose(row)
                request.generated.append(token)
                if len(request.generated) == request.max_tokens or token == self.model.config.get("eos_token_id"):
                    self.running.remove(request)
                    self.pool.release(request.blocks)
        return scheduled

    def run(self) -> None:
        """Step until every request has ended."""
        while self.waiting or self.running:
            self.step()


def main() -> None:
    """Ask for three values of one context, with room for two requests, and print what each step runs."""
    folder = Path(__file__).parents[1] / "models" / "recall"
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]  # every word is a token
    words = {token: word for word, token in vocabulary.items()}
    context = "otter: brass lantern ; wren: kite ; zebra: green wild compass ; lynx: ladder ; heron: acorn ;".split()
    engine = Engine(folder, num_blocks=3)
    requests = {}
    for key in ("otter:", "zebra:", "lynx:"):
        requests[engine.add([vocabulary[word] for word in (*context, key)], max_tokens=8)] = key
    while engine.waiting or engine.running:
        print("a step runs", ", ".join(f"{count} of {requests[request]}" for request, count in engine.step()))
    for request, key in requests.items():
        answer = " ".join(words[token] for token in request.generated)
        print(key, answer, f"({request.num_cached} of {len(request.prompt)} tokens cached)")


if __name__ == "__main__":
    main()
