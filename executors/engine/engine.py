"""Continuous batching: requests come and go, and every step runs everything that can run in one forward."""

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
from paged.kernels.common.compilation import serving_begins
from paged.kernels.common.scalars import as_bool, as_float, as_int, shown
from paged.prompt_embeds import PromptEmbeds
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import as_token_ids
from paged.tools.picture import CachePicture, cache_picture

R = TypeVar("R")

_DEFAULT_PARAMS = SamplingParams()
_ONE_TOKEN = SamplingParams(max_tokens=1)
# A priority beyond this is a mistake; products with `priority_requests` stay small numbers.
_MAX_PRIORITY = 1 << 31
_UINT64_MAX = (1 << 64) - 1


class Engine(EngineCore):
    """Runs requests on any `ModelExecutor`: chunked prefill beside decodes, prefix caching, preemption, speculation.

    If the executor has a cache manager, requests share prefixes, fork and swap; otherwise every prompt is computed. A
    completion whose forward fails ends alone, see `StepRunner`. Not thread-safe: `AsyncEngine` queues calls.

    Args:
        config: policy; None takes the defaults.
        tokenizer: for output texts and stop strings; a `ChatTokenizer` also for prompts that are texts or messages.
        eos_token_ids: end every request without ignore_eos. None takes those of the checkpoint
            (`ModelInfo.eos_token_ids`), () takes none.
        proposer: drafts tokens; the executor verifies several in one forward.
        seed: derives the seeds of requests that have none; None draws one.

    Raises:
        InvalidInputError: the token budget is below one sequence with its drafts, the proposer has another vocabulary,
            or an end token or the seed is out of range.
        UnsupportedError: a proposer was given, and the executor cannot roll tokens back.
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
            # A checkpoint may name tokens that its vocabulary does not have.
            self._eos_token_ids = frozenset(token for token in info.eos_token_ids if token < info.vocab_size)
        else:
            self._eos_token_ids = frozenset(as_token_ids("eos_token_ids", eos_token_ids, may_be_set=True))
            self._prompts.check_ids("eos_token_ids", sorted(self._eos_token_ids))
        if seed is None:
            seed = secrets.randbits(64)
        self._seed = as_int("seed", seed, low=-(1 << 63), high=_UINT64_MAX)
        self._arrivals = itertools.count()
        # Several engines may share an executor, and callers may have sequences of their own in its cache.
        self._name = f"engine-{secrets.token_hex(8)}"
        serving_begins()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    def status(self) -> EngineStatus:
        """Return the counts of the queue, running sequences and cache blocks."""
        scheduler, manager = self._scheduler, self.executor.kv_manager
        used_blocks: int | None = None
        num_blocks: int | None = None
        tiers: dict[str, int] = {}
        if manager is not None:
            stats = manager.stats()
            used_blocks, num_blocks = stats.used_blocks, stats.num_blocks
            tiers = stats.of_tiers()
        return EngineStatus(
            waiting=len(scheduler.waiting),
            swapped=scheduler.num_swapped,
            prefilling=len(scheduler.prefilling),
            decoding=len(scheduler.decoding),
            used_blocks=used_blocks,
            num_blocks=num_blocks,
            lora=self.executor.lora_metrics_snapshot(),
            tiers=tiers,
        )

    def picture(self) -> CachePicture:
        """Return a picture of the KV cache, with the requests' ids. Any thread may call it, also within a step.

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
        """Return the names of this engine's sequences, "request id/completion", by their ids in the cache."""
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
        token_mask: TokenMask | None = None,
        logits_processor: LogitsProcessor | None = None,
        text_end: TextEnd | None = None,
        prompt_embeds: PromptEmbeds | None = None,
    ) -> RequestOutput:
        """Queue a request and return its output, which grows from step to step; its `copy()` keeps a moment.

        Args:
            prompt_token_ids: integers of any library, in any sequence; or a text; or messages, mappings with "role" and
                "content", which the chat template renders. Special tokens inside texts are plain text.
            request_id: a str or int that no unfinished request has; 1 and "1" are two ids. None makes one.
            priority: higher runs first, see `EngineConfig.priority_requests`.
            adapter: name of a loaded adapter, which has cached prefixes of its own.
            metadata: of the request's batch items, with keys that the executor reads (`ModelExecutor.metadata_keys`).
                {"lora_adapter": name} is the same as `adapter`.
            timeout_s: seconds after which the next step ends the request with finish_reason "timeout"; None for no
                limit.
            cache_salt: the request shares cached prefixes only with requests of the same salt. Otherwise a tenant could
                tell from the time to the first token what another one has asked.
            token_mask: says before every token which ones are allowed, such as an `xgrammar.GrammarMatcher`; other
                completions than the first get a fork of it. A text that is complete by it ends with "stop".
            logits_processor: changes the logits of every token. Either of these two reads a step's tokens before it
                samples the next ones: while the device runs the forward, so a slow one holds all requests up.
            text_end: reads the text as it grows and says when it is complete; it then ends with "stop", as by a stop
                string. Other completions than the first get a fork of it.
            prompt_embeds: rows in place of the embeddings of some prompt tokens, such as those of images. The token ids
                there are placeholders, which penalties and prompt_logprobs see.

        Raises:
            InvalidInputError: the id is in use, the prompt is empty, a token id is outside the vocabulary, there are
                stop strings or a text_end but no tokenizer, the adapter is not loaded, prompt and max_tokens do not fit
                the cache, or an argument has another type. A text or messages: as `encode_prompt`.
            UnsupportedError: an adapter is named, and the executor takes none; or prompt_logprobs are asked for, and it
                runs no mixed batches; or it returns no hidden states or routed experts, which are asked for; or the
                model does not take such prompt_embeds.
            SequenceTooLongError: prompt and max_tokens are longer than the model allows.
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
        params = replace(params)  # checked again, and out of the caller's reach
        item_metadata = self._prompts.item_metadata(metadata, adapter)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidInputError(f"cache_salt: {shown(cache_salt)}, expected a text that is not empty, or None")
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
        chunks = whole_chunks(len(ids), prompt_embeds, is_fixed=self.config.batch_invariant)
        max_tokens = self._prompts.max_tokens(name, ids, params, chunks)
        # Not earlier: reading the arguments runs the caller's code, which may have added requests.
        if request_id in self._requests.by_id:
            raise InvalidInputError(f"request {request_id!r}: its id is in use")
        arrival, waiting = next(self._arrivals), len(self._scheduler.waiting)
        if self.config.max_waiting is not None and waiting >= self.config.max_waiting:
            raise QueueFullError(f"{waiting} completions wait, max_waiting is {self.config.max_waiting}")
        if request_id is None:
            # Random, so that no caller's own id can equal it.
            request_id = f"request-{arrival}-{secrets.token_hex(4)}"
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self._eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=ids,
            params=params,
            rank=(arrival - priority * self.config.priority_requests, arrival),
            metadata=item_metadata,
            max_tokens=max_tokens,
            end_token_ids=end_token_ids,
            output=RequestOutput.begin(request_id, ids, params),
            arrived=now,
            name=f"{self._name}-{arrival}",
            cache_salt=cache_salt,
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
        except BaseException:  # nobody would know of it
            self._requests.abort(request)
            raise

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a text or of messages, and anything else itself. Any thread may call it.

        Raises:
            InvalidInputError: the engine's tokenizer does not encode, or it or the chat template refuses the prompt.
        """
        return self._prompts.encode(prompt)

    def abort(self, request_id: SeqId) -> bool:
        """End a request and free what it holds; return False if no unfinished request has this id.

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
        """Abort the request of this output; does nothing if it has ended, even if another request has its id now."""
        request = self._requests.by_id.get(output.request_id)
        if request is not None and request.output is output:
            self._requests.abort(request)

    def stream(
        self, prompt_token_ids: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Add a request and step until it ends; yield a copy of its output after each step that changed it.

        Leaving the iterator aborts the request. Several streams may be read in turns. `options` are those of
        `add_request`.
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

        Errors are those of `LlmExecutor.load_lora`. If the executor takes no adapters, this and the next two raise
        UnsupportedError.
        """
        lora_loader(self.executor).load_lora(name, path)

    def unload_lora(self, name: str) -> None:
        """Unload an adapter between two steps.

        Raises:
            InvalidInputError: it is not loaded, or unfinished requests name it.
        """
        loader = lora_loader(self.executor)
        # Waiting requests hold no sequence yet, so the executor does not know of them.
        request_ids = [request.request_id for request in self._requests.by_id.values() if request.adapter == name]
        if request_ids:
            raise InvalidInputError(f"adapter {name!r}: {len(request_ids)} requests name it, first {request_ids[0]!r}")
        loader.unload_lora(name)

    def list_loras(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return lora_loader(self.executor).list_loras()

    def update_weights(self, source: Any, *, check_finite: bool = False) -> None:
        """Replace the model's weights between two steps, as `LlmExecutor.update_weights`.

        Requests go on from the tokens and log probabilities that they have; their K/V are computed again by the new
        weights. No other result mixes weights: prompt_logprobs of a request without tokens and embeddings begin again,
        and hidden states and routed experts are the old ones until all tokens have run again.

        Raises:
            UnsupportedError: the executor cannot, or this is called within a step.
        """
        update = self._of_executor("update_weights")
        self._begin_update()
        update(source, check_finite=check_finite)

    def sleep(self, level: int = 1) -> None:
        """Give back the device memory of weights and KV cache, as `LlmExecutor.sleep`. Later requests need `wake`.

        Raises:
            InvalidInputError: requests are unfinished.
            UnsupportedError: the executor cannot, or this is called within a step.
        """
        sleep = self._of_executor("sleep")
        if self._requests:
            raise InvalidInputError(f"sleep: {len(self._requests)} requests are unfinished, expected none")
        self._unreported = dict.fromkeys(self.drain())
        sleep(level)

    def wake(self) -> None:
        """Take the memory again, as `LlmExecutor.wake`."""
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
        """Run all prompts to their ends; return their outputs in the same order.

        Args:
            prompts: as in `add_request`, in any mix.
            params: parameters of all prompts, or a list with those of each.
            adapter: the adapter of all prompts, or a list with that of each.
            progress: whether to show a bar, if tqdm is installed.

        Raises:
            InvalidInputError, SequenceTooLongError, QueueFullError: a prompt cannot be added, or there are not as many
                `params` or adapters as prompts; nothing was run.
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

        They run in forwards of their own, and leave nothing in the cache.

        Args:
            prompts: as in `generate`.
            pooling: of hidden states after the final norm: that of the last token, or the mean over all tokens.
            normalize: whether to scale each row to length 1.

        Raises:
            InvalidInputError, SequenceTooLongError: a prompt cannot run, or an argument has another value.
            UnsupportedError: the executor returns no hidden states.
            OutOfBlocksError: the cache has too few blocks, even after all requests but one have been preempted.
            PagedError: hidden states are infinite or NaN.
        """
        *_, pooled = self.embedding_steps(prompts, pooling=pooling, normalize=normalize)
        assert pooled is not None
        return pooled

    def embedding_steps(
        self, prompts: Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> Generator[torch.Tensor | None]:
        """Yield None after each forward of `embed`, then what it returns."""
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

        They have the bits of those that a request returns under `batch_invariant` and `logprobs_mode="processed"`, if
        the temperature alone changes its logits. A completion is one forward beside its prompt's.

        Args:
            prompt: as in `add_request`.
            completion_ids: at least one token.
            temperature: above 0.

        Raises:
            InvalidInputError, SequenceTooLongError: the tokens cannot run, or an argument is out of range.
            UnsupportedError: the executor has no invariant rows, see `ExecutorCapabilities`.
            OutOfBlocksError: the cache has too few free blocks.
        """
        manager = self.executor.kv_manager
        if manager is None or not self.executor.capabilities().has_invariant_rows:
            raise UnsupportedError(f"{self.executor.info().model_id}: has no invariant rows")
        temperature = as_float("temperature", temperature, math.ulp(0.0))
        prompt_ids, ids = self._prompts.token_ids(prompt), as_token_ids("completion_ids", completion_ids)
        if not ids:
            raise InvalidInputError("completion_ids: no tokens, expected at least one")
        self._prompts.check_ids("completion_ids", ids)
        params = SamplingParams(max_tokens=len(ids))
        self._prompts.max_tokens("prompt", prompt_ids, params)
        return completion_logprobs(self.executor, manager, prompt_ids, ids, temperature)

    def beam_search(
        self, prompt: Prompt, beam_width: int, max_tokens: int, length_penalty: float = 1.0
    ) -> list[BeamOutput]:
        """Return the `beam_width` continuations with the best scores that beam search finds, best first.

        A beam ends with an end token of the engine or after `max_tokens`; the search ends when no other can become
        better, as in transformers with `early_stopping="never"`. It runs in forwards of its own.

        Args:
            prompt: as in `add_request`.
            beam_width: number of beams, at most `max_num_seqs`. They share the K/V of what they have in common.
            length_penalty: the score is the sum of log probabilities divided by the number of tokens to this power.

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
    """Return the value of each prompt: those of a list, or the same for all."""
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
    """Return a rule for each completion, or none; the first is `rule` itself, the others are its forks."""
    if rule is None:
        return []
    if not isinstance(rule, kind):
        raise InvalidInputError(f"{name}: {shown(rule)}, expected the methods of {kind.__name__}")
    rules = [rule]
    while len(rules) < count:
        rules.append(rule.fork())  # type: ignore[attr-defined]
    return rules
