"""Engine with continuous batching: requests come and go, and each step runs all that can run in one forward."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

import torch

from paged.cache.pins import PinnedPrefix
from paged.cache.retention import Retention
from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.engine.beam_search import BeamOutput, search_beams
from paged.executors.engine.config import EngineConfig, QueueFullError
from paged.executors.engine.core import EngineCore
from paged.executors.engine.embedding import Pooling, completion_logprobs, embed_prompts
from paged.executors.engine.metrics import EngineStatus
from paged.executors.engine.prompt_checks import Prompt, PromptChecks
from paged.executors.model_executor import ModelExecutor, check_capture, lora_loader
from paged.executors.progress import progress_bar
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, whole_chunks
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.requests.token_rules import LogitsProcessor, TextEnd, TokenMask
from paged.executors.sampling.noise import completion_seeds
from paged.executors.speculation.drafting import Proposer
from paged.executors.text.detokenizer import Tokenizer
from paged.executors.unified_executor import UnifiedExecutor
from paged.kernels.core.errors import as_bool, as_float, as_int, shown
from paged.kernels.core.launch import serving_begins
from paged.prompt_embeds import PromptEmbeds
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import as_token_ids
from paged.tools.picture import CachePicture, cache_picture

R = TypeVar("R")

_DEFAULT_PARAMS = SamplingParams()
_ONE_TOKEN = SamplingParams(max_tokens=1)
# Largest absolute value of a priority. It catches mistakes and keeps products with `priority_requests` small.
_MAX_PRIORITY = 1 << 31
# Fields of `CacheStats` that are in `EngineStatus`.
_CACHE_COUNTS = ("used_blocks", "num_blocks", "retained_blocks", "pinned_blocks")
_UINT64_MAX = (1 << 64) - 1


class Engine(EngineCore):
    """Runs requests on any `ModelExecutor`: chunked prefill with decodes, prefix caching, preemption, speculation.

    If the executor has a cache manager, requests share prefixes, fork and swap; otherwise every prompt is computed in
    full. If a completion's forward fails, only this completion ends, see `Recovery`. Not thread-safe; use
    `AsyncEngine` with threads.

    Args:
        config: policy; None for the defaults.
        tokenizer: makes output texts and finds stop strings; a `ChatTokenizer` also encodes texts and messages.
        eos_token_ids: tokens that end every request without ignore_eos. None for the checkpoint's tokens
            (`ModelInfo.eos_token_ids`), () for none.
        proposer: drafts tokens, which the executor verifies several at a time.
        seed: source of the seeds of requests without a seed; None draws one.

    Raises:
        InvalidInputError: the token budget is too small for one sequence with its drafts, the proposer has another
            vocabulary, or an end token or the seed is out of range.
        UnsupportedError: a proposer is given, but the executor cannot roll tokens back.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        proposer: Proposer | None = None,
        seed: int | None = None,
    ) -> None:
        if config is None:
            config = EngineConfig()
        super().__init__(executor, config, proposer)
        self._prompts = PromptChecks(executor, config, tokenizer)
        info = executor.info()
        if eos_token_ids is None:
            # Ignore end tokens of the checkpoint that are outside its vocabulary.
            self._eos_token_ids = frozenset(token for token in info.eos_token_ids if token < info.vocab_size)
        else:
            self._eos_token_ids = frozenset(as_token_ids("eos_token_ids", eos_token_ids, may_be_set=True))
            self._prompts.check_ids("eos_token_ids", sorted(self._eos_token_ids))
        if seed is None:
            seed = secrets.randbits(64)
        self._seed = as_int("seed", seed, low=-(1 << 63), high=_UINT64_MAX)
        self._arrivals = itertools.count()
        # A unique name, because several engines and other callers may share the executor's cache.
        self._name = f"engine-{secrets.token_hex(8)}"
        serving_begins()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    def status(self) -> EngineStatus:
        """Return the counts of the queue, running sequences and cache blocks."""
        scheduler, manager = self._scheduler, self.executor.kv_manager
        counts: dict[str, int | None] = dict.fromkeys(_CACHE_COUNTS)
        tiers: dict[str, int] = {}
        if manager is not None:
            stats = manager.stats()
            counts = {name: getattr(stats, name) for name in _CACHE_COUNTS}
            tiers = stats.of_tiers()
        return EngineStatus(
            waiting=len(scheduler.waiting),
            swapped=scheduler.num_swapped,
            prefilling=len(scheduler.prefilling),
            decoding=len(scheduler.decoding),
            **counts,
            lora=self.executor.lora_metrics_snapshot(),
            tiers=tiers,
        )

    def picture(self) -> CachePicture:
        """Return a picture of the KV cache with the requests' ids. Any thread may call it, also within a step.

        Raises:
            UnsupportedError: the executor has no cache manager.
        """
        manager = self.executor.kv_manager
        if manager is None:
            raise UnsupportedError(
                f"{type(self.executor).__name__} has no cache manager, so there are no blocks to draw"
            )
        return cache_picture(manager, self.sequence_names())

    def sequence_names(self) -> dict[SeqId, str]:
        """Return the names ("request id/completion") of this engine's sequences by their ids in the cache."""
        names: dict[SeqId, str] = {}
        for request in list(self._requests.by_id.values()):
            for completion in request.completions:
                names[completion.seq_id] = f"{request.request_id}/{completion.index}"
        return names

    def add_request(
        self,
        prompt_token_ids: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: SeqId | None = None,
        priority: int = 0,
        adapter: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        retention: Retention | None = None,
        token_mask: TokenMask | None = None,
        logits_processor: LogitsProcessor | None = None,
        text_end: TextEnd | None = None,
        prompt_embeds: PromptEmbeds | None = None,
    ) -> RequestOutput:
        """Queue a request and return its output, which grows with every step; `copy()` of it takes a snapshot.

        Args:
            prompt_token_ids: integers of any library, in any sequence; or a text; or messages, mappings with "role" and
                "content", which the chat template renders. Special tokens inside texts are plain text.
            request_id: a str or int that no unfinished request has; 1 and "1" are different ids. None generates an id.
            priority: higher runs first, see `EngineConfig.priority_requests`.
            adapter: name of a loaded adapter. Each adapter has its own cached prefixes.
            metadata: metadata of the request's batch items, with keys that the executor reads
                (`ModelExecutor.metadata_keys`). {"lora_adapter": name} means the same as `adapter`.
            timeout_s: time in seconds after which the next step ends the request with finish_reason "timeout"; None for
                no limit.
            cache_salt: the request shares cached prefixes only with requests of the same salt. Without it, a tenant
                could infer another tenant's prompt from the time to the first token.
            retention: priority of the prompt's cached blocks over those of other requests; None for the lowest.
            token_mask: tells before every token which tokens are allowed, for example an `xgrammar.GrammarMatcher`.
                When it is complete, the completion ends with "stop". Every completion after the first gets a fork of
                it.
            logits_processor: changes the logits of every token. A token_mask or logits_processor reads a step's tokens
                before the next tokens are sampled, so a slow one delays all requests.
            text_end: reads the text as it grows and tells when it is complete; the completion then ends with "stop", as
                with a stop string. Every completion after the first gets a fork of it.
            prompt_embeds: rows in place of the embeddings of some prompt tokens, for example of images. The token ids
                at these positions are placeholders; penalties and prompt_logprobs use them.

        Raises:
            InvalidInputError: the id is in use, the prompt is empty, a token id is outside the vocabulary, there are
                stop strings or a text_end but no tokenizer, the adapter is not loaded, prompt and max_tokens do not fit
                the cache, or an argument has the wrong type. For texts and messages also the errors of `encode_prompt`.
            UnsupportedError: the executor does not support adapters, prompt_logprobs (which need mixed batches), hidden
                states, routed experts or these prompt_embeds, and the request asks for them.
            SequenceTooLongError: prompt and max_tokens exceed the model's maximum length.
            QueueFullError: `EngineConfig.max_waiting` completions wait.
        """
        name = "prompt_token_ids"
        if request_id is not None:
            request_id = as_seq_id("request_id", request_id)
            name = f"prompt_token_ids: request {request_id!r}"
        if params is None:
            params = _DEFAULT_PARAMS
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"params: {shown(params)}, expected SamplingParams")
        params = replace(params)  # a copy that is validated and that the caller cannot change
        item_metadata = self._prompts.item_metadata(metadata, adapter)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidInputError(f"cache_salt: {shown(cache_salt)}, expected a text that is not empty, or None")
        if retention is not None and not isinstance(retention, Retention):
            raise InvalidInputError(f"retention: {shown(retention)}, expected a Retention or None")
        token_masks = _forks("token_mask", token_mask, TokenMask, params.n)  # type: ignore[type-abstract]
        processors = _forks("logits_processor", logits_processor, LogitsProcessor, params.n)  # type: ignore[type-abstract]
        text_ends = _forks("text_end", text_end, TextEnd, params.n)  # type: ignore[type-abstract]
        if text_end is not None and self._prompts.tokenizer is None:
            raise InvalidInputError("text_end: the engine has no tokenizer")
        priority = as_int("priority", priority, low=-_MAX_PRIORITY, high=_MAX_PRIORITY)
        deadline_s = math.inf
        if timeout_s is not None:
            deadline_s = as_float("timeout_s", timeout_s, 0.0, math.inf)
        now, ids = perf_counter(), tuple(self._prompts.token_ids(prompt_token_ids))
        if params.returns_states:
            check_capture(self.executor, has_experts=params.return_routed_experts)
        if params.prompt_logprobs is not None and not self._is_unified:
            raise UnsupportedError(f"prompt_logprobs: {type(self.executor).__name__} runs no mixed batches")
        if prompt_embeds is not None:
            self._prompts.check_embeds(prompt_embeds, len(ids))
        if retention is not None:
            retention = retention.of_prompt(len(ids))
        chunks = whole_chunks(len(ids), prompt_embeds, is_fixed=self.config.batch_invariant)
        max_tokens = self._prompts.max_tokens(name, ids, params, chunks)
        # Checked late, because reading the arguments runs the caller's code, which may add requests.
        if request_id in self._requests.by_id:
            raise InvalidInputError(f"request {request_id!r}: its id is in use")
        arrival, waiting = next(self._arrivals), len(self._scheduler.waiting)
        if self.config.max_waiting is not None and waiting >= self.config.max_waiting:
            raise QueueFullError(f"{waiting} completions wait, max_waiting is {self.config.max_waiting}")
        if request_id is None:
            # Random, so that it cannot equal a caller's id.
            request_id = f"request-{arrival}-{secrets.token_hex(4)}"
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self._eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=ids,
            params=params,
            turn=(arrival - priority * self.config.priority_requests, arrival),
            metadata=item_metadata,
            max_tokens=max_tokens,
            end_token_ids=end_token_ids,
            output=RequestOutput.begin(request_id, ids, params),
            arrived=now,
            name=f"{self._name}-{arrival}",
            cache_salt=cache_salt,
            retention=retention,
            embeds=prompt_embeds,
            deadline=now + deadline_s,
            token_masks=token_masks,
            logits_processors=processors,
            text_ends=text_ends,
        )
        seed = self._seed + arrival if params.seed is None else params.seed
        for index, completion_seed in enumerate(completion_seeds(seed, params.n)):
            request.completions.append(Completion(request, index, completion_seed, self._prompts.tokenizer))
        request.unfinished = dict.fromkeys(request.completions)
        try:
            self._requests.add(request)
            return request.output
        except BaseException:  # the caller would not know of the request
            self._requests.abort(request)
            raise

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        """Encode a text or messages to token ids; return any other prompt unchanged. Any thread may call it.

        Raises:
            InvalidInputError: the engine's tokenizer cannot encode, or the tokenizer or the chat template rejects the
                prompt.
        """
        return self._prompts.encode(prompt)

    def pin_prefix(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        ttl_s: float | None = None,
    ) -> PinnedPrefix:
        """Keep the longest cached prefix of a prompt until its `release`; run the prompt before. Any thread may call.

        Args:
            prompt: as `prompt_token_ids` of `add_request`.
            adapter, cache_salt: as those of the requests that are to find the prefix.
            ttl_s: see `PagedKvCacheManager.pin`.

        Raises:
            InvalidInputError, PinBudgetError: as of `PagedKvCacheManager.pin`.
        """
        ids = self._prompts.token_ids(prompt)
        return self._space.manager.pin(ids, namespace=self._space.namespace(adapter, cache_salt), ttl_s=ttl_s)

    def forget_prefixes(self, cache_salt: str) -> None:
        """Hide everything that requests with this salt have cached from later requests, and release its pins.

        Raises:
            InvalidInputError: a request with this salt runs.
        """
        manager = self._space.manager
        for namespace in manager.namespaces():
            if isinstance(namespace, tuple) and namespace[1] == cache_salt:
                manager.forget_namespace(namespace)

    def abort(self, request_id: SeqId) -> bool:
        """End a request and free its cache; return False if no unfinished request has this id.

        Raises:
            InvalidInputError: the id is neither str nor int.
        """
        request = self._requests.by_id.get(as_seq_id("request_id", request_id))
        if request is not None:
            self._requests.abort(request)
        return request is not None

    def find(self, request_id: SeqId) -> RequestOutput | None:
        """Return the output of an unfinished request, or None."""
        request = self._requests.by_id.get(as_seq_id("request_id", request_id))
        return None if request is None else request.output

    def discard(self, output: RequestOutput) -> None:
        """Abort the request of this output; do nothing if it has ended, even if a new request has the same id."""
        request = self._requests.by_id.get(output.request_id)
        if request is not None and request.output is output:
            self._requests.abort(request)

    def stream(
        self, prompt_token_ids: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Add a request and run steps until it ends; yield a copy of its output after each step that changed it.

        Leaving the iterator aborts the request. Several streams may be read in turns. For `options` see `add_request`.
        """
        output: RequestOutput | None = None
        seen = 0
        try:
            output = self.add_request(prompt_token_ids, params, **options)
            while True:
                length = sum(completion.mark.token_ids for completion in output.outputs)
                if length > seen or output.finished:
                    seen = length
                    yield output.copy()
                if output.finished:
                    return
                self.step()
        finally:
            if output is not None:
                self.discard(output)

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter between two steps, for requests with `adapter=name`.

        Raises the errors of `LlmExecutor.load_lora`. If the executor does not support adapters, `load_lora`,
        `unload_lora` and `list_loras` raise UnsupportedError.
        """
        lora_loader(self.executor).load_lora(name, path)

    def unload_lora(self, name: str) -> None:
        """Unload an adapter between two steps.

        Raises:
            InvalidInputError: the adapter is not loaded, or unfinished requests use it.
        """
        loader = lora_loader(self.executor)
        # Check here, because the executor does not know waiting requests, which have no sequences.
        request_ids = [request.request_id for request in self._requests.by_id.values() if request.adapter == name]
        if request_ids:
            raise InvalidInputError(f"adapter {name!r}: {len(request_ids)} requests name it, first {request_ids[0]!r}")
        loader.unload_lora(name)

    def list_loras(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return lora_loader(self.executor).list_loras()

    def update_weights(self, source: Any, *, check_finite: bool = False) -> None:
        """Replace the model's weights between two steps, see `LlmExecutor.update_weights`.

        Requests keep their tokens and log probabilities and continue with the new weights, which compute their K/V
        again.
        No other result mixes weights: embeddings, and prompt_logprobs of requests without tokens, start again. Hidden
        states and routed experts keep the old values until all tokens have run again.

        Raises:
            UnsupportedError: the executor does not support it, or this is called within a step.
        """
        update = self._of_executor("update_weights")
        self._begin_update()
        update(source, check_finite=check_finite)

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache, see `LlmExecutor.sleep`. Call `wake` before new requests.

        Raises:
            InvalidInputError: requests are unfinished.
            UnsupportedError: the executor does not support it, or this is called within a step.
        """
        sleep = self._of_executor("sleep")
        if self._requests:
            raise InvalidInputError(f"sleep: {len(self._requests)} requests are unfinished, expected none")
        self._unreported = dict.fromkeys(self.drain())
        sleep(level)

    def wake(self) -> None:
        """Allocate the memory again, see `LlmExecutor.wake`."""
        self._of_executor("wake")()

    def _of_executor(self, name: str) -> Any:
        method = getattr(self.executor, name, None)
        if method is None:
            raise UnsupportedError(f"{type(self.executor).__name__} has no {name}")
        return method

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to completion; return their outputs in the same order.

        Args:
            prompts: prompts in any form of `add_request`, also mixed.
            params: parameters for all prompts, or a list with one entry per prompt.
            adapter: adapter for all prompts, or a list with one entry per prompt.
            progress: whether to show a bar, if tqdm is installed.

        Raises:
            InvalidInputError, SequenceTooLongError, QueueFullError: a prompt cannot be added, or a list differs in
                length from `prompts`; no prompt is run.
        """
        prompts = _listed(prompts)
        all_params = _for_each("params", params, SamplingParams, len(prompts))
        adapters = _for_each("adapter", adapter, str, len(prompts))
        outputs: list[RequestOutput] = []
        try:
            for prompt, own_params, name in zip(prompts, all_params, adapters, strict=True):
                outputs.append(self.add_request(prompt, own_params, adapter=name))
            with closing(progress_bar(len(outputs), desc="generate", unit="prompt", shown=progress)) as bar:
                pending = set(outputs)
                while pending and self._requests:
                    for output in self.step():
                        if output.finished and output in pending:
                            pending.remove(output)
                            bar.update(1)
        finally:
            for output in outputs:
                self.discard(output)
        return outputs

    def embed(self, prompts: Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True) -> torch.Tensor:
        """Return embeddings of prompts, float32 [n, hidden_size] on the model's device.

        They run in separate forwards and leave no blocks in the cache.

        Args:
            prompts: see `generate`.
            pooling: "last" for the last token's hidden state after the final norm, "mean" for the mean over all tokens.
            normalize: whether to scale each row to length 1.

        Raises:
            InvalidInputError, SequenceTooLongError: a prompt cannot run, or an argument is invalid.
            UnsupportedError: the executor cannot return hidden states.
            OutOfBlocksError: the cache has too few blocks, even after all requests but one have been preempted.
            PagedError: hidden states are infinite or NaN.
        """
        *_, pooled = self.embedding_steps(prompts, pooling=pooling, normalize=normalize)
        assert pooled is not None
        return pooled

    def embedding_steps(
        self, prompts: Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> Generator[torch.Tensor | None]:
        """Yield None after each forward of `embed`, then its result."""
        if not self.executor.capabilities().supports_hidden_states:
            raise UnsupportedError(f"{type(self.executor).__name__} returns no hidden states")
        if pooling not in ("last", "mean"):
            raise InvalidInputError(f"pooling: {shown(pooling)}, expected 'last' or 'mean'")
        normalize = as_bool("normalize", normalize)
        prompt_ids = [self._prompts.token_ids(prompt) for prompt in _listed(prompts)]
        for index, token_ids in enumerate(prompt_ids):
            self._prompts.max_tokens(f"prompts[{index}]", token_ids, _ONE_TOKEN)
        return embed_prompts(self, prompt_ids, is_mean=pooling == "mean", normalize=normalize)

    def score(self, prompt: Prompt, completion_ids: Sequence[int], *, temperature: float = 1.0) -> torch.Tensor:
        """Return the log probability of each token of a completion, float32 [len(completion_ids)].

        They equal, bit by bit, the log probabilities that a request returns under `batch_invariant` and
        `logprobs_mode="processed"`, if only the temperature changes its logits. The completion runs in one forward
        after the prompt's.

        Args:
            prompt: see `add_request`.
            completion_ids: at least one token.
            temperature: above 0.

        Raises:
            InvalidInputError, SequenceTooLongError: the tokens cannot run, or an argument is out of range.
            UnsupportedError: the executor has no invariant rows, see `ExecutorCapabilities`.
            OutOfBlocksError: the cache has too few free blocks.
        """
        manager = self.executor.kv_manager
        executor = self.executor
        has_rows = executor.capabilities().has_invariant_rows
        if manager is None or not isinstance(executor, UnifiedExecutor) or not has_rows:
            raise UnsupportedError(f"{executor.info().model_id}: has no invariant rows")
        temperature = as_float("temperature", temperature, math.ulp(0.0))
        prompt_ids, ids = self._prompts.token_ids(prompt), as_token_ids("completion_ids", completion_ids)
        if not ids:
            raise InvalidInputError("completion_ids: no tokens, expected at least one")
        self._prompts.check_ids("completion_ids", ids)
        params = SamplingParams(max_tokens=len(ids))
        self._prompts.max_tokens("prompt", prompt_ids, params)
        return completion_logprobs(executor, manager, prompt_ids, ids, temperature)

    def beam_search(
        self, prompt: Prompt, beam_width: int, max_tokens: int, length_penalty: float = 1.0
    ) -> list[BeamOutput]:
        """Run beam search; return the `beam_width` continuations with the best scores, best first.

        A beam ends with an end token of the engine or after `max_tokens`. The search ends when no open beam can become
        better, as in transformers with `early_stopping="never"`. It runs in separate forwards.

        Args:
            prompt: see `add_request`.
            beam_width: number of beams, at most `max_num_seqs`. They share the K/V of common tokens.
            length_penalty: exponent p of the score, the sum of log probabilities / (number of tokens)^p.

        Raises:
            InvalidInputError, SequenceTooLongError: the prompt cannot run, or an argument is out of range.
            UnsupportedError: the executor has no cache manager.
            OutOfBlocksError: the cache has too few blocks, even after all requests but one have been preempted.
            PagedError: all logits of a beam are NaN or -infinity, or one is infinite.
        """
        manager = self.executor.kv_manager
        if manager is None:
            raise UnsupportedError(f"{type(self.executor).__name__} has no cache manager, so sequences cannot fork")
        width = as_int("beam_width", beam_width, low=1, high=self.config.max_num_seqs)
        penalty, ids = as_float("length_penalty", length_penalty), self._prompts.token_ids(prompt)
        count = self._prompts.max_tokens("prompt", ids, SamplingParams(max_tokens=max_tokens))
        beams = search_beams(
            self,
            manager,
            ids,
            width=width,
            max_tokens=count,
            length_penalty=penalty,
            end_token_ids=self._eos_token_ids,
        )
        if self._prompts.tokenizer is None:
            return beams
        with_texts = []
        for beam in beams:
            token_ids = beam.token_ids
            if token_ids[-1] in self._eos_token_ids:
                token_ids = token_ids[:-1]
            with_texts.append(beam._replace(text=self._prompts.tokenizer.decode(token_ids)))
        return with_texts


def _for_each(name: str, value: R | Sequence[R | None] | None, kind: type[R], count: int) -> list[R | None]:
    """Return a value for each prompt: the entries of a list, or the same value for all."""
    if value is None or isinstance(value, kind):
        return [value] * count
    values = list(cast("Sequence[R | None]", value))
    if len(values) != count:
        raise InvalidInputError(f"{name}: {len(values)}, expected one for each of {count} prompts")
    return values


def _listed(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | bytes):
        raise InvalidInputError("prompts: a text, expected a list of prompts")
    return prompts


def _forks(name: str, rule: Any, kind: type[R], count: int) -> list[R]:
    """Return a rule for each completion (`rule` itself and its forks), or none."""
    if rule is None:
        return []
    if not isinstance(rule, kind):
        raise InvalidInputError(f"{name}: {shown(rule)}, expected the methods of {kind.__name__}")
    rules = [rule]
    while len(rules) < count:
        rules.append(rule.fork())  # type: ignore[attr-defined]
    return rules
