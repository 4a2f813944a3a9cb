"""What a vLLM engine core sends and what it is sent, as MessagePack: the shapes, and decoding. No I/O, no state.

Written against vLLM 0.32 and 0.33 (``vllm/v1/engine/__init__.py``, ``vllm/v1/serial_utils.py``). Rules that hold here:

* Structs have the fields that are used; the rest is skipped undecoded. A map's unknown keys and an array's further elements
  are accepted, absent ones take their defaults, so that a newer or older engine is still understood.
* Extension type 3 is raw bytes. Types 1 and 2 are pickles and are never loaded: where a field that is used has one, the message
  is refused.
* Arrays are numpy views of the received frames, read-only, without a copy.
* Whatever cannot be understood is a :class:`WireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from trio_frontend.engine.base import EngineInfo, LogprobsLists

__all__ = [
    "ABORT",
    "ADD",
    "ENGINE_CORE_DEAD",
    "UTILITY",
    "Frame",
    "HandshakeMessage",
    "Output",
    "Outputs",
    "RequestError",
    "SchedulerStats",
    "UtilityOutput",
    "WireError",
    "decode_handshake",
    "decode_outputs",
    "decode_ready",
    "decode_utility_result",
    "encode",
    "encode_init",
    "logprobs_of",
]

ADD: Final = b"\x00"
ABORT: Final = b"\x01"
UTILITY: Final = b"\x03"
"""Request types (``EngineCoreRequestType``), the frame before the body."""

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""The single frame by which an engine says that it is gone (``EngineCoreProc.ENGINE_CORE_DEAD``)."""

RAW_VIEW: Final = 3
"""Extension type of raw bytes (``CUSTOM_TYPE_RAW_VIEW``); 1 and 2 are pickles."""

ABSENT: Final = msgspec.Raw(b"\xc0")


class WireError(Exception):
    """A message is not what the protocol says."""


class Frame(Protocol):
    """A frame of a received message, as pyzmq has it."""

    @property
    def buffer(self) -> Any: ...


class RequestError(msgspec.Struct, gc=False):
    """Why an engine of 0.33 ended a request with ERROR (``vllm.outputs.RequestError``)."""

    code: str = ""
    message: str = ""
    retryable: bool = False


class Output(msgspec.Struct, array_like=True, gc=False):
    """``EngineCoreOutput``: one request's part of a step. Fields of type Raw are not used, only skipped."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[Any] | None = None
    new_prompt_logprobs_tensors: list[Any] | None = None
    pooling_output: msgspec.Raw = ABSENT
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: msgspec.Raw = ABSENT
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: msgspec.Raw = ABSENT
    prefill_stats: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    num_nans_in_logits: msgspec.Raw = ABSENT
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: msgspec.Raw = ABSENT
    spec_decode_metrics: msgspec.Raw = ABSENT
    prompt_token_id_logprobs: msgspec.Raw = ABSENT
    error: RequestError | None = None


class SchedulerStats(msgspec.Struct, gc=False):
    """The parts of ``vllm.v1.metrics.stats.SchedulerStats`` that balancing uses. ``kv_cache_usage`` is a share, 0 to 1."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The answer to a utility call. ``result`` stays encoded until the call is found (``decode_utility_result``)."""

    call_id: int
    failure_message: str | None = None
    result: msgspec.Raw = ABSENT


