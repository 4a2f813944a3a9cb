"""The contract of GenerateRequest, case by case: what is asked, and what every server must answer.

Each case is asked in both ways, unary and streamed. ``CASES`` runs against a scripted engine on every test run (``test_contract``) and
against any server by its address (``run``). A case with a ``script`` needs an engine that plays it; the others any engine, with
``EOS`` for its EOS, ``VOCAB_SIZE`` ids and a context of ``MAX_MODEL_LEN`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.services.inference_rig import EOS, VOCAB_SIZE, byte_ids

__all__ = ["CASES", "FATAL", "MAX_MODEL_LEN", "Case"]

MAX_MODEL_LEN = 64
FATAL = "fatal-json"
"""The difference that ends the engine behind vLLM's own frontend: such a case is not put to it over a real engine."""
NAN, INF = math.nan, math.inf
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Case:
    """``fields`` of the request as nested maps; ``code`` the status in both ways, or ``stream_code`` in the one.

    ``words`` is a pattern that this project's message has; what another server says is its own affair. ``expect`` names what the
    answer must have, as ``answers.Answer`` does. ``oracle`` names the difference of vLLM's own frontend, under which
    docs/compatibility.md gives the reason.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    code: str = "OK"
    words: str = ""
    expect: Mapping[str, Any] = field(default_factory=dict)
    script: Sequence[Mapping[str, Any]] | None = None
    metadata: Sequence[tuple[str, str]] = ()
    stream_code: str | None = None
    oracle: str | None = None


CASES: list[Case] = []
IDS = {"token_ids": {"ids": [300, 301]}}


def _case(name: str, fields: Mapping[str, Any] | None = None, **rest: Any) -> None:
    """A case with a short prompt and six tokens that wants its ids back, unless ``fields`` say otherwise."""
    asked = dict(fields or {})
    if not {"text", "token_ids"} & set(asked) and not asked.pop("no_prompt", False):
        asked.update(IDS)
    if not asked.pop("bare", False):
        asked["stopping"] = {"max_new_tokens": 6} | asked.get("stopping", {})
        asked["response"] = {"output_token_ids": True} | asked.get("response", {})
    CASES.append(Case(name, asked, **rest))


def _invalid(name: str, fields: Mapping[str, Any], words: str = "", **rest: Any) -> None:
    _case(name, fields, code="INVALID_ARGUMENT", words=words, **rest)


def step(text: str | bytes | Sequence[int] = (), **rest: Any) -> dict[str, Any]:
    return {"ids": byte_ids(text) if isinstance(text, str | bytes) else list(text)} | rest


def finish(reason: str, which: str | None = None, value: Any = None) -> tuple[str, str | None, Any]:
    return reason, which, value


SIX = {"num_tokens": 6, "finish": finish("LENGTH")}


def prompts() -> None:
    _case("prompt/text", {"text": "The fox"}, expect=SIX)
    _case("prompt/token_ids", expect=SIX | {"num_prompt_tokens": 2})
    _case("prompt/ids_echoed", {"response": {"prompt_token_ids": True}}, expect={"prompt_ids": [300, 301]})
    _case("prompt/ids_not_echoed", expect={"prompt_ids": []})
    _case(
        "prompt/special_tokens_in_text_are_recognized",
        {"text": "<s>", "response": {"prompt_token_ids": True}},
        expect={"prompt_ids": [0]},
    )
    _case("prompt/unicode", {"text": "héllo 世界 🙂"}, expect=SIX)
    _case("prompt/highest_id", {"token_ids": {"ids": [VOCAB_SIZE - 1]}}, expect=SIX)
    _case("prompt/longest", {"token_ids": {"ids": [300] * 63}}, expect={"num_tokens": 1, "finish": finish("LENGTH")})
    _invalid("prompt/missing", {"no_prompt": True}, "prompt is required")
    _invalid("prompt/empty_text", {"text": ""}, "at least one token")
    _invalid("prompt/empty_ids", {"token_ids": {}}, "at least one token")
    _invalid("prompt/id_outside", {"token_ids": {"ids": [5, VOCAB_SIZE]}}, r"\[512\] in token_ids")
    _invalid("prompt/id_far_outside", {"token_ids": {"ids": [2**32 - 1]}}, "token_ids")
    _invalid("prompt/fills_the_context", {"token_ids": {"ids": [300] * 64}}, "64 tokens.*64 tokens")
    _invalid("prompt/exceeds_the_context", {"token_ids": {"ids": [300] * 500}}, "500 tokens.*64 tokens")
    for count, kept in ((1, [303]), (3, [301, 302, 303]), (4, [300, 301, 302, 303]), (64, [300, 301, 302, 303])):
        fields = {
            "token_ids": {"ids": [300, 301, 302, 303]},
            "truncate_prompt_tokens": count,
            "response": {"prompt_token_ids": True},
        }
        _case(f"truncate/{count}_of_4", fields, expect={"prompt_ids": kept})
    _case(
        "truncate/to_fit",
        {"token_ids": {"ids": [300] * 500}, "truncate_prompt_tokens": 63},
        expect={"num_prompt_tokens": 63},
    )
    _invalid("truncate/to_the_context", {"token_ids": {"ids": [300] * 500}, "truncate_prompt_tokens": 64}, "64 tokens")
    _invalid("truncate/beyond_the_context", {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens.*65")


def names_and_ids() -> None:
    for name in ("", "tiny", "tiny-alias"):
        _case(f"model/{name or 'empty'}", {"model": name}, expect=SIX)
    _case("model/unknown", {"model": "other"}, code="NOT_FOUND", words="other")
    _case("model/name_in_other_case", {"model": "Tiny"}, code="NOT_FOUND", words="Tiny")
    _case("request_id/given", {"request_id": "rid"}, expect=SIX)
    _case("request_id/odd_characters", {"request_id": "a\x00b\n é🙂"}, expect=SIX)
    _case("request_id/32_KiB", {"request_id": "x" * 32_768}, expect=SIX)
    _invalid("request_id/beyond_32_KiB", {"request_id": "x" * 32_769}, "request_id.*32769", oracle="request-id-length")
    for session in ("", "s", "x" * 300):
        _case(f"session/{len(session)}_characters", {"session_id": session}, expect=SIX)
    for priority in (0, -3, 2**31 - 1, -(2**31)):
        _case(f"priority/{priority}", {"priority": priority}, expect=SIX)
    _case("lora/without_lora", {"lora_name": "x"}, code="FAILED_PRECONDITION", words="x.*LoRA")


def lengths() -> None:
    _case("max/zero_is_all_that_is_left", {"stopping": {"max_new_tokens": 0, "ignore_eos": True}}, expect={"num_tokens": 62})
    _case("max/more_is_cut", {"stopping": {"max_new_tokens": 5000, "ignore_eos": True}}, expect={"num_tokens": 62})
    _case("max/exactly_what_is_left", {"stopping": {"max_new_tokens": 62, "ignore_eos": True}}, expect={"num_tokens": 62})
    _case("max/largest_number", {"stopping": {"max_new_tokens": 2**32 - 1, "ignore_eos": True}}, expect={"num_tokens": 62})
    _case("max/one", {"stopping": {"max_new_tokens": 1}}, expect={"num_tokens": 1})
    _case("max/unset", {"bare": True}, expect={"text_only": True})
    _case("min/equal_to_max", {"stopping": {"min_new_tokens": 6}}, expect=SIX)
    _case("min/with_all_that_is_left", {"stopping": {"max_new_tokens": 0, "min_new_tokens": 62}}, expect={"num_tokens": 62})
    _invalid("min/more_than_max", {"stopping": {"min_new_tokens": 7}}, "min_new_tokens.*6.*7")
    _invalid("min/more_than_is_left", {"stopping": {"max_new_tokens": 5000, "min_new_tokens": 63}}, "min_new_tokens.*62.*63")
    _invalid("min/largest_number", {"stopping": {"min_new_tokens": 2**32 - 1}}, "min_new_tokens")
    eos = {"decoding": {"logit_bias": {EOS: 100.0}}}
    _case("eos/ends", eos, expect={"num_tokens": 1, "text": "", "finish": finish("STOP", "eos_token_id", EOS)})
    _case("eos/ignored", eos | {"stopping": {"ignore_eos": True}}, expect=SIX | {"ids": [EOS] * 6})
    _case(
        "eos/not_before_min",
        eos | {"stopping": {"min_new_tokens": 3}},
        expect={"num_tokens": 4, "finish": finish("STOP", "eos_token_id", EOS)},
    )
    biased = {"decoding": {"logit_bias": {310: 100.0}}}
    stopped = biased | {"stopping": {"stop_token_ids": [5, 310, 5]}}
    _case("stop_ids/end", stopped, expect={"num_tokens": 1, "text": "", "finish": finish("STOP", "stop_token_id", 310)})
    _case(
        "stop_ids/with_ignore_eos",
        biased | {"stopping": {"stop_token_ids": [310], "ignore_eos": True}},
        expect={"num_tokens": 1},
    )
    _case(
        "stop_ids/not_before_min",
        biased | {"stopping": {"stop_token_ids": [310], "min_new_tokens": 2}},
        expect={"num_tokens": 3},
    )
    _case(
        "stop_ids/included",
        biased | {"stopping": {"stop_token_ids": [310], "include_stop_strings": True}},
        expect={"num_tokens": 1, "has_text": True},
    )
    _invalid("stop_ids/outside", {"stopping": {"stop_token_ids": [VOCAB_SIZE]}}, "stopping.stop_token_ids")


def sampling() -> None:
    for value in (0.0, -0.0, 1e-9, 0.7, 1.0, 2.0):
        _case(f"temperature/{value}", {"temperature": value, "sampling": {"seed": 7}}, expect={"max_tokens": 6})
    for value in (NAN, INF, -INF, -1.0, -1e-6, 2.0001, 100.0):
        _invalid(f"temperature/{value}", {"temperature": value}, "temperature must be")
    ranges: list[tuple[str, str, Sequence[float], Sequence[float]]] = [
        ("sampling", "top_p", (0.0, 1e-10, 0.5, 1.0), (NAN, INF, -INF, -0.1, 1.0001, 5.0)),
        ("sampling", "min_p", (0.0, 1e-10, 0.5, 1.0), (NAN, INF, -INF, -0.1, 1.0001)),
        ("decoding", "presence_penalty", (0.0, -2.0, 1.5, 2.0), (NAN, INF, -INF, -2.01, 2.01)),
        ("decoding", "frequency_penalty", (0.0, -2.0, 1.5, 2.0), (NAN, INF, -INF, -2.01, 2.01)),
        ("decoding", "repetition_penalty", (0.0, 1e-10, 1.0, 2.5, 1000.0), (NAN, INF, -INF, -1.0)),
    ]
    for group, name, good, bad in ranges:
        for value in good:
            _case(f"{name}/{value}", {group: {name: value}}, expect={"max_tokens": 6})
        for value in bad:
            _invalid(f"{name}/{value}", {group: {name: value}}, f"{group}.{name} must be in")
    for count in (0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**32 - 1):
        _case(
            f"top_k/{count}",
            {"sampling": {"top_k": count, "seed": 7}, "temperature": 1.0},
            expect={"max_tokens": 6},
        )
    for seed in (0, 42, -1, -5, 2**63 - 1, -(2**63)):
        deterministic = {} if seed != -1 else {"random": True}
        _case(f"seed/{seed}", {"sampling": {"seed": seed}, "temperature": 1.0}, expect={"max_tokens": 6} | deterministic)
    _case("num_sequences/0", {"sampling": {"num_sequences": 0}}, expect=SIX)
    _case("num_sequences/1", {"sampling": {"num_sequences": 1}}, expect=SIX)
    for count in (2, 3, 128):
        fields = {"sampling": {"num_sequences": count}}
        _invalid(
            f"num_sequences/{count}",
            fields,
            "GenerateStream",
            stream_code="OK",
            expect={"sequences": count},
            oracle="num-sequences",
        )
    _invalid("num_sequences/129", {"sampling": {"num_sequences": 129}}, "num_sequences")


def decoding() -> None:
    for value in (100.0, 50.5, 101.0, 1e30, INF):
        _case(f"logit_bias/{value}", {"decoding": {"logit_bias": {310: value}}}, expect=SIX | {"ids": [310] * 6})
    for value in (0.0, -100.0, -500.0, -INF):
        _case(f"logit_bias/{value}", {"decoding": {"logit_bias": {310: value}}}, expect={"max_tokens": 6})
    _invalid("logit_bias/nan", {"decoding": {"logit_bias": {310: NAN}}}, "logit_bias.*nan", oracle="logit-bias-nan")
    _invalid("logit_bias/outside", {"decoding": {"logit_bias": {VOCAB_SIZE: 1.0}}}, "decoding.logit_bias")
    _case("allowed/one", {"decoding": {"allowed_token_ids": [310]}}, expect=SIX | {"ids": [310] * 6})
    _case("allowed/twice_the_same", {"decoding": {"allowed_token_ids": [310, 310]}}, expect={"ids": [310] * 6})
    _invalid("allowed/outside", {"decoding": {"allowed_token_ids": [5, VOCAB_SIZE]}}, "decoding.allowed_token_ids")
    compiled = {
        "json": [
            "{}",
            "true",
            ' {"type": "object"} ',
            '{"type":"object","properties":{"a":{"type":"boolean"}}}',
            '{"type":["string","null"]}',
        ],
        "regex": ["", "[0-9]{3}", "^a$", "(?:a|b)+?c"],
        "grammar": ['root ::= "ab" | "cd"', 'root ::= "a" root | "b"', "root ::= [a-z]+"],
        "structural_tag": [
            '{"type":"structural_tag","format":{"type":"const_string","value":"ok"}}',
            '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f"]}',
        ],
    }
    for kind, values in compiled.items():
        for number, value in enumerate(values):
            _case(f"{kind}/good_{number}", {"decoding": {kind: value}}, oracle=FATAL if value == "true" else None)
    for choices in (["yes", "no"], ["a", "a"], ["", 'q"\\\n']):
        _case(
            f"choice/{len(choices[0])}_{len(choices[1])}",
            {"decoding": {"choice": {"choices": choices}}},
            oracle="choice-on-0.32",
        )
    _case("json_object/true", {"decoding": {"json_object": True}})
    _case("json_object/false_is_unset", {"decoding": {"json_object": False}}, expect=SIX)
    late = "compiled-late"
    refused: dict[str, list[tuple[str, str | None]]] = {
        "json": [
            ("", None),
            ("{nope", None),
            ('{"type":"object"', None),
            ('"x"', None),
            ("[]", FATAL),
            ("1", FATAL),
            ("null", FATAL),
            ("false", FATAL),
            ('{"type":"nope"}', late),
            ('{"$ref":"#/nope"}', late),
            ('{"type":"array","items":3}', late),
            ('{"enum":[]}', late),
            ('{"type":"string","pattern":"("}', late),
            ('{"type":"integer","multipleOf":3}', None),
            ('{"type":"array","uniqueItems":true}', None),
        ],
        "regex": [
            ("[0-9", late),
            ("a(", late),
            ("(?=a)b", late),
            (r"(a)\1", late),
            (r"\bfoo", late),
            ("a\0b", None),
            (r"\p{L}", late),
        ],
        "grammar": [
            ("", None),
            ("root ::= ", late),
            ("root ::= x", late),
            ("foo", late),
            ('foo ::= "a"', late),
            ('root ::= "a" |', late),
        ],
        "structural_tag": [
            ("", None),
            ("nope", None),
            ("{}", late),
            ("[]", late),
            ('{"type":"structural_tag","format":{"type":"zzz"}}', late),
            ('{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"nope"}}}', late),
            ('{"structures":[],"triggers":[]}', late),
        ],
    }
    for kind, values in refused.items():
        for number, (value, oracle) in enumerate(values):
            _invalid(f"{kind}/bad_{number}", {"decoding": {kind: value}}, f"decoding.{kind}", oracle=oracle)
    _invalid("choice/none", {"decoding": {"choice": {}}}, "decoding.choice")


def stop_strings() -> None:
    def stops(
        name: str, strings: list[str], script: list[Any], expect: dict[str, Any], oracle: str | None = None, **stopping: Any
    ) -> None:
        _case(
            f"stop_strings/{name}",
            {"stopping": {"stop_strings": strings, "max_new_tokens": 20} | stopping},
            script=script,
            expect=expect,
            oracle=oracle,
        )

    letters = [step("a"), step("b"), step("c"), step("d"), step("e", finish="length")]

    def ended(text: str, count: int, stop: str) -> dict[str, Any]:
        return {"text": text, "num_tokens": count, "finish": finish("STOP", "stop_string", stop)}

    stops("across_tokens", ["bcd"], letters, ended("a", 4, "bcd"))
    stops("in_one_token", ["c"], letters, ended("ab", 3, "c"))
    stops("at_the_beginning", ["a"], letters, ended("", 1, "a"))
    stops("included", ["bcd"], letters, ended("abcd", 4, "bcd"), include_stop_strings=True)
    stops("never_found", ["xyz"], letters, {"text": "abcde", "num_tokens": 5, "finish": finish("LENGTH")})
    stops("begun_and_released", ["bcx"], letters, {"text": "abcde", "num_tokens": 5})
    stops("begun_at_the_end", ["efg"], letters, {"text": "abcde", "num_tokens": 5})
    stops("first_complete_wins", ["abcd", "b"], letters, ended("a", 2, "b"))
    stops("first_named_of_two_that_end_together", ["bc", "abc"], letters, ended("a", 3, "bc"))
    stops("longer_named_first", ["abc", "bc"], letters, ended("", 3, "abc"))
    stops("overlapping_themselves", ["aab"], [step("a"), step("a"), step("a"), step("b")], ended("a", 4, "aab"))
    stops("twice_the_same", ["c", "c"], letters, ended("ab", 3, "c"))
    stops("in_a_step_of_many_tokens", ["bc"], [step("abcde"), step("f")], ended("a", 3, "bc"))
    stops("later_tokens_of_the_step_are_dropped", ["b"], [step("abcde", finish="length")], ended("a", 2, "b"))
    stops("before_eos_in_one_step", ["bc"], [step([*byte_ids("abc"), EOS], finish="stop")], ended("a", 3, "bc"))
    stops("instead_of_length", ["bc"], [step("a"), step("bc", finish="length")], ended("a", 3, "bc"))
    stops(
        "not_in_a_stop_tokens_text",
        ["c"],
        [step("abc", finish="stop", stop_reason=byte_ids("c")[0])],
        {"text": "ab", "num_tokens": 3, "finish": finish("STOP", "stop_token_id", byte_ids("c")[0])},
    )
    stops(
        "in_a_stop_tokens_text_if_included",
        ["c"],
        [step("abc", finish="stop", stop_reason=byte_ids("c")[0])],
        ended("abc", 3, "c"),
        include_stop_strings=True,
    )
    stops("unicode", ["世界"], [step("a世".encode()[:2]), step("世".encode()[1:]), step("界")], ended("a", 7, "世界"))
    stops("regex_characters", ["^].*\\"], [step("a^]"), step(".*\\b")], ended("a", 6, "^].*\\"))
    stops("newlines", ["\n\n"], [step("a\n"), step("b\n"), step("\n")], ended("a\nb", 5, "\n\n"))
    stops("a_hundred", [f"<{n}>" for n in range(100)], [step("a<9"), step("9>b")], ended("a", 5, "<99>"))
    stops("not_before_min", ["bc"], [step("abc"), step("abc")], ended("abca", 6, "bc"), min_new_tokens=3)
    stops("complete_after_min", ["bc"], [step("abc"), step("abc")], ended("a", 3, "bc"), min_new_tokens=2)
    stops("not_before_min_in_one_step", ["bc"], [step("abcabc"), step("x")], ended("abca", 6, "bc"), min_new_tokens=3)
    stops(
        "held_back_text_of_an_abort",
        ["abcd"],
        [step("xab"), step(finish="abort")],
        {"text": "xab", "num_tokens": 3, "finish": finish("ABORTED")},
    )
    stops("held_back_text_at_eos", ["abcd"], [step("xab"), step([EOS], finish="stop")], {"text": "xab", "num_tokens": 4})
    _case(
        "stop_strings/without_text",
        {"stopping": {"stop_strings": ["bc"], "max_new_tokens": 20}, "response": {"output_text": False}},
        script=letters,
        expect={"text": "", "num_tokens": 3, "finish": finish("STOP", "stop_string", "bc")},
    )
    _invalid("stop_strings/empty", {"stopping": {"stop_strings": [""]}}, "stopping.stop_strings")
    _invalid("stop_strings/one_of_them_empty", {"stopping": {"stop_strings": ["a", ""]}}, "stopping.stop_strings")
    _case("stop_strings/long", {"stopping": {"stop_strings": ["x" * 65_536]}}, expect={"max_tokens": 6})
    _invalid(
        "stop_strings/too_long",
        {"stopping": {"stop_strings": ["x" * 65_537]}},
        "stop_strings.*65537",
        oracle="stop-string-length",
    )


def text() -> None:
    def says(name: str, script: list[Any], expected: str, oracle: str | None = None, **fields: Any) -> None:
        _case(
            f"text/{name}",
            {"stopping": {"max_new_tokens": 20}} | fields,
            script=script,
            expect={"text": expected},
            oracle=oracle,
        )

    world = "世界".encode()
    says("steps", [step("a"), step("bc"), step("d", finish="length")], "abcd")
    says("halves_of_characters", [step(world[:1]), step(world[1:4]), step(world[4:], finish="length")], "世界")
    says("never_completed", [step("x"), step(world[:2], finish="length")], "x\ufffd")
    says("never_completed_before_eos", [step(world[:2]), step([EOS], finish="stop")], "\ufffd")
    says("not_completed_by_what_follows", [step(world[:1]), step("a", finish="length")], "\ufffda")
    says("bad_bytes", [step(b"\xff"), step(b"\xc0"), step("a", finish="length")], "\ufffd\ufffda")
    says("special_tokens_skipped", [step("a"), step([0, 2]), step("b", finish="length")], "ab")
    says(
        "special_tokens_kept",
        [step("a"), step([0, 2]), step("b", finish="length")],
        "a<s><pad>b",
        response={"skip_special_tokens": False},
    )
    says("eos_text_left_out", [step("a"), step([EOS], finish="stop")], "a", response={"skip_special_tokens": False})
    says(
        "eos_text_included",
        [step("a"), step([EOS], finish="stop")],
        "a</s>",
        response={"skip_special_tokens": False},
        stopping={"include_stop_strings": True, "max_new_tokens": 20},
    )
    says("ids_that_are_no_tokens", [step("a"), step([VOCAB_SIZE - 1]), step("b", finish="length")], "ab")
    says("off", [step("a"), step("b", finish="length")], "", response={"output_text": False})
    says("steps_without_tokens", [step("a"), step(), step("b", finish="length")], "ab")
    half = {"token_ids": {"ids": byte_ids(world[:4])}}
    says(
        "a_character_begun_in_the_prompt",
        [step(world[4:]), step("a", finish="length")],
        "界a",
        oracle="prompt-in-output",
        **half,
    )
    says(
        "a_character_begun_in_the_prompt_and_not_completed",
        [step("ab", finish="length")],
        "\ufffdab",
        oracle="prompt-in-output",
        **half,
    )
    _case(
        "text/default_response",
        {"bare": True, "stopping": {"max_new_tokens": 2}},
        script=[step("ab", finish="length")],
        expect={"text": "ab", "ids": [], "num_tokens": 2},
    )


def finishes() -> None:
    def ends(name: str, script: list[Any], expected: tuple[str, str | None, Any], oracle: str | None = None) -> None:
        _case(f"finish/{name}", script=script, expect={"finish": expected}, oracle=oracle)

    ends("length", [step("a", finish="length")], finish("LENGTH"))
    ends("eos", [step([EOS], finish="stop")], finish("STOP", "eos_token_id", EOS))
    ends("stop_token", [step([310], finish="stop", stop_reason=310)], finish("STOP", "stop_token_id", 310))
    ends("stop_string_of_the_engine", [step("ab", finish="stop", stop_reason="why")], finish("STOP", "stop_string", "why"))
    ends(
        "stop_without_tokens",
        [step("a"), step(finish="stop")],
        finish("STOP", "eos_token_id", byte_ids("a")[0]),
        oracle="stop-without-token",
    )
    ends("stop_without_any_token", [step(finish="stop")], finish("STOP"))
    ends("abort", [step("a"), step(finish="abort")], finish("ABORTED"))
    ends("abort_at_once", [step(finish="abort")], finish("ABORTED"))
    ends("repetition", [step("a"), step(finish="repetition")], finish("ABORTED"))
    for name, script in (("before_output", [step(finish="error")]), ("after_output", [step("a"), step(finish="error")])):
        _case(f"error/{name}", script=script, code="INTERNAL", words="engine failed during generation")
    params = {"a": 1, "b": [True, None, "x"], "c": {"d": 1.5}}
    _case(
        "finish/transfer_parameters",
        script=[step("a", finish="length", kv=params, ec={"e": "f"})],
        expect={"kv": params, "ec": {"e": "f"}},
    )
    _case("finish/no_transfer_parameters", script=[step("a", finish="length")], expect={"kv": None, "ec": None})


def logprobs() -> None:
    wanted = {"output_logprobs": True}
    _case("logprobs/none", expect={"logprobs": 0, "candidates": None})
    _case("logprobs/sampled", {"response": wanted}, expect={"logprobs": 6, "candidates": 0})
    for count in (0, 1, 3, 20):
        _case(
            f"logprobs/top_{count}",
            {"response": wanted | {"output_candidates": {"top_n": count}}},
            expect={"logprobs": 6, "candidates": count},
        )
    _case("logprobs/all_false", {"response": wanted | {"output_candidates": {"all": False}}}, expect={"candidates": 0})
    _case("logprobs/empty_selection", {"response": wanted | {"output_candidates": {}}}, expect={"candidates": 0})
    _case("logprobs/no_ids", {"response": wanted | {"output_candidates": {"token_ids": {}}}}, expect={"candidates": 0})
    named = {"output_candidates": {"token_ids": {"ids": [310, 5]}}}
    _case("logprobs/ids_in_the_order_given", {"response": wanted | named}, expect={"logprobs": 6, "candidate_ids": [310, 5]})
    _case(
        "logprobs/128_ids",
        {"response": wanted | {"output_candidates": {"token_ids": {"ids": list(range(128))}}}},
        expect={"candidates": 128},
    )
    _case(
        "logprobs/candidates_without_the_flag",
        {"response": {"output_candidates": {"top_n": 99}}},
        expect={"logprobs": 0, "candidates": None},
    )
    _case(
        "logprobs/ids_outside_without_the_flag",
        {"response": {"output_candidates": {"token_ids": {"ids": [9999]}}}},
        expect={"logprobs": 0},
    )
    _invalid(
        "logprobs/top_21", {"response": wanted | {"output_candidates": {"top_n": 21}}}, "output_candidates.top_n.*20.*21"
    )
    _invalid("logprobs/all", {"response": wanted | {"output_candidates": {"all": True}}}, "output_candidates.all.*20")
    _invalid("logprobs/129_ids", {"response": wanted | {"output_candidates": {"token_ids": {"ids": [5] * 129}}}}, "128.*129")
    _invalid(
        "logprobs/id_outside",
        {"response": wanted | {"output_candidates": {"token_ids": {"ids": [VOCAB_SIZE]}}}},
        "output_candidates.token_ids",
    )
    rows = [[[97, 5, 6], [-1.5, -2.5, -3.5], 7]]
    merged = [step([310], logprobs=rows), step([311, 312], logprobs=rows * 2), step([313], logprobs=rows, finish="length")]
    _case(
        "logprobs/steps_of_many_tokens",
        {"response": wanted | {"output_candidates": {"top_n": 2}}},
        script=merged,
        expect={"logprobs": 4, "ranks": [7] * 4, "candidates": 2},
    )
    stopped = {"response": wanted, "stopping": {"stop_strings": ["b"]}}
    _case(
        "logprobs/of_tokens_before_a_stop_string",
        stopped,
        script=[step("abc", logprobs=rows * 3)],
        expect={"logprobs": 2, "num_tokens": 2},
    )
    held = [step(letter, logprobs=[[[1], [-1.0], 1]]) for letter in "abx"] + [
        step("y", logprobs=[[[1], [-1.0], 1]], finish="length")
    ]
    _case(
        "logprobs/while_text_is_held_back",
        {"response": wanted, "stopping": {"stop_strings": ["abc"]}},
        script=held,
        expect={"logprobs": 4, "text": "abxy"},
    )
    prompt = {"prompt_logprobs": True}
    three = {"token_ids": {"ids": [300, 301, 302]}}
    _case("prompt_logprobs/none", three, expect={"prompt_logprobs": 0})
    _case("prompt_logprobs/sampled", three | {"response": prompt}, expect={"prompt_logprobs": 3, "prompt_candidates": 0})
    _case("prompt_logprobs/one_token", {"token_ids": {"ids": [300]}, "response": prompt}, expect={"prompt_logprobs": 1})
    for count in (1, 2, 20):
        _case(
            f"prompt_logprobs/top_{count}",
            three | {"response": prompt | {"prompt_candidates": {"top_n": count}}},
            expect={"prompt_logprobs": 3, "prompt_candidates": count},
        )
    _case(
        "prompt_logprobs/with_output_logprobs",
        three | {"response": prompt | wanted},
        expect={"prompt_logprobs": 3, "logprobs": 6},
    )
    _case(
        "prompt_logprobs/candidates_without_the_flag",
        three | {"response": {"prompt_candidates": {"token_ids": {"ids": [5]}}}},
        expect={"prompt_logprobs": 0},
    )
    _invalid(
        "prompt_logprobs/top_21", {"response": prompt | {"prompt_candidates": {"top_n": 21}}}, "prompt_candidates.top_n"
    )
    _invalid("prompt_logprobs/all", {"response": prompt | {"prompt_candidates": {"all": True}}}, "prompt_candidates.all")
    _invalid(
        "prompt_logprobs/ids", {"response": prompt | {"prompt_candidates": {"token_ids": {"ids": [5]}}}}, "prompt_candidates"
    )


def routing() -> None:
    _case("kv/bypass_prefix_cache", {"kv": {"bypass_prefix_cache": True}}, expect=SIX)
    _case("kv/cache_salt", {"kv": {"cache_salt": "salty"}}, expect=SIX)
    for rank in ("0", "00", "+0"):
        _case(f"data_parallel_rank/{rank}", metadata=[("x-data-parallel-rank", rank)], expect=SIX)
    for rank in ("9", "4294967295"):
        _invalid(f"data_parallel_rank/{rank}", {}, f"rank {rank}", metadata=[("x-data-parallel-rank", rank)])
    for rank in ("", "-0", "-1", "abc", "0x0", "1.0", "4294967296"):
        _invalid(
            f"data_parallel_rank/{rank or 'empty'}", {}, "x-data-parallel-rank", metadata=[("x-data-parallel-rank", rank)]
        )
    _case("trace/parent", metadata=[("traceparent", PARENT)], expect=SIX)
    _case("trace/parent_and_state", metadata=[("traceparent", PARENT), ("tracestate", "a=1")], expect=SIX)
    _case("trace/junk_is_ignored", metadata=[("traceparent", "junk")], expect=SIX)
    ids = {"token_ids": {"ids": [300, 301]}}
    _invalid("media/url", ids | {"media": [{"modality": 1, "url": "http://x/y.png"}]}, "media")
    _invalid("media/data", ids | {"media": [{"modality": 1, "data_uri": "data:,x"}]}, "media")
    _invalid("media/raw_bytes", ids | {"media": [{"modality": 3, "raw_bytes": b"x"}]}, "media")
    _invalid("media/with_text", {"text": "x", "media": [{"modality": 1, "url": "http://x/y.png"}]}, "media.*text")
    _invalid("media/no_modality", ids | {"media": [{"url": "http://x/y.png"}]}, r"media\[0\].modality")
    _invalid("media/unknown_modality", ids | {"media": [{"modality": 9, "url": "http://x/y.png"}]}, r"media\[0\].modality")
    _invalid("media/no_source", ids | {"media": [{"modality": 1}]}, r"media\[0\].*source")
    features = {"identifier": "a", "offset": 0, "length": 1}
    _invalid("media/features_without_kwargs", ids | {"media": [{"modality": 1, "features": features}]}, r"features.kwargs")
    _invalid(
        "media/features_for_a_text_model",
        ids | {"media": [{"modality": 1, "features": features | {"kwargs": b"\x80"}}]},
        "media",
    )


for _group in (prompts, names_and_ids, lengths, sampling, decoding, stop_strings, text, finishes, logprobs, routing):
    _group()
