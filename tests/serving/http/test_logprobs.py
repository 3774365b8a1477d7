"""Log probabilities of answers: bytes join to the content, offsets are exact, and alternatives are as many as asked."""

import random
from itertools import chain
from typing import Any

import openai
import pytest
import tokenizers

from paged import ChatTokenizer
from paged.executors.requests.output import CompletionOutput, Growth
from paged.executors.text.detokenizer import Detokenizer
from paged.serving.text.chat_template import ChatTemplate
from paged.serving.text.token_texts import TokenReader, TokenTexts
from tests.serving.grammar.test_structured import byte_tokenizer
from tests.serving.http.test_chat import untrained
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import MESSAGES, PROMPT
from tests.serving.served import Served

__all__ = ["untrained"]


def word_tokenizer() -> tokenizers.Tokenizer:
    """Words with a space before all but the first, and a token that is not shown."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "bb": 2, "\u65e5": 3}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<end>"])
    return tokenizer


def piece_tokenizer() -> tokenizers.Tokenizer:
    """SentencePiece's spaces, and its tokens for bytes."""
    pieces = ["<unk>", "\u2581a", "b", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer, "words": word_tokenizer, "pieces": piece_tokenizer}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_join_to_any_text(kind: str) -> None:
    """Random tokens, as characters in parts and as bytes of none, in any pieces: bytes join, and offsets are exact."""
    tokenizer = ChatTokenizer(TOKENIZERS[kind](), ChatTemplate({}, {}, "here"))
    texts, size = TokenTexts(tokenizer), tokenizer.tokenizer.get_vocab_size()
    whole_bytes = {byte: texts.bytes(byte) for byte in range(size)}
    rng = random.Random(kind)
    for _ in range(300):
        characters = "".join(rng.choices("ab \u65e5\u00e9\U0001f600", k=5))
        ids = tokenizer.encode(characters) + rng.choices(range(size), k=rng.randrange(4))
        engine, shown = Detokenizer(tokenizer), list[str]()
        reader = TokenReader(texts, tokenizer, 7)
        growth, rows, begin = Growth([], [], []), [], CompletionOutput(0).mark
        cuts = sorted({*rng.choices(range(1, len(ids) + 1), k=3), len(ids)})
        for end in cuts:
            for token in ids[len(growth.token_ids) : end]:
                growth.token_ids.append(token)
                growth.logprobs.append({token: -1.0})
                growth.texts.append(engine.read(ids, len(growth.token_ids), is_last=len(growth.token_ids) == len(ids)))
            part = CompletionOutput(0, growth, "length" if end == len(ids) else None).since(begin)
            shown.append(part.text)
            begin = part.mark
            rows += reader.read(part)
            assert "".join(shown).encode().startswith(b"".join(row.bytes for row in rows)), "no token before its text"
        text = "".join(shown)
        assert [row.token for row in rows] == ids
        assert b"".join(row.bytes for row in rows) == text.encode()
        before = 0
        for row in rows:
            assert row.offset == 7 + len(text.encode()[:before].decode(errors="ignore"))
            before += len(row.bytes)
        if "\N{REPLACEMENT CHARACTER}" not in text and kind == "bytes":
            assert [row.bytes for row in rows if texts.is_shown(row.token)] == [
                whole_bytes[token] for token in ids if texts.is_shown(token)
            ]


def test_text_behind_a_stop_string_belongs_to_no_token() -> None:
    """A token that may begin one waits; what of it is not shown is in no bytes."""
    tokenizer = ChatTokenizer(byte_tokenizer(), ChatTemplate({}, {}, "here"))
    ids = tokenizer.encode("abcd")
    reader = TokenReader(TokenTexts(tokenizer), tokenizer)
    growth = Growth(ids[:3], ["a"], [{token: -1.0} for token in ids[:3]])  # "bc" is held back
    first = CompletionOutput(0, growth).since(CompletionOutput(0).mark)
    assert [row.bytes for row in reader.read(first)] == [b"a"]
    growth.token_ids.append(ids[3])
    growth.logprobs.append({ids[3]: -1.0})  # type: ignore[union-attr]
    growth.texts.append("b")  # and "cd" was one
    last = CompletionOutput(0, growth, "stop", "cd").since(first.mark)
    assert [row.bytes for row in reader.read(last)] == [b"b", b"", b""]


