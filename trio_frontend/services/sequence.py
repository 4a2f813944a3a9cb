"""One sequence on its way from the engine's outputs to the caller's messages: text, stop strings, logprobs, how it ended.

Rules that hold here:

* ``absorb`` takes outputs in order, ``take`` gives all that came since the last ``take``. However often it is called, what was taken,
  joined, is the same.
* A stop string ends the sequence at the token that completes it: later tokens of the same step are dropped. Tokens are counted
  whether their text is given, held back or cut.
* A token that ended the sequence (EOS, a stop token) keeps its id; its text is left out unless stop strings are to be included.
* The text of a sequence that wants no text is looked at only if stop strings must be found in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from typing import Any

from trio_frontend.engine.base import EngineError, EngineOutput, FinishReason, LogprobsLists
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.conversion import OutputOptions
from trio_frontend.services.responses import add_logprobs, encode_tokens, finish_info
from trio_frontend.text import Detokenizer, StopStrings, Tokenizer, detokenizer

__all__ = ["Sequence"]


class Sequence:
    """See the module. ``finished`` once it has ended, by the engine or by a stop string: nothing may be absorbed any more."""

    __slots__ = (
        "_detokenizer",
        "_ec_transfer_params",
        "_finish_reason",
        "_include",
        "_kv_transfer_params",
        "_last_id",
        "_logprobs",
        "_min_tokens",
        "_passed",
        "_skipped",
        "_stop_reason",
        "_stop_string",
        "_stops",
        "_taken",
        "_text",
        "finished",
        "ids",
        "index",
        "options",
    )

    def __init__(self, index: int, options: OutputOptions, tokenizer: Tokenizer, prompt_token_ids: TokenIds[int]) -> None:
        self.index = index
        self.finished = False
        self.ids: list[int] = []
        """The tokens that came since the last ``take``."""
        self.options = options
        self._include = options.include_stop_strings
        self._min_tokens = options.min_tokens
        self._stops = StopStrings(options.stop_strings, include=self._include) if options.stop_strings else None
        self._detokenizer: Detokenizer | None = None
        if options.text or self._stops is not None:
            self._detokenizer = detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=options.skip_special_tokens)
        self._taken = 0  # tokens
        self._text = ""  # of the untaken tokens; without stop strings it is made when they are taken
        self._skipped = False  # the last token's text is left out
        self._passed = 0  # characters of tentative text in which no stop string counts
        self._logprobs: list[tuple[LogprobsLists, int]] = []
        self._finish_reason: FinishReason | None = None
        self._stop_string: str | None = None
        self._stop_reason: int | str | None = None
        self._last_id: int | None = None
        self._kv_transfer_params: Mapping[str, Any] | None = None
        self._ec_transfer_params: Mapping[str, Any] | None = None

    @property
    def plain(self) -> bool:
        """Nothing is held back or untaken: the next token's text is the same as anywhere else."""
        return not self.ids and self._detokenizer is not None and self._detokenizer.clean

    def pass_over(self, token_id: int) -> None:
        """As ``absorb`` and ``take``, of a single token while ``plain``, whose message is known."""
        self._taken += 1
        self._last_id = token_id

    @property
    def counts_only(self) -> bool:
        """A step that is not the last one adds its ids to ``ids``, and that is all there is to it (but for transfer parameters)."""
        return self._stops is None and not self.options.logprobs

    def absorb(self, output: EngineOutput) -> None:
        """Take one step's output. Raises EngineError for a finish reason that is none."""
        ids = output.token_ids
        reason = output.finish_reason
        if self._stops is not None:
            ended = reason is FinishReason.STOP and not self._include
            kept = self._look_for_stops(self._stops, ids[:-1] if ended else ids)
            if kept is not None:
                ids = ids[:kept]
                self.finished = True
                reason = None
                self._finish_reason = FinishReason.STOP
        self.ids += ids
        if output.logprobs is not None and self.options.logprobs:
            self._logprobs.append((output.logprobs, len(ids)))
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if output.ec_transfer_params is not None:
            self._ec_transfer_params = output.ec_transfer_params
        if reason is not None:
            self._finish(reason, output.stop_reason, len(ids))

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, count: int) -> None:
        if reason is FinishReason.ERROR:
            raise EngineError
        self.finished = True
        self._finish_reason = reason
        self._stop_reason = stop_reason
        if reason is FinishReason.STOP and count and not self._include:
            self._skipped = True

    def _look_for_stops(self, stops: StopStrings, ids: TokenIds[int]) -> int | None:
        """Make the text of ``ids``, token by token, up to the one that completes a stop string. How many those are, or None."""
        step = self._detokenizer.step  # type: ignore[union-attr]  # there is one if there are stop strings
        number = self._taken + len(self.ids)
        for position, token_id in enumerate(ids, start=1):
            text = step(token_id)
            if number + position <= self._min_tokens:
                self._text += stops.pass_over(text)
                self._passed = len(self._detokenizer.tentative)  # type: ignore[union-attr]
                continue
            if self._passed and text:
                self._text += stops.pass_over(text[: self._passed])
                text, self._passed = text[self._passed :], 0
            text, match = stops.feed(text)
            self._text += text
            if match is None and not self._passed:
                tentative = self._detokenizer.tentative  # type: ignore[union-attr]
                peeked = stops.peek(tentative) if tentative else None
                if peeked is not None:
                    self._text += peeked[0]
                    match = peeked[1]
            if match is not None:
                self._stop_string = match
                return position
        return None

    def _take_text(self) -> str:
        if self._detokenizer is None:
            return ""
        if self._stops is None:
            step = self._detokenizer.step
            ids = self.ids[:-1] if self._skipped else self.ids
            text = step(ids[0]) if len(ids) == 1 else "".join([step(token_id) for token_id in ids])
            if self.finished:
                text += self._detokenizer.flush()
            return text
        if self.finished and self._stop_string is None:
            self._text += self._stops.pass_over(self._detokenizer.flush()) + self._stops.release()
        text, self._text = self._text, ""
        return text if self.options.text else ""

    def take(self) -> pb.SequenceOutput:
        """All since the last ``take`` as one message, with finish_info if the sequence has ended. For ``finished`` only once."""
        message = pb.SequenceOutput(index=self.index, text=self._take_text(), num_tokens=len(self.ids))
        if self.options.token_ids:
            message.token_ids.extend(self.ids)
        for logprobs, count in self._logprobs:
            add_logprobs(message, logprobs, count)
        if self.finished:
            message.finish_info.CopyFrom(self._finish_info())
        self._forget()
        return message

    def take_serialized(self) -> bytes:
        """``GenerateResponse(outputs=take())``, serialized."""
        if self.finished or self._logprobs:
            return pb.GenerateResponse(outputs=self.take()).SerializeToString()
        message = encode_tokens(self.index, self._take_text(), len(self.ids), self.ids if self.options.token_ids else ())
        self._forget()
        return message

    def _forget(self) -> None:
        if self.ids:
            self._taken += len(self.ids)
            self._last_id = self.ids[-1]
            self.ids = []
        self._logprobs = []

    def _finish_info(self) -> pb.FinishInfo:
        return finish_info(
            self._taken + len(self.ids),
            self._finish_reason or FinishReason.STOP,
            stop_string=self._stop_string,
            stop_reason=self._stop_reason,
            last_token_id=self.ids[-1] if self.ids else self._last_id,
            kv_transfer_params=self._kv_transfer_params,
            ec_transfer_params=self._ec_transfer_params,
        )
