"""transformers' own modules over several processes, split by their plans."""

from pathlib import Path

import pytest

from paged.errors import UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.step.batch import UnifiedBatchItem
from tests.executors.parallel.followers import OPTIONS, Followers
from tests.executors.parallel.spread import PROMPT, Case
from tests.models.families import Families, save_checkpoint

SPLIT = Families(
    gpt_neox="GPTNeoX attention_bias=True",  # a fused projection of q, k and v, with biases
    granite_swa="GraniteSWA",  # sinks
    mixtral="Mixtral",
    phi="Phi vocab_size=131",  # a bias of the head, whose rows are not even
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path, followers: Followers) -> None:
    save_checkpoint(SPLIT[name], tmp_path)
    options = OPTIONS | {"model_impl": "transformers"}
    with followers.load(tmp_path, 2, **options) as spread:
        case = Case(LlmExecutor.from_pretrained(tmp_path, **options), spread)
        held, whole = (executor.model.parameter_bytes() for executor in (spread, case.alone))
        assert held < 0.8 * whole
        case.same(UnifiedBatchItem("a", PROMPT[:12]), UnifiedBatchItem("b", PROMPT[:9], is_final_chunk=False))
        case.same(UnifiedBatchItem("a", [5], pos_offset=12), UnifiedBatchItem("b", PROMPT[9:], pos_offset=9))


def test_a_module_without_a_plan_is_refused(tmp_path: Path, followers: Followers) -> None:
    save_checkpoint(Families(opt="OPT ffn_dim=96 word_embed_proj_dim=64")["opt"], tmp_path)
    message = "tensor_parallel_size 2: transformers' plan of OPTForCausalLM does not split the head"
    with pytest.raises(UnsupportedError, match=message):
        followers.order(tmp_path, 2, {}, OPTIONS)
    assert message in followers.answers(2)[0]
