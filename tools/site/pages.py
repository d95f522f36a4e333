"""Writes what the documentation site is made of into a folder: pages of Markdown, and their menu in `mkdocs.yml`.

A page has the place that it has in the repository, so that its links work here and there: `README.md` is the first page, `docs/`,
`schema/` and others lie beside it. A link to something that is no page (a program, a folder) leads to a page that shows it.
`reference.py` makes pages of the code. The menu is the table "Pages" of `docs/README.md`: a page that it does not name is an error.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.make_layouts_page import page as layouts
from tools.site import reference

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MENU = "docs/README.md"  # whose table of pages is the menu
LAYOUTS = "docs/layouts.md"  # made, as those of the reference are
REFERENCE = {"commands": "Commands", "http": "HTTP requests", "python": "Python"}
LANGUAGES = {"py": "python", "yml": "yaml", "cfg": "text", "conf": "nginx", "tpl": "text"}
BOOSTS = {"docs/decisions/": 0.2, "schema/": 0.5}  # of what is found there, in the order of what the search has found
LINK = re.compile(r"\]\(([^)#\s:]+)(?=[)#])")  # its target, without what follows a #
HIDDEN = "---\nsearch: {exclude: true}\n---\n"


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pages = {path.as_posix(): (ROOT / path).read_text(encoding="utf-8") for path in _sources()}
    pages[LAYOUTS] = layouts()
    menu = _menu(pages)
    linked = sorted({target for page, text in pages.items() for target in _linked(page, text)})
    pages |= {f"reference/{name}.md": getattr(reference, name)() for name in REFERENCE}
    for target in linked:
        if _page(target) not in pages:
            pages[_page(target)] = _folder(target, pages) if (ROOT / target).is_dir() else _source(target)
    for page, text in pages.items():
        (where := folder / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        boost = next(
            (f"---\nsearch: {{boost: {by}}}\n---\n" for start, by in BOOSTS.items() if page.startswith(start)), ""
        )
        where.write_text(("" if text.startswith(HIDDEN) else boost) + _with_links(page, text), encoding="utf-8")
    (folder / "pages/assets").mkdir()
    shutil.copy(HERE / "iframe-worker.js", folder / "pages/assets")
    settings = (HERE / "mkdocs.yml").read_text(encoding="utf-8").replace("REPOSITORY", str(ROOT))
    settings += yaml.safe_dump({"nav": menu, "not_in_nav": "\n".join(f"/{page}" for page in pages)}, allow_unicode=True)
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")


@functools.cache
def _sources() -> list[Path]:
    """Pages of the repository, relative to it."""
    found = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    found += [path for folder in ("docs", "schema") for path in sorted((ROOT / folder).rglob("*.md"))]
    return [path.relative_to(ROOT) for path in found]


# --- the menu


def _menu(pages: dict[str, str]) -> list[dict[str, object]]:
    menu: list[dict[str, object]] = [{"tierstore": "README.md"}, {"All pages": MENU}]
    table = pages[MENU].split("\n## Pages\n")[1].split("\n## ")[0]
    for title, links in re.findall(r"^\| ([^|]+) \| (.+) \|$", table, flags=re.MULTILINE):
        found = re.findall(r"\[(.+?)\]\((.+?)\)", links)
        menu.append({_capital(title): [{_capital(text): _entry(_target(MENU, link), pages)} for text, link in found]})
    made = [{title: f"reference/{name}.md"} for name, title in REFERENCE.items()]
    menu.append({"Reference": [*made, {"Layouts in memory": LAYOUTS}]})
    if missing := pages.keys() - set(re.findall(r"[\w/-]+\.md", str(menu))):
        raise SystemExit(f"{MENU}: expected every page in the table `Pages`; not there: {', '.join(sorted(missing))}")
    return menu


def _entry(target: str, pages: dict[str, str]) -> object:
    if not (ROOT / target).is_dir():
        return target
    first = _page(target)
    within = [{_title(text): page} for page, text in pages.items() if page.startswith(f"{target}/") and page != first]
    return [first, *within]


def _capital(text: str) -> str:
    return text if text == "gRPC" else text[0].upper() + text[1:]


def _title(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("# ")


# --- links


def _linked(page: str, text: str) -> Iterator[str]:
    """What exists in the repository and is linked from a page, relative to the repository."""
    for link in LINK.findall(text):
        target = _target(page, link)
        if (ROOT / target).exists():
            yield target


def _with_links(page: str, text: str) -> str:
    """The page, with its links to pages."""

    def to_page(link: re.Match[str]) -> str:
        target = _target(page, link[1])
        return f"]({os.path.relpath(_page(target), os.path.dirname(page))}" if (ROOT / target).exists() else link[0]

    return LINK.sub(to_page, text)


def _target(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def _page(target: str) -> str:
    """The page on which a file or folder of the repository is shown."""
    if target.endswith(".md"):
        return target
    if (own := f"{target}/README.md") in map(Path.as_posix, _sources()):
        return own
    return f"{target}/index.md" if (ROOT / target).is_dir() else f"{target}.md"


# --- pages of what is no page


def _source(target: str) -> str:
    language = LANGUAGES.get(suffix := target.rpartition(".")[2], suffix)
    return f"{HIDDEN}# {target}\n\n~~~~{language}\n{(ROOT / target).read_text(encoding='utf-8')}\n~~~~\n"


def _folder(target: str, pages: dict[str, str]) -> str:
    lines = [f"{HIDDEN}# {target}\n"]
    for path in sorted((ROOT / target).iterdir()):
        if path.name.startswith((".", "_")):
            continue
        page = _page(path.relative_to(ROOT).as_posix())
        shown = f"`{path.name}{'/' if path.is_dir() else ''}`"
        lines.append(f"- {f'[{shown}]({path.name})' if page in pages else shown}{_about(path)}")
    return "\n".join(lines) + "\n"


def _about(path: Path) -> str:
    """The first line of what a file says of itself."""
    source = path / "__init__.py" if path.is_dir() else path
    if source.suffix == ".md":
        return f": {_title(source.read_text(encoding='utf-8'))}"
    if source.suffix != ".py" or not source.exists():
        return ""
    says = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    return f": {says.splitlines()[0]}" if says else ""
