"""PromptLookup continues the longest run of last tokens."""

from paged import PromptLookup, SamplingParams
from tests.executors.sampling.completions import completion


def test_lookup_continues_the_longest_run() -> None:
    lookup = PromptLookup(num_tokens=3, max_ngram=2)
    text = completion(SamplingParams(max_tokens=99), [5, 6, 7, 8, 9, 6, 7])
    assert lookup.propose([text], [9]).token_ids == [[8, 9, 6]]
    assert lookup.propose([text], [2]).token_ids == [[8, 9]]
    text.token_ids += [8, 1]
    assert lookup.propose([text], [9]).token_ids == [[]]
    text.token_ids += [7]
    assert lookup.propose([text], [9]).token_ids == [[8, 1, 7]], "where the run stood last"
    other = completion(SamplingParams(max_tokens=99), [4])
    assert lookup.propose([other, text], [9, 0]).token_ids == [[], []]
    lookup.forget(text)
    lookup.forget(other)
