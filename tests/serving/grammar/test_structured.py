"""Grammars beside xgrammar's own matcher, over two kinds of vocabularies; hostile ones; the cache of compiled ones."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paged import InvalidInputError
from paged.serving.grammar.structured import GrammarCompiler, GrammarLimitError
from tests.deadline import HANG_S
from tests.processes import branches_of, wait_until

pytest.importorskip("xgrammar", reason="needs the extra serve")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PROCESS = "paged.serving.grammar.grammar_process"
END = 256
VOCABULARY = 288  # more rows than the tokenizer has tokens


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


@pytest.mark.parametrize(
    ("kind", "grammar", "is_right"),
    [
        ("json", SCHEMA, lambda text: set(json.loads(text)) == {"a", "b"} and json.loads(text)["b"] in ("x", "yy")),
        ("regex", "[a-c]{2,4}-\\d", lambda text: 4 <= len(text) <= 6 and text[-2] == "-" and text[-1].isdigit()),
        ("choice", ["ja", 'n"ein', "ü"], lambda text: text in ("ja", 'n"ein', "ü")),
    ],
)
def test_ways_through_a_grammar(kind: Any, grammar: Any, is_right: Any) -> None:
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END])
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
        ("regex", None),
        ("regex", ["ab"]),
        ("grammar", None),
        ("grammar", "root ::= nothing"),
        ("choice", []),
        ("choice", "a"),
        ("xml", "a"),
    ],
)
def test_malformed_grammars_are_refused(kind: Any, grammar: Any) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END])
    with pytest.raises(InvalidInputError, match=kind):
        asyncio.run(compiler.compile(kind, grammar, seconds=HANG_S))


def test_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END], max_cached=2)
    compiled: list[str] = []
    may_end = asyncio.Event()
    original = compiler._compile

    async def count(vocabulary: Any, kind: str, text: str, *limits: float) -> Any:
        compiled.append(text)
        if text == "slow":
            await may_end.wait()
        return await original(vocabulary, kind, text, *limits)

    monkeypatch.setattr(compiler, "_compile", count)

    async def run() -> None:
        both = await asyncio.gather(*(compiler.compile("regex", "a", seconds=HANG_S) for _ in range(2)))
        assert both[0] is not both[1]
        for text in ("b", "a", "c", "a", "b"):
            await compiler.compile("regex", text, seconds=HANG_S)
        other = asyncio.create_task(compiler.compile("regex", "slow", seconds=HANG_S))
        with pytest.raises(TimeoutError):  # who leaves does not end it for the other
            await asyncio.wait_for(compiler.compile("regex", "slow", seconds=HANG_S), 0.1)
        may_end.set()
        assert await other is not None

    asyncio.run(run())
    assert compiled == ["a", "b", "c", "b", "slow"]


def slow_tag(num_properties: int) -> dict[str, Any]:
    """A tag that only xgrammar reads, whose schema takes it seconds."""
    schema = {"type": "object", "properties": {f"p{index}": {} for index in range(num_properties)}}
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    return {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_grammars_that_take_too_long_leave_the_others() -> None:
    """Clients come in turn, and a grammar that takes long gives way, so others need not wait for twenty of them."""
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END])
    hostile = [slow_tag(1900 - number) for number in range(20)]

    async def run() -> set[int]:
        await compiler.compile("regex", "first")
        before = branches_of(PROCESS)
        tasks = []
        for tag in hostile:
            tasks.append(asyncio.create_task(compiler.compile("structural_tag", tag, seconds=3600, client="hostile")))
        await asyncio.sleep(0.1)
        innocent = await asyncio.gather(*(compiler.compile("regex", f"a{n}", seconds=60) for n in range(6)))
        assert [allowed(matcher) for matcher in innocent] == [[64]] * 6
        assert len(branches_of(PROCESS) - before) <= 8 + 4 + 6 + sum(task.done() for task in tasks)
        assert not all(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return before

    before = asyncio.run(run())
    wait_until(lambda: len(branches_of(PROCESS) - before) < 6 + 20)


def test_grammars_wait_for_each_other() -> None:
    """A hundred at once are all compiled; where more wait than may, the newest of the client with most is refused."""
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END], max_waiting=60)

    async def compiled(number: int, client: str) -> Any:
        schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
        try:
            return await compiler.compile("json", schema, seconds=HANG_S, client=client)
        except GrammarLimitError as error:
            return str(error)

    async def run() -> list[Any]:
        await compiler.compile("regex", "first")
        first = [asyncio.create_task(compiled(number, "first")) for number in range(68)]  # 8 run, 60 wait
        await asyncio.sleep(0)
        second = [asyncio.create_task(compiled(number, "second")) for number in range(100, 120)]
        return await asyncio.gather(*first, *second)

    answers = asyncio.run(run())
    is_refused = [isinstance(answer, str) for answer in answers]
    assert sum(is_refused) <= 20
    assert not any(is_refused[:48])
    assert not any(is_refused[68:])


def ambiguous(rng: random.Random) -> str:
    """A grammar that reads any number of letters a in very many ways, with more of them after every letter."""
    count, steps = rng.randint(24, 40), [rng.randint(1, 20) for _ in range(2)]
    choices = " | ".join(f"x{index} s x{index}" for index in range(count))
    lines = ["root ::= s", f's ::= {choices} | ""']
    for index in range(count):
        others = [f"x{(index + step) % count}" for step in steps]
        lines.append(
            f'x{index} ::= {rng.choice(["", chr(34) + "b" + chr(34) + "? "])}"a"? "a"? {others[0]}? | {others[1]}? "a"?'
        )
    return "\n".join(lines)


def follow(matcher: Any, token: int, rng: random.Random) -> Any:
    """Accept a token 200 times, now and then after a rollback or by a fork."""
    for _ in range(200):
        assert matcher.accept_token(token)
        assert token in allowed(matcher)
        if rng.random() < 0.3:
            matcher.rollback(1)
        if rng.random() < 0.3:
            matcher = matcher.fork()
    return matcher


@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_that_takes_too_long_for_a_token_ends(seed: int) -> None:
    """Random ambiguous grammars, in every state that rollback and fork leave; others go on."""
    rng, letter = random.Random(seed), byte_tokenizer().encode("a").ids[0]
    compiler = GrammarCompiler(byte_tokenizer(), VOCABULARY, [END], token_seconds=0.005)
    matcher = asyncio.run(compiler.compile("grammar", ambiguous(rng), seconds=60))
    with pytest.raises(GrammarLimitError, match="5 ms a token"):
        follow(matcher, letter, rng)
    honest = asyncio.run(compiler.compile("regex", "(a|aa)*"))
    assert letter in allowed(follow(honest, letter, rng))
