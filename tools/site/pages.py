"""Pages of the site that are other files of the repository, and links from pages to files that are not on it.

A hook of mkdocs (mkdocs.yml). README.md is the home page, CHANGELOG.md and CONTRIBUTING.md are pages as they are, a
notebook of docs/notebooks is a page of its cells. On GitHub the same files lead to each other by relative links, so a
link to a file that is not on the site becomes one to the repository, if its address is known (``REPOSITORY_URL``), and
plain text otherwise. A link to a file that is not there is an error. Commands that install the package have the
repository's address, and badges that only GitHub can show are left out.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OTHERS = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
OTHERS["SECURITY.md"] = "security.md"
NAMELESS = "https://github.com/OWNER/hf-sparsekv"  # the repository, in commands
GITHUB = re.compile(r"<!-- only on GitHub -->\n.*?<!-- /only on GitHub -->\n", re.S)
PICTURE = re.compile(r'((?:src|srcset)="|!\[[^\]]*\]\()docs/')  # README's
CODE = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])", re.M | re.S)  # not the code that a link is labelled with
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def cells(path: Path) -> str:
    """A notebook's text, code and outputs as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                parts.append(f'<img alt="what the cell above draws" src="data:image/png;base64,{picture}">')
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config) -> Files:
    """Add the pages that lie elsewhere."""
    for source, page in OTHERS.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=cells(path)))
    return files


def on_page_markdown(text: str, page, config, files: Files) -> str:
    """Links, pictures and the repository's address as the site needs them."""
    text = PICTURE.sub(r"\1", GITHUB.sub("", text)).replace("<details>", "<details markdown>")
    if config.repo_url:
        text = text.replace(NAMELESS, config.repo_url.rstrip("/"))
    there = next((source for source, made in OTHERS.items() if made == page.file.src_uri), f"docs/{page.file.src_uri}")

    def changed(match: re.Match) -> str:
        label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match.group()
        at = posixpath.normpath(posixpath.join(posixpath.dirname(there), path))  # from the repository's root
        inside = OTHERS.get(at) or at.removeprefix("docs/")
        if (at in OTHERS or at.startswith("docs/")) and files.get_file_from_path(inside):
            return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or '.')}{mark}{anchor})"
        if not (ROOT / at).exists():
            raise PluginError(f"{there} links to {target}, which is not there")
        address = config.repo_url and f"{config.repo_url.rstrip('/')}/blob/main/{at}{mark}{anchor}"
        return f"[{label}]({address})" if address else label

    def outside_code(part: str) -> str:
        return LINK.sub(changed, part)

    parts, end = [], 0
    for start, stop in (match.span() for match in CODE.finditer(text)):
        parts += [outside_code(text[end:start]), text[start:stop]]
        end = stop
    return "".join(parts) + outside_code(text[end:])
