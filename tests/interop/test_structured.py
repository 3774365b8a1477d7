"""Grammars beside xgrammar's own matcher, over two kinds of vocabularies; hostile ones; the cache of compiled ones."""

import asyncio
import json
import random
import threading
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paged import InvalidInputError
from paged.interop.structured import GrammarCompiler
from tests.deadline import HANG_S

pytest.importorskip("xgrammar", reason="needs the extra serve")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
END = 256
VOCABULARY = 288  # more rows than the tokenizer has tokens
BACKENDS: list[Literal["xgrammar", "llguidance"]] = ["xgrammar", "llguidance"]


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def allowed(matcher: Any) -> list[int]:
    mask = torch.full((2, VOCABULARY // 32), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask, 1)
    assert (mask[0] == -1).all()
    words = mask[1].tolist()
    return [token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1]


def sample(matcher: Any, seed: int, most: int = 200) -> list[int]:
    """A random way through a grammar, with a detour that is rolled back."""
    rng, tokens = random.Random(seed), list[int]()
    while not matcher.is_terminated() and len(tokens) < most:
        choices = allowed(matcher)
        detour = matcher.fork()
        if (step := rng.choice(choices)) != END:
            assert matcher.accept_token(step)
            matcher.rollback(1)
        assert allowed(matcher) == choices == allowed(detour)
        ends = [token for token in choices if token == END]
        tokens.append(ends[0] if ends else rng.choice(choices))
        assert matcher.accept_token(tokens[-1])
    return tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "grammar", "is_right"),
    [
        ("json", SCHEMA, lambda text: set(json.loads(text)) == {"a", "b"} and json.loads(text)["b"] in ("x", "yy")),
        ("regex", "[a-c]{2,4}-\\d", lambda text: 4 <= len(text) <= 6 and text[-2] == "-" and text[-1].isdigit()),
        ("choice", ["ja", 'n"ein', "ü"], lambda text: text in ("ja", 'n"ein', "ü")),
    ],
)
def test_ways_through_a_grammar(backend: Any, kind: Any, grammar: Any, is_right: Any) -> None:
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END], backend=backend)
    for seed in range(5):
        tokens = sample(asyncio.run(compiler.compile(kind, grammar, seconds=HANG_S)), seed)
        assert tokens[-1] == END
        assert is_right(tokenizer.decode(tokens)), tokenizer.decode(tokens)


def test_masks_are_xgrammars_own() -> None:
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    info = xgrammar.TokenizerInfo.from_huggingface(theirs, vocab_size=VOCABULARY, stop_token_ids=[END])
    grammar = 'root ::= "a" [b-d]* ("\\n" | root)'
    own = asyncio.run(GrammarCompiler(tokenizer, VOCABULARY, [END]).compile("grammar", grammar, seconds=HANG_S))
    other = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    rng = random.Random(1)
    for _ in range(50):
        choices = allowed(own)
        assert choices == allowed(other)
        token = rng.choice([one for one in choices if one != END] or [END])
        assert own.accept_token(token)
        assert other.accept_token(token)
        if own.is_terminated():
            break


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("json", {"properties": {f"p{index}": {} for index in range(2048)}}),
        ("json", DEEP),
        ("json", {"enum": ["a" * (1 << 17)]}),
        ("json", "{"),
        ("json", {"type": "nothing"}),
        ("json", {"$ref": "#/nowhere"}),
        ("regex", "(a"),
        ("grammar", "root ::= nothing"),
        ("choice", []),
        ("choice", "a"),
        ("xml", "a"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_malformed_grammars_are_refused(kind: Any, grammar: Any, backend: Any) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END], backend=backend)
    with pytest.raises(InvalidInputError, match=kind):
        asyncio.run(compiler.compile(kind, grammar, seconds=HANG_S))


def test_compiled_grammars_are_kept_and_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END], max_cached=2)
    compiled: list[str] = []
    may_end = threading.Event()
    original = compiler._compiled

    def count(kind: str, text: str) -> Any:
        compiled.append(text)
        if text == "slow":
            assert may_end.wait(HANG_S)
        return original(kind, text)

    monkeypatch.setattr(compiler, "_compiled", count)

    async def run() -> None:
        both = await asyncio.gather(*(compiler.compile("regex", "a", seconds=HANG_S) for _ in range(2)))
        assert both[0] is not both[1]
        for text in ("b", "a", "c", "a", "b"):
            await compiler.compile("regex", text, seconds=HANG_S)
        with pytest.raises(InvalidInputError, match=r"within 0\.1 s"):
            await compiler.compile("regex", "slow", seconds=0.1)
        may_end.set()
        assert await compiler.compile("regex", "slow", seconds=HANG_S) is not None

    asyncio.run(run())
    assert compiled == ["a", "b", "c", "b", "slow"]
