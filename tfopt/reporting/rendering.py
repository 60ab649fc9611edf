"""The templates of the HTML pages. Every word from outside is escaped, and has no control characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from tfopt.terminal import printable

TEMPLATES = Path(__file__).parent / "templates"
END_OF_PAGE = b"<footer>Written by tfopt.</footer>\n</main>\n</body>\n</html>"  # of page.html.jinja


def render(template: str, **values: Any) -> str:
    """Returns a page made of a template. A value that the template uses and that is not given is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # Markup is ours
    )
    return templates.get_template(template).render(**values)


def is_page(content: bytes) -> bool:
    """Whether a file is a page that tfopt wrote, of any version; see tfopt.atomic.own_files."""
    return content.rstrip().endswith(END_OF_PAGE)
