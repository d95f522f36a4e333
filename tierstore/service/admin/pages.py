"""The pages `/` and `/docs`, each one document that loads nothing from other hosts. Any thread.

`static/` has their markup, styles and scripts, which are put into one document when this module is imported, and named
by their hashes in its policy: a browser runs nothing else, whatever gets into the page. The status page calls the
admin interface; the page about that interface is made from its OpenAPI document and has no script.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple


def _read(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _one_document(name: str) -> str:
    """A page with the styles and scripts that it refers to inserted."""
    page = re.sub(
        r'<link rel="stylesheet" href="(.+?)">', lambda style: f"<style>\n{_read(style[1])}</style>", _read(name)
    )
    return re.sub(r'<script src="(.+?)"></script>', lambda script: f"<script>\n{_read(script[1])}</script>", page)


def _policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own styles and scripts, requests to its own service, no frame
    around it.
    """
    hashes = {
        kind: " ".join(
            f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        )
        for kind in ("style", "script")
    }
    sources = f"style-src {hashes['style']}; "
    if hashes["script"]:
        sources += f"script-src {hashes['script']}; connect-src 'self'; "
    return f"default-src 'none'; {sources}img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"


STATUS_PAGE = _one_document("status.html")
_DOCS_PAGE = Template(_one_document("docs.html"))
STATUS_POLICY, DOCS_POLICY = _policy(STATUS_PAGE), _policy(_DOCS_PAGE.template)


class Operation(NamedTuple):
    """A request of the admin interface, described for people."""

    tag: str
    name: str  # method and path
    text: str
    rows: list[
        tuple[str, str, str]
    ]  # of parameters, fields of the body and statuses of answers: name, type, description
    example: str  # a command line


def docs_page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    about = document["info"]
    by_tag: dict[str, list[str]] = {}
    for operation in operations(document):
        by_tag.setdefault(operation.tag, []).append(_section(operation))
    return _DOCS_PAGE.substitute(
        {name: escape(about[name]) for name in ("title", "version", "description")},
        operations="\n".join(f"<h2>{escape(tag)}</h2>{''.join(parts)}" for tag, parts in by_tag.items()),
    )


def operations(document: dict[str, Any]) -> Iterator[Operation]:
    """The requests of an OpenAPI document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield _operation(document, method.upper(), path, operation)


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Operation:
    content = operation.get("requestBody", {}).get("content", {})
    rows = [
        (f"{{{p['name']}}}", _type(document, p["schema"]), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    example = [f"curl -X {method} http://127.0.0.1:8000{path}"]
    for media_type, body in content.items():
        fields = list(_fields(document, body.get("schema", {})))
        rows += [(name, kind, text) for name, kind, text, _ in fields]
        sent = "@FILE" if not fields else json.dumps({name: value for name, *_, value in fields if value is not None})
        example.append(f"-H 'Content-Type: {media_type}' {'--data-binary' if not fields else '-d'} '{sent}'")
    for status, answer in operation.get("responses", {}).items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        names = ", ".join(name for name, *_ in _fields(document, schema))
        if status != "422":  # FastAPI's status for what is 400 here
            rows.append((status, f"{{{names}}}" if names else "JSON", ""))
    (tag, *_) = operation.get("tags", ["others"])
    return Operation(tag, f"{method} {path}", operation.get("description", ""), rows, " ".join(example))


def _section(operation: Operation) -> str:
    parts = "".join(
        f"<dt><code>{escape(name)}</code></dt><dd>{escape(kind)} <i>{escape(text)}</i></dd>"
        for name, kind, text in operation.rows
    )
    return (
        f"<section><h3><code>{escape(operation.name)}</code></h3><p>{escape(operation.text)}</p>"
        f"<dl>{parts}</dl><pre>{escape(operation.example)}</pre></section>"
    )


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """(name, type, description, a value for the example) of an object's properties."""
    schema = _resolved(document, schema)
    for name, field in schema.get("properties", {}).items():
        needed = name in schema.get("required", ())
        kind = _type(document, field)
        default = "" if needed or "default" not in field else f", by default {json.dumps(field['default'])}"
        value = {"integer": 20261121, "string": name.upper()}.get(kind) if needed else field.get("default")
        yield name, kind, f"{field.get('description', '')}{default}".removeprefix(", "), value


def _type(document: dict[str, Any], schema: dict[str, Any]) -> str:
    schema = _resolved(document, schema)
    if "anyOf" in schema:
        return " or ".join(_type(document, one) for one in schema["anyOf"])
    return str(schema.get("type", "any"))


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that it refers to; of alternatives the first object."""
    for one in schema.get("anyOf", ()):
        if "$ref" in one:
            return _resolved(document, one)
    if "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return dict(found)
    return schema
