"""Structured outputs: a constraint is compiled here, before any engine sees it. Pure functions.

An engine core of vLLM 0.32 answers a constraint that it cannot compile with a bare ERROR in the middle of the request, and its own
frontends check before they send. So does this one, with ``llguidance``, whose JSON schema, regex and EBNF dialects are wide; what the
named backend of the engine is known to refuse beyond that is refused too (``vllm/v1/structured_output/backend_xgrammar.py`` and its
neighbours). What only the engine's own compiler can see still ends the request with its error.

Compiling takes from half a millisecond up to a second for a huge grammar and lets other threads run: callers choose the thread. What
compiled once is remembered.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trio_frontend.engine.base import StructuredOutput
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.errors import InvalidRequestError, shown
from trio_frontend.services.structural_tags import check_structural_tag
from trio_frontend.services.validation import check_entries

__all__ = ["MAX_LENGTH", "MAX_REMEMBERED_LENGTH", "compile_constraint", "constraint_of", "is_known"]

MAX_REMEMBERED_LENGTH = 16_384
"""Characters of a constraint that is remembered once it compiled; 256 of them are 4 MiB at most."""
MAX_LENGTH = 262_144
"""Characters of a constraint, all its choices together: a grammar of so many, and no larger one, compiles in seconds."""
MAX_NESTING = 64
"""Levels of a JSON schema or structural tag: engines walk them recursively."""

_known: dict[StructuredOutput, None] = {}
_KNOWN_LIMIT = 256


def constraint_of(decoding: pb.DecodingParameters, backend: str) -> StructuredOutput | None:
    """The constraint that a request names, as it is; None for none (``json_object`` false is none)."""
    match decoding.WhichOneof("structured_output"):
        case "json":
            return StructuredOutput("json", decoding.json, backend)
        case "regex":
            return StructuredOutput("regex", decoding.regex, backend)
        case "choice":
            check_entries("decoding.choice", len(decoding.choice.choices), MAX_LENGTH)
            return StructuredOutput("choice", tuple(decoding.choice.choices), backend)
        case "grammar":
            return StructuredOutput("grammar", decoding.grammar, backend)
        case "json_object" if decoding.json_object:
            return StructuredOutput("json_object", None, backend)
        case "structural_tag":
            return StructuredOutput("structural_tag", decoding.structural_tag, backend)
        case _:
            return None


def is_known(constraint: StructuredOutput) -> bool:
    """Whether it has compiled before, so that compiling it again costs nothing."""
    return constraint.kind == "json_object" or constraint in _known


def compile_constraint(constraint: StructuredOutput) -> None:
    """Raise InvalidRequestError, naming the kind and what is wrong, if ``constraint`` cannot be compiled."""
    if is_known(constraint):
        return
    _check_backend(constraint)
    value = constraint.value
    length = sum(map(len, value or ()))
    if length > MAX_LENGTH:
        raise InvalidRequestError(f"decoding.{constraint.kind} must have at most {MAX_LENGTH} characters, got {length}")
    match constraint.kind:
        case "choice":
            if not value:
                raise InvalidRequestError("decoding.choice must have at least one string")
        case "json":
            _check_json(str(value), constraint.backend)
        case "regex":
            _check_regex("decoding.regex", str(value), constraint.backend)
        case "grammar":
            _check_grammar("decoding.grammar", str(value), constraint.backend)
        case "structural_tag":
            _check_tag(str(value), constraint.backend)
    if len(value or ()) <= MAX_REMEMBERED_LENGTH and not isinstance(value, tuple):
        if len(_known) >= _KNOWN_LIMIT:
            _known.pop(next(iter(_known)), None)
        _known[constraint] = None


def _check_backend(constraint: StructuredOutput) -> None:
    supported = {
        "outlines": ("json", "json_object", "regex", "choice"),
        "lm-format-enforcer": ("json", "json_object", "regex", "choice"),
    }.get(constraint.backend)
    if supported is not None and constraint.kind not in supported:
        raise InvalidRequestError(
            f"decoding.{constraint.kind} is not supported by the structured outputs backend {constraint.backend}"
        )


def _parse_json(field: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError:
        raise InvalidRequestError(f"{field} is nested deeper than {MAX_NESTING} levels") from None
    except ValueError as error:
        raise InvalidRequestError(f"{field} is no valid JSON: {error}") from None
    if _depth(value, MAX_NESTING + 1) > MAX_NESTING:
        raise InvalidRequestError(f"{field} is nested deeper than {MAX_NESTING} levels")
    return value


def _depth(value: Any, limit: int) -> int:
    """Levels of objects and arrays, counted up to ``limit``."""
    level, depth = [value], 0
    while level and depth < limit:
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        depth += 1
    return depth


def _check_json(text: str, backend: str) -> None:
    _check_schema("decoding.json", _parse_json("decoding.json", text), backend)


def _check_schema(field: str, schema: Any, backend: str) -> None:
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{field} must be a JSON schema, an object or true, got {shown(schema)}")
    if backend == "xgrammar":
        keyword = _unsupported_by_xgrammar(schema)
    elif backend == "guidance":
        keyword = _find(schema, lambda node: "patternProperties" if "patternProperties" in node else None)
    else:
        keyword = None
    if keyword is not None:
        raise InvalidRequestError(f"{field}: the structured outputs backend {backend} does not support {keyword}")
    import llguidance

    # Keywords that llguidance does not know are the engine's business; what is malformed is an error in any case.
    lenient: Any = None if backend == "guidance" else {"lenient": True}
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=lenient)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {_first_line(error)}") from None
    _validate(field, grammar)


def _check_regex(field: str, pattern: str, backend: str) -> None:
    if "\0" in pattern:
        raise InvalidRequestError(f"{field} must not contain NUL")
    import llguidance

    _validate(field, llguidance.LLMatcher.grammar_from_regex(pattern))
    if backend == "xgrammar" and (construct := _UNSUPPORTED_IN_REGEX.match(pattern)) is not None:
        raise InvalidRequestError(
            f"{field}: the structured outputs backend xgrammar does not support {construct['unsupported']}"
        )


_UNSUPPORTED_IN_REGEX = re.compile(
    # What may stand before: escapes, character classes, anything else. Each can be read in one way only, so this takes linear time.
    r"""(?s:(?:\\[^pPbBdDwWsS1-9] | \\[dDwWsS] | (?>\[\^?\]?(?:\\.|[^\]\\])*\]) | \((?!\?) | \(\?(?:: | <[A-Za-z_]) | [^\\\[(])*?)
        (?P<unsupported> \\[pPbB1-9] | \(\?[^:<] | \(\?<[=!] | [*+?}][*+{] )""",
    re.VERBOSE,
)
"""Unicode classes, word boundaries, back references, group flags, look-around, two repetitions in a row (``regex_converter.cc``)."""


def _check_grammar(field: str, grammar: str, backend: str) -> None:
    if not grammar.strip():
        raise InvalidRequestError(f"{field} must not be empty")
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if not is_lark_syntax(grammar):
        if backend == "xgrammar":
            if _XGRAMMAR_ONLY.search(grammar):
                return
            if (rule := _EMPTY_ALTERNATIVE.search(_without_literals(grammar))) is not None:
                raise InvalidRequestError(
                    f"{field}: a rule has an empty alternative, after {shown(rule['before'].strip()[-40:])}"
                )
        try:
            grammar = any_to_lark(grammar)
        except RecursionError:
            raise InvalidRequestError(f"{field} is nested too deep") from None
        except Exception as error:  # noqa: BLE001 - the converter raises bare Exceptions for whatever is wrong
            raise InvalidRequestError(f"{field} cannot be compiled: {_first_line(error)}") from None
    _validate(field, llguidance.LLMatcher.grammar_from_lark(grammar))


_XGRAMMAR_ONLY = re.compile(r"\(\s*=|\b(?:TagDispatch|TokenTagDispatch|Token|ExcludeToken)\s*\(")
"""Look-ahead and macros of xgrammar's EBNF, which only xgrammar itself can judge."""
_EMPTY_ALTERNATIVE = re.compile(r"(?P<before>(?:::=|\|)\s*)(?:\||\)|\Z|(?=[\w.\-]+\s*::=))")


def _without_literals(grammar: str) -> str:
    """String literals, character classes and comments replaced by what can stand in their place."""
    # One that does not end goes on to the end: looking there for each that might would take quadratic time.
    return re.sub(
        r'"(?:\\.|[^"\\\n])*+"?|\[(?:\\.|[^\]\\])*+\]?|#[^\n]*', lambda m: "" if m[0][0] == "#" else '"_"', grammar
    )


def _check_tag(text: str, backend: str) -> None:
    field = "decoding.structural_tag"
    if not text.strip():
        raise InvalidRequestError(f"{field} must not be empty")
    for where, kind, source in check_structural_tag(field, _parse_json(field, text)):
        if kind == "json_schema":
            _check_schema(where, source, backend)
        elif kind == "regex":
            _check_regex(where, source, backend)
        else:
            _check_grammar(where, source, backend)


def _validate(field: str, grammar: str) -> None:
    import llguidance

    error = llguidance.LLMatcher.validate_grammar(grammar)
    if error:
        raise InvalidRequestError(f"{field} cannot be compiled: {_first_line(error)}")


def _first_line(error: object) -> str:
    """An error's text on one line, cut."""
    return shown_text(" ".join(str(error).split()))


def shown_text(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _find(schema: Any, judge: Any) -> str | None:
    """The first thing that ``judge`` names in any object of ``schema``. Nesting is bounded by ``_parse_json``."""
    if isinstance(schema, dict):
        found: str | None = judge(schema)
        if found is not None:
            return found
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            found = _find(item, judge)
            if found is not None:
                return found
    return None


_XGRAMMAR_FORMATS = frozenset(
    [
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)


def _types(node: dict[str, Any]) -> frozenset[str]:
    stated = node.get("type")
    names = stated if isinstance(stated, list) else [stated]
    return frozenset(name for name in names if isinstance(name, str))


def _length_and_pattern(node: dict[str, Any]) -> bool:
    return ("pattern" in node or "format" in node) and ("minLength" in node or "maxLength" in node)


def _unsupported_by_xgrammar(schema: dict[str, Any]) -> str | None:
    """What ``has_xgrammar_unsupported_json_features`` of vLLM 0.32 refuses, by name."""

    def judge(node: dict[str, Any]) -> str | None:
        types = _types(node)
        if types & {"integer", "number"} and "multipleOf" in node:
            return "multipleOf"
        if "array" in types:
            for keyword in ("uniqueItems", "contains", "minContains", "maxContains"):
                if keyword in node:
                    return keyword
        if "string" in types:
            if "format" in node and node["format"] not in _XGRAMMAR_FORMATS:
                return f"format {shown(node['format'])}"
            if _length_and_pattern(node):
                return "pattern or format together with a length"
        if "object" in types:
            return _unsupported_in_object(node)
        return "allOf with several branches" if _several_branches(node) else None

    return _find(schema, judge)


def _several_branches(node: dict[str, Any]) -> bool:
    return isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1


def _unsupported_in_object(node: dict[str, Any]) -> str | None:
    names = node.get("propertyNames")
    if names is not None:
        if isinstance(names, dict) and _length_and_pattern(names):
            return "propertyNames with a pattern and a length"
        for keyword in ("patternProperties", "properties"):
            if keyword in node:
                return f"propertyNames together with {keyword}"
        if node.get("unevaluatedProperties", True) is not True:
            return "propertyNames together with unevaluatedProperties"
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        if "properties" in node:
            return "patternProperties together with properties"
        if len(patterns) > 1:
            return "several patternProperties"
    return "allOf with several branches" if _several_branches(node) else None
