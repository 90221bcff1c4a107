"""Firecracker's interface definition: which requests there are, and whether a body is what it says."""

import re
from typing import Any, Final

PATHS: Final = "paths"
INT64_MAX: Final = 2**63 - 1
KINDS: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
}


class Interface:
    """The requests of a Swagger 2.0 definition. Unknown fields are refused, as Firecracker does."""

    def __init__(self, definition: dict[str, Any]) -> None:
        self._definitions = definition["definitions"]
        self._requests = [
            (re.compile(re.sub(r"\{\w+\}", "([^/]+)", path) + "$"), path, methods)
            for path, methods in definition[PATHS].items()
        ]

    def find(self, method: str, path: str) -> tuple[str, str | None, dict[str, Any] | None]:
        """The path as defined, the id in it, and its body's schema; `ValueError` when there is no such request."""
        for pattern, defined, methods in self._requests:
            match = pattern.match(path)
            if match is not None and method.lower() in methods:
                parameters = methods[method.lower()].get("parameters", [])
                bodies = [one["schema"] for one in parameters if one["in"] == "body"]
                return defined, match[1] if match.groups() else None, bodies[0] if bodies else None
        raise ValueError(f"Invalid request method and/or path: {method} {path}.")

    def check(self, value: Any, schema: dict[str, Any], at: str = "body") -> None:
        """Raise `ValueError` when a value is not what its schema says."""
        schema = self.resolved(schema)
        kind = schema.get("type", "object")
        found: Any = value
        if not isinstance(value, KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
            raise ValueError(f"{at}: invalid type: expected {kind}, found {value!r}")
        if "enum" in schema and value not in schema["enum"]:
            raise ValueError(f"{at}: unknown variant {value!r}, expected one of {schema['enum']}")
        if kind == "integer":
            largest = schema.get("maximum", INT64_MAX if schema.get("format") == "int64" else found)
            if found < schema.get("minimum", found) or found > largest:
                raise ValueError(f"{at}: {value} is out of range")
        elif kind == "array":
            for number, item in enumerate(found):
                self.check(item, schema["items"], f"{at}[{number}]")
        elif kind == "object":
            self._check_object(found, schema, at)

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema that a reference means."""
        if "$ref" not in schema:
            return schema
        found: dict[str, Any] = self._definitions[schema["$ref"].rpartition("/")[2]]
        return found

    def _check_object(self, value: dict[str, Any], schema: dict[str, Any], at: str) -> None:
        properties = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                raise ValueError(f"{at}: missing field `{name}`")
        for name, item in value.items():
            if name in properties:
                self.check(item, properties[name], f"{at}.{name}")
            elif not schema.get("additionalProperties"):
                raise ValueError(f"{at}: unknown field `{name}`, expected one of {sorted(properties)}")
