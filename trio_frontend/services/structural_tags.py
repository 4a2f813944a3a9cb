"""The shape of a structural tag: which formats there are, and what each must have. Pure functions.

A structural tag is JSON: ``{"type": "structural_tag", "format": FORMAT}``, where a format is a string, a schema, a regex, a grammar, or
made of other formats (``xgrammar/structural_tag.py``); or the older ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``.
Only an engine's compiler knows it whole. What is checked here: the names, the types of fields, that a tag begins with one of its
triggers; and the schemas, regexes and grammars inside are handed back to be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trio_frontend.services.errors import InvalidRequestError, shown

__all__ = ["check_structural_tag"]

Source = tuple[str, str, Any]
"""Where it stands in the tag, what it is (json_schema, regex, grammar), and the thing itself."""


def check_structural_tag(field: str, tag: Any) -> Iterator[Source]:
    """Check ``tag``, parsed JSON, and yield every schema, regex and grammar in it. Raises InvalidRequestError naming the place."""
    _require(field, tag, dict, "a JSON object")
    if "structures" in tag or "triggers" in tag:
        yield from _check_structures(field, tag)
        return
    if tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequestError(f'{field}.type must be "structural_tag", got {shown(tag["type"])}')
    if "format" not in tag:
        raise InvalidRequestError(f"{field}.format is required")
    yield from _check_format(f"{field}.format", tag["format"])


def _check_structures(field: str, tag: dict[str, Any]) -> Iterator[Source]:
    structures = _list(f"{field}.structures", tag.get("structures"))
    triggers = _strings(f"{field}.triggers", tag.get("triggers"))
    for position, structure in enumerate(structures):
        where = f"{field}.structures[{position}]"
        _require(where, structure, dict, "an object")
        begin = _require(f"{where}.begin", structure.get("begin"), str, "a string")
        _require(f"{where}.end", structure.get("end"), str, "a string")
        _check_trigger(f"{where}.begin", begin, triggers)
        yield f"{where}.schema", "json_schema", structure.get("schema")


def _check_format(where: str, value: Any) -> Iterator[Source]:
    _require(where, value, dict, "an object")
    name = value.get("type", "const_string" if "value" in value else None)
    check = _FORMATS.get(name) if isinstance(name, str) else None
    if check is None:
        raise InvalidRequestError(f"{where}.type must be one of {', '.join(sorted(_FORMATS))}, got {shown(name)}")
    yield from check(where, value)


def _nothing(where: str, value: dict[str, Any]) -> Iterator[Source]:
    yield from ()


def _const_string(where: str, value: dict[str, Any]) -> Iterator[Source]:
    _require(f"{where}.value", value.get("value"), str, "a string")
    yield from ()


def _token(where: str, value: dict[str, Any]) -> Iterator[Source]:
    _require(f"{where}.token", value.get("token"), (int, str), "a token or its id")
    yield from ()


def _source(kind: str, key: str) -> Callable[[str, dict[str, Any]], Iterator[Source]]:
    def check(where: str, value: dict[str, Any]) -> Iterator[Source]:
        kinds: tuple[type, ...] = (bool, dict) if kind == "json_schema" else (str,)
        _require(f"{where}.{key}", value.get(key), kinds, "a JSON schema" if kind == "json_schema" else "a string")
        yield f"{where}.{key}", kind, value[key]

    return check


def _elements(where: str, value: dict[str, Any]) -> Iterator[Source]:
    for position, element in enumerate(_list(f"{where}.elements", value.get("elements"))):
        yield from _check_format(f"{where}.elements[{position}]", element)


def _content(where: str, value: dict[str, Any]) -> Iterator[Source]:
    yield from _check_format(f"{where}.content", value.get("content"))


def _repeat(where: str, value: dict[str, Any]) -> Iterator[Source]:
    for key in ("min", "max"):
        _require(f"{where}.{key}", value.get(key), int, "an integer")
    yield from _content(where, value)


def _tag(where: str, value: dict[str, Any]) -> Iterator[Source]:
    _border(f"{where}.begin", value.get("begin"))
    end = value.get("end")
    if isinstance(end, list):
        _strings(f"{where}.end", end)
    else:
        _border(f"{where}.end", end)
    yield from _content(where, value)


def _border(where: str, value: Any) -> None:
    if isinstance(value, dict) and value.get("type") == "token":
        list(_token(where, value))
    else:
        _require(where, value, str, "a string")


def _tags(where: str, value: dict[str, Any]) -> Iterator[Source]:
    for position, tag in enumerate(_list(f"{where}.tags", value.get("tags"))):
        _require(f"{where}.tags[{position}]", tag, dict, "an object")
        yield from _tag(f"{where}.tags[{position}]", tag)


def _triggered_tags(where: str, value: dict[str, Any]) -> Iterator[Source]:
    triggers = _strings(f"{where}.triggers", value.get("triggers"))
    yield from _tags(where, value)
    for position, tag in enumerate(value["tags"]):
        if isinstance(tag["begin"], str):
            _check_trigger(f"{where}.tags[{position}].begin", tag["begin"], triggers)


def _token_triggered_tags(where: str, value: dict[str, Any]) -> Iterator[Source]:
    _list(f"{where}.trigger_tokens", value.get("trigger_tokens"))
    yield from _tags(where, value)


def _tags_with_separator(where: str, value: dict[str, Any]) -> Iterator[Source]:
    _require(f"{where}.separator", value.get("separator"), str, "a string")
    yield from _tags(where, value)


def _dispatch(where: str, value: dict[str, Any]) -> Iterator[Source]:
    for position, rule in enumerate(_list(f"{where}.rules", value.get("rules"))):
        if not isinstance(rule, list) or len(rule) != 2:
            raise InvalidRequestError(f"{where}.rules[{position}] must be a trigger and a format, got {shown(rule)}")
        yield from _check_format(f"{where}.rules[{position}][1]", rule[1])


_FORMATS: dict[str, Callable[[str, dict[str, Any]], Iterator[Source]]] = {
    "const_string": _const_string,
    "json_schema": _source("json_schema", "json_schema"),
    "qwen_xml_parameter": _source("json_schema", "json_schema"),
    "regex": _source("regex", "pattern"),
    "grammar": _source("grammar", "grammar"),
    "any_text": _nothing,
    "any_tokens": _nothing,
    "exclude_token": _nothing,
    "token": _token,
    "sequence": _elements,
    "or": _elements,
    "optional": _content,
    "plus": _content,
    "star": _content,
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "token_triggered_tags": _token_triggered_tags,
    "tags_with_separator": _tags_with_separator,
    "dispatch": _dispatch,
    "token_dispatch": _dispatch,
}


def _check_trigger(where: str, begin: str, triggers: list[str]) -> None:
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise InvalidRequestError(f"{where} must begin with one of the triggers, got {shown(begin)}")


def _require(where: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> Any:
    if value is None or not isinstance(value, kinds):
        raise InvalidRequestError(f"{where} must be {wanted}, got {shown(value)}")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{where} must be a list with at least one entry, got {shown(value)}")
    return value


def _strings(where: str, value: Any) -> list[str]:
    strings = _list(where, value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"{where} must hold strings that are not empty, got {shown(string)}")
    return strings
