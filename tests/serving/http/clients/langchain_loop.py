"""LangChain's OpenAI provider: for each line of the input, print the calls of three turns, one of them a stream.

python langchain_loop.py URL PROMPT
"""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

URL, PROMPT = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
model = ChatOpenAI(model="recall", base_url=f"{URL}/v1", api_key="none", temperature=0, max_retries=0)
model = model.bind_tools([TOOL])
for _ in sys.stdin:
    messages = [HumanMessage(PROMPT)]
    calls = []
    for turn in range(3):
        if turn == 1:
            chunks = list(model.stream(messages))
            answer = chunks[0]
            for chunk in chunks[1:]:
                answer += chunk
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            calls.append([call["name"], call["args"]])
            messages.append(ToolMessage(PROMPT, tool_call_id=call["id"]))
    print(json.dumps(calls), flush=True)
