"""Build the documentation site.

python -m tools.site FOLDER

Its pages are written into FOLDER.pages, and the site into FOLDER, which is opened by a browser as it is or served by any web server.
Needs the extra `site`. Any warning of MkDocs is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.site import pages


def main(folder: Path) -> int:
    source = folder.with_name(folder.name + ".pages")
    pages.write(source)
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--config-file",
        str(source / "mkdocs.yml"),
    ]
    # Material for MkDocs would print that another project follows it: see docs/decisions/dependencies.md
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*build, "--site-dir", str(folder.resolve())], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
