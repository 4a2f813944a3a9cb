"""Protects what of a GenerateRequest becomes what of an engine's request, and which default stands where nothing is said."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.services.inference_rig import EOS, VOCAB_SIZE, model, request
from trio_frontend.engine.base import Capabilities
from trio_frontend.protos.google.protobuf import struct_pb2
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.conversion import GenerationPlan, OutputOptions, convert, resolve_lora
from trio_frontend.services.errors import InvalidRequestError, PreconditionError, UnknownNameError
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.structs import mapping_of_struct, struct_of_mapping
from trio_frontend.text import GenerationDefaults


def plan(message: pb.GenerateRequest, metadata: dict[str, Any] | None = None, **changes: Any) -> GenerationPlan:
    settings: dict[str, Any] = {
        "model": model(),
        "defaults": GenerationDefaults(),
        "capabilities": Capabilities(max_model_len=64),
        "lora": None,
        "max_logprobs": 20,
        "structured_outputs_backend": "xgrammar",
    }
    return convert(message, list(message.token_ids.ids), metadata or {}, **(settings | changes))


def test_a_request_that_says_nothing_is_greedy_and_neutral_and_as_long_as_the_context() -> None:
    made = plan(pb.GenerateRequest(token_ids={"ids": [5, 6]}))
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (62, 0, None)
    assert (sampling.eos_token_id, list(sampling.stop_token_ids), sampling.ignore_eos) == (EOS, [], False)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.logprob_token_ids) == (None, None, None)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.extra_args) == (None, None, None)
    assert sampling.structured_output is None
    assert made.output == OutputOptions()
    assert (made.num_sequences, made.priority, made.session_id, made.cache_salt) == (1, 0, None, None)
    assert (made.data_parallel_rank, made.trace_headers, made.mm_features, made.lora) == (None, None, None, None)


def test_what_a_request_says_stands() -> None:
    made = plan(
        request(
            [5, 6],
            7,
            temperature=0.5,
            sampling={"top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 0},
            decoding={
                "presence_penalty": -2,
                "frequency_penalty": 2,
                "repetition_penalty": 0.5,
                "logit_bias": {7: 500.0},
                "allowed_token_ids": [8, 8],
                "regex": "a",
            },
            stopping={
                "min_new_tokens": 2,
                "stop_token_ids": [9],
                "stop_strings": ["x"],
                "include_stop_strings": True,
                "ignore_eos": True,
            },
            response={"output_text": False, "skip_special_tokens": False, "output_logprobs": True},
            priority=-3,
            session_id="s",
            kv={"cache_salt": "salt", "bypass_prefix_cache": True},
        )
    )
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 3, 0.5, 0.25, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 0.5)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({7: 100.0}, [8, 8])
    assert sampling.structured_output is not None
    assert sampling.structured_output.backend == "xgrammar"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (7, 2, [9], True)
    assert (sampling.logprobs, sampling.skip_reading_prefix_cache) == (0, True)
    assert made.output == OutputOptions(
        text=False,
        token_ids=True,
        logprobs=True,
        skip_special_tokens=False,
        stop_strings=("x",),
        include_stop_strings=True,
        min_tokens=2,
    )
    assert (made.priority, made.session_id, made.cache_salt) == (-3, "s", "salt")


def test_the_models_defaults_stand_for_fields_that_are_zero_but_never_for_temperature() -> None:
    defaults = GenerationDefaults(
        max_new_tokens=7,
        top_k=11,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.3,
    )
    sampling = plan(pb.GenerateRequest(token_ids={"ids": [5]}), defaults=defaults).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.top_p, sampling.min_p) == (7, 11, 0.9, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 0.25, 1.3)
    assert sampling.temperature == 0.0
    stated = request([5], 9, sampling={"top_k": 2, "top_p": 1.0, "min_p": 0.5}, decoding={"presence_penalty": 1})
    sampling = plan(stated, defaults=defaults).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.top_p, sampling.min_p) == (9, 2, 1.0, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.25)


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (-1, None), (-5, -5), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63))])
def test_any_int64_is_a_seed_and_minus_one_is_none(seed: int, expected: int | None) -> None:
    assert plan(request(sampling={"seed": seed})).sampling.seed == expected


def test_sequences_have_seeds_and_engine_ids_of_their_own_and_share_the_callers() -> None:
    made = plan(request(request_id="mine", sampling={"num_sequences": 3, "seed": -3}, response={"prompt_logprobs": True}))
    first, second, third = made.engine_requests()
    assert [r.sampling.seed for r in (first, second, third)] == [-3, -2, -(2**63)]
    assert {r.external_request_id for r in (first, second, third)} == {"mine"}
    assert len({r.request_id for r in (first, second, third)}) == 3
    assert [r.sampling.prompt_logprobs for r in (first, second, third)] == [0, None, None]
    assert [r.sampling.seed for r in plan(request(sampling={"num_sequences": 2})).engine_requests()] == [None, None]


def test_a_request_without_an_id_gets_one() -> None:
    one, other = plan(request()), plan(request())
    assert one.external_id != other.external_id
    assert len(one.external_id) == 36
    assert one.engine_requests()[0].request_id.startswith(one.external_id)


def test_two_requests_of_one_id_differ_to_the_engine() -> None:
    made = [plan(request(request_id="same")).engine_requests()[0] for _ in range(2)]
    assert made[0].request_id != made[1].request_id


@pytest.mark.parametrize(("truncate", "expected"), [(0, [1, 2, 3]), (2, [2, 3]), (64, [1, 2, 3])])
def test_truncation_keeps_the_end(truncate: int, expected: list[int]) -> None:
    assert plan(request([1, 2, 3], truncate_prompt_tokens=truncate)).prompt_token_ids == expected


def test_a_prompt_that_fits_once_it_is_truncated_fits() -> None:
    made = plan(request([5] * 1000, truncate_prompt_tokens=63))
    assert (len(made.prompt_token_ids), made.sampling.max_tokens) == (63, 1)
    with pytest.raises(InvalidRequestError, match="64 tokens"):
        plan(request([5] * 1000, truncate_prompt_tokens=64))


def test_a_top_k_beyond_the_vocabulary_is_the_vocabulary() -> None:
    assert plan(request(sampling={"top_k": 2**32 - 1})).sampling.top_k == VOCAB_SIZE


@pytest.mark.parametrize(
    ("response", "limit", "expected"),
    [
        ({"output_logprobs": True}, 20, (0, None, None)),
        ({"output_logprobs": True, "output_candidates": {"top_n": 3}}, 20, (3, None, None)),
        ({"output_logprobs": True, "output_candidates": {"all": True}}, -1, (-1, None, None)),
        ({"output_logprobs": True, "output_candidates": {"token_ids": {"ids": [7, 5]}}}, 20, (None, [7, 5], None)),
        ({"output_candidates": {"top_n": 3}}, 20, (None, None, None)),
        ({"output_candidates": {"top_n": 3000}}, 20, (None, None, None)),
        ({"prompt_logprobs": True, "prompt_candidates": {"top_n": 2}}, 20, (None, None, 2)),
        ({"prompt_candidates": {"token_ids": {"ids": [5]}}}, 20, (None, None, None)),
    ],
)
def test_logprobs_that_the_engine_is_asked_for(response: dict[str, Any], limit: int, expected: Any) -> None:
    sampling = plan(request(response=response), max_logprobs=limit).sampling
    assert (sampling.logprobs, sampling.logprob_token_ids, sampling.prompt_logprobs) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [VOCAB_SIZE]}, "in token_ids are outside"),
        ({"stopping": {"stop_token_ids": [VOCAB_SIZE]}}, "in stopping.stop_token_ids"),
        ({"stopping": {"min_new_tokens": 9}}, "stopping.min_new_tokens"),
        ({"stopping": {"stop_strings": [""]}}, "stopping.stop_strings"),
        ({"decoding": {"allowed_token_ids": [VOCAB_SIZE]}}, "in decoding.allowed_token_ids"),
        ({"decoding": {"logit_bias": {VOCAB_SIZE: 1.0}}}, "in decoding.logit_bias"),
        ({"decoding": {"presence_penalty": 2.01}}, "decoding.presence_penalty must be in"),
        ({"decoding": {"frequency_penalty": -2.01}}, "decoding.frequency_penalty must be in"),
        ({"decoding": {"repetition_penalty": -1}}, "decoding.repetition_penalty must be in"),
        ({"decoding": {"repetition_penalty": math.inf}}, "decoding.repetition_penalty must be in"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p must be in"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p must be in"),
        ({"sampling": {"min_p": -0.5}}, "sampling.min_p must be in"),
        ({"sampling": {"num_sequences": 129}}, "sampling.num_sequences must be at most 128, got 129"),
        ({"temperature": 3.0}, "temperature must be in"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"request_id": "x" * 40_000}, "request_id"),
        ({"response": {"output_logprobs": True, "output_candidates": {"top_n": 21}}}, "response.output_candidates.top_n"),
        ({"response": {"prompt_logprobs": True, "prompt_candidates": {"token_ids": {}}}}, "response.prompt_candidates"),
    ],
)
def test_each_field_is_checked_under_its_own_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        plan(request(**fields))


def test_metadata_picks_an_engine_and_carries_the_trace() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    made = plan(request(), {"x-data-parallel-rank": "3", "traceparent": parent, "tracestate": "a=1", "other": "x"})
    assert made.data_parallel_rank == 3
    assert made.trace_headers == {"traceparent": parent, "tracestate": "a=1"}
    with pytest.raises(InvalidRequestError, match="x-data-parallel-rank"):
        plan(request(), {"x-data-parallel-rank": "x"})


def test_transfer_parameters_keep_their_shape_and_whole_numbers_become_ints() -> None:
    values = {"a": 1, "b": [True, None, "x", 2.0], "c": {"d": 1.5, "e": -3.0, "big": 1e20}}
    struct = struct_pb2.Struct()
    struct.update(values)
    message = request()
    message.kv.kv_transfer_params.CopyFrom(struct)
    message.kv.ec_transfer_params.SetInParent()
    extra = plan(message).sampling.extra_args
    assert extra == {
        "kv_transfer_params": {"a": 1, "b": [True, None, "x", 2], "c": {"d": 1.5, "e": -3, "big": 1e20}},
        "ec_transfer_params": {},
    }
    assert type(extra["kv_transfer_params"]["b"][3]) is int
    assert type(extra["kv_transfer_params"]["b"][0]) is bool
    assert mapping_of_struct("f", struct_of_mapping(values)) == mapping_of_struct("f", struct)


def test_transfer_parameters_that_no_engine_could_take_are_refused() -> None:
    struct = struct_pb2.Struct()
    struct.update({"a": math.inf})
    with pytest.raises(InvalidRequestError, match="f must hold finite numbers, got inf"):
        mapping_of_struct("f", struct)
    deep = struct_pb2.Struct()
    inner = deep
    for _ in range(60):
        inner = inner.fields["a"].struct_value
    with pytest.raises(InvalidRequestError, match="f must be nested at most 48 levels"):
        mapping_of_struct("f", deep)


def test_an_engines_parameters_become_a_struct_whatever_they_are() -> None:
    struct = struct_of_mapping({"ids": (1, 2), 3: b"x", "none": None, "flag": True, "deep": {"a": {}}, "empty": []})
    assert mapping_of_struct("f", struct) == {
        "ids": [1, 2],
        "3": "b'x'",
        "none": None,
        "flag": True,
        "deep": {"a": {}},
        "empty": [],
    }


NAMES = ("tiny", "alias")


def test_a_model_is_a_served_name_or_none_and_a_loaded_adapter() -> None:
    loras = LoraRegistry()
    capabilities = Capabilities(max_model_len=1, supports_lora=True)
    assert resolve_lora("", "", NAMES, capabilities, loras) is None
    assert resolve_lora("alias", "", NAMES, capabilities, loras) is None
    with pytest.raises(UnknownNameError, match=r"'other'.*'tiny', 'alias'"):
        resolve_lora("other", "", NAMES, capabilities, loras)
    adapter = loras.reserve("other", "/adapters/other")
    loras.add(adapter)
    assert resolve_lora("other", "", NAMES, capabilities, loras) is adapter
    assert resolve_lora("other", "other", NAMES, capabilities, loras) is adapter
    with pytest.raises(InvalidRequestError, match=r"'x'.*'other'"):
        resolve_lora("other", "x", NAMES, capabilities, loras)


def test_a_lora_name_needs_an_engine_with_lora_and_a_loaded_adapter() -> None:
    loras = LoraRegistry()
    without, with_lora = Capabilities(max_model_len=1), Capabilities(max_model_len=1, supports_lora=True)
    with pytest.raises(PreconditionError, match="enable-lora"):
        resolve_lora("tiny", "x", NAMES, without, loras)
    with pytest.raises(UnknownNameError, match="'x'"):
        resolve_lora("tiny", "x", NAMES, with_lora, loras)
    adapter = loras.reserve("x", "/adapters/x")
    loras.add(adapter)
    assert resolve_lora("", "x", NAMES, with_lora, loras) is adapter
    assert plan(request(), lora=adapter).engine_requests()[0].lora is adapter


def tensor(dtype: str, shape: list[int], size: int, code: int = 3) -> list[Any]:
    return [dtype, shape, msgspec.msgpack.Ext(code, bytes(size))]


def kwargs(data: Any = None, field: Any = None) -> bytes:
    element = {"data": data if data is not None else tensor("float32", [2, 3], 24), "field": field or ["batched", {}]}
    return msgspec.msgpack.encode({"pixel_values": element})


def item(**features: Any) -> pb.MediaItem:
    stated = {"kwargs": kwargs(), "identifier": "hash", "offset": 1, "length": 2} | features
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, features={k: v for k, v in stated.items() if v is not None})


MULTIMODAL = Capabilities(max_model_len=64, supports_multimodal=True)


def test_preprocessed_media_pass_to_the_engine() -> None:
    media = [item(is_embed=[True, False], mm_hash="h"), item(offset=3, length=1)]
    features = plan(request([5, 6, 7, 8], media=media), capabilities=MULTIMODAL).mm_features
    assert features is not None
    first, second = features
    assert (first["modality"], first["identifier"], first["mm_hash"], second["mm_hash"]) == ("image", "hash", "h", None)
    assert (first["mm_position"]["offset"], first["mm_position"]["length"]) == (1, 2)
    dtype, shape, mask = first["mm_position"]["is_embed"]
    assert (dtype, shape, bytes(mask.data)) == ("bool", [2], b"\x01\x00")
    assert second["mm_position"]["is_embed"] is None
    assert first["data"]["pixel_values"]["field"] == ["batched", {}]
    assert msgspec.msgpack.encode(features)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (3, None),
        ([1.5, tensor("int64", [], 8)], None),
        (tensor("bfloat16", [0, 4], 0), ["shared", {"batch_size": 2}]),
        (tensor("uint8", [4], 4), ["flat", {"slices": [[0, 2, None], [2, 4, None]], "dim": 0}]),
    ],
)
def test_tensors_of_every_shape_pass(data: Any, field: Any) -> None:
    plan(request([5, 6, 7], media=[item(kwargs=kwargs(data, field))]), capabilities=MULTIMODAL)


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (pb.MediaItem(url="http://x/y"), r"media\[0\].modality must be"),
        (pb.MediaItem(modality=9, url="http://x/y"), r"media\[0\].modality must be image, video or audio, got 9"),  # type: ignore[arg-type]
        (pb.MediaItem(modality=pb.MODALITY_AUDIO), r"media\[0\] must have a source"),
        (pb.MediaItem(modality=pb.MODALITY_IMAGE, url="http://x/y"), r"media\[0\].url is not supported"),
        (pb.MediaItem(modality=pb.MODALITY_VIDEO, raw_bytes=b"x"), r"media\[0\].raw_bytes is not supported"),
        (item(kwargs=None), r"features.kwargs is required"),
        (item(identifier=""), "identifier is required"),
        (item(length=0), "offset 1 and length 0 must be a range"),
        (item(length=3), "offset 1 and length 3 must be a range .* of 3 tokens"),
        (item(offset=2**64 - 1, length=2**64 - 1), "must be a range"),
        (item(is_embed=[True]), "is_embed must be empty or have 2 entries"),
        (item(kwargs=b""), "is no MessagePack"),
        (item(kwargs=kwargs() + b"\x00"), "is no MessagePack"),
        (item(kwargs=b"\x80"), "must be a map with at least one entry"),
        (item(kwargs=msgspec.msgpack.encode({"a": 1})), "'a' must be a map of data and field"),
        (item(kwargs=kwargs(tensor("object", [1], 8))), "dtype must be one of"),
        (item(kwargs=kwargs(tensor("float32", [2, 3], 23))), r"float32 \[2, 3\] must have 24 bytes, got 23"),
        (item(kwargs=kwargs(tensor("float32", [-1], 4))), "shape must be a list of sizes"),
        (item(kwargs=kwargs(tensor("float32", [1], 4, code=1))), "must be inline, an extension of type 3"),
        (item(kwargs=kwargs(["float32", [1], 1])), "must be inline"),
        (item(kwargs=kwargs(["float32", [1]])), "a dtype, a shape and bytes, got 2"),
        (item(kwargs=kwargs("x")), "must be a number, a tensor or a list"),
        (item(kwargs=kwargs(1, ["nope", {}])), "must be one of batched, flat, shared"),
        (
            item(kwargs=kwargs(1, ["flat", {"slices": [msgspec.msgpack.Ext(1, b"x")]}])),
            "the argument slices of flat must not be",
        ),
        # An engine calls the factory with these, in its input thread, which an exception ends for good.
        (item(kwargs=kwargs(1, ["batched", {"dim": 0}])), "batched has no argument 'dim'"),
        (item(kwargs=kwargs(1, ["batched", {1: 0}])), "batched has no argument 1"),
        (item(kwargs=kwargs(1, ["flat", {}])), "flat needs the argument slices"),
        (item(kwargs=kwargs(1, ["flat", {"slices": 5}])), "the argument slices of flat must not be 5"),
        (item(kwargs=kwargs(1, ["flat", {"slices": [0, 1, 1]}])), "the argument slices of flat"),
        (item(kwargs=kwargs(1, ["flat", {"slices": [[0, 1, 1, 1]]}])), "the argument slices of flat"),
        (item(kwargs=kwargs(1, ["flat", {"slices": [["0", 1]]}])), "the argument slices of flat"),
        (item(kwargs=kwargs(1, ["flat", {"slices": [[0, 1]], "dim": 2.5}])), "the argument dim of flat must not be 2.5"),
        (item(kwargs=kwargs(1, ["shared", {}])), "shared needs the argument batch_size"),
        (item(kwargs=kwargs(1, ["shared", {"batch_size": 0}])), "the argument batch_size of shared must not be 0"),
        (item(kwargs=kwargs(1, ["batched", {"keep_on_cpu": 1}])), "the argument keep_on_cpu of batched must not be 1"),
        (item(kwargs=kwargs(tensor("float32", [0, 2**63], 0))), "at most 64 dimensions and 2147483648 elements"),
        (item(kwargs=kwargs(tensor("float32", [1] * 65, 4))), "at most 64 dimensions"),
    ],
)
def test_media_that_an_engine_could_not_take_are_refused(media: pb.MediaItem, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        plan(request([5, 6, 7], media=[media]), capabilities=MULTIMODAL)


def test_media_need_token_ids_and_a_model_that_takes_them() -> None:
    with pytest.raises(InvalidRequestError, match="the model takes no media"):
        plan(request([5, 6, 7], media=[item()]))
    with pytest.raises(InvalidRequestError, match="with a prompt of token_ids"):
        convert(
            request("text", media=[item()]),
            [5, 6, 7],
            {},
            model=model(),
            defaults=GenerationDefaults(),
            capabilities=MULTIMODAL,
            lora=None,
            max_logprobs=20,
            structured_outputs_backend="xgrammar",
        )
    with pytest.raises(InvalidRequestError, match="must not cut a prompt with media"):
        plan(request([5, 6, 7, 8], media=[item()], truncate_prompt_tokens=3), capabilities=MULTIMODAL)
