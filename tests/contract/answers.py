"""Asking a case through grpcio's stubs of vLLM's own protos, and what is wrong with the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import json_format

from tests.contract.cases import Case

__all__ = ["Answer", "Client", "problems"]


@dataclass
class Answer:
    """What a client has at the end, of one sequence; ``code`` and ``words`` are the status."""

    code: str = "OK"
    words: str = ""
    messages: list[Any] = field(default_factory=list)
    prompt: Any = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    candidates: list[list[tuple[int, float, int]]] = field(default_factory=list)
    finishes: dict[int, Any] = field(default_factory=dict)

    def add(self, message: Any) -> None:
        self.messages.append(message)
        if message.HasField("prompt_info"):
            self.prompt = message.prompt_info
        output = message.outputs
        if message.HasField("outputs") and output.HasField("finish_info"):
            self.finishes[output.index] = output.finish_info
        if message.HasField("outputs") and output.index == 0:
            self.text += output.text
            self.ids += output.token_ids
            self.num_tokens += output.num_tokens
            self.logprobs += [round(value, 3) for value in output.logprobs]
            self.ranks += output.ranks
            self.candidates += [
                [(t.id, round(t.logprob, 3), t.rank) for t in entry.tokens] for entry in output.candidate_tokens
            ]

    @property
    def whole(self) -> tuple[Any, ...]:
        """Everything that a stream and a unary answer must have in common."""
        return (
            self.prompt,
            self.text,
            self.ids,
            self.num_tokens,
            self.logprobs,
            self.ranks,
            self.candidates,
            self.finishes.get(0),
        )


class Client:
    """``pb`` and ``stubs`` are the modules generated from vLLM's inference.proto."""

    def __init__(self, channel: grpc.Channel, pb: ModuleType, stubs: ModuleType, service: str = "Inference") -> None:
        self.pb = pb
        self.stub = getattr(stubs, service + "Stub")(channel)

    def request(self, case: Case) -> Any:
        message = self.pb.GenerateRequest(**case.fields)
        if case.script is not None:
            json_format.ParseDict({"steps": case.script}, message.kv.kv_transfer_params)
        return message

    def unary(self, case: Case) -> Answer:
        answer = Answer()
        try:
            answer.add(self.stub.Generate(self.request(case), metadata=case.metadata, timeout=30))
        except grpc.RpcError as error:
            answer.code, answer.words = error.code().name, error.details() or ""
        return answer

    def stream(self, case: Case) -> Answer:
        answer = Answer()
        try:
            for message in self.stub.GenerateStream(self.request(case), metadata=case.metadata, timeout=30):
                answer.add(message)
        except grpc.RpcError as error:
            answer.code, answer.words = error.code().name, error.details() or ""
        return answer


def problems(case: Case, unary: Answer, stream: Answer, *, words: bool) -> Iterator[str]:
    """What differs from the contract, each as a line; nothing if all is well. ``words``: messages are this project's."""
    for way, answer, code in (("unary", unary, case.code), ("stream", stream, case.stream_code or case.code)):
        if answer.code != code:
            yield f"{way}: {answer.code} {answer.words[:120]!r}, not {code}"
        elif code != "OK":
            if words and not re.search(case.words, answer.words):
                yield f"{way}: the message {answer.words!r} has nothing of {case.words!r}"
            if answer.finishes:
                yield f"{way}: finish_info beside {code}"
        else:
            yield from (f"{way}: {problem}" for problem in _wrong(case, answer))
    if stream.code == "OK":
        yield from (f"stream: {problem}" for problem in _misshapen(stream, case.expect.get("sequences", 1)))
    if unary.code == stream.code == "OK" and not case.expect.get("random") and unary.whole != stream.whole:
        yield f"stream and unary differ: {stream.whole}, {unary.whole}"


def _misshapen(answer: Answer, sequences: int) -> Iterator[str]:
    first, *rest = answer.messages
    if not first.HasField("prompt_info") or first.HasField("outputs"):
        yield "the first message is not prompt_info alone"
    if any(message.HasField("prompt_info") for message in rest):
        yield "prompt_info comes twice"
    if sorted(answer.finishes) != list(range(sequences)):
        yield f"finish_info for {sorted(answer.finishes)}, not for {sequences} sequences"
    if not rest or not rest[-1].outputs.HasField("finish_info"):
        yield "the last message has no finish_info"
    for message in rest:
        output = message.outputs
        for name in ("token_ids", "logprobs", "ranks", "candidate_tokens"):
            if len(getattr(output, name)) not in (0, output.num_tokens):
                yield f"a message has {output.num_tokens} tokens and {len(getattr(output, name))} {name}"


def _wrong(case: Case, answer: Answer) -> Iterator[str]:
    if answer.prompt is None or 0 not in answer.finishes:
        yield "prompt_info or finish_info is missing"
        return
    if answer.finishes[0].num_output_tokens != answer.num_tokens:
        yield f"num_output_tokens {answer.finishes[0].num_output_tokens}, num_tokens {answer.num_tokens}"
    found = _facts(answer)
    for name, wanted in case.expect.items():
        if name == "max_tokens":
            if answer.num_tokens > wanted:
                yield f"{answer.num_tokens} tokens, not at most {wanted}"
        elif name in found and found[name] != wanted:
            yield f"{name}: {found[name]!r}, not {wanted!r}"


def _facts(answer: Answer) -> dict[str, Any]:
    info, prompt = answer.finishes[0], answer.prompt
    which = info.WhichOneof("stop_reason")
    reason = type(info).DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number[info.finish_reason].name
    return {
        "text": answer.text,
        "ids": answer.ids,
        "num_tokens": answer.num_tokens,
        "finish": (reason, which, getattr(info, which) if which else None),
        "num_prompt_tokens": prompt.num_prompt_tokens,
        "prompt_ids": list(prompt.token_ids),
        "logprobs": len(answer.logprobs)
        if len(answer.logprobs) == len(answer.ranks) == len(answer.candidates)
        else "uneven",
        "ranks": answer.ranks,
        "candidates": _one_number([len(entry) for entry in answer.candidates]),
        "candidate_ids": _one_number([[token_id for token_id, _, _ in entry] for entry in answer.candidates]),
        "prompt_logprobs": len(prompt.logprobs)
        if len(prompt.logprobs) == len(prompt.ranks) == len(prompt.candidate_tokens)
        else "uneven",
        "prompt_candidates": _one_number([len(entry.tokens) for entry in prompt.candidate_tokens[1:]]),
        "kv": json_format.MessageToDict(info.kv_transfer_params) if info.HasField("kv_transfer_params") else None,
        "ec": json_format.MessageToDict(info.ec_transfer_params) if info.HasField("ec_transfer_params") else None,
        "has_text": bool(answer.text),
        "text_only": bool(answer.text) and not answer.ids,
    }


def _one_number(values: list[Any]) -> Any:
    """What all entries have in common; None for no entries."""
    if not values:
        return None
    return values[0] if all(value == values[0] for value in values) else values
