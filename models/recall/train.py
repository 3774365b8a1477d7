"""Train the bundled demo checkpoint: a Qwen3-MoE of 0.2 million parameters that looks up values in its context.

Run as `python -m paged.models.recall.train`. It needs transformers, trains on the CPU, and writes the
Hugging Face folder only where the trained model answers 99 % of held-out prompts in float32 and in bfloat16.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from paged.models.recall.task import MAX_TOKENS, TERMINATOR, WORDS, RecallPrompt, sample_pairs, sample_prompts

UNKNOWN = "<unk>"
VOCABULARY = [UNKNOWN, TERMINATOR, *WORDS]
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}
MAX_POSITIONS = 1024
REQUIRED_ACCURACY = 0.99
SHORTEST_CONTEXT = 16
# Some initialisations never find the copying heads. One that does is past the shortest context by then.
PATIENCE = 800
HELD_OUT_SEED = 1_000_003  # sample_prompts has a random stream of its own, which training never draws from


def build_tokenizer() -> Tokenizer:
    """Return the word-level tokenizer: one token for each word, each key with its colon, and each terminator."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNKNOWN))
    split_terminator = pre_tokenizers.Split(Regex(TERMINATOR), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split_terminator])
    # The WordPiece decoder puts a space before every token but the first; the terminator has none.
    join = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.decoder = decoders.Sequence([join, decoders.Replace(f" {TERMINATOR}", TERMINATOR)])
    return tokenizer


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """Return the untrained model."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.1,
        # Tied embeddings let one copying matrix serve all words, where untied ones learn to copy word by word.
        tie_word_embeddings=True,
        eos_token_id=TOKEN_IDS[TERMINATOR],
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    # On a CPU, 4096 tokens take 0.16 s a step with this loop over the experts, 0.4 s grouped and 2.5 s batched.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        # A direction that all words share: without one, no head can attend by position alone, whatever the word.
        model.model.embed_tokens.weight += 0.1 * torch.randn(config.hidden_size)
    return model


def build_optimizer(model: Qwen3MoeForCausalLM, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW with ten times the learning rate for the query and key norms, which set how sharp attention is."""
    norms = [p for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name]
    others = [p for name, p in model.named_parameters() if "q_norm" not in name and "k_norm" not in name]
    groups = [
        {"params": others, "lr": learning_rate, "weight_decay": 0.01},
        {"params": norms, "lr": 10 * learning_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def sample_batch(rng: random.Random, max_context: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of about `num_tokens` tokens in all, and the mask of the tokens that can be told from the context.

    A row lists its pairs once, up to `max_context` tokens, and then again and again in random order: each repeated
    pair is one question, so that a row trains on tens of answers where a prompt has one.
    """
    context = rng.randint(10, max_context)
    questions = min(2 * max_context, max(64, context // 2))
    rows, masks = [], []
    for _ in range(max(1, num_tokens // (context + questions))):
        pairs = [[TOKEN_IDS[token] for token in pair] for pair in sample_pairs(rng, context)]
        row = [token for pair in pairs for token in pair]
        mask = [False] * context
        while len(row) < context + questions:
            rng.shuffle(pairs)
            for pair in pairs:
                row += pair
                mask += [False] + [True] * (len(pair) - 1)  # which key comes next cannot be known
        rows.append(row[: context + questions])
        masks.append(mask[: context + questions])
    return torch.tensor(rows), torch.tensor(masks)


def train(model: Qwen3MoeForCausalLM, seed: int, steps: int, learning_rate: float, num_tokens: int) -> bool:
    """Train with contexts of at most 16 tokens, and double that whenever 90 % of the answer tokens are right.

    Returns whether the model went beyond the shortest context within PATIENCE steps; one that has not is given up.
    """
    rng = random.Random(f"recall training {seed}")
    optimizer = build_optimizer(model, learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    max_context, running_accuracy = SHORTEST_CONTEXT, 0.0
    progress = tqdm(range(steps), desc="training", unit="step")
    for step in progress:
        tokens, mask = sample_batch(rng, max_context, num_tokens)
        output = model(tokens, output_router_logits=True, use_cache=False)
        logits, targets = output.logits[:, :-1][mask[:, 1:]], tokens[:, 1:][mask[:, 1:]]
        loss = functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        # The auxiliary loss keeps all four experts in use.
        (loss + 0.01 * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running_accuracy = 0.9 * running_accuracy + 0.1 * (logits.argmax(-1) == targets).float().mean().item()
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}", accuracy=f"{running_accuracy:.4f}", context=max_context)
        if running_accuracy > 0.9 and max_context < MAX_TOKENS:
            max_context, running_accuracy = min(MAX_TOKENS, 2 * max_context), 0.0
        if step == PATIENCE and max_context == SHORTEST_CONTEXT:
            return False
    return True


@torch.no_grad()
def accuracy(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, prompts: list[RecallPrompt]) -> float:
    """Return the part of the prompts whose whole answer, terminator included, greedy decoding gets right.

    One pass over prompt and answer decides it: greedy decoding gives the answer exactly where each of its tokens is
    the most likely one after the ones before it.
    """
    rows = []
    for prompt in prompts:
        context = tokenizer.encode(prompt.text).ids
        rows.append((context, context + tokenizer.encode(prompt.answer + TERMINATOR).ids))
    rows.sort(key=lambda row: len(row[1]))
    right = 0
    for start in tqdm(range(0, len(rows), 16), desc=f"evaluating {str(model.dtype)[6:]}", leave=False):
        batch = rows[start : start + 16]
        width = len(batch[-1][1])
        # Padding on the right needs no attention mask: no token looks ahead.
        tokens = torch.tensor([row + [0] * (width - len(row)) for _, row in batch])
        guesses = model(tokens, use_cache=False).logits.argmax(-1).tolist()
        for (context, row), guess in zip(batch, guesses, strict=True):
            right += guess[len(context) - 1 : len(row) - 1] == row[len(context) :]
    return right / len(rows)


def save(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder, with one tensor per expert and projection, as `save_pretrained` does."""
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=TOKEN_IDS[TERMINATOR])
    model.save_pretrained(out)
    # The keys that Qwen3-MoE checkpoints on the hub have, which transformers 5 reads but no longer writes.
    config = json.loads((out / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "unk_token": UNKNOWN,
        "eos_token": TERMINATOR,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> int:
    """Train, evaluate and write; return 1 without writing where the accuracy is too low."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attempts", type=int, default=5, help="initialisations to try until one learns the task")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    # One thread: matrices this small gain nothing from two, which stall each other as soon as other programs run.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=2000, help="number of prompts to evaluate on")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    for attempt in range(args.attempts):
        seed = args.seed + 1_000_000 * attempt
        model = build_model(seed)
        if train(model, seed, args.steps, args.learning_rate, args.batch_tokens):
            break
        print(f"attempt {attempt + 1} of {args.attempts} learned nothing in {PATIENCE} steps", file=sys.stderr)
    print(f"trained {sum(p.numel() for p in model.parameters())} parameters in {time.perf_counter() - start:.0f} s")

    model.eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = sample_prompts(HELD_OUT_SEED, args.held_out)
    scores = {dtype: accuracy(model.to(dtype), tokenizer, prompts) for dtype in (torch.float32, torch.bfloat16)}  # type: ignore[arg-type]
    for dtype, score in scores.items():
        print(f"{str(dtype)[6:]}: {score:.2%} of {len(prompts)} held-out prompts right")
    if min(scores.values()) < REQUIRED_ACCURACY:
        print(f"below {REQUIRED_ACCURACY:.0%}: nothing is written", file=sys.stderr)
        return 1
    model.to(torch.float32)  # type: ignore[arg-type]
    model.load_state_dict(weights)
    save(model, tokenizer, args.out)
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
