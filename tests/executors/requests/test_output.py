"""RequestOutput: copies keep their moment."""

import torch

from paged import Engine, SamplingParams
from tests.executors.oracle import make_executor


def test_a_copy_keeps_a_moment(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    output = engine.add_request([1], SamplingParams(temperature=0, max_tokens=5, logprobs=1))
    moments = []
    while not output.finished:
        engine.step()
        moments.append(output.copy())
    assert [len(one.outputs[0].token_ids) for one in moments] == [1, 2, 3, 4, 5]
    assert [len(one.outputs[0].logprobs or ()) for one in moments] == [1, 2, 3, 4, 5]
    news = moments[3].since([moments[1].outputs[0].mark])
    assert news.outputs[0].token_ids == output.outputs[0].token_ids[2:4]
    assert moments[0].copy().outputs[0].token_ids == moments[0].outputs[0].token_ids
