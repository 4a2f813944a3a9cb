"""One request on its way through the engine: what is computed, how it picks tokens, and when it ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trio_frontend.engine.base import EngineOutput, EngineRequest, FinishReason, LogprobsLists
from trio_frontend.engine.embedded.guidance import Grammar
from trio_frontend.engine.embedded.sampling import Sampler, top_logprobs
from trio_frontend.engine.embedded.session import KVCache
from trio_frontend.engine.outputs import RequestOutputs

__all__ = ["Sequence"]

FloatArray = npt.NDArray[np.float32]


class Sequence:
    """A request's state. The stepper's thread changes it during a step, Trio's thread between steps; ``ended`` is Trio's alone.

    ``ended``: nobody waits for it any more (cancelled, aborted, or its last output delivered): its cache is to be freed.
    ``done``: the stepper has made its last output.
    """

    __slots__ = (
        "_grammar",
        "_max_model_len",
        "_prompt_logprobs",
        "_sampler",
        "_stop_ids",
        "cache",
        "done",
        "ended",
        "last_token_id",
        "outputs",
        "prompt",
        "request",
    )

    def __init__(self, request: EngineRequest, grammar: Grammar | None, vocab_size: int, max_model_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.outputs = RequestOutputs(sampling.max_tokens)
        self.prompt: npt.NDArray[np.int64] = np.asarray(request.prompt_token_ids, np.int64)
        self.cache: KVCache | None = None  # while the prompt is computed; then the cohort has it
        self.last_token_id = -1
        self.ended = False
        self.done = False
        self._grammar = grammar
        self._max_model_len = max_model_len
        self._stop_ids = frozenset(sampling.stop_token_ids)
        eos: frozenset[int] = frozenset()
        if not sampling.ignore_eos:
            # As in vLLM, the first EOS ends without a stop reason, a further one as a stop token does.
            self._stop_ids |= frozenset(sampling.extra_eos_token_ids)
            if sampling.eos_token_id is not None:
                eos = frozenset((sampling.eos_token_id,))
        self._sampler = Sampler(sampling, request.prompt_token_ids, vocab_size, self._stop_ids | eos)
        self._prompt_logprobs: list[LogprobsLists] = []

    @property
    def computed_prompt_tokens(self) -> int:
        """While the prompt is computed."""
        return 0 if self.cache is None else self.cache.length

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def add_prompt_logprobs(self, start: int, logits: FloatArray) -> None:
        """Take the prompt logprobs of ``logits`` [n, vocab], which belong to the prompt's tokens from ``start`` on."""
        k = self.request.sampling.prompt_logprobs
        assert k is not None
        following = self.prompt[start + 1 : start + 1 + len(logits)]
        if len(following):
            self._prompt_logprobs.append(top_logprobs(logits[: len(following)], following, k))

    def next_output(self, logits: FloatArray) -> EngineOutput:
        """Pick the next token of ``logits`` [vocab], which are used up. Raises SamplingError, GrammarError."""
        grammar, sampler = self._grammar, self._sampler
        if grammar is not None:
            grammar.mask(logits)
        raw = logits.copy() if sampler.wants_logprobs else None
        token_id = sampler.pick(logits, grammar is not None)
        if grammar is not None:
            grammar.accept(token_id)
        self.last_token_id = token_id
        finish_reason, stop_reason = self._finish(token_id)
        self.done = finish_reason is not None
        return EngineOutput(
            [token_id],
            None if raw is None else sampler.logprobs(raw, token_id),
            self._take_prompt_logprobs(),
            finish_reason,
            stop_reason,
        )

    def _finish(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """vLLM's order (``vllm/v1/core/sched/utils.py``): EOS, stop ids, length. A grammar that has had its EOS ends too."""
        sampling = self.request.sampling
        if token_id == sampling.eos_token_id and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token_id in self._stop_ids:
            return FinishReason.STOP, token_id
        if self._grammar is not None and self._grammar.finished:
            return FinishReason.STOP, None
        picked = self._sampler.picked
        if picked >= sampling.max_tokens or len(self.prompt) + picked >= self._max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def _take_prompt_logprobs(self) -> LogprobsLists | None:
        if not self.wants_prompt_logprobs or self._sampler.picked > 1:
            return None
        parts, self._prompt_logprobs = self._prompt_logprobs, []
        if not parts:  # a prompt of one token
            return LogprobsLists(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int64))
        return LogprobsLists(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )
