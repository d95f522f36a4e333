"""The page `/docs`: the admin interface as `/openapi.json` describes it, one document without scripts. Pure functions; any thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
)

_STYLE = """:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1c2330;--dim:#667085;--line:#e3e6ec;--accent:#2563eb}
@media(prefers-color-scheme:dark){:root{--bg:#10141b;--card:#181e28;--ink:#e6eaf0;--dim:#94a0b3;--line:#293140;--accent:#60a5fa}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:900px;margin:0 auto;padding:16px 20px}h1{font-size:20px}h2{font-size:16px;margin:22px 0 8px}h3{font-size:14px;margin:0}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;margin-bottom:10px}
code,pre{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}pre{white-space:pre-wrap;margin:8px 0 0;padding:8px 10px;background:var(--bg);border-radius:6px}
dl{margin:8px 0 0;display:grid;grid-template-columns:minmax(90px,max-content) 1fr;gap:3px 14px}dd{margin:0;overflow-wrap:anywhere}
.dim,dd i{color:var(--dim);font-style:normal}a{color:var(--accent)}p{margin:4px 0}"""


def docs_page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    about = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            (tag, *_) = operation.get("tags", ["others"])
            by_tag.setdefault(tag, []).append(_operation(document, method.upper(), path, operation))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(parts)}" for tag, parts in by_tag.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{escape(about["title"])}: admin interface</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>'
        f'<body><main><h1>{escape(about["title"])} <span class="dim">{escape(about["version"])}</span></h1>'
        f"<p>{escape(about['description'])}</p>"
        '<p>For programs: <a href="/openapi.json">openapi.json</a>. What is served now: <a href="/">status</a>.</p>'
        f"{body}</main></body></html>"
    )


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    rows = [
        (f"{{{p['name']}}}", _type(document, p["schema"]), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    example = [f"curl -X {method} http://127.0.0.1:8000{path}"]
    for media_type, given in content.items():
        fields = list(_fields(document, given.get("schema", {})))
        rows += [(name, kind, text) for name, kind, text, _ in fields]
        sent = "@FILE" if not fields else json.dumps({name: value for name, *_, value in fields if value is not None})
        example.append(f"-H 'Content-Type: {media_type}' {'--data-binary' if not fields else '-d'} '{sent}'")
    answers = []
    for status, answer in operation.get("responses", {}).items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        names = ", ".join(name for name, *_ in _fields(document, schema))
        if status != "422":  # FastAPI's word for what is 400 here
            answers.append((status, f"{{{names}}}" if names else "JSON", ""))
    parts = "".join(
        f"<dt><code>{escape(name)}</code></dt><dd>{escape(kind)} <i>{escape(text)}</i></dd>"
        for name, kind, text in (*rows, *answers)
    )
    return (
        f"<section><h3><code>{method} {escape(path)}</code></h3><p>{escape(operation.get('description', ''))}</p>"
        f"<dl>{parts}</dl><pre>{escape(' '.join(example))}</pre></section>"
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
    """A schema, or the one that it refers to; of alternatives the first that is an object."""
    for one in schema.get("anyOf", ()):
        if "$ref" in one:
            return _resolved(document, one)
    if "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return dict(found)
    return schema
