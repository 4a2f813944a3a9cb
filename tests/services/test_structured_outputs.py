"""Protects that what an engine could not compile is refused before it is sent, and that what it can is not."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from trio_frontend.engine.base import StructuredOutput
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.errors import InvalidRequestError
from trio_frontend.services.structured_outputs import MAX_LENGTH, compile_constraint, constraint_of, is_known

D = pb.DecodingParameters
TAG = {"type": "structural_tag"}


def compile_(kind: Any, value: Any, backend: str = "xgrammar") -> None:
    compile_constraint(StructuredOutput(kind, value, backend))


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        (D(), None),
        (D(json="{}"), ("json", "{}")),
        (D(json=""), ("json", "")),
        (D(regex="a"), ("regex", "a")),
        (D(choice=D.StringChoices(choices=["a", "b"])), ("choice", ("a", "b"))),
        (D(grammar="root ::= x"), ("grammar", "root ::= x")),
        (D(json_object=True), ("json_object", None)),
        (D(json_object=False), None),
        (D(structural_tag="{}"), ("structural_tag", "{}")),
    ],
)
def test_the_constraint_that_a_request_names(decoding: pb.DecodingParameters, expected: tuple[str, Any] | None) -> None:
    constraint = constraint_of(decoding, "guidance")
    assert (None if constraint is None else (constraint.kind, constraint.value)) == expected
    assert constraint is None or constraint.backend == "guidance"


# What is good and bad here was put to xgrammar 0.2 itself.
GOOD = [
    ("json", "{}"),
    ("json", "true"),
    ("json", ' {"type": "object"} '),
    ("json", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'),
    ("json", '{"type":["string","null"]}'),
    ("json", '{"type":"string","format":"email"}'),
    ("json", '{"$defs":{"n":{"type":"object","properties":{"next":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}'),
    ("json", '{"not":{"type":"string"}}'),
    ("json", '{"title":"x","unknown":1}'),
    ("json", '{"type":"object","patternProperties":{"a":{}}}'),
    ("json_object", None),
    ("regex", ""),
    ("regex", "[0-9]{3}"),
    ("regex", "^a$"),
    ("regex", "a*?x|(?:b|c)+"),
    ("regex", r"\d+\.\w*[^\]x]"),
    ("regex", r"[*+?{]+\*\+"),
    ("regex", "(?<name>a)"),
    ("choice", ("a", "b")),
    ("choice", ("", 'with "quotes" and \\ and \n')),
    ("grammar", 'root ::= "ab" | "cd"'),
    ("grammar", 'root ::= "a" root | "b"'),
    ("grammar", 'root ::= [a-z|)]+ "x|"? ("y" | "z"){2,3} # | \nother ::= "q"'),
    ("grammar", 'root ::= ""'),
    ("grammar", 'root ::= "a" (= "b")'),
    ("grammar", 'start: "a"'),
    ("structural_tag", json.dumps(TAG | {"format": {"type": "const_string", "value": "ok"}})),
    ("structural_tag", '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f"]}'),
    (
        "structural_tag",
        json.dumps(
            TAG
            | {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<a"],
                    "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": ["</a>", "x"]}],
                }
            }
        ),
    ),
    (
        "structural_tag",
        json.dumps(
            TAG
            | {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, {"type": "any_text"}]},
                        {"type": "grammar", "grammar": 'root ::= "a"'},
                        {"type": "star", "content": {"type": "token", "token": 5}},
                        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "x"}},
                    ],
                }
            }
        ),
    ),
]


@pytest.mark.parametrize(("kind", "value"), GOOD)
def test_what_compiles_passes(kind: str, value: Any) -> None:
    compile_(kind, value)
    compile_(kind, value)


BAD = [
    ("json", "", "decoding.json is no valid JSON"),
    ("json", "{nope", "decoding.json is no valid JSON"),
    ("json", '{"type":"object"', "decoding.json is no valid JSON"),
    ("json", "[]", "must be a JSON schema, an object or true"),
    ("json", "1", "must be a JSON schema"),
    ("json", "null", "must be a JSON schema"),
    ("json", "false", "must be a JSON schema"),
    ("json", '"x"', "must be a JSON schema"),
    ("json", '{"type":"nope"}', "nope"),
    ("json", '{"$ref":"#/nope"}', "nope"),
    ("json", '{"type":"array","items":3}', "schema must be an object or boolean"),
    ("json", '{"type":"object","properties":3}', "properties"),
    ("json", '{"type":"integer","minimum":5,"maximum":3}', "minimum"),
    ("json", '{"type":"string","pattern":"("}', "regex"),
    ("json", '{"enum":[]}', "Unsatisfiable"),
    ("json", '{"type":"integer","multipleOf":3}', "does not support multipleOf"),
    ("json", '{"properties":{"a":{"type":"array","uniqueItems":true}}}', "does not support uniqueItems"),
    ("json", '{"type":"string","format":"zzz"}', "does not support format 'zzz'"),
    ("json", '{"type":"string","pattern":"a","maxLength":3}', "pattern or format together with a length"),
    ("json", '{"type":"object","patternProperties":{"a":{}},"properties":{"b":{}}}', "together with properties"),
    ("json", '{"type":"object","patternProperties":{"a":{},"b":{}}}', "several patternProperties"),
    ("json", '{"type":"object","propertyNames":{"pattern":"a"},"properties":{}}', "propertyNames together"),
    ("json", '{"allOf":[{"type":"string"},{"enum":["a"]}]}', "allOf with several branches"),
    ("json", '{"a":' * 100 + "{}" + "}" * 100, "nested deeper than 64"),
    ("json", "[" * 100_000, "nested deeper than 64"),
    ("regex", "[0-9", "decoding.regex cannot be compiled"),
    ("regex", r"\d+(", "decoding.regex cannot be compiled"),
    ("regex", "(?=a)b", "decoding.regex"),
    ("regex", r"(a)\1", "decoding.regex"),
    ("regex", r"\bfoo", "decoding.regex"),
    ("regex", "a\0b", "must not contain NUL"),
    ("regex", "(?i)a", r"xgrammar does not support \(\?i"),
    ("regex", r"x\p{L}", r"xgrammar does not support \\p"),
    ("regex", "a**", r"xgrammar does not support \*\*"),
    ("regex", "(?P<n>a)", "xgrammar does not support"),
    ("choice", (), "decoding.choice must have at least one string"),
    ("grammar", "", "decoding.grammar must not be empty"),
    ("grammar", " \n", "decoding.grammar must not be empty"),
    ("grammar", "root ::= ", "empty alternative"),
    ("grammar", 'root ::= "a" | ', "empty alternative"),
    ("grammar", 'root ::= | "a"', "empty alternative"),
    ("grammar", 'root ::= ("a" | )', "empty alternative"),
    ("grammar", 'root ::=\nother ::= "a"', "empty alternative"),
    ("grammar", "root ::= x", "Rule 'x' not found"),
    ("grammar", "foo", "decoding.grammar cannot be compiled"),
    ("grammar", 'foo ::= "a"', "No 'root' rule"),
    ("grammar", "start: b", "decoding.grammar cannot be compiled"),
    ("structural_tag", "", "must not be empty"),
    ("structural_tag", "nope", "no valid JSON"),
    ("structural_tag", "[]", "must be a JSON object"),
    ("structural_tag", "{}", "format is required"),
    ("structural_tag", '{"type":"structural_tag"}', "format is required"),
    ("structural_tag", '{"type":"x","format":{}}', "type must be"),
    ("structural_tag", '{"format":{"type":"zzz"}}', r"format\.type must be one of .*, got 'zzz'"),
    ("structural_tag", '{"format":{"type":"const_string"}}', r"format\.value must be a string, got None"),
    ("structural_tag", '{"format":{"type":"const_string","value":3}}', "must be a string, got 3"),
    ("structural_tag", '{"format":{"type":"or","elements":[]}}', "at least one entry"),
    ("structural_tag", '{"format":{"type":"json_schema","json_schema":{"type":"nope"}}}', "json_schema cannot be compiled"),
    ("structural_tag", '{"format":{"type":"regex","pattern":"("}}', "pattern cannot be compiled"),
    ("structural_tag", '{"format":{"type":"grammar","grammar":"root ::= "}}', "empty alternative"),
    ("structural_tag", '{"structures":[],"triggers":[]}', "at least one entry"),
    ("structural_tag", '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<g"]}', "one of the triggers"),
    (
        "structural_tag",
        '{"format":{"type":"triggered_tags","triggers":["<b"],"tags":[{"begin":"<a>","content":{"type":"any_text"},"end":"x"}]}}',
        "one of the triggers",
    ),
]


@pytest.mark.parametrize(("kind", "value", "words"), BAD)
def test_what_does_not_compile_is_refused_by_name(kind: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        compile_(kind, value)
    assert f"decoding.{kind}" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not is_known(StructuredOutput(kind, value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value", "backend", "passes"),
    [
        ("json", '{"type":"integer","multipleOf":3}', "guidance", True),
        ("json", '{"type":"object","patternProperties":{"a":{}}}', "guidance", False),
        ("json", '{"not":{"type":"string"}}', "guidance", False),
        ("regex", "(?i)a", "guidance", True),
        ("grammar", 'root ::= "a"', "guidance", True),
        ("grammar", 'root ::= "a"', "outlines", False),
        ("structural_tag", '{"format":{"type":"const_string","value":"a"}}', "outlines", False),
        ("regex", "a", "outlines", True),
        ("choice", ("a",), "outlines", True),
    ],
)
def test_backends_differ(kind: str, value: Any, backend: str, passes: bool) -> None:
    if passes:
        compile_(kind, value, backend)
    else:
        with pytest.raises(InvalidRequestError, match=backend if backend == "outlines" else kind):
            compile_(kind, value, backend)


def test_what_compiled_once_is_known_and_the_memory_of_it_is_bounded() -> None:
    for number in range(600):
        constraint = StructuredOutput("regex", f"a{{{number}}}")
        compile_constraint(constraint)
    assert is_known(constraint)
    assert not is_known(StructuredOutput("regex", "a{1}"))
    long = StructuredOutput("regex", "a" * 20_000)
    compile_constraint(long)
    assert not is_known(long)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "[^]a]" * 20_000),
        ("regex", "[]a]" * 20_000 + "["),
        ("grammar", "root ::= " + "[" * 100_000),
        ("grammar", "root ::= " + '"\\' * 100_000),
    ],
)
def test_a_constraint_made_to_be_read_in_many_ways_is_read_in_linear_time(kind: str, value: str) -> None:
    begun = time.monotonic()
    with contextlib.suppress(InvalidRequestError):
        compile_(kind, value)
    assert time.monotonic() - begun < 10  # it was minutes, and of the whole process: the interpreter was not given up


@pytest.mark.parametrize(
    ("kind", "value"),
    [("regex", "a" * (MAX_LENGTH + 1)), ("json", '"' + "a" * MAX_LENGTH), ("choice", ("a", "b" * MAX_LENGTH))],
)
def test_a_constraint_too_long_to_compile_soon_is_refused_unseen(kind: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"decoding.{kind} must have at most {MAX_LENGTH} characters, got"):
        compile_(kind, value)
