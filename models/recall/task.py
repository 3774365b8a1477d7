"""The recall task of the bundled demo checkpoint: a line of random keys with their values, then one key again.

A prompt reads "otter: brass lantern; wren: kite; ... ; otter:" and its answer is "brass lantern", ended by ";".
Every word is one token, and so is every ";"; a key and its colon are one token. No word occurs twice in the pairs of a
prompt, so each word of an answer is at exactly one position of the context. A KV cache that loses the block of this
position, or reads another prompt's block, gives a wrong answer.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

MAX_TOKENS = 512
# Words of the checkpoint's tokenizer, in order of their ids: unknown word, terminator of a value, keys with their
# colons, adjectives, nouns.
_IDS: dict[str, int] = json.loads(Path(__file__).with_name("tokenizer.json").read_text())["model"]["vocab"]
_, TERMINATOR, *_WORDS = sorted(_IDS, key=_IDS.__getitem__)
KEYS = [word for word in _WORDS if word.endswith(":")]
_FIRST_NOUN = _WORDS.index("acorn")
ADJECTIVES, NOUNS = _WORDS[len(KEYS) : _FIRST_NOUN], _WORDS[_FIRST_NOUN:]


@dataclass(frozen=True)
class RecallPrompt:
    """A line that ends in a key and a colon, and the value of that key earlier in the line."""

    text: str
    answer: str


def sample_pairs(rng: random.Random, num_tokens: int) -> list[list[str]]:
    """Return pairs of exactly `num_tokens` tokens in all: each a key, a noun after 0 to 2 adjectives, a terminator."""
    if num_tokens < 3 or num_tokens > MAX_TOKENS:
        raise ValueError(f"the number of tokens must be 3 to {MAX_TOKENS}, not {num_tokens}")
    while True:
        counts: list[int] = []  # adjectives of each pair
        unused = num_tokens
        while unused:
            # After a pair, there must be no tokens left, or enough for another pair.
            fitting = [count for count in range(3) if unused - 3 - count == 0 or unused - 3 - count >= 3]
            counts.append(rng.choice(fitting))
            unused -= 3 + counts[-1]
        # Draw again if the prompt needs more words than exist. This is rare: the longest has 128 pairs on average.
        if len(counts) <= min(len(KEYS), len(NOUNS)) and sum(counts) <= len(ADJECTIVES):
            break
    keys, nouns = rng.sample(KEYS, len(counts)), rng.sample(NOUNS, len(counts))
    adjectives = rng.sample(ADJECTIVES, sum(counts))
    pairs = []
    start = 0
    for key, noun, count in zip(keys, nouns, counts, strict=True):
        pairs.append([key, *adjectives[start : start + count], noun, TERMINATOR])
        start += count
    return pairs


def sample_prompt(rng: random.Random, num_tokens: int) -> RecallPrompt:
    """Return a random prompt of exactly `num_tokens` tokens (4 to 512) that asks for the value of one pair."""
    pairs = sample_pairs(rng, num_tokens - 1)
    asked = rng.choice(pairs)
    context = " ".join(" ".join(pair[:-1]) + TERMINATOR for pair in pairs)
    return RecallPrompt(text=f"{context} {asked[0]}", answer=" ".join(asked[1:-1]))


def sample_prompts(seed: int, count: int, min_tokens: int = 16, max_tokens: int = MAX_TOKENS) -> list[RecallPrompt]:
    """Return `count` prompts, the same for the same seed, with lengths uniform between the two token counts."""
    # A string as seed keeps this stream apart from the trainer's stream.
    rng = random.Random(f"recall prompts {seed}")
    return [sample_prompt(rng, rng.randint(min_tokens, max_tokens)) for _ in range(count)]
