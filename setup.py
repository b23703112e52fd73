"""What pyproject.toml cannot say: README.md as PyPI needs it, where a relative link leads nowhere.

With REPOSITORY_URL in the environment (a release's workflow sets it) links to files become links to the repository, at
REPOSITORY_REF or its main branch; without, the text is README.md as it is.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description(text: str, repository: str, ref: str) -> str:
    """README.md with absolute links: files to the repository, headings to this page, pictures to their contents.

    Badges of the repository's own state are left out, and the command that installs it has its address.

    Args:
        repository: its address, as https://github.com/NAME/PROJECT; empty: the text as it is.
        ref: tag or branch.
    """
    if not repository:
        return text

    def absolute(match: re.Match) -> str:
        mark, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        return f"{mark}[{label}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/{ref}/{target})"

    text = re.sub(r"<!-- only on GitHub -->\n.*?<!-- /only on GitHub -->\n", "", text, flags=re.S)
    text = text.replace("https://github.com/OWNER/hf-sparsekv", repository.rstrip("/"))
    text = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{repository.rstrip("/")}/raw/{ref}/', text)
    return re.sub(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", absolute, text)


if __name__ == "__main__":
    repository = os.environ.get("REPOSITORY_URL", "")
    setup(
        long_description=long_description(
            (ROOT / "README.md").read_text(encoding="utf-8"), repository, os.environ.get("REPOSITORY_REF", "main")
        ),
        long_description_content_type="text/markdown",
        project_urls={"Repository": repository} if repository else {},
    )
