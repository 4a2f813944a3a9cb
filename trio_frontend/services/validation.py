"""What a GenerateRequest may say, rule by rule. Pure functions: a value in, the value or an InvalidRequestError out.

Rules that hold here:

* Every rule names the field as the proto does, the value, and what is allowed.
* An engine core trusts its frontend (one bad ADD ends its input thread for good), so nothing out of range passes.
* Ranges are those of vLLM's own gRPC frontend; where vLLM names a source, the rule says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.errors import InvalidRequestError, shown

__all__ = [
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_REQUEST_ID_LENGTH",
    "MAX_SEQUENCES",
    "MAX_STOP_CHARACTERS",
    "Candidates",
    "check_candidates",
    "check_data_parallel_rank",
    "check_entries",
    "check_in_range",
    "check_logit_bias",
    "check_new_tokens",
    "check_prompt_length",
    "check_request_id",
    "check_stop_strings",
    "check_temperature",
    "check_text_length",
    "check_token_ids",
    "check_truncation",
    "check_untruncated_length",
    "trace_headers",
]

MAX_LOGPROB_TOKEN_IDS = 128
"""``vllm.sampling_params.MAX_LOGPROB_TOKEN_IDS``."""
MAX_REQUEST_ID_LENGTH = 32 * 1024
"""Bytes of UTF-8. An id is kept while its request lives, and stands in log lines."""
MAX_STOP_CHARACTERS = 65_536
"""Characters of all stop strings together: an automaton of them is built before the request starts, some microseconds and 300 bytes for
each."""
MAX_SEQUENCES = 128
"""``num_sequences``: each is an engine request of its own, and one message must not start any number of them."""
MIN_TEXT_LIMIT = 2**20
"""Characters that a text may have in any case, for they are tokenized in about a second; and ids that a prompt may have that will be
truncated."""
CHARACTERS_PER_TOKEN = 32
"""Characters that a text may have for each token of the model's context, where the tokenizer sets no bound: a language
has about four, and what is truncated is mostly thrown away."""
_NAMED_IDS = 8
"""Token ids that an error message names at most."""


def check_request_id(request_id: str) -> str:
    length = len(request_id.encode())
    if length > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(f"request_id must have at most {MAX_REQUEST_ID_LENGTH} bytes, got {length}")
    return request_id


def check_temperature(temperature: float) -> float:
    """Finite, in [0, 2]."""
    if not math.isfinite(temperature):
        raise InvalidRequestError(f"temperature must be a finite number, got {temperature}")
    return check_in_range("temperature", temperature, 0, 2)


def check_in_range(field: str, value: float, least: float, most: float, *, above: bool = False) -> float:
    """In [least, most], or (least, most] with ``above``. NaN is in no range, and an infinite ``most`` is itself not allowed."""
    within = least < value if above else least <= value
    if not (within and value <= most and math.isfinite(value)):
        bracket = ")" if math.isinf(most) else "]"
        raise InvalidRequestError(f"{field} must be in {'(' if above else '['}{least:g}, {most:g}{bracket}, got {value:g}")
    return value


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Every id inside the vocabulary."""
    if not token_ids:
        return []
    ids = list(token_ids)
    if max(ids) >= vocab_size:
        raise _outside(field, ids, vocab_size)
    return ids


def _outside(field: str, ids: Iterable[int], vocab_size: int) -> InvalidRequestError:
    outside = [token_id for token_id in ids if token_id >= vocab_size]
    more = f" and {len(outside) - _NAMED_IDS} more" if len(outside) > _NAMED_IDS else ""
    return InvalidRequestError(
        f"token ids {outside[:_NAMED_IDS]}{more} in {field} are outside the vocabulary: each must be less than {vocab_size}"
    )


def check_entries(field: str, number: int, most: int) -> None:
    """Before they are looked at one by one: in 32 MiB there is room for more than the loop has time for."""
    if number > most:
        raise InvalidRequestError(f"{field} must have at most {most} entries, got {number}")


def check_logit_bias(bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    """Ids inside the vocabulary; values clamped to [-100, 100], NaN refused."""
    check_entries("decoding.logit_bias", len(bias), vocab_size)
    checked = {}
    for token_id, value in bias.items():
        if math.isnan(value):
            raise InvalidRequestError(f"decoding.logit_bias[{token_id}] must be a number, got nan")
        checked[token_id] = min(100.0, max(-100.0, value))
    if checked and max(checked) >= vocab_size:
        raise _outside("decoding.logit_bias", checked, vocab_size)
    return checked


def check_truncation(truncate_prompt_tokens: int, max_model_len: int) -> int:
    if truncate_prompt_tokens > max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at most the maximum context length of {max_model_len} tokens, "
            f"got {truncate_prompt_tokens}"
        )
    return truncate_prompt_tokens


