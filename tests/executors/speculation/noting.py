"""A proposer that notes what another one drafts."""

from collections.abc import Sequence

from paged.cache.manager import PagedKvCacheManager
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Drafts
from paged.executors.speculation.drafting import Proposer


class NotingProposer:
    """Passes all calls to `proposer`. drafted: the drafts that each text got, by its tokens."""

    def __init__(self, proposer: Proposer) -> None:
        self.num_tokens, self.vocab_size = proposer.num_tokens, proposer.vocab_size
        self.drafted: dict[tuple[int, ...], list[int]] = {}
        self._proposer = proposer

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        drafts = self._proposer.propose(completions, limits)
        for completion, token_ids in zip(completions, drafts.token_ids, strict=True):
            self.drafted[tuple(completion.tokens_from(0))] = token_ids
        return drafts

    def forget(self, completion: Completion) -> None:
        self._proposer.forget(completion)

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        return self._proposer.make_room(manager)
