"""Prompts that are texts or messages."""

import asyncio
import threading
from typing import Any

import pytest

from paged import AsyncEngine, ChatTokenizer, Engine, InvalidInputError, LlmExecutor, SamplingParams
from paged.serving.command_line.cli import RECALL
from paged.serving.text.chat_template import ChatTemplate
from tests.deadline import HANG_S
from tests.executors.engine_cases import TOKENIZER, check_empty, recall_prompts, tokens_of
from tests.serving.text.checkpoints import tokenizer_of_bytes

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
FIVE = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """That of the bundled checkpoint, with a chat template."""
    return ChatTokenizer(TOKENIZER, ChatTemplate({"default": CHAT}, {}, "test"))


def make_engine(tokenizer: Any) -> Engine:
    return Engine(LlmExecutor.from_pretrained(RECALL, num_blocks=64), tokenizer=tokenizer)


def test_texts_and_messages_among_token_ids(tokenizer: ChatTokenizer) -> None:
    engine, questions = make_engine(tokenizer), recall_prompts(3)
    ids = [tokenizer.encode(question.text) for question in questions]
    chats = [[{"role": "user", "content": text} for text in (one.text[:9], one.text[9:])] for one in questions]
    prompts: list[Any] = [questions[0].text, chats[1], ids[2], tuple(chats[0])]
    outputs = engine.generate(prompts, FIVE, progress=False)
    assert [output.prompt_token_ids for output in outputs] == [*ids, ids[0]]
    assert [output.outputs[0].text.strip()[:3] for output in outputs[:3]] == [one.answer[:3] for one in questions]
    assert [*engine.stream(questions[0].text, FIVE)][-1].outputs[0].token_ids == tokens_of(outputs)[0]
    assert engine.embed(prompts[:2]).equal(engine.embed(ids[:2]))
    assert engine.beam_search(chats[0], 2, 3) == engine.beam_search(ids[0], 2, 3)
    check_empty(engine)


def test_special_tokens_in_texts_are_plain() -> None:
    """The one that begins a text is the tokenizer's own."""
    template = ChatTemplate({"default": CHAT}, {}, "test")
    engine = make_engine(ChatTokenizer(tokenizer_of_bytes(), template))
    assert len(engine.encode_prompt("<eos>")) == 1 + len("<eos>")
    assert len(engine.encode_prompt([{"role": "user", "content": "<eos>"}])) == len("<eos>")


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "text"}]])
def test_without_a_tokenizer_that_encodes(prompt: Any) -> None:
    """One of `tokenizers` would take special tokens in a text for special."""
    for tokenizer in (None, TOKENIZER):
        engine = make_engine(tokenizer)
        with pytest.raises(InvalidInputError, match="ChatTokenizer"):
            engine.generate([[1], prompt], FIVE, progress=False)
        check_empty(engine)


def test_what_the_tokenizer_refuses(tokenizer: ChatTokenizer) -> None:
    engine = make_engine(tokenizer)
    for prompt in ("", "\ud800", [{"role": "user", "content": object()}]):
        with pytest.raises(InvalidInputError):
            engine.add_request(prompt, FIVE)
    check_empty(engine)


def test_encoding_holds_up_neither_steps_nor_the_event_loop(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that takes long to encode, while a request runs and ends."""
    engine, asked, may_go = make_engine(tokenizer), threading.Event(), threading.Event()
    encode = ChatTokenizer.encode

    def slowly(self: ChatTokenizer, text: str) -> list[int]:
        asked.set()
        assert may_go.wait(HANG_S)
        return encode(self, text)

    monkeypatch.setattr(ChatTokenizer, "encode", slowly)

    async def main() -> None:
        async with AsyncEngine(engine) as server:
            late = asyncio.ensure_future(_run(server, "otter: kite; otter:"))
            await asyncio.to_thread(asked.wait, HANG_S)
            early = await _run(server, [5, 6, 7])
            assert not late.done()
            left = asyncio.ensure_future(server.embed(["otter"]))
            await asyncio.sleep(0)
            left.cancel()
            may_go.set()
            assert len((await late).outputs[0].token_ids) == len(early.outputs[0].token_ids) == 5
            with pytest.raises(asyncio.CancelledError):
                await left

    asyncio.run(main())
    check_empty(engine)


async def _run(server: AsyncEngine, prompt: Any) -> Any:
    return [output async for output in server.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True))][-1]
