"""vLLM's own encoder and decoder, for the tests of ours. Run by the Python that has vLLM; knows nothing of trio_frontend.

    python vllm_codec.py < ADD bodies > {"version", "requests", "outputs"}

Standard input is a MessagePack array of ADD bodies, standard output a MessagePack map: each body as vLLM understood it (an
EngineCoreRequest as a map, its SamplingParams another), and messages of outputs as vLLM encodes them, frame by frame, by name.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult
from vllm.version import __version__

CONSTRAINT = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "_backend")


def understood(body: bytes) -> dict[str, Any]:
    request = MsgpackDecoder(EngineCoreRequest).decode([body])
    params = request.sampling_params
    fields = {name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__ if name != "sampling_params"}
    fields["lora_request"] = (
        None if request.lora_request is None else [request.lora_request.name, request.lora_request.lora_path]
    )
    sampling = {name: getattr(params, name) for name in type(params).__struct_fields__}
    sampling["_all_stop_token_ids"] = sorted(params.all_stop_token_ids)
    sampling["output_kind"] = params.output_kind.name
    constraint = params.structured_outputs
    sampling["structured_outputs"] = None if constraint is None else {name: getattr(constraint, name) for name in CONSTRAINT}
    sampling["_eos_token_id"] = params.eos_token_id
    return {**fields, "sampling_params": sampling}


def logprobs(tokens: int, candidates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.arange(tokens * (candidates + 1), dtype=np.int32).reshape(tokens, candidates + 1)
    return ids, -ids.astype(np.float32) / 8, np.arange(1, tokens + 1, dtype=np.int64)


def outputs() -> dict[str, EngineCoreOutputs]:
    small, large = logprobs(1, 2), logprobs(3, 200)
    tensors = LogprobsTensors(*(torch.from_numpy(array) for array in logprobs(40, 5)))
    return {
        "plain": EngineCoreOutputs(
            engine_index=3,
            outputs=[
                EngineCoreOutput("a", [1]),
                EngineCoreOutput("b", [2, 3], finish_reason=FinishReason.STOP, stop_reason=9),
            ],
            scheduler_stats=SchedulerStats(num_running_reqs=4, num_waiting_reqs=5, kv_cache_usage=0.5),
        ),
        "small logprobs": EngineCoreOutputs(outputs=[EngineCoreOutput("a", [0], new_logprobs=LogprobsLists(*small))]),
        "large logprobs": EngineCoreOutputs(
            outputs=[EngineCoreOutput("a", [0, 201, 402], new_logprobs=LogprobsLists(*large))]
        ),
        "prompt logprobs": EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7], new_prompt_logprobs_tensors=tensors)]),
        "everything at once": EngineCoreOutputs(
            outputs=[
                EngineCoreOutput(
                    "a",
                    [0],
                    new_logprobs=LogprobsLists(*small),
                    new_prompt_logprobs_tensors=tensors,
                    pooling_output=torch.ones(100),
                    finish_reason=FinishReason.LENGTH,
                    kv_transfer_params={"blocks": [1, 2], "host": "h"},
                    ec_transfer_params={"x": None},
                    routed_experts=np.ones((50, 3), np.int64),
                )
            ],
            finished_requests={"a"},
        ),
        "utility": EngineCoreOutputs(utility_output=UtilityOutput(5, None, UtilityResult({"nested": [1, None, "x"]}))),
        "utility failure": EngineCoreOutputs(utility_output=UtilityOutput(6, "it failed")),
    }


def main() -> None:
    bodies = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[bytes])
    encoder = MsgpackEncoder()
    encoded = {name: [bytes(frame) for frame in encoder.encode(message)] for name, message in outputs().items()}
    result = {"version": __version__, "requests": [understood(body) for body in bodies], "outputs": encoded}
    sys.stdout.buffer.write(msgspec.msgpack.encode(result, enc_hook=str))


if __name__ == "__main__":
    main()