def check_prompt_length(length: int, max_model_len: int) -> int:
    """The prompt and one token more must fit. Returns the number of tokens that are left."""
    if length == 0:
        raise InvalidRequestError("the prompt must have at least one token, got none")
    if length >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {length} tokens, which leaves no room for output in the maximum context length of "
            f"{max_model_len} tokens: it must have at most {max_model_len - 1}"
        )
    return max_model_len - length


def check_untruncated_length(length: int, max_model_len: int) -> None:
    """Token ids of which truncation keeps the last: a copy of all is made and looked through."""
    check_entries("token_ids", length, max(MIN_TEXT_LIMIT, 2 * max_model_len))


def check_text_length(length: int, longest_token: int | None, max_model_len: int) -> None:
    """Refuse a text of so many characters that its tokens cannot fit, before it is tokenized, which takes a second and 100 MB of memory
    for a MB or two. ``longest_token`` None: there is no telling how few tokens it has, or it may have any number (it is truncated)."""
    if longest_token:
        if length > longest_token * max_model_len:
            raise InvalidRequestError(
                f"the prompt has {length} characters, which are more than {length // longest_token} tokens: it must have at most "
                f"{max_model_len - 1} tokens to fit the maximum context length of {max_model_len} tokens"
            )
        return
    most = max(MIN_TEXT_LIMIT, CHARACTERS_PER_TOKEN * max_model_len)
    if length > most:
        raise InvalidRequestError(
            f"the prompt must have at most {most} characters for a context length of {max_model_len} tokens, got {length}"
        )


def check_new_tokens(max_new_tokens: int, min_new_tokens: int, default: int | None, left: int) -> tuple[int, int]:
    """Most and least tokens to generate. 0 means the default, or all that is ``left``; more than that is cut to it."""
    most = min(max_new_tokens or default or left, left)
    if min_new_tokens > most:
        raise InvalidRequestError(
            f"stopping.min_new_tokens must be at most the {most} tokens that can be generated, got {min_new_tokens}"
        )
    return most, min_new_tokens


def check_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    if not strings:
        return ()
    checked = tuple(strings)
    if "" in checked:
        raise InvalidRequestError("stopping.stop_strings must not be empty, got ''")
    total = sum(map(len, checked))
    if total > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"stopping.stop_strings must have at most {MAX_STOP_CHARACTERS} characters in all, got {total}"
        )
    return checked


Candidates = tuple[int | None, list[int] | None]
"""``SamplingParams.logprobs`` and ``logprob_token_ids``: exactly one of them is set."""


def check_candidates(field: str, candidates: pb.CandidateTokens, vocab_size: int, max_logprobs: int) -> Candidates:
    """Which candidates' logprobs a request wants: the likeliest n, the whole vocabulary (-1), or the named ones.

    ``max_logprobs`` is the server's, -1 for no limit. ``all`` false and no ids are none.
    """
    match candidates.WhichOneof("select"):
        case "top_n":
            wanted, asked = candidates.top_n, "top_n"
        case "all" if candidates.all:
            wanted, asked = vocab_size, "all"
        case "token_ids" if candidates.token_ids.ids:
            check_entries(f"{field}.token_ids", len(candidates.token_ids.ids), MAX_LOGPROB_TOKEN_IDS)
            return None, check_token_ids(f"{field}.token_ids", candidates.token_ids.ids, vocab_size)
        case _:
            return 0, None
    if 0 <= max_logprobs < wanted:
        raise InvalidRequestError(
            f"{field}.{asked} must be at most the server's limit of {max_logprobs} logprobs, got {wanted}"
        )
    return -1 if wanted >= vocab_size else wanted, None


_UNSIGNED = re.compile(r"\+?[0-9]{1,32}")


def check_data_parallel_rank(value: object) -> int:
    """``x-data-parallel-rank`` metadata: an unsigned 32-bit integer."""
    if isinstance(value, str) and _UNSIGNED.fullmatch(value) and int(value) < 2**32:
        return int(value)
    raise InvalidRequestError(f"x-data-parallel-rank metadata must be an unsigned 32-bit integer, got {shown(value)}")


_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_TRACE_STATE = 512
"""Characters that every tracing system passes on (W3C Trace Context, section 3.3.1.5)."""


def trace_headers(trace_parent: object, trace_state: object) -> dict[str, str] | None:
    """What goes to the engine of ``traceparent`` and ``tracestate`` metadata. A trace parent that is none is no error: it is
    ignored, and its state with it (W3C Trace Context, section 4.3)."""
    if not isinstance(trace_parent, str) or not _TRACE_PARENT.fullmatch(trace_parent):
        return None
    headers = {"traceparent": trace_parent}
    if isinstance(trace_state, str) and 0 < len(trace_state) <= _MAX_TRACE_STATE:
        headers["tracestate"] = trace_state
    return headers