class Outputs(msgspec.Struct, array_like=True, gc=False):
    """``EngineCoreOutputs``: what one engine step brought for the requests of one frontend."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


class HandshakeMessage(msgspec.Struct, gc=False):
    """What an engine sends to the handshake address: ``status`` is HELLO or READY."""

    status: str
    local: bool = False
    headless: bool = False


class _Ready(msgspec.Struct):
    """The parts of ``EngineCoreReadyResponse`` that become an EngineInfo."""

    max_model_len: int
    num_gpu_blocks: int | None = 0
    block_size: int | None = 0
    effective_attention_block_size: int | None = None
    vllm_version: str = ""
    instance_id: str = ""
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    decode_context_parallel_size: int = 1
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    supports_lora: bool = False
    max_loras: int = 0
    kv_events_config: dict[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False


def _extension(code: int, data: memoryview) -> memoryview:
    if code == RAW_VIEW:
        return data
    raise WireError(f"extension type {code} is refused" + (" (a pickle)" if code in (1, 2) else ""))


_outputs = msgspec.msgpack.Decoder(Outputs, ext_hook=_extension)
_handshake = msgspec.msgpack.Decoder(HandshakeMessage)
_map = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_extension)
_any = msgspec.msgpack.Decoder(ext_hook=_extension)
_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode
"""Any plain value as MessagePack."""


def decode_outputs(frames: Sequence[Frame]) -> Outputs:
    """One message of the output socket. WireError if it is none. Auxiliary frames are looked at by ``logprobs_of``."""
    try:
        return _outputs.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable engine outputs: {error}") from error


def decode_handshake(frame: Frame) -> HandshakeMessage:
    try:
        return _handshake.decode(frame.buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable handshake message: {error}") from error


def decode_ready(frame: Frame, rank: int) -> EngineInfo:
    """An engine's ready response, sent to each input address."""
    try:
        raw = _map.decode(frame.buffer)
        ready = msgspec.convert(raw, _Ready, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable ready response: {error}") from error
    if ready.max_model_len < 1:
        raise WireError(f"ready response with max_model_len {ready.max_model_len}")
    fields = msgspec.structs.asdict(ready)
    fields.update(num_gpu_blocks=ready.num_gpu_blocks or 0, block_size=ready.block_size or 0)
    return EngineInfo(rank=rank, raw=raw, **fields)


def encode_init(inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """The answer to HELLO (``EngineHandshakeMetadata``): where the engine connects to, one address for each frontend process.

    There is no coordinator (only mixture-of-experts models need one) and no parallel configuration to override.
    """
    addresses = {
        "inputs": list(inputs),
        "outputs": list(outputs),
        "coordinator_input": None,
        "coordinator_output": None,
        "frontend_stats_publish_address": None,
    }
    return encode({"addresses": addresses, "parallel_config": {}})


def decode_utility_result(raw: msgspec.Raw) -> Any:
    """The value of ``UtilityResult``, sent as [type information, value]; the types are for Python peers and not used."""
    try:
        result = _any.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable utility result: {error}") from error
    if result is None:
        return None
    if not isinstance(result, list) or len(result) != 2:
        raise WireError("a utility result must be [type information, value]")
    return result[1]


_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(numpy_name)
    for name, numpy_name in {
        # numpy's names, then torch's
        **{code: code for code in ("<i4", "<i8", "<u4", "<f4", "<f8", "<f2")},
        **{torch: torch for torch in ("int32", "int64", "float32", "float64", "float16")},
    }.items()
}


def _array(value: Any, frames: Sequence[Frame], ndim: int) -> np.ndarray:
    """``[dtype, shape, data]``: data are raw bytes, or the index of the frame that holds them (the body is frame 0)."""
    try:
        dtype_name, shape, data = value
        if type(data) is int:
            if not 0 < data < len(frames):
                raise WireError(f"auxiliary frame {data} of a message of {len(frames)} frames")
            data = frames[data].buffer
        elif not isinstance(data, memoryview | bytes):
            # Above all not None, of which numpy would make an array of any size that is asked for.
            raise WireError(f"the data of an array must be bytes or the index of a frame, got {type(data).__name__}")
        array = np.ndarray(shape, _DTYPES[dtype_name], data)
        if array.ndim != ndim or array.nbytes != len(data):
            raise WireError(f"an array of {ndim} dimensions was expected, not {dtype_name} {shape} in {len(data)} bytes")
    except (TypeError, ValueError, KeyError) as error:
        raise WireError(f"not an array that is understood: {error!r}") from error
    return array


def logprobs_of(value: Sequence[Any], frames: Sequence[Frame]) -> LogprobsLists:
    """``LogprobsLists`` and ``LogprobsTensors``: token ids [n, k+1], logprobs [n, k+1], ranks [n]; further elements are ignored."""
    if len(value) < 3:
        raise WireError(f"logprobs of {len(value)} arrays")
    token_ids, logprobs, ranks = _array(value[0], frames, 2), _array(value[1], frames, 2), _array(value[2], frames, 1)
    if token_ids.shape != logprobs.shape or len(ranks) != len(token_ids) or not token_ids.shape[1]:
        raise WireError(f"logprobs of shapes {token_ids.shape}, {logprobs.shape} and {ranks.shape}")
    return LogprobsLists(token_ids, logprobs, ranks)
