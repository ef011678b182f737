"""A JSON schema as the engine's converter takes it, and which of its words the converter leaves out. Pure.

References are resolved here and nothing is ever fetched: the engine names rules after a reference's letters and digits,
so that two Chinese names would share one rule. Invariant: what comes out holds references to `#/$defs/rN` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import UsageError
from ..printable import printable

LONGEST = 1 << 20  # bytes of a schema or grammar
_MOST_REPEATS = 2000  # MAX_REPETITION_THRESHOLD (llama-grammar.cpp): a larger maximum counts as none
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}  # fmt: skip
_FORMATS = re.compile(r"date|time|date-time|uuid[1-5]?")


def prepared(text: str) -> tuple[str, tuple[str, ...]]:
    """(the schema for the engine, what of it has no effect, a line each). Raises UsageError with the place."""
    try:
        schema = json.loads(text)
        walk = _Walk(schema)
        made = walk.whole()
    except json.JSONDecodeError as error:
        what = f"the JSON schema is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise UsageError(what, 'for example {"type": "object"}') from None
    except (RecursionError, ValueError):  # a number of thousands of digits
        raise UsageError("the JSON schema is nested too deep, or holds a number too long", "simplify it") from None
    return json.dumps(made, ensure_ascii=False), tuple(walk.without_effect)


class _Walk:
    """One schema. `without_effect`: what the engine leaves out."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # reference → name of its definition
        self._waiting: list[str] = []
        self.without_effect: list[str] = []

    def whole(self) -> dict[str, Any]:
        made = self._node(self._root, "#")
        definitions: dict[str, Any] = {}
        while self._waiting:
            reference = self._waiting.pop()
            definitions[self._names[reference]] = self._node(self._target(reference), reference)
        if not definitions:
            return made
        if "$ref" in made:  # a reference hides what stands beside it
            made = {"anyOf": [made]}
        return {**made, "$defs": definitions}

    def _node(self, schema: Any, at: str) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            what = "false allows nothing" if schema is False else "an object is needed"
            raise UsageError(f"the JSON schema cannot be used: {what} at {printable(at)}", "leave it out, or mend it")
        if "$ref" in schema:
            self._unused(schema, {"$ref"}, at)
            return {"$ref": f"#/$defs/{self._name(schema['$ref'], at)}"}
        for key in ("oneOf", "anyOf"):
            if key in schema:
                self._unused(schema, {key}, at)
                return {key: self._nodes(schema[key], f"{at}/{key}")}
        if isinstance(schema.get("type"), list) and len(schema["type"]) > 1:
            kinds = [{**schema, "type": kind} for kind in schema["type"]]
            return {"anyOf": [self._one_type(kind, at, alone=False) for kind in kinds]}
        return self._one_type(schema, at, alone=True)

    def _one_type(self, schema: dict[str, Any], at: str, *, alone: bool) -> dict[str, Any]:
        """`alone`: not one of several types, each of which has words of its own."""
        for key in ("const", "enum"):
            if key in schema:
                self._unused(schema, {key, "type"}, at)
                return {name: schema[name] for name in (key, "type") if name in schema}
        kind = schema.get("type")
        kinds = [kind] if isinstance(kind, str) else list(_OF_TYPE)
        known = {"type", *(name for k in kinds for name in _OF_TYPE.get(k, ()))}
        if "allOf" in schema and not {"properties", "additionalProperties"} & set(schema):
            self._unused(schema, {"type", "allOf"}, at)
            return {**({"type": kind} if kind else {}), "allOf": self._nodes(schema["allOf"], f"{at}/allOf")}
        if alone:
            self._unused(schema, known, at)
        self._limits(schema, at)
        return {name: self._part(name, value, f"{at}/{name}") for name, value in schema.items() if name in known}

    def _part(self, name: str, value: Any, at: str) -> Any:
        if name == "properties" and isinstance(value, dict):
            return {key: self._node(part, f"{at}/{key}") for key, part in value.items()}
        if name in ("items", "prefixItems"):
            return self._nodes(value, at) if isinstance(value, list) else self._node(value, at)
        if name == "additionalProperties" and not isinstance(value, bool):
            return self._node(value, at)
        return value

    def _nodes(self, value: Any, at: str) -> Any:
        return [self._node(part, f"{at}/{n}") for n, part in enumerate(value)] if isinstance(value, list) else value

    # --- references ---

    def _name(self, reference: Any, at: str) -> str:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            what = (
                f"the JSON schema's $ref {printable(str(reference), limit=80)} at {printable(at)} is not in the schema"
            )
            raise UsageError(what, "put what it names under $defs: nothing is fetched")
        if reference not in self._names:
            self._names[reference] = f"r{len(self._names)}"
            self._target(reference)
            self._waiting.append(reference)
        return self._names[reference]

    def _target(self, reference: str) -> Any:
        target = self._root
        for word in reference.split("/")[1:]:
            key = unquote(word).replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isascii() and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:
                what = f"the JSON schema has nothing at {printable(reference, limit=80)}"
                raise UsageError(what, "mend the $ref that names it")
        return target

    # --- what the engine leaves out ---

    def _unused(self, schema: Mapping[str, Any], known: set[str], at: str) -> None:
        unused = [key for key in schema if key not in known and key not in _ANNOTATIONS]
        self.without_effect += [f"{printable(key, limit=40)} at {printable(at, limit=80)}" for key in unused]

    def _limits(self, schema: Mapping[str, Any], at: str) -> None:
        lost: list[str] = []
        for key in ("maxItems", "maxLength"):
            value = schema.get(key)
            if isinstance(value, int) and value > _MOST_REPEATS:
                lost.append(f"{key} {value} (above {_MOST_REPEATS})")
        if "pattern" in schema:
            lost += [key for key in ("minLength", "maxLength", "format") if key in schema]
        elif isinstance(schema.get("format"), str) and not _FORMATS.fullmatch(schema["format"]):
            lost.append(f"format {printable(schema['format'], limit=40)}")
        named, asked = schema.get("properties", {}), schema.get("required", [])
        if isinstance(asked, list) and isinstance(named, dict):
            absent = [name for name in asked if isinstance(name, str) and name not in named]
            lost += [f"required {printable(name, limit=40)} (not among the properties)" for name in absent]
        self.without_effect += [f"{text} at {printable(at, limit=80)}" for text in lost]
