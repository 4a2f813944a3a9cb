"""How a sequence's messages get to the caller: the plain way, by the call's task, and the fast one, by the engine's reader.

Rules that hold here:

* Both ways give the same: the same texts, ids and counts in the same order, one message for a step.
* The engine's reader offers an output to the sink only while the call's task waits and nothing is queued. The sink takes it,
  makes the message and has it framed there and then. It must not wait, so if the message cannot be sent now it keeps it, refuses the
  output, and the task, woken by that, sends the message and passes over the output that it was made of.
* No message of a sequence overtakes another; a slow caller gets several steps in one.
* The last message is not sent here: whoever runs a delivery first leaves the engine's scope.
"""

from __future__ import annotations

from typing import Protocol

import trio

from trio_frontend.engine.base import EngineError, EngineOutput, LogprobsLists, OutputStream, Sink
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.conversion import GenerationPlan, OutputOptions
from trio_frontend.services.sequence import Sequence

__all__ = ["Delivery", "PromptMessage", "Sender", "TokenMessages", "collect"]

ENDED_EARLY = "the engine's outputs ended without a finish reason"


class Sender(Protocol):
    """The sending part of a call."""

    async def send_bytes(self, serialized: bytes) -> None: ...

    def try_send_bytes(self, serialized: bytes) -> bool: ...


class TokenMessages:
    """Whole messages of one token each, by token id: what a token adds to a text is nearly always the same.

    One table for each kind of message, each bounded, shared by all calls.
    """

    LIMIT = 65_536
    """Messages of a table: about 6 MB. The tokens of a text are far fewer; what comes later is made anew each time."""

    def __init__(self) -> None:
        self._tables: dict[tuple[bool, bool], dict[int, bytes]] = {}

    def of(self, options: OutputOptions, index: int) -> dict[int, bytes] | None:
        """The table for messages like these; None where a token's message is not always the same, or rarely wanted."""
        if index or not options.text or options.logprobs or options.stop_strings:
            return None
        return self._tables.setdefault((options.token_ids, options.skip_special_tokens), {})


class PromptMessage:
    """The stream's first message, sent once, by the first sequence. The others wait for it."""

    def __init__(self, plan: GenerationPlan, call: Sender) -> None:
        self._plan = plan
        self._call = call
        self._sent = trio.Event()

    async def send(self, outputs: OutputStream) -> list[EngineOutput]:
        """Send it, at once, or with its logprobs as soon as the engine gives them. The outputs that were read meanwhile."""
        read: list[EngineOutput] = []
        logprobs = None
        if self._plan.prompt_logprobs_wanted:
            async for batch in outputs:
                read += batch
                logprobs = _prompt_logprobs(read)
                if logprobs is not None or _begun(batch):
                    break
        message = pb.GenerateResponse(prompt_info=self._plan.prompt_info(logprobs))
        await self._call.send_bytes(message.SerializeToString())
        self._sent.set()
        return read

    async def wait(self) -> list[EngineOutput]:
        await self._sent.wait()
        return []


def _prompt_logprobs(outputs: list[EngineOutput]) -> LogprobsLists | None:
    return next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None)


def _begun(outputs: list[EngineOutput]) -> bool:
    """The prompt is done with: prompt logprobs come with the first token, or not at all (a prompt of one token has none)."""
    return any(output.token_ids or output.finish_reason is not None for output in outputs)


async def collect(sequence: Sequence, outputs: OutputStream) -> LogprobsLists | None:
    """Absorb all outputs up to the sequence's end. The prompt's logprobs, if any came."""
    prompt_logprobs: LogprobsLists | None = None
    refused, counts_only = False, sequence.counts_only

    def sink(output: EngineOutput) -> bool:
        nonlocal refused
        if output.prompt_logprobs is not None:
            return False
        if counts_only and output.kv_transfer_params is None and output.ec_transfer_params is None:
            sequence.ids += output.token_ids
            return True
        sequence.absorb(output)
        refused = sequence.finished  # a stop string: wake the task, which leaves
        return not refused

    outputs.set_sink(sink)
    async for batch in outputs:
        if refused:
            return prompt_logprobs
        if prompt_logprobs is None:
            prompt_logprobs = _prompt_logprobs(batch)
        for output in batch:
            sequence.absorb(output)
            if sequence.finished:
                return prompt_logprobs
    raise EngineError(ENDED_EARLY)


class Delivery:
    """One sequence's messages, sent through ``call``: one for ``interval`` tokens or more, but the first token at once."""

    __slots__ = ("_call", "_interval", "_refused", "_sequence", "_table", "_wanted")

    def __init__(self, sequence: Sequence, call: Sender, interval: int, table: dict[int, bytes] | None) -> None:
        self._sequence = sequence
        self._call = call
        self._interval = interval
        self._wanted = 1  # untaken tokens that make a message
        self._table = table if interval == 1 else None
        self._refused: bytes | None = None  # a message that the sink made and could not send

    async def run(self, outputs: OutputStream, first: list[EngineOutput]) -> bytes:
        """Send everything of ``first`` and then of ``outputs`` but the last message, serialized, which is returned.

        Raises EngineError; what came before it has been sent.
        """
        sequence = self._sequence
        try:
            if not await self._deliver(first):
                outputs.set_sink(self._choose_sink())
                async for batch in outputs:
                    if self._refused is not None:
                        message, self._refused = self._refused, None
                        if sequence.finished:
                            return message
                        await self._call.send_bytes(message)
                        del batch[0]
                    if await self._deliver(batch):
                        break
                else:
                    raise EngineError(ENDED_EARLY)
        except EngineError:
            if sequence.ids and not sequence.finished:
                await self._call.send_bytes(sequence.take_serialized())
            raise
        return sequence.take_serialized()

    async def _deliver(self, outputs: list[EngineOutput]) -> bool:
        """Send what these make, as one message. True if the sequence has ended: then its last message is still to be taken."""
        sequence = self._sequence
        for output in outputs:
            sequence.absorb(output)
            if sequence.finished:
                return True
        if len(sequence.ids) >= self._wanted:
            self._wanted = self._interval
            await self._call.send_bytes(sequence.take_serialized())
        return False

    def _choose_sink(self) -> Sink | None:
        """None for logprobs: their messages are too much work for the reader, which all requests share."""
        if self._sequence.options.logprobs:
            return None
        return self._sink if self._table is None else self._table_sink

    def _sink(self, output: EngineOutput) -> bool:
        sequence = self._sequence
        sequence.absorb(output)
        if len(sequence.ids) < self._wanted and not sequence.finished:
            return True
        self._wanted = self._interval
        message = sequence.take_serialized()
        if not sequence.finished and self._call.try_send_bytes(message):
            return True
        self._refused = message
        return False

    def _table_sink(self, output: EngineOutput) -> bool:
        """As ``_sink``, for single tokens whose message is known."""
        ids = output.token_ids
        sequence, table = self._sequence, self._table
        if table is None or len(ids) != 1 or output.kv_transfer_params is not None or not sequence.plain:
            return self._sink(output)
        message = table.get(ids[0])
        if message is None:
            sequence.absorb(output)
            message = sequence.take_serialized()
            if sequence.plain and len(table) < TokenMessages.LIMIT:
                table[ids[0]] = message
        else:
            sequence.pass_over(ids[0])
        if self._call.try_send_bytes(message):
            return True
        self._refused = message
        return False
