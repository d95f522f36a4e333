"""Write docs/settings.md, the reference of all settings.

python tools/make_settings_page.py
"""

from __future__ import annotations

from pathlib import Path

from tierstore.config import ENV_PREFIX, described_settings

PAGE = Path(__file__).parents[1] / "docs/settings.md"
HEAD = f"""# Settings

Everything that can be set, of the store and of the service. Each is a key of `tierstore.toml`, a variable `{ENV_PREFIX}<NAME>` and a keyword of
`tierstore.open`; the last of file, variable and flag or keyword wins. Sizes take `512MiB`, `4GiB` or a number of bytes, 1024 at least. What
Kubernetes puts into the environment for a service of this name (`{ENV_PREFIX}SERVICE_HOST`, `{ENV_PREFIX}PORT=tcp://…`) sets nothing. This page is made by `python tools/make_settings_page.py`.

| name | default | |
|---|---|---|
"""


def page() -> str:
    rows = (
        f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |" for name, default, text in described_settings()
    )
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
