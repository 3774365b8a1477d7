"""What the oracle answers to the prompts of most engine tests, at ten greedy tokens each, and what parrots do."""

from tests.executors.engine_cases import PROMPTS, expected_tokens
from tests.executors.parrot import parrot_logits

ANSWERS = [expected_tokens(prompt, 10) for prompt in PROMPTS]


def parrot_tokens(prompt: list[int], count: int) -> list[int]:
    """A parrot's greedy answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(parrot_logits(tokens).argmax()))
    return tokens[len(prompt) :]
