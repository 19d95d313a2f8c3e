"""What mkdocs does to each page of the site: links to files outside docs/ lead to the repository; no other server is asked."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave docs/ by addresses in the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        return f"]({config.repo_url}/blob/main/{path}{found[2] or ''})"

    return LINK.sub(replaced, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the link to the repository, without the counts of stars that the theme would ask the code host for."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same to pages that no Markdown file is behind, such as 404.html."""
    return on_post_page(output_content)
