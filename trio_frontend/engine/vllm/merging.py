"""Outputs of several messages as one for each request: how a reader that has fallen behind catches up. Pure functions.

Rules that hold here:

* No token is lost, and those of a request stay in order.
* Only plain outputs merge: tokens and nothing else. Any other is delivered at once, after what was held of its request; a last
  output without logprobs takes that along.
"""

from __future__ import annotations

from collections.abc import Iterable

from trio_frontend.engine.vllm.wire import Output

__all__ = ["MERGED_MESSAGES", "Held", "merge", "release"]

MERGED_MESSAGES = 16
"""Messages that merge at most, and so tokens of a request in one output: more would hold up the loop for longer than they save."""

Held = dict[str, list[int]]
"""Tokens to be delivered, by request."""


def merge(held: Held, outputs: Iterable[Output]) -> list[Output]:
    """Hold the plain ones of ``outputs``. What is to be delivered now, in order."""
    now: list[Output] = []
    for output in outputs:
        request_id = output.request_id
        alone = output.new_logprobs is not None or output.new_prompt_logprobs_tensors is not None
        if output.finish_reason is None and not alone:
            earlier = held.get(request_id)
            if earlier is None:
                held[request_id] = output.new_token_ids
            else:
                earlier += output.new_token_ids
            continue
        token_ids = held.pop(request_id, None)
        if token_ids is not None and alone:
            now.append(Output(request_id, token_ids))
        elif token_ids is not None:
            output.new_token_ids = token_ids + output.new_token_ids
        now.append(output)
    return now


def release(held: Held) -> list[Output]:
    """All that is held, which then is nothing."""
    outputs = [Output(request_id, token_ids) for request_id, token_ids in held.items()]
    held.clear()
    return outputs
