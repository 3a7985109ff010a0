# SPDX-License-Identifier: Apache-2.0
"""Reads the files in a folder's ``templates/``: pages, words and code with gaps."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def template(folder: str, name: str, **filters: Any) -> "jinja2.Template":
    """A template with its own filters; what it prints into HTML is escaped.

    A name that it does not get is an error. Jinja2 is imported here, because torch, which depends
    on it, does not import it either.

    >>> from gnsfast.templates import template
    >>> lines = template("gnsfast.critical_batch", "torchtitan.jinja")
    >>> print(lines.render(stages={0: (1, 1.0)}).splitlines()[3])
    STAGES = {0: (1, 1.0)}
    """
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader(folder),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= filters
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return found.get_template(name)
