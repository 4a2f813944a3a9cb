"""The parts of a GenerateResponse, made of what an engine gave. Pure functions.

Rules that hold here:

* Logprobs stand beside their tokens: as many logprobs, ranks and lists of candidates as token ids, in the same order.
* Column 0 of an engine's logprobs is the token itself. The columns after it are the candidates, in the engine's order, and their
  rank is their position there.
* The first prompt token has nothing before it: logprob 0, rank 0, no candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trio_frontend.engine.base import FinishReason, LogprobsLists
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.structs import struct_of_mapping

__all__ = ["add_logprobs", "encode_tokens", "finish_info", "prompt_info"]

_REASONS = {
    FinishReason.STOP: pb.FinishInfo.STOP,
    FinishReason.LENGTH: pb.FinishInfo.LENGTH,
    FinishReason.ABORT: pb.FinishInfo.ABORTED,
    FinishReason.REPETITION: pb.FinishInfo.ABORTED,
}


def add_logprobs(target: pb.SequenceOutput | pb.PromptInfo, logprobs: LogprobsLists, count: int) -> None:
    """Append the first ``count`` positions of ``logprobs`` to ``target``'s logprobs, ranks and candidate_tokens."""
    target.logprobs.extend(logprobs.logprobs[:count, 0].tolist())
    target.ranks.extend(logprobs.ranks[:count].tolist())
    ids = logprobs.token_ids[:count, 1:].tolist()
    values = logprobs.logprobs[:count, 1:].tolist()
    for row_ids, row_values in zip(ids, values, strict=True):
        tokens = target.candidate_tokens.add().tokens
        for rank, (token_id, value) in enumerate(zip(row_ids, row_values, strict=True), start=1):
            tokens.add(id=token_id, logprob=value, rank=rank)


def prompt_info(
    prompt_token_ids: Sequence[int], *, token_ids_wanted: bool, logprobs_wanted: bool, logprobs: LogprobsLists | None
) -> pb.PromptInfo:
    """What a caller is told of its prompt; ``logprobs`` are those of all prompt tokens but the first."""
    info = pb.PromptInfo(num_prompt_tokens=len(prompt_token_ids))
    if token_ids_wanted:
        info.token_ids.extend(prompt_token_ids)
    if logprobs_wanted:
        info.logprobs.append(0.0)
        info.ranks.append(0)
        info.candidate_tokens.add()
        if logprobs is not None:
            add_logprobs(info, logprobs, len(logprobs.ranks))
    return info


def finish_info(
    num_output_tokens: int,
    reason: FinishReason,
    *,
    stop_string: str | None,
    stop_reason: int | str | None,
    last_token_id: int | None,
    kv_transfer_params: Mapping[str, Any] | None,
    ec_transfer_params: Mapping[str, Any] | None,
) -> pb.FinishInfo:
    """How a sequence ended. ``stop_string`` is one that was matched here; ``stop_reason`` is the engine's own statement.

    A stop for which the engine names no reason is its EOS token, which is the last one it gave.
    """
    info = pb.FinishInfo(num_output_tokens=num_output_tokens, finish_reason=_REASONS[reason])
    if stop_string is not None:
        info.stop_string = stop_string
    elif reason is FinishReason.STOP:
        if isinstance(stop_reason, str):
            info.stop_string = stop_reason
        elif stop_reason is not None:
            info.stop_token_id = stop_reason
        elif last_token_id is not None:
            info.eos_token_id = last_token_id
    if kv_transfer_params is not None:
        info.kv_transfer_params.CopyFrom(struct_of_mapping(kv_transfer_params))
    if ec_transfer_params is not None:
        info.ec_transfer_params.CopyFrom(struct_of_mapping(ec_transfer_params))
    return info


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_VARINTS = [_varint(number) for number in range(1 << 14)]


def encode_tokens(index: int, text: str, num_tokens: int, token_ids: Sequence[int]) -> bytes:
    """``GenerateResponse(outputs=SequenceOutput(index, text, num_tokens, token_ids))``, serialized, byte for byte as protobuf does it.

    Written by hand because it is the message of every streamed token: a third of the time. Empty ``token_ids`` are left out, as
    are 0 and "" (proto3).
    """
    varints = _VARINTS
    body = b"\x08" + _any_varint(index) if index else b""
    if text:
        encoded = text.encode()
        length = len(encoded)
        body += b"\x12" + (varints[length] if length < 16384 else _varint(length)) + encoded
    if num_tokens:
        body += b"\x18" + _any_varint(num_tokens)
    if token_ids:
        packed = b"".join([varints[token] if 0 <= token < 16384 else _varint(token) for token in token_ids])
        body += b"\x22" + _any_varint(len(packed)) + packed
    return b"\x12" + _any_varint(len(body)) + body


def _any_varint(number: int) -> bytes:
    return _VARINTS[number] if number < 16384 else _varint(number)