@pytest.mark.parametrize("top", [None, 0, 3])
def test_chat_logprobs(top: int | None, untrained: Served) -> None:
    """Whole and streamed, of any bytes, and with strings that stop it."""
    client = openai.OpenAI(base_url=f"{untrained.url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "recall", "messages": MESSAGES, "logprobs": True, "temperature": 3, "n": 4, "seed": 1}
    given |= {"max_tokens": 40, "stop": ["a", "\x07e", "\u00e9"]} | ({} if top is None else {"top_logprobs": top})
    whole = client.chat.completions.create(**given)
    joined: list[list[Any]] = [[], [], [], []]
    for event in client.chat.completions.create(**given, stream=True):
        for part in event.choices:
            joined[part.index] += (part.logprobs and part.logprobs.content) or ()
    for choice in whole.choices:
        content: Any = choice.logprobs.content  # type: ignore[union-attr]
        text = choice.message.content or ""
        assert bytes(chain.from_iterable(one.bytes for one in content)) == text.encode()
        assert {len(one.top_logprobs) for one in content} == {top or 0}
        for one in content:
            values = [other.logprob for other in one.top_logprobs]
            assert values == sorted(values, reverse=True)
        assert [one.token for one in joined[choice.index]] == [one.token for one in content]
        assert [one.bytes for one in joined[choice.index]] == [one.bytes for one in content]
    assert whole.usage is not None
    assert sum(len(choice.logprobs.content or ()) for choice in whole.choices) == whole.usage.completion_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("prompt", [PROMPT, "otter:  brass\n lantern;   otter:", [1, 5, 9, 5]])
def test_offsets_of_completions(prompt: Any, logprobs: int, served: Served) -> None:
    """Each token's text lies at its offset, in prompts with other spaces too, and the last one ends the text."""
    body = {"prompt": prompt, "echo": True, "n": 2, "logprobs": logprobs, "temperature": 1.5, "max_tokens": 9}
    status, _, answer = ask(served, "/v1/completions", body | {"ignore_eos": True, "min_tokens": 9})
    assert status == 200, answer
    for choice in answer["choices"]:
        text, found = choice["text"], choice["logprobs"]
        ends = [*found["text_offset"][1:], len(text)]
        spans = [text[begin:end] for begin, end in zip(found["text_offset"], ends, strict=True)]
        assert [span.strip() for span in spans] == [token.strip() for token in found["tokens"]]
        assert "".join(spans) == text
        if not logprobs:
            assert found["top_logprobs"] is None
        else:
            assert {len(row) for row in found["top_logprobs"][1:]} <= {2, 3}
            assert all(token in row for token, row in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


def test_prompts_rows_are_written_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of n choices."""
    counts = []
    for n in (1, 32):
        calls = 0
        text = TokenTexts.text

        def counted(self: Any, token: int, *, is_first: bool = False, text: Any = text) -> str:
            nonlocal calls
            calls += 1
            return str(text(self, token, is_first=is_first))

        with monkeypatch.context() as patched:
            patched.setattr(TokenTexts, "text", counted)
            body = {"prompt": PROMPT * 20, "echo": True, "logprobs": 20, "n": n, "max_tokens": 1, "ignore_eos": True}
            status, _, answer = ask(served, "/v1/completions", body)
        assert status == 200, answer
        rows = [choice["logprobs"]["top_logprobs"][:-1] for choice in answer["choices"]]
        assert rows == [rows[0]] * n
        counts.append(calls)
    assert counts[1] < 2 * counts[0]


def test_echoed_tokens_count(served: Served) -> None:
    """A request cannot make the server write more prompts than it may ask for new tokens."""
    body = {"prompt": PROMPT * 100, "echo": True, "n": 128, "max_tokens": 1}
    status, _, answer = ask(served, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "echo")
