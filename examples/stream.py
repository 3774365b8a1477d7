"""The engine with streaming: requests arrive while others run, and each prints its tokens as they come.

    python examples/stream.py [FOLDER]

FOLDER is a checkpoint in Hugging Face's format. The default is the bundled one: it reads keys with values, then
one of the keys again, and answers with the value.
"""

import asyncio
import sys

from paged import AsyncEngine, ChatTokenizer, Engine, EngineConfig, LlmExecutor, SamplingParams

folder = sys.argv[1] if len(sys.argv) > 1 else "models/recall"
PROMPTS = [
    "otter: brass lantern; wren: kite; otter:",
    "zebra: green wild compass; lynx: ladder; lynx:",
    "wren: pipe; wren:",
]


async def main() -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    executor = LlmExecutor.from_pretrained(folder, num_blocks=256)
    engine = Engine(executor, EngineConfig(token_budget=512), tokenizer=tokenizer)
    async with AsyncEngine(engine) as server:

        async def answer(prompt: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)  # the others are running already
            params = SamplingParams(temperature=0, max_tokens=8)
            async for output in server.generate(tokenizer.encode(prompt), params, deltas=True):
                print(f"{prompt!r}: {output.outputs[0].text!r}", "" if not output.finished else output.metrics)

        await asyncio.gather(*(answer(prompt, 0.05 * index) for index, prompt in enumerate(PROMPTS)))


asyncio.run(main())
